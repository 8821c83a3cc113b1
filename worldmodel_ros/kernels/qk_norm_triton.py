"""``qk_norm.rotate_qk`` in one launch: values are not touched, queries and keys read and written once."""
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .formats_triton import cast
from .page_write_triton import normalised
from .qk_norm import check

TOKENS, HEADS = 16, 8  # per program: few enough for many programs, enough to read a token's rotation from memory once


def rotate_qk_triton(qkv: Tensor, rotary: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float = 1e-6) -> None:
    """As ``qk_norm.rotate_qk``, for D a power of two and contiguous, rotary and weights contiguous."""
    check(qkv, rotary)
    tokens, _, heads, dim = qkv.shape
    if dim & (dim - 1) or qkv.stride(3) != 1:
        raise ValueError(f'qkv {tuple(qkv.shape)} with strides {qkv.stride()}: the last axis must be contiguous and '
                         f'its size a power of two')
    if not (rotary.is_contiguous() and q_weight.is_contiguous() and k_weight.is_contiguous()):
        raise ValueError(f'rotary {tuple(rotary.shape)} with strides {rotary.stride()}: it and the weights must be '
                         f'contiguous')
    group = min(HEADS, heads & -heads)
    _rotate[(triton.cdiv(tokens, TOKENS), heads // group, 2)](
        qkv, rotary, q_weight, k_weight, *qkv.stride()[:3], tokens, eps, GROUP=group, D=dim, BLOCK=TOKENS)


@triton.jit
def _rotate(qkv, rotary, q_weight, k_weight, token_stride, part_stride, head_stride, tokens, eps, GROUP: tl.constexpr,
            D: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = qkv + tl.program_id(1) * GROUP * head_stride
    if tl.program_id(2) == 0:
        _group(first, rotary, q_weight, token, tokens, token_stride, head_stride, eps, GROUP, D)
    else:
        _group(first + part_stride, rotary, k_weight, token, tokens, token_stride, head_stride, eps, GROUP, D)


@triton.jit
def _group(first, rotary, weight, token, tokens, token_stride, head_stride, eps, GROUP: tl.constexpr, D: tl.constexpr):
    there = token < tokens
    for head in range(GROUP):
        source = first + head * head_stride
        x = normalised(source, rotary, tokens * (D // 2), weight, token, there, there, token_stride, eps, D)
        at = source + token.to(tl.int64)[:, None] * token_stride + tl.arange(0, D)[None, :]
        tl.store(at, cast(x, first.dtype.element_ty), mask=there[:, None])
