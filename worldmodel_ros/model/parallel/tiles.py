"""Sequence-parallel pass over tiles: each process has the pages of its own heads."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..dit import Modulated
from ..tile_attention import QUERY_BLOCK
from .group import ArrivingProducts, ExchangedProducts, SequenceParallel

if TYPE_CHECKING:
    from worldmodel_ros.model.dit import Block, DiT
    from worldmodel_ros.model.tile_attention import PagedTiles

Share = Callable[[int, Tensor | None], Tensor]
FRAMES, TOKENS, HEADS = 1, 2, -2  # axes of x (B, T, P, D), and of attended (B, T, P, H, d)


class DividedTiles:
    """A ``TileAttention`` that every process calls with its own frames (``axis`` FRAMES), or with its own tokens of every
    frame.

    Attention beyond these uses own heads over the whole pass: its inputs are exchanged for that (in cache layers by their
    ``SentProducts``, see ``join``), and its outputs are exchanged back. ``whole`` is the attention of the whole pass, over
    pages of own heads.
    """

    def __init__(self, group: SequenceParallel, whole: PagedTiles, frames: int, axis: int):
        self._group, self._whole, self._axis = group, whole, axis
        self._frames = frames // group.count if axis == FRAMES else frames  # own ones
        # Contiguous, as the kernels read it.
        self.rotary = group.own(whole.rotary.unflatten(1, (frames, -1)), axis).flatten(1, 2).contiguous()

    def within_frames(self, qkv: Tensor) -> Tensor:
        return self._whole.within_frames(qkv) if self._axis == FRAMES else \
            self._by_heads(qkv, self._whole.within_frames)

    def over_tiles(self, layer: int, block: Block, qkv: ArrivingProducts) -> Tensor:
        """As in ``TileAttention``, for the products of own heads, 3 * H / count * d a token, from all processes."""
        rows = qkv.own.flatten(0, -2).unflatten(1, (3, -1, block.head_dim))
        share, in_parts = self._by_parts(layer, block, qkv, rows) if self._in_slabs else \
            (self._at_once(layer, block, qkv.whole()), False)
        like = rows.new_empty(len(rows), rows.shape[2:].numel(), device='meta')
        attended = self._group.exchange_products(share, like, block.head_dim, joined=True, exact=in_parts)
        return attended.reshape(1, self._frames, len(rows) // self._frames, -1)

    @property
    def _in_slabs(self) -> bool:
        """Whether each process's frames fill whole slabs of the pass."""
        return self._axis == FRAMES and self._whole.shape[0] % self._group.count == 0 and self._whole.whole_slabs

    def _by_parts(self, layer: int, block: Block, qkv: ArrivingProducts, own: Tensor) -> tuple[Share, bool]:
        """Write each process's keys and values as they arrived, own ones meanwhile. Return what ``_at_once`` does; and whether
        it attends for each process in turn, so that what is for others travels while own queries attend."""
        whole, count, rank = self._whole, self._group.count, self._group.rank
        q = {rank: whole.write(layer, block, own, rank, count)}
        for source, values, scale in qkv.others():
            q[source] = whole.write(layer, block, values.view(own.shape), source, count,
                                    None if scale is None else scale.view(own.shape[:3]), own.dtype)
        # No slower than all at once, if a GPU's multiprocessors have as many rounds of blocks of queries.
        blocks, processors = count * len(own) // QUERY_BLOCK * own.shape[2], self._group.processors
        if count * -(-blocks // count // processors) <= -(-blocks // processors):
            return lambda to, out: whole.attend(layer, q[to], to, count, out), True
        attended = whole.attend(layer, torch.cat([q[each] for each in range(count)])).chunk(count)
        return lambda to, out: attended[to], False

    def _at_once(self, layer: int, block: Block, products: Tensor) -> Share:
        """Return what maps a process's number to the attended (n, H / count * d) of its tokens, and may write it to its second
        argument; the products (count, n, 3 * H / count * d) have been read by then."""
        count = self._group.count
        qkv = products.view(count, 1, self._frames, -1, 3, products.shape[-1] // block.head_dim // 3, block.head_dim)
        qkv = qkv.movedim(0, self._axis).flatten(self._axis, self._axis + 1).contiguous()
        attended = self._whole.over_tiles(layer, block, qkv).unflatten(self._axis, (count, -1))
        return lambda to, out: attended.select(self._axis, to).flatten(0, -2)

    def _by_heads(self, qkv: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        whole = self._group.exchange(qkv, divide=HEADS, join=self._axis).contiguous()
        attended = attend(whole).unflatten(-1, (-1, qkv.shape[-1]))
        return self._group.exchange(attended, divide=self._axis, join=HEADS).flatten(HEADS)


class SentProducts(ExchangedProducts):
    """As its base, but returns ``ArrivingProducts``."""

    def forward(self, rows: Tensor | tuple[Tensor, Tensor]) -> ArrivingProducts:
        return self.send(rows)


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
    """Make the layers share their modulations, and cache layers send their products, in place; to be called after all
    other changes to the layers. All processes must call this."""
    if group.link.device.type == 'cuda':  # the sizes of messages depend on it, so all must have the same
        own = torch.cuda.get_device_properties(group.link.device).multi_processor_count
        group.processors = int(group.link.all_gather(torch.tensor([own], device=group.link.device)).min())
    dit.shared_modulations = SharedModulations([block.modulation for block in dit.blocks], group)
    for block, is_cache in zip(dit.blocks, dit.kinds):
        block.modulation = nn.Identity()  # its input is the modulation already
        if is_cache:
            block.qkv = SentProducts(block.qkv, group, block.head_dim)


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
