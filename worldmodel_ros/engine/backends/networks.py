"""The networks that a torch backend runs: where their weights are, of which type, and what is done to them last."""
from __future__ import annotations

import torch

from worldmodel_ros.kernels.pages import Precision
from worldmodel_ros.model.precision import to_fp8
from worldmodel_ros.model.presets import PRESETS, Preset
from worldmodel_ros.model.weights import PartOf, RandomWeights, build
from worldmodel_ros.model.world_model import WorldModel


def random_model(preset: str, seed: int = 0, device: torch.device | str = 'cpu', layers: torch.dtype | None = None,
                 part: PartOf = lambda name: None) -> WorldModel:
    """Networks of a preset with random weights, drawn on the device; ``layers``: type of the DiT's, float32 if not
    given; ``part`` as in `weights.build`."""
    return build(PRESETS[preset], RandomWeights(seed, device), device, layers or torch.float32, part)


def form(backend: str) -> tuple[torch.device, torch.dtype]:
    """Where a back end of torch has its weights, and as what it has those of the layers."""
    return (torch.device('cuda' if torch.cuda.is_available() else 'cpu'),
            torch.float32 if backend == 'torch' else torch.bfloat16)


def precision(backend: str, preset: Preset) -> Precision:
    """As what a back end of torch has pages."""
    if backend == 'torch':
        return Precision.FP32
    return Precision.FP8 if backend == 'torch-fp8' and preset.tile else Precision.BF16


def finish(model: WorldModel, backend: str) -> None:
    """What is done last to the layers of a back end of torch."""
    if backend == 'torch-fp8':
        to_fp8(model.dit, fused=True)
