"""Masks of a preset with tiles, for frames that lie next to each other in one tensor, as in training.

They express what a session's page lists do (``engine.tile_window``): which frames a frame sees, and which tiles of the plane
each tile sees. FlexAttention (``tile_flex``) skips the blocks that a mask leaves out; ``dense`` is the definition, for CPUs and
tests.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..cache.layout import TileLayout
from .presets import VideoPreset

if TYPE_CHECKING:
    from .tile_flex import FlexMask


FOR_GOOD = np.iinfo(np.int64).max  # later than any frame


@dataclass(frozen=True, eq=False)
class FrameOrder:
    """Frames of a session: ``times`` (T,), their numbers, ascending; ``slabs`` (T,), the slabs that they count as; ``until``
    (T,), the number of the first frame that no longer finds them in the cache."""

    times: np.ndarray
    slabs: np.ndarray
    until: np.ndarray

    @classmethod
    def committed(cls, preset: VideoPreset, times: np.ndarray, until: np.ndarray | None = None) -> FrameOrder:
        """Return frames in their own slabs; without ``until``, they stay as long as the window holds them, and sinks for
        good."""
        slabs = times // preset.tile[0]
        if until is None:
            left = (slabs + 1) * preset.tile[0] + preset.window_frames
            until = np.where(slabs < preset.sink_slabs, FOR_GOOD, left)
        return cls(times, slabs, until)

    @classmethod
    def chunk(cls, preset: VideoPreset, times: np.ndarray) -> FrameOrder:
        """Return a chunk to be denoised: whole slabs, after that of the previous frame, complete or not."""
        frames = preset.tile[0]
        slabs = (times[0] - 1) // frames + 1 + np.arange(len(times)) // frames
        return cls(times, slabs, np.full(len(times), FOR_GOOD))


def commit_frames(preset: VideoPreset, order: FrameOrder, slabs: int) -> np.ndarray:
    """Return which committed frames each of them sees, (T, T), in a neighbourhood of ``slabs``, 0 for all: those up to
    itself in its slab, and the earlier slabs that are still in the cache."""
    times, own = order.times, order.slabs
    visible = (np.tril(np.ones((len(times),) * 2, bool))
               & ((order.until > times[:, None]) | (own[None] == own[:, None])))
    return visible & _near(own, own, visible, own, slabs)


def chunk_sees(preset: VideoPreset, before: FrameOrder, chunk: FrameOrder, slabs: int) -> np.ndarray:
    """Return which of the committed frames ``before`` a chunk (S) and of its own frames each of these (T) sees, (T, S + T)."""
    kept = (before.times < chunk.times[0]) & (before.until > chunk.times[0])
    visible = np.broadcast_to(np.concatenate([kept, np.ones(len(chunk.times), bool)]),
                              (len(chunk.times), len(kept) + len(chunk.times)))
    others = np.concatenate([before.slabs, chunk.slabs])
    return visible & _near(chunk.slabs, others, visible, np.full(len(chunk.slabs), chunk.slabs[-1]), slabs)


def _near(own: np.ndarray, others: np.ndarray, visible: np.ndarray, last: np.ndarray, size: int) -> np.ndarray:
    """Return which of the slabs ``others`` lie in the ``size`` around each of ``own``, shifted to stay between the first
    visible one and ``last``, as in ``cache.patterns``; bool (own, others)."""
    if not size:
        return np.ones((len(own), len(others)), bool)
    first = np.where(visible, others, np.iinfo(np.int64).max).min(1)
    low = np.maximum(np.minimum(own - size // 2, last - size + 1), first)[:, None]
    return (others >= low) & (others < low + size)


def plane_tiles(preset: VideoPreset, rows: int, columns: int) -> np.ndarray:
    """Return which tiles of a plane each tile sees in a neighbourhood of (rows, columns) of tiles, bool (tiles, tiles)."""
    layout = TileLayout(preset.tile, preset.grid)
    seen = np.ones((layout.tiles,) * 2, bool)
    for axis, size in enumerate((rows, columns)):
        place = layout.positions[:, axis]
        seen &= _near(place, place, np.ones_like(seen), np.full(len(place), layout.plane[axis] - 1), size)
    return seen


class TileMask:
    """Attention of T frames to S frames, (T, S) bool on the device, whose tiles see ``tiles`` (tiles, tiles) of the plane.

    Tokens are ordered by frame, within a frame by tile. If each tile sees only its own place, places form a batch, in which
    only frames are masked.
    """

    def __init__(self, preset: VideoPreset, frames: Tensor, tiles: np.ndarray):
        self.tokens, self.count = preset.tokens, len(tiles)
        self.run = preset.tokens // self.count
        self.frames, self.tiles = frames, torch.from_numpy(tiles).to(frames.device, non_blocking=True)
        self.column = bool((tiles == np.eye(len(tiles), dtype=bool)).all())
        # Tokens that share a row of ``units``: those of a frame, or of a tile in a frame.
        self.unit = self.run if self.column or not tiles.all() else self.tokens
        # Not in ``attend``, which is compiled for any mask of this shape.
        self.blocks = self.make_blocks() if frames.is_cuda else None

    @property
    def units(self) -> Tensor:
        """Which unit sees which, bool."""
        return self.frames if self.column or self.unit == self.tokens else torch.kron(self.frames, self.tiles)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from q (B, H, T * P, d) to k and v (B, H, S * P, d); return (B, H, T * P, d)."""
        if self.blocks is None:
            return F.scaled_dot_product_attention(q, k, v, self.dense)
        if not self.column:
            return self.blocks.attend(q, k, v)
        out = self.blocks.attend(*(self._by_place(part) for part in (q, k, v)))
        b, heads, tokens, dim = q.shape
        return out.view(b, self.count, heads, -1, self.run, dim).permute(0, 2, 3, 1, 4, 5).reshape(b, heads, tokens, dim)

    def _by_place(self, x: Tensor) -> Tensor:
        """Rearrange (B, H, T * P, d) to (B * tiles, H, T * run, d)."""
        b, heads, _, dim = x.shape
        return x.view(b, heads, -1, self.count, self.run, dim).permute(0, 3, 1, 2, 4, 5).reshape(b * self.count, heads, -1, dim)

    @cached_property
    def dense(self) -> Tensor:
        """The mask between tokens, bool (T * P, S * P)."""
        places = torch.kron(self.tiles, torch.ones(self.run, self.run, dtype=torch.bool, device=self.tiles.device))
        return torch.kron(self.frames, places)

    def make_blocks(self) -> FlexMask:
        """Return the mask for FlexAttention, imported only here: it loads PyTorch's compiler, two seconds of a core."""
        from .tile_flex import FlexMask
        return FlexMask(self.units, self.unit)
