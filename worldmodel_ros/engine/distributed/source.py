"""Where a process finds the model of which it takes its share."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from worldmodel_ros.engine.backends import networks
from worldmodel_ros.engine.backends.cache_folder import keep_compiled_kernels
from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.checkpoint_description import read_description
from worldmodel_ros.model.presets import PRESETS, Preset
from worldmodel_ros.model.weights import PartOf
from worldmodel_ros.model.world_model import WorldModel


@dataclass(frozen=True)
class Source:
    """``model`` is a folder of weights; or, if there is a ``seed``, the preset of random ones. ``backend`` is one of
    `backends.BACKENDS`, of torch; ``threads`` bounds those of one network call on a CPU."""

    model: str
    seed: int | None = None
    backend: str = 'torch'
    threads: int = 1

    @property
    def preset(self) -> Preset:
        return PRESETS[self.model] if self.seed is not None else read_description(Path(self.model)).preset

    def read(self, part: PartOf) -> WorldModel:
        """The networks on this process's device; of the DiT's layers, what ``part`` says. Raises ModelError."""
        keep_compiled_kernels()
        form = networks.form(self.backend)
        if self.seed is not None:
            return networks.random_model(self.model, self.seed, *form, part)
        return checkpoint.load(Path(self.model), *form, part)


def use_device(rank: int) -> torch.device:
    """Gives this process a GPU of its own, if there are any."""
    if not torch.cuda.is_available():
        return torch.device('cpu')
    if rank >= torch.cuda.device_count():
        raise ValueError(f'process {rank} of the model has no GPU: there are {torch.cuda.device_count()}')
    torch.cuda.set_device(rank)
    return torch.device('cuda', rank)
