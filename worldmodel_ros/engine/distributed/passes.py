"""A process's part in the passes of a model with tiles that several processes run together."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worldmodel_ros.engine.backends.cuda_graphs import Eager, Graphs
from worldmodel_ros.engine.backends.tile_passes import Storages, TilePasses
from worldmodel_ros.model.dit import Modulated
from worldmodel_ros.model.parallel.group import Group, SequenceParallel
from worldmodel_ros.model.parallel.tiles import pass_over_tiles
from worldmodel_ros.model.tile_attention import PagedTiles
from worldmodel_ros.model.world_model import WorldModel

PASSES = ('commit', 'approach', 'prepare', 'denoise', 'finish')


class DividedPasses(TilePasses):
    """As ``TilePasses``, by all processes of a group; each has the results.

    ``denoise`` and ``finish`` return outcomes instead of features, which are a hundred times as large, and divided.
    """

    def __init__(self, model: WorldModel, device: torch.device, launch: Eager | Graphs, group: Group):
        super().__init__(model.dit, device, launch)
        self._outcome_head, self._group = model.outcome_head, group

    def run(self, network: str, storages: Storages, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run one of PASSES on rank 0's tensors; those of other ranks only give the shapes and types."""
        return getattr(self, f'{network}_pass')(storages, *self._group.shared(tensors))

    def finished(self, moved: Tensor, features: Tensor) -> tuple[Tensor, ...]:
        logits, progress = self._outcome_head(features.float())
        return moved, self._of_all_frames(torch.cat([logits[..., None], progress], -1), moved)

    def commit_pass(self, storages: Storages, latents: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        features, = super().commit_pass(storages, latents, *inputs)
        return (self._of_all_frames(features, latents),)

    def modulated(self, conditions: Sequence[Tensor]) -> list[Modulated]:
        if isinstance(self._group, SequenceParallel):
            return self.dit.shared_modulations(conditions)
        return super().modulated(conditions)

    def over_tiles(self, latents: Tensor, modulated: Modulated, attention: PagedTiles) -> tuple[Tensor, Tensor]:
        if isinstance(self._group, SequenceParallel):
            return pass_over_tiles(self._group, self.dit, latents, modulated, attention)
        return super().over_tiles(latents, modulated, attention)

    def _of_all_frames(self, x: Tensor, latents: Tensor) -> Tensor:
        return x if x.shape[1] == latents.shape[1] else self._group.gather(x, 1)
