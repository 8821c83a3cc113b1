"""A sequence without pages: the definition of what ``sequence.PagedSequence`` computes.

Keys are kept as the layers return them and rotated at each pass to their positions in the window, in float32; nothing is
rounded, moved or shared. For tests and for small models.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .config import WanConfig
from .rotary import rotate, rotation
from .sequence import Window

Frame = list[tuple[Tensor, Tensor]]  # keys and values (P, H, d) of each layer


class DenseSequence:
    """As ``sequence.PagedSequence``."""

    def __init__(self, config: WanConfig, window: Window, grid: tuple[int, int]):
        self.config, self.window, self.grid = config, window, grid
        self.frame, self._shift = 0, 0
        self._frames: dict[int, Frame] = {}

    def fork(self) -> DenseSequence:
        other = DenseSequence(self.config, self.window, self.grid)
        other.frame, other._shift, other._frames = self.frame, self._shift, dict(self._frames)
        return other

    @contextmanager
    def chunk(self, frames: int, observed: bool = False) -> Iterator[DenseAttention]:
        end = self.frame + frames
        self.window.check(self.frame, frames)
        oldest = self.window.oldest(end)
        self._frames = {at: kept for at, kept in self._frames.items() if at >= oldest or at < self.window.sinks}
        self._shift = self.window.shift(end, self._shift)
        attention = DenseAttention(self, dict(self._frames), self.frame, frames)
        yield attention
        self._frames |= attention.own()
        self.frame = end

    def position(self, frame: int) -> int:
        """Return the position that a frame of the window is rotated to."""
        return frame + self._shift if frame < self.window.sinks else frame


class DenseAttention:
    """``dit.SelfAttention``, by a product of all queries and keys."""

    def __init__(self, sequence: DenseSequence, seen: dict[int, Frame], first: int, count: int):
        self._sequence, self._seen, self._first, self._count = sequence, seen, first, count
        self._own: Frame = []
        positions = [sequence.position(frame) for frame in seen] + list(range(first, first + count))
        self._positions = np.array(positions)

    def keep(self, layer: int, qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> None:
        self._keep(layer, qkv, q_weight, k_weight)

    def attend(self, layer: int, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, fp8: bool = False) -> Tensor:
        q, k, v = self._keep(layer, qkv, q_weight, k_weight)
        keys, values = (torch.cat([*(frame[layer][part] for frame in self._seen.values()), own])
                        for part, own in ((0, k), (1, v)))
        rotary = rotation(self._sequence.config.head_dim, self._positions, self._sequence.grid, q.device)
        cos, sin = rotary[:, :, None]
        q, keys = rotate(q, cos[-len(q):], sin[-len(q):]), rotate(keys, cos, sin)
        out = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, keys, values)))
        return out[0].transpose(0, 1).flatten(1)

    def _keep(self, layer: int, qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = normalise(qkv, q_weight, k_weight, self._sequence.config.eps)
        self._own[layer:layer + 1] = [(k, v)]
        return q, k, v

    def own(self) -> dict[int, Frame]:
        """Return the chunk's frames, as of the last pass."""
        parts = [(k.chunk(self._count), v.chunk(self._count)) for k, v in self._own]
        return {self._first + at: [(k[at], v[at]) for k, v in parts] for at in range(self._count)}


def normalise(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values (N, H, d), float32, of products (N, 3, H, d): RMSNorm over all heads of a token,
    unlike in most other families."""
    q, k, v = qkv.float().unbind(1)
    shape = q.shape
    q, k = (F.rms_norm(x.flatten(1), (x[0].numel(),), weight.float(), eps).view(shape)
            for x, weight in ((q, q_weight), (k, k_weight)))
    return q, k, v
