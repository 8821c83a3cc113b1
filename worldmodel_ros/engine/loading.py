"""Finds a model by name or folder, chooses the back end and builds the engine."""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ..kernels.pages import Precision
    from ..model.presets import Preset
    from ..model.weights import PartOf
    from ..model.world_model import WorldModel
    from .engine import Engine
    from .torch_backend import TorchBackend

BACKENDS = ('auto', 'torch', 'torch-bf16', 'torch-compiled', 'torch-fp8', 'onnx', 'onnx-int8')
PARALLEL_BACKENDS = ('torch', 'torch-bf16', 'torch-fp8')  # that run on several GPUs
PARALLEL_KINDS = ('sequence', 'sequence-fp8', 'tensor')  # -fp8: what the processes exchange is rounded to e4m3
WEIGHTS = Path(__file__).resolve().parents[1] / 'weights'


def model_folder(model: str) -> Path:
    """Folder of a model that the package ships, by name, or of one's own, by path."""
    shipped = WEIGHTS / model
    return shipped if (shipped / 'model.json').is_file() else Path(model).expanduser()


def load(model: str = 'tiny', backend: str = 'auto', threads: int = 1, sessions: int = 8, gpus: int = 1,
         parallel: str = 'sequence') -> Engine:
    """Engine of a model.

    ``model`` names a shipped model or a folder that `worldmodel train` wrote. ``backend`` is one of BACKENDS: `auto`
    takes torch on a GPU and ONNX Runtime on a CPU; `torch-compiled` is `torch-bf16` with its layers compiled for one
    session, which takes minutes at its first start on a machine; `torch-fp8` has the layers' weights in FP8, and the
    pages of presets with tiles, too. ``threads`` bounds the threads of one network call on a CPU.
    ``sessions`` may be open at a time; a robot needs one, and a second one for the moment in which it begins anew.
    ``gpus``: on so many, if the preset has tiles, divided as ``parallel``, one of PARALLEL_KINDS, says.

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
        return Engine(_torch_backend(checkpoint.load(folder, *form(backend)), backend, threads), folder, sessions)
    from .onnx_backend import OnnxBackend
    return Engine(OnnxBackend(folder, threads, quantised=backend == 'onnx-int8'), folder, sessions)


def load_random(preset: str, backend: str = 'torch', threads: int = 1, sessions: int = 8, seed: int = 0, gpus: int = 1,
                parallel: str = 'sequence') -> Engine:
    """Engine of a preset with random weights: as fast as a trained model of that size, and knowing nothing.

    ``backend`` is one of those of torch; ``gpus`` and ``parallel`` as of `load`.
    """
    from .engine import Engine
    if gpus > 1:
        return _on_several(preset, seed, backend, threads, sessions, gpus, parallel)
    model = random_model(preset, seed, *form(backend))
    return Engine(_torch_backend(model, backend, threads), Path(preset), sessions)


def _on_several(model: str, seed: int | None, backend: str, threads: int, sessions: int, gpus: int, parallel: str
                ) -> Engine:
    import torch

    from ..model.checkpoint_description import ModelError
    from .parallel.engine import ParallelEngine
    from .parallel.failure import RankFailure
    from .parallel.leader import LeadingBackend
    from .parallel.source import Source
    if backend not in PARALLEL_BACKENDS:
        raise ModelError(f'back end {backend!r} runs on one GPU; on several: {", ".join(PARALLEL_BACKENDS)}')
    if torch.cuda.is_available() and torch.cuda.device_count() < gpus:
        raise ModelError(f'gpus is {gpus}, and this machine has {torch.cuda.device_count()}: choose fewer')
    try:
        leading = LeadingBackend(Source(model, seed, backend, threads), parallel, gpus)
    except (RankFailure, ValueError) as error:
        raise ModelError(str(error)) from error
    return ParallelEngine(leading, Path(model), sessions)


def random_model(preset: str, seed: int = 0, device: torch.device | str = 'cpu', layers: torch.dtype | None = None,
                 part: PartOf = lambda name: None) -> WorldModel:
    """Networks of a preset with random weights, drawn on the device; ``layers``: type of the DiT's, float32 if not
    given; ``part`` as in `weights.build`."""
    import torch

    from ..model.presets import PRESETS
    from ..model.weights import RandomWeights, build
    return build(PRESETS[preset], RandomWeights(seed, device), device, layers or torch.float32, part)


def form(backend: str) -> tuple[torch.device, torch.dtype]:
    """Where a back end of torch has its weights, and as what it has those of the layers."""
    import torch
    return (torch.device('cuda' if torch.cuda.is_available() else 'cpu'),
            torch.float32 if backend == 'torch' else torch.bfloat16)


def precision(backend: str, preset: Preset) -> Precision:
    """As what a back end of torch has pages."""
    from ..kernels.pages import Precision
    if backend == 'torch':
        return Precision.FP32
    return Precision.FP8 if backend == 'torch-fp8' and preset.tile else Precision.BF16


def finish(model: WorldModel, backend: str) -> None:
    """What is done last to the layers of a back end of torch."""
    if backend == 'torch-fp8':
        from ..model.precision import to_fp8
        to_fp8(model.dit, fused=True)


def _torch_backend(model: WorldModel, backend: str, threads: int) -> TorchBackend:
    from .cache_folder import keep_compiled_kernels
    from .torch_backend import TorchBackend
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
