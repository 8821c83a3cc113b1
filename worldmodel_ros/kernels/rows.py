"""The operations between a layer's matrix products, rounded to FP8 row by row: the definitions, in plain PyTorch.

A row is a token. Its values become e4m3 under the row's own scale, with which its largest magnitude is 448, or under a given
one, from calibration, beyond which values saturate. A non-finite row reads as non-finite: a fault of the model must show.

Modulation (adaLN-Zero, Peebles and Xie 2023) is given per frame: if it has F rows and x has M, the first M / F rows of x are
those of the first frame, and so on. All is computed in float32, whatever the type of the inputs.
"""
from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from .quantise import FP8_MAX, SCALE_MIN, to_e4m3

Rounded = tuple[Tensor, Tensor]  # e4m3 (M, K) and the rows' scales, float32 (M, 1): the input of an FP8 product


def row_kernels(x: Tensor) -> ModuleType:
    """Return the module with ``quantise_rows``, ``modulate_rows``, ``inverse_rms``, ``mean_squares`` and ``gelu_rows`` for the
    device of x."""
    # Not every machine without a GPU has Triton.
    return import_module(f'{__name__}_triton' if x.is_cuda else __name__)


def quantise_rows(x: Tensor, static: Tensor | None = None) -> Rounded:
    """Return x (M, K) in e4m3, and scales (M, 1); ``static``, float32 () or (M, 1), replaces the rows' own."""
    x = x.float()
    if static is None:
        rounded, scales = to_e4m3(x[:, None])
        return rounded[:, 0], scales[:, None]
    rounded = (x * static.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return rounded, static + (x * 0.0).sum(-1, keepdim=True)


def modulate_rows(x: Tensor, shift: Tensor, scale: Tensor, added: tuple[Tensor, Tensor] | None = None,
                  fp8: bool = True, static: Tensor | None = None, eps: float = 1e-6, bound: Tensor | None = None,
                  film: Tensor | None = None, dtype: torch.dtype | None = None
                  ) -> tuple[Tensor, Rounded | Tensor, Tensor | None]:
    """Apply ``add_rows`` with ``added`` (y and gate), if any; FiLM (Perez et al. 2018) with ``film`` (M, 2 * D), if any: times
    1 + its first half, plus the second; LayerNorm without weights, times 1 + scale, plus shift, both (F, D); and with
    ``fp8``, ``quantise_rows``.

    Returns x (M, D) as it is before LayerNorm; the modulated rows, without ``fp8`` in ``dtype``, which is x's unless given; and
    with ``bound``, scales (M, 1) by which the results of a product with these rows can be rounded before they exist, or None.
    ``bound``, float32 (2,), is a factor and an addend: no result exceeds the length of its row times the first, plus the
    second.
    """
    x, each = x if added is None else add_rows(x, *added), frame_length(x, shift)
    if film is not None:
        factor, addend = film.float().chunk(2, -1)
        x = ((1.0 + factor) * x.float() + addend).to(x.dtype)
    normal = F.layer_norm(x.float(), x.shape[-1:], eps=eps)
    rows = normal * (1.0 + scale.float().repeat_interleave(each, 0)) + shift.float().repeat_interleave(each, 0)
    scales = None
    if bound is not None:
        largest = rows.norm(dim=-1, keepdim=True) * bound[0] + bound[1]
        scales = (largest * (1.0 / FP8_MAX)).clamp_min(SCALE_MIN)
    return x, quantise_rows(rows, static) if fp8 else rows.to(dtype or x.dtype), scales


def inverse_rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Return RMSNorm's factors of rows: x (M, parts, D) to float32 (parts, M)."""
    return mean_squares(x, eps).rsqrt()


def mean_squares(x: Tensor, eps: float = 1e-6, count: int = 1) -> Tensor:
    """Return what ``count`` processes add up, each for its part of the rows, to a sum whose inverse root is RMSNorm's
    factor: x (M, parts, D) to float32 (parts, M)."""
    return ((x.float().square().mean(-1) + eps) / count).t().contiguous()


def add_rows(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """Return x + gate * y, for x and y (M, D) and gate (F, D), in x's type."""
    return (x.float() + gate.float().repeat_interleave(frame_length(x, gate), 0) * y.float()).to(x.dtype)


def gelu_rows(x: Tensor, fp8: bool = True, static: Tensor | None = None) -> Rounded | Tensor:
    """Return the tanh form of GELU of x (M, K); with ``fp8``, ``quantise_rows`` of that, else in x's type."""
    rows = F.gelu(x.float(), approximate='tanh')
    return quantise_rows(rows, static) if fp8 else rows.to(x.dtype)


def frame_length(x: Tensor, modulation: Tensor) -> int:
    """Return the number of rows of x (M, D) in each of the F frames; raises ValueError if they do not divide."""
    if not len(modulation) or len(x) % len(modulation):
        raise ValueError(f'{len(x)} rows are not {len(modulation)} frames of equally many tokens')
    return len(x) // len(modulation)
