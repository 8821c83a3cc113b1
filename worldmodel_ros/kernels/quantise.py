"""Formats of FP8 and FP4 pages: the definitions that the kernels are tested against, in plain PyTorch.

FP8 is e4m3 with one scale for each page and head. FP4 is e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6) in blocks of 16 values
that share a power of two, as in the OCP Microscaling formats (MX v1.0) with a smaller block, under one scale for each
page and head. With powers of two every FP4 value is exactly an e4m3 number times the page's scale: a kernel turns a
block into FP8 by table look-up, and both precisions go through the same tensor core instructions.

A non-finite value makes its page and head read as non-finite: a fault of the model must show.

Root-mean-square error of normally distributed values: 2.6 % for FP8, 11 % for FP4.
"""
from __future__ import annotations

import torch
from torch import Tensor

from .pages import FP4_BLOCK, Pool, Precision

FP8_MAX = 448.0
FP4_MAX = 6.0
# Magnitudes of e2m1 by their three bits.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# A block's exponent k scales e2m1 by 2^(k - 6). At its limits, 6 * 2^6 = 384 and 0.5 * 2^-5 are still normal e4m3
# numbers, so that in between the FP8 code is that of k = 0 plus k in the exponent field.
EXPONENT_BIAS, EXPONENT_MIN, EXPONENT_MAX = 6, 1, 12
# The reciprocal of a smaller scale might not be finite; its values count as zero, with a scale of 1.
SCALE_MIN = 2.0 ** -120


def token_order(tokens: int, device: torch.device | str = 'cpu') -> Tensor:
    """Return which token each position along the tokens of v holds: position p of an FP8 or FP4 page has token order[p].

    Of 16 neighbouring columns of P, a thread of wgmma holds columns 2t, 2t + 1, 8 + 2t and 9 + 2t (the accumulator's layout),
    but an 8-bit operand needs four neighbouring ones. With this order of v they are the same.
    """
    p = torch.arange(tokens, device=device)
    return p // 16 * 16 + p % 4 // 2 * 8 + p % 16 // 4 * 2 + p % 2


def to_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise x (..., A, B) to e4m3 and float32 scales (...): the largest magnitude of the last two axes becomes 448."""
    x, scale = _scaled(x, FP8_MAX)
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def to_e2m1(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise x (..., A, B) to packed e2m1 (..., A, B / 2), block exponents uint8 (..., A, B / 16) and scales (...).

    The scale makes the largest magnitude of the last two axes 384; of the two powers of two around its own largest magnitude,
    each block takes the one with the smaller squared error.

    Of eight values, nibble i has the three magnitude bits of value i; the top bits have the signs in the order 0, 4, 1, 5, 2,
    6, 3, 7: as bytes of FP8, values 4 to 7 then find theirs in place, and values 0 to 3 one shift away.
    """
    x, scale = _scaled(x, FP4_MAX * 2.0 ** (EXPONENT_MAX - EXPONENT_BIAS))
    blocks = x.unflatten(-1, (-1, FP4_BLOCK))
    top = blocks.abs().amax(-1, keepdim=True)
    # The smallest power of two with which nothing is clipped, and the one below, which may clip the largest value.
    fraction, power = torch.frexp(top.clamp_min(2.0 ** -20))
    upper = power - 3 + (fraction > FP4_MAX / 8).int() + EXPONENT_BIAS
    best, error, code = None, None, None
    for candidate in (upper, upper - 1):
        k = candidate.clamp(EXPONENT_MIN, EXPONENT_MAX)
        unit = torch.exp2(k - EXPONENT_BIAS)
        nearest = _nearest_e2m1(blocks.abs() / unit)
        e = (_magnitudes(nearest) * unit - blocks.abs()).square().sum(-1, keepdim=True)
        if best is None:
            best, error, code = k, e, nearest
        else:
            better = e < error
            best, code = torch.where(better, k, best), torch.where(better, nearest, code)
    sign = torch.signbit(blocks).flatten(-2).unflatten(-1, (-1, 2, 4)).transpose(-1, -2)
    pairs = code.flatten(-2).unflatten(-1, (-1, 4, 2)) | sign.to(torch.uint8) << 3
    pairs = pairs.flatten(-3).unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4, best[..., 0].to(torch.uint8), scale


def from_e2m1(packed: Tensor, exponent: Tensor) -> Tensor:
    """Convert packed e2m1 (..., B / 2) and block exponents (..., B / 16) to float32 (..., B), without the page's scale."""
    code = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    negative = (code > 7).unflatten(-1, (-1, 4, 2)).transpose(-1, -2).flatten(-3)
    value = _magnitudes(code & 7) * torch.where(negative, -1.0, 1.0)
    unit = torch.exp2(exponent.float() - EXPONENT_BIAS)
    return (value.unflatten(-1, (-1, FP4_BLOCK)) * unit[..., None]).flatten(-2)


def write_pages(pool: Pool, pages: Tensor, k: Tensor, v: Tensor) -> None:
    """Fill whole pages (n,) of a pool with k and v (n, H, T, D), rounded to the pool's precision."""
    tensors = pool.tensors()
    for name, values in page_form(pool.precision, k, v).items():
        whole = tensors[name]
        if whole.dtype is torch.float8_e4m3fn:
            # Not every device has indexed assignment for float8 tensors; their bytes have it.
            whole, values = whole.view(torch.uint8), values.view(torch.uint8)
        whole[pages] = values


def page_form(precision: Precision, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """Return what the tensors of a ``Pool`` hold, by name, for n pages of k and v (n, H, T, D)."""
    if not precision.quantised:
        dtype = torch.float32 if precision is Precision.FP32 else torch.bfloat16
        return {'k': k.to(dtype), 'v': v.to(dtype)}
    v = v[:, :, token_order(v.shape[2], v.device)].transpose(-1, -2)
    names = ('{}', '{}_scale') if precision is Precision.FP8 else ('{}', '{}_exponent', '{}_scale')
    encode = to_e4m3 if precision is Precision.FP8 else to_e2m1
    return {name.format(part): tensor for part, values in (('k', k), ('v', v)) for name, tensor in zip(names, encode(values))}


def read_pages(pool: Pool, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values (n, H, T, D) of pages (n,) in float32, tokens in their natural order."""
    if not pool.precision.quantised:
        return pool.k[pages].float(), pool.v[pages].float()
    if pool.precision is Precision.FP8:
        k, v = (t.view(torch.uint8)[pages].view(torch.float8_e4m3fn).float() for t in (pool.k, pool.v))
    else:
        k, v = (from_e2m1(t[pages], e[pages]) for t, e in ((pool.k, pool.k_exponent), (pool.v, pool.v_exponent)))
    k, v = k * pool.k_scale[pages][..., None, None], v * pool.v_scale[pages][..., None, None]
    natural = torch.argsort(token_order(v.shape[-1], v.device))
    return k, v[..., natural].transpose(-1, -2)


def _scaled(x: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Return x (..., A, B) divided by scales (...) that make the largest magnitude of the last two axes ``limit``; and the
    scales."""
    # As products, for the same bits on every device: GPUs do not divide by a constant, nor kernels by a scale.
    scale = x.float().abs().amax((-2, -1)) * (1.0 / limit)
    scale = torch.where(scale < SCALE_MIN, torch.ones_like(scale), scale)
    return x.float() * scale.reciprocal()[..., None, None], scale


def _magnitudes(code: Tensor) -> Tensor:
    return torch.tensor(E2M1, device=code.device)[code.long()]


def _nearest_e2m1(x: Tensor) -> Tensor:
    """Return three-bit codes of magnitudes x; ties go to the even code, as in IEEE rounding."""
    bounds = torch.tensor([(a + b) / 2 for a, b in zip(E2M1, E2M1[1:])], device=x.device)
    x = x.contiguous()
    above = torch.bucketize(x, bounds)                    # a tie is below
    at_tie = torch.bucketize(x, bounds, right=True)       # a tie is above
    return torch.where(above % 2 == 0, above, at_tie).to(torch.uint8)
