"""Sequence-parallel pass over tiles: each process has the pages of its own heads."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..dit import Modulated
from ..tile_attention import QUERY_BLOCK
from .group import ExchangedProducts, SequenceParallel

if TYPE_CHECKING:
    from worldmodel_ros.model.dit import Block, DiT
    from worldmodel_ros.model.tile_attention import PagedTiles

FRAMES, TOKENS, HEADS = 1, 2, -2  # axes of x (B, T, P, D), and of attended (B, T, P, H, d)


class DividedTiles:
    """A ``TileAttention`` that every process calls with its own frames (``axis`` FRAMES), or with its own tokens of every
    frame.

    Attention beyond these uses own heads over the whole pass: its inputs are exchanged for that (in cache layers by their
    ``ExchangedProducts``, see ``join``), and its outputs are exchanged back. ``whole`` is the attention of the whole pass, over
    pages of own heads.
    """

    def __init__(self, group: SequenceParallel, whole: PagedTiles, frames: int, axis: int):
        self._group, self._whole, self._axis = group, whole, axis
        # Contiguous, as the kernels read it.
        self.rotary = group.own(whole.rotary.unflatten(1, (frames, -1)), axis).flatten(1, 2).contiguous()

    def within_frames(self, qkv: Tensor) -> Tensor:
        return self._whole.within_frames(qkv) if self._axis == FRAMES else \
            self._by_heads(qkv, self._whole.within_frames)

    def over_tiles(self, layer: int, block: Block, qkv: Tensor) -> Tensor:
        """As in ``TileAttention``, for all processes' tokens and own heads, (count, B, T, P, 3, H / count, d)."""
        whole = qkv.movedim(0, self._axis).flatten(self._axis, self._axis + 1).contiguous()
        in_parts = self._whole.whole_slabs and self._in_parts(whole)
        share = self._shares(layer, block, whole, in_parts)
        like = qkv.new_empty(qkv.shape[1:4].numel(), qkv.shape[-2:].numel(), device='meta')
        attended = self._group.exchange_products(share, like, qkv.shape[-1], joined=True, exact=in_parts)
        return attended.reshape(*qkv.shape[1:4], -1)

    def _shares(self, layer: int, block: Block, qkv: Tensor, in_parts: bool) -> Callable[[int, Tensor | None], Tensor]:
        """Return what maps a process's number to the attended (n, H / count * d) of its tokens, and may write it to its second
        argument; qkv has been read by then."""
        count, whole = self._group.count, self._whole
        if whole.whole_slabs:
            q = whole.write(layer, block, qkv)
            if in_parts:
                return lambda rank, out: whole.attend(layer, q, rank, count, out)
            attended = cache(partial(whole.attend, layer, q))
        else:
            attended = partial(whole.over_tiles(layer, block, qkv).flatten, 0, -2)

        def share(rank: int, out: Tensor | None) -> Tensor:
            divided = attended().view(*qkv.shape[:3], -1).unflatten(self._axis, (count, -1))
            return divided.select(self._axis, rank).flatten(0, -2)
        return share

    def _in_parts(self, qkv: Tensor) -> bool:
        """Return whether attention of each process's frames in turn, so that those of others travel while own ones attend,
        takes no longer than that of all at once: if a GPU's multiprocessors have as many rounds of blocks of queries."""
        count = self._group.count
        if self._axis != FRAMES or self._whole.shape[0] % count:
            return False
        blocks = qkv.shape[FRAMES] * qkv.shape[TOKENS] // QUERY_BLOCK * qkv.shape[-2]
        processors = torch.cuda.get_device_properties(qkv.device).multi_processor_count if qkv.is_cuda else 1
        return count * -(-blocks // count // processors) <= -(-blocks // processors)

    def _by_heads(self, qkv: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        whole = self._group.exchange(qkv, divide=HEADS, join=self._axis).contiguous()
        attended = attend(whole).unflatten(-1, (-1, qkv.shape[-1]))
        return self._group.exchange(attended, divide=self._axis, join=HEADS).flatten(HEADS)


class SharedModulations(nn.Module):
    """The modulations of all layers, computed before them, for several passes at once: every process computes its share of each
    layer's outputs, for all frames. These are products of few rows, bound by reading the weights."""

    def __init__(self, linears: Sequence[nn.Linear], group: SequenceParallel):
        super().__init__()
        self._group, self._layers = group, len(linears)
        self.weight, self.bias = (nn.Parameter(torch.cat([group.own(getattr(linear, name), 0) for linear in linears]), False)
                                  for name in ('weight', 'bias'))

    def forward(self, conditions: Sequence[Tensor]) -> list[Modulated]:
        """Return each layer's modulation for the conditions (1, T, D) of several passes, whose weights are read once; for
        own frames, if the frames can be divided evenly, else for all."""
        link, rows = self._group.link, torch.cat(list(conditions))  # (passes, T, D)
        divided = rows.shape[1] % link.count == 0
        if divided:
            rows = rows.unflatten(1, (link.count, -1)).transpose(0, 1)  # those of each process in turn
        shares = F.linear(rows.flatten(0, -2), self.weight, self.bias).unflatten(-1, (self._layers, -1))
        if divided:
            sent = shares.view(link.count, -1).view(torch.uint8)
            shares = link.all_to_all(sent)[0].view(shares.dtype).view(link.count, -1, *shares.shape[1:])
            conditions = [self._group.own(cond, FRAMES) for cond in conditions]
        else:
            shares = link.all_gather(shares)
        passes = shares.permute(2, 1, 0, 3).flatten(2).chunk(len(conditions), 1)  # (layers, T, 6 * D)
        return [Modulated(cond, each[:, None].unbind()) for cond, each in zip(conditions, passes)]


def join(dit: DiT, group: SequenceParallel) -> None:
    """Make the layers share their modulations, and cache layers exchange their products, in place; to be called after all
    other changes to the layers."""
    dit.shared_modulations = SharedModulations([block.modulation for block in dit.blocks], group)
    for block, is_cache in zip(dit.blocks, dit.kinds):
        block.modulation = nn.Identity()  # its input is the modulation already
        if is_cache:
            block.qkv = ExchangedProducts(block.qkv, group, block.head_dim)


def pass_over_tiles(group: SequenceParallel, dit: DiT, latents: Tensor, modulated: Modulated, whole: PagedTiles
                    ) -> tuple[Tensor, Tensor]:
    """Run ``DiT.over_tiles`` on all processes, each with the whole block and all weights except those of the modulations:
    ``modulated`` is from ``SharedModulations``, see ``join``.

    Returns the predicted clean latents of all frames, and the features of own frames; those of all if the
    frames cannot be divided evenly, where their tokens are divided instead.
    """
    frames = latents.shape[1]
    if frames % group.count == 0:
        x = dit.tokens(group.own(latents, FRAMES))
        x = dit.layers_over_tiles(x, modulated.cond, DividedTiles(group, whole, frames, FRAMES), modulated.layers)
        clean, features = dit.finish(x, modulated.cond)
        return group.gather(clean, FRAMES), features
    x = group.own(dit.tokens(latents), TOKENS)
    x = dit.layers_over_tiles(x, modulated.cond, DividedTiles(group, whole, frames, TOKENS), modulated.layers)
    features = group.gather(dit.features(x, modulated.cond), TOKENS)
    return dit.clean(features), features
