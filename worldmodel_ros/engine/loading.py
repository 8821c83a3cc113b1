"""Finds a model by name or folder, chooses the back end and builds the engine."""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..model.world_model import WorldModel
    from .engine import Engine
    from .torch_backend import TorchBackend

BACKENDS = ('auto', 'torch', 'torch-bf16', 'onnx', 'onnx-int8')
WEIGHTS = Path(__file__).resolve().parents[1] / 'weights'


def model_folder(model: str) -> Path:
    """Folder of a model that the package ships, by name, or of one's own, by path."""
    shipped = WEIGHTS / model
    return shipped if (shipped / 'model.json').is_file() else Path(model).expanduser()


def load(model: str = 'tiny', backend: str = 'auto', threads: int = 1, sessions: int = 8) -> Engine:
    """Engine of a model.

    ``model`` names a shipped model or a folder that `worldmodel train` wrote. ``backend`` is one of BACKENDS: `auto`
    takes torch on a GPU and ONNX Runtime on a CPU. ``threads`` bounds the threads of one network call on a CPU.
    ``sessions`` may be open at a time; a robot needs one, and a second one for the moment in which it begins anew.

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
    folder = model_folder(model)
    if not (folder / 'model.json').is_file():
        shipped = ', '.join(sorted(p.parent.name for p in WEIGHTS.glob('*/model.json'))) or 'none'
        raise ModelError(f'no model {model!r}: neither a shipped one ({shipped}) nor a folder with model.json')
    if backend == 'auto':
        backend = 'torch' if _has_gpu() else 'onnx-int8'
    if backend.startswith('torch'):
        from ..model import checkpoint
        return Engine(_torch_backend(checkpoint.load(folder), backend, threads), folder, sessions)
    from .onnx_backend import OnnxBackend
    return Engine(OnnxBackend(folder, threads, quantised=backend == 'onnx-int8'), folder, sessions)


def load_random(preset: str, backend: str = 'torch', threads: int = 1, sessions: int = 8, seed: int = 0) -> Engine:
    """Engine of a preset with random weights: as fast as a trained model of that size, and knowing nothing.

    ``backend`` is torch or torch-bf16.
    """
    from .engine import Engine
    return Engine(_torch_backend(random_model(preset, seed), backend, threads), Path(preset), sessions)


def random_model(preset: str, seed: int = 0) -> WorldModel:
    """Networks of a preset with random weights."""
    import torch

    from ..model.presets import PRESETS
    from ..model.world_model import WorldModel
    torch.manual_seed(seed)
    model = WorldModel(PRESETS[preset])
    for parameter in model.parameters():
        # Layers that start at zero would make an identity of the network, whose answers show no mistake.
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def _torch_backend(model: WorldModel, backend: str, threads: int) -> TorchBackend:
    from ..kernels.pages import Precision
    from .torch_backend import TorchBackend
    return TorchBackend(model, threads, Precision.BF16 if backend == 'torch-bf16' else Precision.FP32)


def _has_gpu() -> bool:
    # Importing torch takes seconds; a machine without the driver's device node needs no torch to run the model.
    if not Path('/dev/nvidiactl').exists():
        return False
    import torch
    return torch.cuda.is_available()
