"""Finds a model by name or folder, chooses the back end and builds the engine."""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .backends import BACKENDS, PARALLEL_BACKENDS

if TYPE_CHECKING:
    from ..model.world_model import WorldModel
    from .backends.torch import TorchBackend
    from .engine import Engine

WEIGHTS = Path(__file__).resolve().parents[1] / 'weights'


def model_folder(model: str) -> Path:
    """Folder of a model that the package ships, by name, or of one's own, by path."""
    shipped = WEIGHTS / model
    return shipped if (shipped / 'model.json').is_file() else Path(model).expanduser()


def load(model: str = 'tiny', backend: str = 'auto', threads: int = 1, sessions: int = 8, gpus: int = 1,
         parallel: str = 'sequence') -> Engine:
    """Engine of a model.

    ``model`` names a shipped model or a folder that `worldmodel train` wrote. ``backend`` is one of `backends.BACKENDS`: `auto`
    takes torch on a GPU and ONNX Runtime on a CPU; `torch-compiled` is `torch-bf16` with its layers compiled for one
    session, which takes minutes at its first start on a machine; `torch-fp8` has the layers' weights in FP8, and the
    pages of presets with tiles, too. ``threads`` bounds the threads of one network call on a CPU.
    ``sessions`` may be open at a time; a robot needs one, and a second one for the moment in which it begins anew.
    ``gpus``: on so many, if the preset has tiles, divided as ``parallel``, one of `backends.PARALLEL_KINDS`, says.

    Raises ModelError, with the remedy, for a model or back end that is missing or does not work here.
    """
    from ..model.checkpoint_description import ModelError
    from .engine import Engine

    if backend not in BACKENDS:
        raise ModelError(f'unknown backend {backend!r}; choose one of {", ".join(BACKENDS)}')
    if threads < 1:
        raise ModelError(f'threads must be at least 1, not {threads}')
    if sessions < 1:
        raise ModelError(f'sessions must be at least 1, not {sessions}')
    if gpus < 1:
        raise ModelError(f'gpus must be at least 1, not {gpus}')
    folder = model_folder(model)
    if not (folder / 'model.json').is_file():
        shipped = ', '.join(sorted(p.parent.name for p in WEIGHTS.glob('*/model.json'))) or 'none'
        raise ModelError(f'no model {model!r}: neither a shipped one ({shipped}) nor a folder with model.json')
    if backend == 'auto':
        backend = 'torch' if _has_gpu() else 'onnx-int8'
    if gpus > 1:
        return _on_several(str(folder), None, backend, threads, sessions, gpus, parallel)
    if backend.startswith('torch'):
        from ..model import checkpoint
        from .backends.networks import form
        return Engine(_torch_backend(checkpoint.load(folder, *form(backend)), backend, threads), folder, sessions)
    from .backends.onnx import OnnxBackend
    return Engine(OnnxBackend(folder, threads, quantised=backend == 'onnx-int8'), folder, sessions)


def load_random(preset: str, backend: str = 'torch', threads: int = 1, sessions: int = 8, seed: int = 0, gpus: int = 1,
                parallel: str = 'sequence') -> Engine:
    """Engine of a preset with random weights: as fast as a trained model of that size, and knowing nothing.

    ``backend`` is one of those of torch; ``gpus`` and ``parallel`` as of `load`.
    """
    from .backends.networks import form, random_model
    from .engine import Engine
    if gpus > 1:
        return _on_several(preset, seed, backend, threads, sessions, gpus, parallel)
    model = random_model(preset, seed, *form(backend))
    return Engine(_torch_backend(model, backend, threads), Path(preset), sessions)


def _on_several(model: str, seed: int | None, backend: str, threads: int, sessions: int, gpus: int, parallel: str
                ) -> Engine:
    import torch

    from ..model.checkpoint_description import ModelError
    from .distributed.engine import ParallelEngine
    from .distributed.failure import RankFailure
    from .distributed.leader import LeadingBackend
    from .distributed.source import Source
    if backend not in PARALLEL_BACKENDS:
        raise ModelError(f'back end {backend!r} runs on one GPU; on several: {", ".join(PARALLEL_BACKENDS)}')
    if torch.cuda.is_available() and torch.cuda.device_count() < gpus:
        raise ModelError(f'gpus is {gpus}, and this machine has {torch.cuda.device_count()}: choose fewer')
    try:
        leading = LeadingBackend(Source(model, seed, backend, threads), parallel, gpus)
    except (RankFailure, ValueError) as error:
        raise ModelError(str(error)) from error
    return ParallelEngine(leading, Path(model), sessions)


def _torch_backend(model: WorldModel, backend: str, threads: int) -> TorchBackend:
    from .backends.cache_folder import keep_compiled_kernels
    from .backends.networks import finish, precision
    from .backends.torch import TorchBackend
    keep_compiled_kernels()
    made = TorchBackend(model, threads, precision(backend, model.preset), compiled=backend == 'torch-compiled')
    finish(model, backend)
    return made


def _has_gpu() -> bool:
    # Importing torch takes seconds; a machine without the driver's device node needs no torch to run the model.
    if not Path('/dev/nvidiactl').exists():
        return False
    import torch
    return torch.cuda.is_available()
