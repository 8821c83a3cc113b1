"""Attention of a model with tiles: within frames, and over whole tiles of pages, the block's own among them.

A pass has some groups of frames: those of a tile's length that a chunk to be denoised is made of, or the frames of one
slab that are committed. A cache layer writes the keys and values of each group to pages of its own first; then every
query tile attends to the pages that its list names, and a window's page is no different from an own one.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..kernels.attention import paged_attention, split_attention, write_qkv
from ..kernels.pages import Pool, TileLists

if TYPE_CHECKING:
    from .dit import Block

# Of what PyTorch has, only cuDNN's is written for Hopper; the others are for where it does not serve.
FASTEST_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
                 SDPBackend.MATH]

QUERY_BLOCK = 128  # of a tile, for the attention to pages


class TileAttention(Protocol):
    """What the layers of ``DiT.over_tiles`` attend by: qkv (B, T, P, 3, H, d) to (B, T, P, H * d)."""

    rotary: Tensor  # of the tokens of x, (2, B * T * P, d / 2): by it is rotated what attends within frames

    def within_frames(self, qkv: Tensor) -> Tensor:
        """Each frame attends to itself; queries and keys are normalised and rotated."""

    def over_tiles(self, layer: int, block: Block, qkv: Tensor) -> Tensor:
        """Attend to tiles, as cache layer number ``layer``, and keep the block's own keys and values in its own
        pages; queries and keys are not yet normalised nor rotated, which is done by the norms of the block."""


@dataclass(frozen=True)
class OwnPages:
    """Where a pass writes its keys and values: of the pool ``tier``, ``pages`` (groups * tiles,), each from the place
    ``offsets`` on, where there are any, and ``counts`` tokens; all int32."""

    tier: int
    pages: Tensor
    counts: Tensor
    offsets: Tensor | None


@dataclass(frozen=True)
class PagedTiles:
    """The attention of one session's pass (B = 1), on any device.

    shape: groups, frames of a group, tiles of a frame, tokens of a tile in a frame; rotary (2, T * P, d / 2), float32,
    contiguous; pools and lists, by cache layer and tier, the lists for the tiles of each group in turn.
    """

    shape: tuple[int, int, int, int]
    rotary: Tensor
    own: OwnPages
    pools: list[list[Pool]]
    lists: list[list[TileLists]]

    def within_frames(self, qkv: Tensor) -> Tensor:
        return attend_within_frames(qkv)

    def over_tiles(self, layer: int, block: Block, qkv: Tensor) -> Tensor:
        (groups, frames, tiles, run), pools, (heads, dim) = self.shape, self.pools[layer], qkv.shape[4:]
        own, lists, order = self.own, self.lists[layer], (frames, tiles)
        q = write_qkv(pools[own.tier], own.pages, own.counts, qkv.view(-1, 3, heads, dim), self.rotary,
                      block.q_norm.weight, block.k_norm.weight, own.offsets, order)
        if frames * run == pools[0].page_tokens:
            return paged_attention(q, pools, lists, by_frame=order).view(*qkv.shape[:3], heads * dim)
        # Some frames of a slab alone: the kernels take blocks of queries.
        q = F.pad(q.view(groups * tiles, frames * run, heads, dim), (0, 0, 0, 0, 0, -frames * run % QUERY_BLOCK))
        out = paged_attention(q.view(-1, heads, dim), pools, lists).view(groups, tiles, -1, heads * dim)
        out = out[:, :, :frames * run].unflatten(2, (frames, run)).transpose(1, 2)
        return out.reshape(*qkv.shape[:3], heads * dim)


@dataclass(frozen=True)
class PagedFrames:
    """The attention of one session's pass (B = 1) of a preset without tiles, whose pages are frames, on any device.

    own: where the pass writes its keys and values, a page a frame; pools by cache layer; lists as ``split_attention`` takes
    them, in ``splits`` parts, either of each frame's queries or of all together. rotary as of ``PagedTiles``.
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
    """``TileAttention.within_frames``."""
    b, t, p, _, heads, dim = qkv.shape
    q, k, v = qkv.flatten(0, 1).permute(2, 0, 3, 1, 4).unbind(0)
    with sdpa_kernel(FASTEST_FIRST, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, p, heads * dim)
