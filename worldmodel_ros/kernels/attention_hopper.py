"""Paged attention for Hopper (compute capability 9.0), in Gluon: persistent, warp-specialised, pages read in place.

A program owns an SM: two groups of four warps attend, one warp loads, and four warps expand FP4 pages to FP8, if there are any.
FP8 and FP4 pages, in any mix, take one launch; bf16 pages another, which adds to the first one's result.
"""
from __future__ import annotations

import math

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .attention_hopper_attend import attend
from .attention_hopper_load import RAW_STAGES, expand_tiles, load_tiles
from .pages import Pool, Precision, TileLists
from .query import quantise_queries

BLOCK_M, BLOCK_N = 128, 128  # queries of a program at a time; keys of a step
HEAD_DIM = 128


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def _tiles(desc):
    return gl.allocate_shared_memory(desc.dtype, [RAW_STAGES] + desc.block_type.shape, desc.layout)


@gluon.jit
def _attention(q_desc, k_desc, v_desc, raw_k_desc, raw_k_exponent_desc,
               raw_v_desc, raw_v_exponent_desc, o, o_stride, o_desc, lse, q_scale, k_scale, v_scale, fp4_k_scale, fp4_v_scale,
               starts, pages, lengths, full, fp4_starts, fp4_pages, fp4_lengths, fp4_full,
               items, q_blocks, heads, tile_blocks, scale_log2,
               PAGE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
               QUANTISED: gl.constexpr, HAS_FP4: gl.constexpr, ADD: gl.constexpr, FRAMES: gl.constexpr,
               TILES: gl.constexpr, REPEATS: gl.constexpr):
    DTYPE: gl.constexpr = gl.float8e4nv if QUANTISED else gl.bfloat16
    smem = (gl.allocate_shared_memory(DTYPE, [4, BM // 2, D], q_desc.layout),
            gl.allocate_shared_memory(DTYPE, [STAGES, BN, D], k_desc.layout),
            gl.allocate_shared_memory(DTYPE, [STAGES] + v_desc.block_type.shape, v_desc.layout))
    bars = (_barriers(2, 1), _barriers(2, 2), _barriers(STAGES, 1), _barriers(STAGES, 2), _barriers(STAGES, 1),
            _barriers(STAGES, 2))
    lists = (starts, pages, lengths, full, fp4_starts, fp4_pages, fp4_lengths, fp4_full)
    scales = (k_scale, v_scale, fp4_k_scale, fp4_v_scale)
    descs = (q_desc, k_desc, v_desc)
    work = (items, q_blocks, heads, tile_blocks)
    out = (o, o_stride, o_desc, gl.allocate_shared_memory(gl.bfloat16, [2, BM // 2, D], o_desc.layout), lse)
    if HAS_FP4:
        raw_descs = (raw_k_desc, raw_k_exponent_desc, raw_v_desc, raw_v_exponent_desc)
        raw_smem = (_tiles(raw_k_desc), _tiles(raw_k_exponent_desc), _tiles(raw_v_desc), _tiles(raw_v_exponent_desc))
        raw_bars = (_barriers(RAW_STAGES, 1), _barriers(RAW_STAGES, 1), _barriers(RAW_STAGES, 1),
                    _barriers(RAW_STAGES, 1))
        fence_async_shared()
        # Registers of each partition's threads after the first, which takes what is left: 224 here, 248 below.
        gl.warp_specialize([
            (attend, (0, q_scale, scales, out, lists, smem, bars, work, scale_log2, PAGE, BM, BN, D, STAGES,
                      QUANTISED, HAS_FP4, ADD, FRAMES, TILES, REPEATS)),
            (attend, (1, q_scale, scales, out, lists, smem, bars, work, scale_log2, PAGE, BM, BN, D, STAGES,
                      QUANTISED, HAS_FP4, ADD, FRAMES, TILES, REPEATS)),
            (expand_tiles, (lists, smem, bars, raw_smem, raw_bars, work, PAGE, BM, BN, D, STAGES, HAS_FP4)),
            (load_tiles, (descs, raw_descs, lists, smem, bars, raw_smem, raw_bars, work, PAGE, BM, BN, D, STAGES,
                          QUANTISED, HAS_FP4, ADD, REPEATS)),
        ], [4, 4, 1], [224, 40, 24])
    else:
        fence_async_shared()
        gl.warp_specialize([
            (attend, (0, q_scale, scales, out, lists, smem, bars, work, scale_log2, PAGE, BM, BN, D, STAGES,
                      QUANTISED, HAS_FP4, ADD, FRAMES, TILES, REPEATS)),
            (attend, (1, q_scale, scales, out, lists, smem, bars, work, scale_log2, PAGE, BM, BN, D, STAGES,
                      QUANTISED, HAS_FP4, ADD, FRAMES, TILES, REPEATS)),
            (load_tiles, (descs, (), lists, smem, bars, (), (), work, PAGE, BM, BN, D, STAGES, QUANTISED, HAS_FP4,
                          ADD, REPEATS)),
        ], [4, 1], [240, 24])


def supports(q: Tensor, pools: list[Pool], query_tiles: int, by_frame: tuple[int, int] | None = None) -> bool:
    """Return whether ``paged_attention_hopper`` takes these."""
    # A row of FP4 exponents, one per 16 tokens, is copied in units of 16 bytes.
    tokens = {Precision.BF16: BLOCK_N, Precision.FP8: BLOCK_N, Precision.FP4: 256}
    return (q.is_cuda and torch.cuda.get_device_capability(q.device) == (9, 0) and q.dtype == torch.bfloat16
            and q.is_contiguous() and q.shape[-1] == HEAD_DIM
            and len(q) % (query_tiles * BLOCK_M) == 0
            and (by_frame is None or pools[0].page_tokens // by_frame[0] % (BLOCK_M // 2) == 0)
            and all(pool.precision in tokens and pool.page_tokens % tokens[pool.precision] == 0 for pool in pools))


def paged_attention_hopper(q: Tensor, pools: list[Pool], lists: list[TileLists], scale: float | None = None,
                           out: Tensor | None = None, quantised_q: tuple[Tensor, Tensor] | None = None,
                           by_frame: tuple[int, int] | None = None, repeats: int = 1, lse: Tensor | None = None
                           ) -> Tensor:
    """Compute ``reference.paged_attention`` for q bf16 (query tiles * N, H, 128), N a multiple of 128, and at most one pool of
    each precision. ``quantised_q``: q as e4m3 and its scales (tokens, H), if a previous kernel made them already; ``by_frame``
    and ``out``, bf16, as in ``attention.paged_attention``.

    With ``repeats``, the lists' query tiles are those of q, that many times over, each time with another part of what a tile
    attends to. ``splits.merge`` merges the results (repeats * tokens, H, 128); ``lse``, float32 (H, repeats * tokens), receives
    what that needs, as in ``attention_triton``.
    """
    rows, heads, dim = repeats * len(q), *q.shape[1:]
    given = {pool.precision: (pool, table) for pool, table in zip(pools, lists, strict=True)}
    if len(given) != len(pools):
        raise ValueError('one pool of each precision at most')
    out = torch.empty((rows, heads, dim), dtype=torch.bfloat16, device=q.device) if out is None else out
    lse = torch.empty((heads, rows), dtype=torch.float32, device=q.device) if lse is None else lse
    scale_log2 = (1.0 / math.sqrt(dim) if scale is None else scale) * math.log2(math.e)
    bf16, fp8, fp4 = (given.get(p) for p in (Precision.BF16, Precision.FP8, Precision.FP4))
    launch = _Launch(q, out, lse, scale_log2, repeats, *(by_frame or (1, 1)))
    if fp8 or fp4:
        q8, q_scale = quantise_queries(q) if quantised_q is None else quantised_q
        # Without FP8 pages their rows are empty, and nothing is read through their descriptors.
        first = fp8 or (Pool.allocate(Precision.FP8, 1, heads, fp4[0].page_tokens, dim, q.device), _no_pages(fp4[1]))
        launch(q8, *first, *(fp4 or (None, None)), q_scale, add=False)
    if bf16:
        launch(q, *bf16, None, None, q_scale=None, add=bool(fp8 or fp4))
    return out


class _Launch:
    """Launches the kernel for the same queries, result and log-sum-exp."""

    def __init__(self, q: Tensor, out: Tensor, lse: Tensor, scale_log2: float, repeats: int, frames: int,
                 tiles: int):
        self.repeats, self.frames, self.tiles = repeats, frames, tiles
        self.tokens, self.heads, self.dim = out.shape
        self.out, self.lse, self.scale_log2 = out, lse, scale_log2
        self.programs = torch.cuda.get_device_properties(q.device).multi_processor_count

    def __call__(self, q: Tensor, pool: Pool, table: TileLists, raw: Pool | None, raw_table: TileLists | None,
                 q_scale: Tensor | None, add: bool) -> None:
        width, dim, page, quantised = self.heads * self.dim, self.dim, pool.page_tokens, q_scale is not None
        value_rows = (pool.v, page, dim, BLOCK_N) if quantised else (pool.v, dim, BLOCK_N, dim)
        raw_descs = [None] * 4 if raw is None else [
            _rows(raw.k, dim // 2, BLOCK_N, dim // 2), _rows(raw.k_exponent, 16, BLOCK_N * dim // 256, 16),
            _rows(raw.v, page // 2, dim, BLOCK_N // 2), _rows(raw.v_exponent, page // 16, dim, page // 16)]
        items = self.tokens // BLOCK_M * self.heads
        stages = 2 if not quantised else 5 if raw is None else 3  # what shared memory has room for
        _attention[(min(self.programs, items),)](
            _rows(q, width, BLOCK_M // 2, dim), _rows(pool.k, dim, BLOCK_N, dim), _rows(*value_rows), *raw_descs,
            self.out, self.out.stride(0), _rows(self.out, width, BLOCK_M // 2, dim), self.lse,
            q_scale, pool.k_scale, pool.v_scale, *((None, None) if raw is None else (raw.k_scale, raw.v_scale)),
            *_pointers(table), *_pointers(raw_table), items, self.tokens // BLOCK_M, self.heads,
            self.tokens // table.query_tiles // BLOCK_M, self.scale_log2,
            PAGE=page, BM=BLOCK_M, BN=BLOCK_N, D=dim, STAGES=stages, QUANTISED=quantised,
            HAS_FP4=raw is not None, ADD=add, FRAMES=self.frames, TILES=self.tiles, REPEATS=self.repeats,
            num_warps=4)


def _no_pages(like: TileLists) -> TileLists:
    return TileLists(torch.zeros_like(like.starts), like.pages, like.lengths, torch.zeros_like(like.full))


def _pointers(table: TileLists | None) -> tuple[Tensor | None, ...]:
    return (None,) * 4 if table is None else (table.starts, table.pages, table.lengths, table.full)


def _rows(tensor: Tensor, width: int, *block: int) -> TensorDescriptor:
    """Return a descriptor of rows of ``width`` values, each of them contiguous, copied in blocks."""
    dtype = {torch.bfloat16: gl.bfloat16, torch.float8_e4m3fn: gl.float8e4nv, torch.uint8: gl.uint8}[tensor.dtype]
    rows = tensor.view(-1, width)
    return TensorDescriptor(rows, list(rows.shape), [rows.stride(0), 1], list(block),
                            gl.NVMMASharedLayout.get_default_for(list(block), dtype))
