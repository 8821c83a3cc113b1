"""Parts of the epilogue of ``linear_hopper``'s product that normalises and rotates.

The sums of a tile lie in registers as the tensor cores leave them, where columns N / 2 or N / 4 apart belong to the same
thread. So a tile splits into quarters without an exchange; and if heads are half as wide as a tile, the halves of a head, which
rotation pairs, are two of them.
"""
from __future__ import annotations

import triton
import triton.language as tl

from .formats_triton import cast


@triton.jit
def quarters(x):
    """Split (M, N) into four times (M, N / 4), from left to right."""
    low, high = _halves(x)
    first, second = _halves(low)
    third, fourth = _halves(high)
    return first, second, third, fourth


@triton.jit
def store_quarters(out, row, column, first, second, third, fourth):
    """Store them by a descriptor of (M, N / 4), which takes a quarter of the shared memory that one of (M, N) does."""
    WIDTH: tl.constexpr = first.shape[1]
    out.store([row, column], cast(first, out.dtype))
    out.store([row, column + WIDTH], cast(second, out.dtype))
    out.store([row, column + 2 * WIDTH], cast(third, out.dtype))
    out.store([row, column + 3 * WIDTH], cast(fourth, out.dtype))


@triton.jit
def normalised_and_rotated(a, b, cos, sin, weight, eps):
    """Return the halves (M, D / 2) of a head of D, normalised and rotated as ``qk_norm.rotate_qk`` defines it."""
    HALF: tl.constexpr = a.shape[1]
    d = tl.arange(0, HALF)
    norm = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
    a *= norm * tl.load(weight + d).to(tl.float32)[None, :]
    b *= norm * tl.load(weight + HALF + d).to(tl.float32)[None, :]
    return a * cos - b * sin, a * sin + b * cos


@triton.jit
def _halves(x):
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()
