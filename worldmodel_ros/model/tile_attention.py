"""Attention of a model with tiles: within frames, and over whole tiles of pages, including the block's own.

A pass has some groups of frames: those of a tile's length that make up a chunk to be denoised, or the frames of one slab that
are committed. A cache layer first writes the keys and values of each group to pages of its own; then every query tile attends
to the pages in its list, where the window's pages and own pages are treated alike.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..kernels.attention import paged_attention, split_attention, write_qkv
from ..kernels.pages import Pool, TileLists

if TYPE_CHECKING:
    from .dit import Block

# Of PyTorch's back ends only cuDNN's is written for Hopper; the others are fallbacks.
FASTEST_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
                 SDPBackend.MATH]

QUERY_BLOCK = 128  # queries of a tile per block, in the attention to pages


class TileAttention(Protocol):
    """How the layers of ``DiT.over_tiles`` attend: qkv (B, T, P, 3, H, d) to (B, T, P, H * d)."""

    rotary: Tensor  # of the tokens of x, (2, B * T * P, d / 2), for layers that attend within frames

    def within_frames(self, qkv: Tensor) -> Tensor:
        """Attend within each frame; queries and keys are already normalised and rotated."""

    def over_tiles(self, layer: int, block: Block, qkv: Tensor) -> Tensor:
        """Attend to tiles, as cache layer number ``layer``, and write the block's own keys and values to its own pages.
        Queries and keys are not yet normalised or rotated; the norms are those of ``block``."""


@dataclass(frozen=True)
class OwnPages:
    """Where a pass writes its keys and values: ``pages`` (groups * tiles,) of the pool ``tier``, ``counts`` tokens in each,
    from the place ``offsets`` on, if any; all int32."""

    tier: int
    pages: Tensor
    counts: Tensor
    offsets: Tensor | None


@dataclass(frozen=True)
class PagedTiles:
    """The attention of one session's pass (B = 1), on any device.

    shape: groups, frames per group, tiles per frame, tokens of a tile in a frame; rotary (2, T * P, d / 2), float32,
    contiguous; pools and lists by cache layer and tier, the lists for the tiles of each group in turn.
    """

    shape: tuple[int, int, int, int]
    rotary: Tensor
    own: OwnPages
    pools: list[list[Pool]]
    lists: list[list[TileLists]]

    def within_frames(self, qkv: Tensor) -> Tensor:
        return attend_within_frames(qkv)

    def over_tiles(self, layer: int, block: Block, qkv: Tensor) -> Tensor:
        (groups, frames, tiles, run), (heads, dim) = self.shape, qkv.shape[4:]
        q = self.write(layer, block, qkv.view(-1, 3, heads, dim))
        if self.whole_slabs:
            return self.attend(layer, q).view(*qkv.shape[:3], heads * dim)
        # An incomplete slab is padded, since the kernels take whole blocks of queries.
        q = F.pad(q.view(groups * tiles, frames * run, heads, dim), (0, 0, 0, 0, 0, -frames * run % QUERY_BLOCK))
        out = paged_attention(q.view(-1, heads, dim), self.pools[layer], self.lists[layer]).view(groups, tiles, -1, heads * dim)
        out = out[:, :, :frames * run].unflatten(2, (frames, run)).transpose(1, 2)
        return out.reshape(*qkv.shape[:3], heads * dim)

    @property
    def whole_slabs(self) -> bool:
        """Whether each group's frames fill its pages."""
        _, frames, _, run = self.shape
        return frames * run == self.pools[0][0].page_tokens

    def write(self, layer: int, block: Block, qkv: Tensor, part: int = 0, parts: int = 1, scale: Tensor | None = None,
              dtype: torch.dtype | None = None) -> Tensor:
        """Write keys and values of qkv (n, 3, H, d) to own pages; return the queries (n, H, d), tile after tile of each group.
        qkv has all T * P tokens, or those of part number ``part`` of equal ``parts`` of the groups; ``scale`` and ``dtype``: of
        rounded ones, as in ``page_write.write_qkv``."""
        pools, own, (_, frames, tiles, _) = self.pools[layer], self.own, self.shape
        pages, counts, offsets = (each if each is None else each.chunk(parts)[part]
                                  for each in (own.pages, own.counts, own.offsets))
        return write_qkv(pools[own.tier], pages, counts, qkv, self.rotary.chunk(parts, 1)[part], block.q_norm.weight,
                         block.k_norm.weight, offsets, (frames, tiles), scale, dtype)

    def attend(self, layer: int, q: Tensor, part: int = 0, parts: int = 1, out: Tensor | None = None) -> Tensor:
        """Map queries from ``write`` to results (n, H * d), frame after frame, where groups are whole slabs; ``part`` and
        ``parts`` as there. Results are written to ``out``, if given, and that is returned."""
        groups, frames, tiles, _ = self.shape
        lists = [table.of_tiles(part * groups // parts * tiles, (part + 1) * groups // parts * tiles)
                 for table in self.lists[layer]]
        place = None if out is None else out.unflatten(1, q.shape[1:])
        found = paged_attention(q, self.pools[layer], lists, None, (frames, tiles), place)
        return found.flatten(1) if out is None else out


@dataclass(frozen=True)
class PagedFrames:
    """The attention of one session's pass (B = 1) of a preset without tiles, whose pages are frames, on any device.

    own: where the pass writes its keys and values, one page per frame; pools by cache layer; lists as ``split_attention`` takes
    them, in ``splits`` parts, either per frame of queries or for all together. rotary as in ``PagedTiles``.
    """

    rotary: Tensor
    own: OwnPages
    pools: list[Pool]
    lists: TileLists
    splits: int

    def within_frames(self, qkv: Tensor) -> Tensor:
        return attend_within_frames(qkv)

    def over_tiles(self, layer: int, block: Block, qkv: Tensor) -> Tensor:
        q = write_qkv(self.pools[layer], self.own.pages, self.own.counts, qkv.view(-1, *qkv.shape[3:]), self.rotary,
                      block.q_norm.weight, block.k_norm.weight)
        return split_attention(q, self.pools[layer], self.lists, self.splits).view(*qkv.shape[:3], -1)


def attend_within_frames(qkv: Tensor) -> Tensor:
    """Implement ``TileAttention.within_frames``."""
    b, t, p, _, heads, dim = qkv.shape
    q, k, v = qkv.flatten(0, 1).permute(2, 0, 3, 1, 4).unbind(0)
    with sdpa_kernel(FASTEST_FIRST, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, p, heads * dim)
