"""The networks that a back end of torch runs: source, device and type of their weights, and their final quantisation."""
from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from worldmodel_ros.kernels.pages import Precision
from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.checkpoint_description import read_description
from worldmodel_ros.model.precision import to_fp8
from worldmodel_ros.model.presets import PRESETS, Preset
from worldmodel_ros.model.weights import PartOf, RandomWeights, build
from worldmodel_ros.model.world_model import WorldModel
from worldmodel_ros.paths import cache_folder


def random_model(preset: str, seed: int = 0, device: torch.device | str = 'cpu', layers: torch.dtype | None = None,
                 part: PartOf = lambda name: None) -> WorldModel:
    """Return networks of a preset with random weights, drawn on the device; ``layers``: type of the DiT's weights, by default
    float32; ``part`` as in ``weights.build``."""
    return build(PRESETS[preset], RandomWeights(seed, device), device, layers or torch.float32, part)


@dataclass(frozen=True)
class Source:
    """
    Where a process finds the networks that its back end runs.

    ``model`` is a folder of weights or, with a ``seed``, the preset of random ones. ``backend`` is one of
    ``backends.BACKENDS``, of torch; ``threads`` limits the threads of one network call on a CPU.
    """

    model: str
    seed: int | None = None
    backend: str = 'torch'
    threads: int = 1

    @property
    def preset(self) -> Preset:
        return PRESETS[self.model] if self.seed is not None else read_description(Path(self.model)).preset

    @property
    def precision(self) -> Precision:
        """Number format of the pages."""
        if self.backend == 'torch':
            return Precision.FP32
        pages = {'torch-fp8': Precision.FP8, 'torch-fp4': Precision.FP4} if self.preset.tile else {}
        return pages.get(self.backend, Precision.BF16)

    def read(self, part: PartOf = lambda name: None) -> WorldModel:
        """Return the networks on this process's device, with the parts of the DiT's layers that ``part`` selects. Raises
        ModelError."""
        _keep_compiled_kernels()
        device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
        layers = torch.float32 if self.backend == 'torch' else torch.bfloat16
        if self.seed is not None:
            return random_model(self.model, self.seed, device, layers, part)
        return checkpoint.load(Path(self.model), device, layers, part)

    def finish(self, model: WorldModel) -> None:
        """Quantise the layers to FP8, for back ends that need it, once the back end has placed them."""
        if self.backend in ('torch-fp8', 'torch-fp4'):
            to_fp8(model.dit, fused=True)


def _keep_compiled_kernels() -> None:
    # By default those of torch.compile are under /tmp, and lost on reboot. Must run before anything is compiled; folders set
    # by the user take precedence.
    os.environ.setdefault('TORCHINDUCTOR_CACHE_DIR', str(cache_folder() / 'inductor'))
    os.environ.setdefault('TRITON_CACHE_DIR', str(cache_folder() / 'triton'))
