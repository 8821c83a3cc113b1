"""A pass over tiles that processes divide among them, each with the pages of its own heads: sequence parallel."""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from .group import SequenceParallel

if TYPE_CHECKING:
    from worldmodel_ros.model.dit import Block, DiT
    from worldmodel_ros.model.tile_attention import PagedTiles

FRAMES, TOKENS, HEADS = 1, 2, -2  # axes of x (B, T, P, D), and of attended (B, T, P, H, d)


class DividedTiles:
    """A ``TileAttention`` that every process calls with its own frames (``axis`` FRAMES), or with its own tokens of
    every frame.

    Where attention leaves these, it is done by own heads over the whole pass: what comes in is exchanged for that,
    and what was attended to is exchanged back. ``whole`` is the attention of the whole pass, over pages of own
    heads.
    """

    def __init__(self, group: SequenceParallel, whole: PagedTiles, frames: int, axis: int):
        self._group, self._whole, self._axis = group, whole, axis
        # Contiguous, as the kernels read it.
        self.rotary = group.own(whole.rotary.unflatten(1, (frames, -1)), axis).flatten(1, 2).contiguous()

    def within_frames(self, qkv: Tensor) -> Tensor:
        return self._whole.within_frames(qkv) if self._axis == FRAMES else \
            self._by_heads(qkv, self._whole.within_frames)

    def over_tiles(self, layer: int, block: Block, qkv: Tensor) -> Tensor:
        return self._by_heads(qkv, lambda whole: self._whole.over_tiles(layer, block, whole))

    def _by_heads(self, qkv: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        whole = self._group.exchange(qkv, divide=HEADS, join=self._axis).contiguous()
        attended = attend(whole).unflatten(-1, (-1, qkv.shape[-1]))
        return self._group.exchange(attended, divide=self._axis, join=HEADS).flatten(HEADS)


def pass_over_tiles(group: SequenceParallel, dit: DiT, latents: Tensor, tau: Tensor, step: Tensor, action: Tensor,
                    whole: PagedTiles) -> tuple[Tensor, Tensor]:
    """``DiT.over_tiles`` by all processes, each of which is given the whole block and has all weights.

    Returns the predicted clean latents of all frames, and the features of own frames; of all, where there are too few
    frames to be divided: then it is their tokens that are.
    """
    frames = latents.shape[1]
    if frames % group.count == 0:
        part = [group.own(each, FRAMES) for each in (latents, tau, step, action)]
        cond, x = dit.enter(*part)
        x = dit.layers_over_tiles(x, cond, DividedTiles(group, whole, frames, FRAMES))
        clean, features = dit.finish(x, cond)
        return group.gather(clean, FRAMES), features
    cond, x = dit.enter(latents, tau, step, action)
    x = dit.layers_over_tiles(group.own(x, TOKENS), cond, DividedTiles(group, whole, frames, TOKENS))
    features = group.gather(dit.features(x, cond), TOKENS)
    return dit.clean(features), features
