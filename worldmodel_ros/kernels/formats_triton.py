"""Number formats inside Triton kernels: what ``quantise`` defines, decoded and encoded in registers, bit for bit.

The integer arithmetic here has two reasons. GPUs before compute capability 8.9 have no conversions to and from e4m3. And
Triton's interpreter, in which the tests run these kernels on a CPU, truncates where it casts to bfloat16 or e4m3 and computes
wrongly in bfloat16.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .pages import Precision
from .quantise import EXPONENT_BIAS, EXPONENT_MAX, FP4_MAX, FP8_MAX

# Decided, as Triton itself does, when the kernels are defined.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
# What the largest magnitude of a page is scaled to.
LIMITS = {Precision.FP8: FP8_MAX, Precision.FP4: FP4_MAX * 2.0 ** (EXPONENT_MAX - EXPONENT_BIAS)}


def native_e4m3(device: torch.device) -> bool:
    """Return whether kernels on a device convert to and from e4m3 by its own instructions."""
    return not INTERPRETED.value and device.type == 'cuda' and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def token_order(place):
    """``quantise.token_order``: the token at each place along the tokens of v in FP8 and FP4."""
    return place // 16 * 16 + place % 4 // 2 * 8 + place % 16 // 4 * 2 + place % 2


@triton.jit
def place_of(token):
    """Invert ``token_order``."""
    return token // 16 * 16 + token % 8 // 2 * 4 + token % 16 // 8 * 2 + token % 2


@triton.jit
def cast(x, TYPE: tl.constexpr):
    """Cast float32 to TYPE (float32, float16 or bfloat16), to nearest, ties to even."""
    if INTERPRETED and TYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(TYPE)


@triton.jit
def from_e4m3(bits, TYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Convert bytes of e4m3 to TYPE, exactly."""
    if NATIVE:
        return bits.to(tl.float8e4nv, bitcast=True).to(TYPE)
    else:
        # The bits in the fields of a half, whose exponent bias is 8 larger and whose subnormals are those of e4m3.
        wide = bits.to(tl.uint16)
        half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return cast(half.to(tl.float32) * 256.0, TYPE)


@triton.jit
def to_e4m3(x, NATIVE: tl.constexpr):
    """Convert float32 to bytes of e4m3, to nearest, ties to even, saturating beyond 448."""
    if NATIVE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)  # the instruction saturates by itself
    else:
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
        bits = x.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 the step is 2^-9, which is what float32 rounds to at 2^14.
        subnormal = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        code = tl.where(magnitude < 0x3C800000, subnormal, normal)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e2m1_value(code, exponent):
    """Convert codes of e2m1, 0 to 15, under their blocks' exponents to float32, without the page's scale."""
    # The bits in the fields of a half, whose subnormals hold 0.5: the value times 2^-14.
    code = code.to(tl.uint16)
    half = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * ((exponent.to(tl.uint32) + (127 - 6 + 14)) << 23).to(tl.float32, bitcast=True)


@triton.jit
def from_e2m1(packed, exponent, A: tl.constexpr, B: tl.constexpr):
    """Convert packed e2m1 (A, B / 2) and block exponents (A, B / 16) to float32 (A, B), without the page's scale."""
    code = tl.join(packed & 15, packed >> 4).reshape(A, B // 8, 4, 2)
    sign = (code & 8).trans(0, 1, 3, 2).reshape(A, B // 16, 16)
    return e2m1_value((code & 7).reshape(A, B // 16, 16) | sign, exponent[:, :, None]).reshape(A, B)


@triton.jit
def e2m1_of_word(word, index):
    """Return the code of value ``index``, 0 to 7, of the eight that a uint32 holds."""
    return ((word >> (index * 4)) & 7) | ((word >> (index % 4 * 8 + index // 4 * 4)) & 8)


@triton.jit
def _nearest_e2m1(x):
    """Return three-bit codes of magnitudes, ties to the even code, and the magnitudes that they stand for."""
    code = ((x > 0.25).to(tl.uint32) + (x >= 0.75).to(tl.uint32) + (x > 1.25).to(tl.uint32) + (x >= 1.75).to(tl.uint32)
            + (x > 2.5).to(tl.uint32) + (x >= 3.5).to(tl.uint32) + (x > 5.0).to(tl.uint32))
    half = (code.to(tl.uint16) << 9).to(tl.float16, bitcast=True)
    return code, half.to(tl.float32) * 16384.0


@triton.jit
def _e2m1_at(x, k):
    """Return the codes of x (A, blocks, 16) under block exponents k (A, blocks), and the squared error of each block."""
    unit = ((k + (127 - 6)) << 23).to(tl.float32, bitcast=True)[:, :, None]
    inverse = ((127 + 6 - k) << 23).to(tl.float32, bitcast=True)[:, :, None]
    magnitude = tl.abs(x)
    code, value = _nearest_e2m1(magnitude * inverse)
    error = value * unit - magnitude
    return code, tl.sum(error * error, 2)


@triton.jit
def to_e2m1(x, A: tl.constexpr, B: tl.constexpr):
    """Convert float32 (A, B), divided by the page's scale, to packed e2m1 (A, B / 2) and block exponents (A, B / 16), uint8."""
    x = x.reshape(A, B // 16, 16)
    # The smallest power of two with which nothing is clipped, and the one below, as ``quantise.to_e2m1`` has it.
    top = tl.maximum(tl.max(tl.abs(x), 2), 2.0 ** -20).to(tl.uint32, bitcast=True)
    upper = (top >> 23).to(tl.int32) - (126 + 3 - 6) + ((top & 0x7FFFFF) > 0x400000).to(tl.int32)
    k = tl.minimum(tl.maximum(upper, 1), 12)
    lower = tl.minimum(tl.maximum(upper - 1, 1), 12)
    code, error = _e2m1_at(x, k)
    other, other_error = _e2m1_at(x, lower)
    better = other_error < error
    k = tl.where(better, lower, k)
    code = tl.where(better[:, :, None], other, code)
    sign = (x.to(tl.uint32, bitcast=True) >> 28) & 8
    sign = sign.reshape(A, B // 8, 2, 4).trans(0, 1, 3, 2).reshape(A, B // 2, 2)
    low, high = tl.split(code.reshape(A, B // 2, 2) | sign)
    return (low | (high << 4)).to(tl.uint8), k.to(tl.uint8)


@triton.jit
def largest_magnitude(x, AXIS: tl.constexpr):
    """Return the largest magnitude along an axis; NaN if anything is not finite, which Triton's maximum would ignore."""
    return tl.max(tl.abs(x), AXIS) + tl.sum(x * 0.0, AXIS)


@triton.jit
def scale_for(largest, LIMIT: tl.constexpr):
    """Return the scale with which the largest magnitude becomes LIMIT, and its reciprocal; as in ``quantise``."""
    scale = largest * (1.0 / LIMIT)
    scale = tl.where(scale < 2.0 ** -120, 1.0, scale)
    return scale, tl.math.div_rn(1.0, scale)


@triton.jit
def store_quantised(x, out, exponent, row, first, A: tl.constexpr, B: tl.constexpr, WIDTH: tl.constexpr,
                    NATIVE: tl.constexpr, there=True):
    """Store x (A, B), divided by the page's scale, to columns from ``first`` on of rows (A,) of WIDTH values, except rows
    that are not ``there`` and columns beyond WIDTH: in FP4 if there are exponents, else in FP8."""
    if exponent is None:
        _store_rows(to_e4m3(x, NATIVE), out, row, first, there, A, B, WIDTH)
    else:
        packed, power = to_e2m1(x, A, B)
        _store_rows(packed, out, row, first // 2, there, A, B // 2, WIDTH // 2)
        _store_rows(power, exponent, row, first // 16, there, A, B // 16, WIDTH // 16)


@triton.jit
def _store_rows(x, out, row, first, there, A: tl.constexpr, B: tl.constexpr, WIDTH: tl.constexpr):
    column = first + tl.arange(0, B)[None, :]
    there = tl.full([A], True, tl.int1) & there
    tl.store(out + row[:, None] * WIDTH + column, x, mask=there[:, None] & (column < WIDTH))
