"""Finds a model by name or folder, chooses the back end and builds the engine."""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..model.checkpoint_description import WORLD_FILE, ModelError, read_description
from .backends import BACKENDS, PARALLEL_BACKENDS
from .device_failure import RankFailure

if TYPE_CHECKING:
    from .engine import Engine
    from .open_world.world import OpenWorld

WEIGHTS = Path(__file__).resolve().parents[1] / 'weights'


def model_folder(model: str) -> Path:
    """Return the folder of a shipped model by name, or of any other by path. Raises ModelError if there is none."""
    for folder in (WEIGHTS / model, Path(model).expanduser()):
        if (folder / 'model.json').is_file():
            return folder
    shipped = ', '.join(sorted(p.parent.name for p in WEIGHTS.glob('*/model.json'))) or 'none'
    raise ModelError(f'no model {model!r}: neither a shipped one ({shipped}) nor a folder with model.json')


def is_world(model: str) -> bool:
    """Return whether ``model`` is the folder of an open world model (``open_world``)."""
    return (Path(model).expanduser() / WORLD_FILE).is_file()


def load_world(model: str, backend: str = 'auto', threads: int = 1, gpus: int = 1, sessions: int = 1,
               parallel: str = 'sequence', smaller: bool = True) -> OpenWorld:
    """Load an open world model, with its ``smaller`` one if that is wanted. ``sessions`` may be open at a time. ``backend``:
    ``torch`` (float32), ``torch-bf16``, ``torch-fp8`` or ``auto``, ``torch-bf16`` on a GPU and ``torch`` on a CPU. ``gpus``
    and ``parallel`` as of ``load``. Raises ModelError."""
    _check_numbers(threads, sessions, gpus)
    if gpus > 1:
        from .open_world.divided import LeadingWorld
        return LeadingWorld.load(model, backend, threads, sessions, smaller, gpus=gpus, kind=parallel)
    from .open_world.world import OpenWorld
    return OpenWorld.load(model, backend, threads, sessions, smaller)


def load(model: str = 'tiny', backend: str = 'auto', threads: int = 1, sessions: int = 8, gpus: int = 1,
         parallel: str = 'sequence', anchors: int = 0) -> Engine:
    """Load a model and return its engine.

    ``model`` names a shipped model or a folder that ``worldmodel train`` wrote. ``backend`` is one of ``backends.BACKENDS``:
    ``auto`` takes torch on a GPU and for presets with tiles, and ONNX Runtime on a CPU; ``torch-compiled`` is ``torch-bf16``
    with its layers compiled for one session, which takes minutes at the first start on a machine; ``torch-fp8`` has the
    layers' weights in FP8 and, for presets with tiles, the pages too; ``torch-fp4`` also has pages older than a quarter of the
    window in FP4. ``threads`` limits the threads of one network call on a CPU. ``sessions`` may be open at a time; a robot
    needs one, and a second one while it restarts. ``gpus``: how many to run on, if the preset has tiles, divided by
    ``parallel``, one of ``backends.PARALLEL_KINDS``. ``anchors``: observed moments that each session keeps, to imagine for
    minutes (``engine.anchors``), on one GPU or a CPU.

    Raises ModelError, with the remedy, for a model or back end that is missing or does not work here.
    """
    from .anchors import check_anchors
    from .engine import Engine

    if backend not in BACKENDS:
        raise ModelError(f'unknown backend {backend!r}; choose one of {", ".join(BACKENDS)}')
    _check_numbers(threads, sessions, gpus)
    folder = model_folder(model)
    try:
        check_anchors(read_description(folder).preset, anchors)
    except ValueError as error:
        raise ModelError(str(error)) from error
    if backend == 'auto':
        backend = 'torch' if _has_gpu() or read_description(folder).preset.tile else 'onnx-int8'
    if gpus > 1 or backend.startswith('torch'):
        return _torch_engine(str(folder), None, backend, threads, sessions, gpus, parallel, anchors)
    from .backends.onnx import OnnxBackend
    return Engine(OnnxBackend(folder, threads, quantised=backend == 'onnx-int8'), folder, sessions, anchors=anchors)


def load_random(preset: str, backend: str = 'torch', threads: int = 1, sessions: int = 8, seed: int = 0, gpus: int = 1,
                parallel: str = 'sequence') -> Engine:
    """Return the engine of a preset with random weights: as fast as a trained model of that size, with meaningless predictions.

    ``backend`` is one of those of torch; ``gpus`` and ``parallel`` as of ``load``.
    """
    return _torch_engine(preset, seed, backend, threads, sessions, gpus, parallel)


def _check_numbers(threads: int, sessions: int, gpus: int) -> None:
    for name, number in (('threads', threads), ('sessions', sessions), ('gpus', gpus)):
        if number < 1:
            raise ModelError(f'{name} must be at least 1, not {number}')


def _torch_engine(model: str, seed: int | None, backend: str, threads: int, sessions: int, gpus: int, parallel: str,
                  anchors: int = 0) -> Engine:
    if anchors and gpus > 1:
        raise ModelError(f'anchors is {anchors}, and a model on several GPUs keeps none: leave it 0, or gpus 1')
    if gpus > 1 and backend not in PARALLEL_BACKENDS:
        raise ModelError(f'back end {backend!r} runs on one GPU; on several: {", ".join(PARALLEL_BACKENDS)}')
    import torch

    from .backends.networks import Source
    from .engine import Engine
    source = Source(model, seed, backend, threads)
    if gpus == 1:
        from .backends.torch import TorchBackend
        networks = source.read()
        made = TorchBackend(networks, threads, source.precision, compiled=backend == 'torch-compiled')
        source.finish(networks)
        return Engine(made, Path(model), sessions, anchors=anchors)
    from .distributed.leader import LeadingBackend
    from .distributed.session import RestoringSession
    if torch.cuda.is_available() and torch.cuda.device_count() < gpus:
        raise ModelError(f'gpus is {gpus}, but this machine has {torch.cuda.device_count()}: choose fewer')
    try:
        leading = LeadingBackend(source, parallel, gpus)
    except (RankFailure, ValueError) as error:
        raise ModelError(str(error)) from error
    return Engine(leading, Path(model), sessions, RestoringSession)


def _has_gpu() -> bool:
    # Importing torch takes seconds, and is not needed on a machine without the driver's device node.
    if not Path('/dev/nvidiactl').exists():
        return False
    import torch
    return torch.cuda.is_available()
