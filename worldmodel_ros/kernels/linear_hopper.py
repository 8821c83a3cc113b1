"""``linear.fp8_linear`` in a persistent kernel with an epilogue: GELU and rounding, or QK-norm and rotary embedding.

With GELU and rounding, the output of the MLP's first layer never exists in bfloat16, which would be written, read and written
again as FP8. The rows' own scales need all of a row, and a program has 256 columns of it: so the results are rounded by a
calibrated scale, or by scales that follow from the lengths of the rows and weights, which no result can exceed.

In addition to three stages of operands, shared memory has room for a tile's cosines and sines and a quarter of its results: so
these go by four copies.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .epilogues_triton import normalised_and_rotated, quarters, store_quarters
from .formats_triton import cast, from_e4m3, native_e4m3, to_e4m3
from .pools_triton import as_bytes
from .rows import Rounded
from .rows_triton import gelu


@dataclass(frozen=True)
class Tiles:
    """How the product is tiled: rows, columns and depth of a step, and the compiler's stages and warps.

    With ``specialised`` a separate group of warps loads ahead, also while the others are at the epilogue of a tile. The
    compiler does that with 4 warps, from which it makes 12, and only with descriptors that are made on the device.
    """

    m: int = 128
    n: int = 256
    k: int = 128
    stages: int = 3
    warps: int = 8
    specialised: bool = False


DEFAULT, SPECIALISED = Tiles(), Tiles(warps=4, specialised=True)
# Up to so many rows, or half as many with an epilogue, a width of 3,072 has fewer tiles than there are multiprocessors.
FEW_ROWS = 256
FEW, FEW_GELU, FEW_ROTATE = Tiles(64, 128, stages=5, warps=4), Tiles(n=128, stages=4), Tiles(64, stages=4, warps=4)
GROUP = 8  # tiles of rows that take the same columns in turn, so that these stay in the second-level cache


def supports(x: Tensor) -> bool:
    """Return whether x is on a GPU with the copy engine that the kernel reads by."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9


def fp8_linear_hopper(x: Rounded, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None,
                      tiles: Tiles | None = None) -> Tensor:
    """``linear.fp8_linear`` in bfloat16; K and N multiples of 16."""
    values = x[0]
    tiles = tiles or (FEW if len(values) <= FEW_ROWS else DEFAULT)
    out = torch.empty((len(values), len(weight)), dtype=torch.bfloat16, device=values.device)
    _launch(x, weight, weight_scale, bias, out, tiles)
    return out


def fp8_linear_gelu_hopper(x: Rounded, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, static: Tensor,
                           tiles: Tiles | None = None) -> Rounded:
    """``linear.fp8_linear``, ``rows.gelu_rows`` and ``rows.quantise_rows`` by ``static`` scales; K and N multiples of 16.

    Non-finite results become NaN in e4m3 here, not in the scales, which are the given ones.
    """
    values = x[0]
    tiles = tiles or (FEW_GELU if len(values) <= FEW_ROWS // 2 else DEFAULT)
    out = torch.empty((len(values), len(weight)), dtype=torch.float8_e4m3fn, device=values.device)
    static = static.expand(len(values), 1).contiguous()
    _launch(x, weight, weight_scale, bias, out, tiles, static=static)
    return out, static


def fp8_linear_rotate_hopper(x: Rounded, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, rotary: Tensor,
                             q_weight: Tensor, k_weight: Tensor, eps: float = 1e-6, tiles: Tiles | None = None) -> Tensor:
    """``linear.fp8_linear_rotate`` in bfloat16; K a multiple of 16, an even number of heads half as wide as a tile, rotary
    and weights contiguous."""
    dim, rows = 2 * rotary.shape[2], len(x[0])
    tiles = tiles or (FEW_ROTATE if rows <= FEW_ROWS // 2 else DEFAULT)
    if tiles.n != 2 * dim or len(weight) % (3 * tiles.n) or rotary.shape[1] != rows or not rotary.is_contiguous():
        raise ValueError(f'{len(weight)} columns and rotary {tuple(rotary.shape)} with strides {rotary.stride()}: '
                         f'heads must be {tiles.n // 2} wide, an even number, and rotary contiguous, of {rows} rows')
    out = torch.empty((rows, len(weight)), dtype=torch.bfloat16, device=rotary.device)
    _launch(x, weight, weight_scale, bias, out, tiles, rotation=(rotary, q_weight, k_weight, eps))
    return out.view(rows, 3, -1, dim)


def _launch(x: Rounded, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, out: Tensor, tiles: Tiles,
            static: Tensor | None = None, rotation: tuple[Tensor, Tensor, Tensor, float] | None = None) -> None:
    values, scale = x
    (rows, depth), columns = values.shape, len(weight)
    if depth % 16 or columns % 16:
        raise ValueError(f'{columns} columns of depth {depth}: both must be multiples of 16')
    native = native_e4m3(values.device)
    count = triton.cdiv(rows, tiles.m) * triton.cdiv(columns, tiles.n)
    programs = torch.cuda.get_device_properties(values.device).multi_processor_count if values.is_cuda else 2
    operands = [*(t if native else as_bytes(t) for t in (values, weight)), as_bytes(out)]
    if tiles.specialised:
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=values.device))
    else:
        blocks = [tiles.m, tiles.k], [tiles.n, tiles.k], [tiles.m, tiles.n if rotation is None else tiles.n // 4]
        operands = [TensorDescriptor.from_tensor(t, block) for t, block in zip(operands, blocks)]
    rotary, q_weight, k_weight, eps = rotation or (None, None, None, 0.0)
    if rotary is not None:
        rotary = TensorDescriptor.from_tensor(rotary, [2, tiles.m, tiles.n // 4])
    _product[(min(programs, count),)](
        *operands, scale, weight_scale, bias, static, rotary, q_weight, k_weight, eps, rows, columns, depth,
        PROGRAMS=min(programs, count), M=tiles.m, N=tiles.n, K=tiles.k, GROUP=GROUP, GELU=static is not None,
        NATIVE=native, SPECIALISED=tiles.specialised, num_stages=tiles.stages, num_warps=tiles.warps)


@triton.jit
def _product(a, b, out, a_scale, b_scale, bias, static, rotary, q_weight, k_weight, eps, rows, columns, depth,
             PROGRAMS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
             GELU: tl.constexpr, NATIVE: tl.constexpr, SPECIALISED: tl.constexpr):
    if SPECIALISED:
        a = tl.make_tensor_descriptor(a, [rows, depth], [depth, 1], [M, K])
        b = tl.make_tensor_descriptor(b, [columns, depth], [depth, 1], [N, K])
        out = tl.make_tensor_descriptor(out, [rows, columns], [columns, 1], [M, N])
    across, down = tl.cdiv(columns, N), tl.cdiv(rows, M)
    for tile in tl.range(tl.program_id(0), across * down, PROGRAMS, flatten=not SPECIALISED,
                         warp_specialize=SPECIALISED):
        group = tile // (GROUP * across) * GROUP
        height = min(down - group, GROUP)
        row = (group + tile % (GROUP * across) % height) * M
        column = tile % (GROUP * across) // height * N
        total = tl.zeros([M, N], tl.float32)
        for k in range(tl.cdiv(depth, K)):
            total = tl.dot(_e4m3(a.load([row, k * K]), NATIVE), _e4m3(b.load([column, k * K]), NATIVE).T, total)
        n = column + tl.arange(0, N)
        m = row + tl.arange(0, M)
        left = tl.load(a_scale + m, mask=m < rows, other=0.0)
        left += left * 0.0  # infinite becomes NaN: the row was not finite, which FP8 would not show
        x = total * left[:, None] * tl.load(b_scale + n, mask=n < columns, other=0.0)[None, :]
        if bias is not None:
            x += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
        if GELU:
            x = gelu(x) * tl.math.div_rn(1.0, tl.load(static + m, mask=m < rows, other=1.0))[:, None]
            out.store([row, column], _bytes(x, NATIVE))
        elif rotary is not None:
            first, second, third, fourth = quarters(x)
            if column < columns // 3 * 2:  # queries or keys
                weight = q_weight if column < columns // 3 else k_weight
                cos, sin = rotary.load([0, row, 0]).permute(1, 2, 0).split()
                first, second = normalised_and_rotated(first, second, cos, sin, weight, eps)
                third, fourth = normalised_and_rotated(third, fourth, cos, sin, weight, eps)
            store_quarters(out, row, column, first, second, third, fourth)
        else:
            out.store([row, column], cast(x, out.dtype))


@triton.jit
def _e4m3(x, NATIVE: tl.constexpr):
    """Return operands as they are, or, in the interpreter, in float32."""
    if NATIVE:
        return x
    else:
        return from_e4m3(x, tl.float32, NATIVE)


@triton.jit
def _bytes(x, NATIVE: tl.constexpr):
    """``to_e4m3``, where NaN stays NaN as in the GPU's own conversion."""
    if NATIVE:
        return to_e4m3(x, NATIVE)
    else:
        return tl.where(x == x, to_e4m3(x, NATIVE), 0x7F).to(tl.uint8)
