"""A process's share of a model: weights or frames, and the pages of its own heads."""
from __future__ import annotations

import torch

from worldmodel_ros.cache.layout import TileLayout
from worldmodel_ros.engine.backends import PARALLEL_KINDS
from worldmodel_ros.engine.backends.networks import Source
from worldmodel_ros.engine.backends.torch import TorchBackend
from worldmodel_ros.kernels.pages import Precision
from worldmodel_ros.model.parallel import tensor_parallel, tiles
from worldmodel_ros.model.parallel.group import Group, SequenceParallel, TensorParallel
from worldmodel_ros.model.parallel.link import Link
from worldmodel_ros.model.parallel.pages import HeadsOfPages
from worldmodel_ros.model.presets import Preset
from .passes import DividedPasses


def check(preset: Preset, kind: str, count: int) -> None:
    """Raise ValueError if a model cannot be divided this way."""
    if kind not in PARALLEL_KINDS:
        raise ValueError(f'a model is not divided by {kind!r}; known: {", ".join(PARALLEL_KINDS)}')
    if preset.tile is None:
        raise ValueError(f'preset {preset.name!r} has no tiles: it runs on one GPU')
    if count < 2 or preset.heads % count or preset.tokens % count:
        raise ValueError(f'preset {preset.name!r}: {preset.heads} heads and {preset.tokens} tokens of a frame '
                         f'cannot be divided among {count} processes')


def use_device(rank: int) -> torch.device:
    """Select this process's own GPU, if there are any, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device('cpu')
    if rank >= torch.cuda.device_count():
        raise ValueError(f'process {rank} of the model has no GPU: there are {torch.cuda.device_count()}')
    torch.cuda.set_device(rank)
    return torch.device('cuda', rank)


class DividedBackend(TorchBackend):
    """A ``TorchBackend`` whose passes over tiles all processes run together; the small networks are not divided."""

    storage_type = HeadsOfPages
    group: Group
    passes: DividedPasses

    def __init__(self, source: Source, kind: str, rank: int, count: int):
        """Read its share of the model; call ``join`` before anything else."""
        preset = source.preset
        check(preset, kind, count)
        self._source, self._kind = source, kind
        part = tensor_parallel.share(preset, rank, count) if kind == 'tensor' else lambda name: None
        super().__init__(source.read(part), source.threads, source.precision)
        self.heads = preset.heads // count

    def join(self, link: Link) -> None:
        """Connect to the other processes."""
        if self._kind == 'tensor':
            self.group = TensorParallel(link)
            tensor_parallel.join(self.model.dit, self.group)
        else:
            self.group = SequenceParallel(link, rounded=self._kind == 'sequence-fp8')
        self._source.finish(self.model)
        if isinstance(self.group, SequenceParallel):
            tiles.join(self.model.dit, self.group)
        self._tiles = self.passes = DividedPasses(self.model, self.device, self._launch, self.group)

    def _storage(self, layout: TileLayout, pages: int, precision: Precision) -> HeadsOfPages:
        storage = super()._storage(layout, pages, precision)
        storage.group = self.group
        return storage

    def _outcomes(self, columns: list[tuple]) -> list:
        outcomes, = columns  # the pass has computed them already
        return [(each[..., 0], each[..., 1:]) for each in outcomes]
