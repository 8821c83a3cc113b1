"""A model with tiles and two kinds of layers, small enough for unit tests, and its definition without pages."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from small_model import SMALL, small_model
from torch import Tensor

from worldmodel_ros.model.dit import Block, DiT, rotate
from worldmodel_ros.model.presets import Preset
from worldmodel_ros.model.rotary import rotary_angles
from worldmodel_ros.model.tile_attention import attend_within_frames
from worldmodel_ros.model.world_model import WorldModel

# 4 x 4 tiles a slab of two frames; a chunk of two slabs; a window of four.
TILED = replace(SMALL, name='tiled-test', image_size=(128, 128), patch=1, depth=4, cache_every=2, tile=(2, 4, 4),
                patterns=((0, 1, 1), (3, 3, 3)), chunk_frames=4, window_frames=8, head_features=2, sink_slabs=1)


def tiled_model(preset: Preset = TILED, seed: int = 0) -> WorldModel:
    return small_model(seed, preset)


def decided(model: WorldModel) -> WorldModel:
    """Strengthen the layers and sharpen attention: with freshly drawn weights, nearly everything is a mean."""
    with torch.no_grad():
        for block in model.dit.blocks:
            block.modulation.weight.mul_(8.0)
            block.q_norm.weight.mul_(4.0)
    return model


class DenseTiles:
    """``TileAttention`` with the keys and values of all frames in one tensor, and a token mask made from the preset's tiles and
    neighbourhoods."""

    def __init__(self, dit: DiT):
        self.preset, (_, rows, columns) = dit.preset, dit.preset.tile
        row, column = np.divmod(dit.order.cpu().numpy(), self.preset.grid[1])
        self.place = np.stack([row // rows, column // columns], 1)  # of each token's tile in the plane
        self.seen = np.zeros(0, np.int64)  # committed frames, and their keys and values in each cache layer
        self.k: dict[int, Tensor] = {}
        self.v: dict[int, Tensor] = {}

    def begin(self, times: np.ndarray, commit: bool) -> None:
        """Begin a pass over frames at ``times``."""
        frames, window = self.preset.tile[0], self.preset.window_frames
        slab = self.seen // frames
        self.visible = ((slab + 1) * frames > times[0] - window) | (slab < self.preset.sink_slabs)
        # A chunk has as many slabs as it fills tiles, behind the newest one.
        own = times // frames if commit else slab.max() + 1 + np.arange(len(times)) // frames
        self.slabs = np.concatenate([slab, own])
        self.times, self.commit = times, commit
        self.rotary = torch.from_numpy(rotary_angles(self.preset, times)).flatten(1, 2)

    def end(self) -> None:
        """End the pass; keep what was committed."""
        if self.commit:
            self.seen = np.concatenate([self.seen, self.times])

    def within_frames(self, qkv: Tensor) -> Tensor:
        return attend_within_frames(qkv)

    def over_tiles(self, layer: int, block: Block, qkv: Tensor) -> Tensor:
        q, k, v = qkv[0].flatten(0, 1).permute(1, 2, 0, 3).unbind(0)  # (H, T * P, d)
        q, k = rotate(block.q_norm(q), self.rotary), rotate(block.k_norm(k), self.rotary)
        if layer in self.k:
            k, v = torch.cat([self.k[layer], k], 1), torch.cat([self.v[layer], v], 1)
        if self.commit:
            self.k[layer], self.v[layer] = k, v
        mask = self._mask(*self.preset.patterns[layer % len(self.preset.patterns)])
        out = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], mask)
        return out[0].transpose(0, 1).reshape(1, len(self.times), self.preset.tokens, -1)

    def _mask(self, slabs: int, rows: int, columns: int) -> Tensor:
        """Return which token of the pass sees which of all, bool."""
        visible = np.concatenate([self.visible, np.ones(len(self.times), bool)])
        there = self.slabs[visible]
        own = self.slabs[-len(self.times):]
        in_time = visible & _near(own, self.slabs, slabs, there.min(), there.max())
        in_plane = np.ones((self.preset.tokens,) * 2, bool)
        for axis, size in enumerate((rows, columns)):
            place = self.place[:, axis]
            in_plane &= _near(place, place, size, 0, place.max())
        return torch.from_numpy(np.kron(in_time, in_plane))


def _near(own: np.ndarray, others: np.ndarray, size: int, first: int, last: int) -> np.ndarray:
    """Return bool (own, others): whether it is in the ``size`` (0: all) around, shifted into ``first`` to ``last``."""
    low = np.clip(own - size // 2, first, max(first, last - size + 1))[:, None]
    return (others >= low) & (others < low + size) if size else np.ones((len(own), len(others)), bool)
