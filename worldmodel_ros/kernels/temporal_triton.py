"""``temporal.temporal_attention`` in one launch, for CUDA GPUs from compute capability 8.0 on.

A program has some positions of one column and head, and all query frames there, so that every key and value is read once. With
the tiles of ``attention_triton``, all but one logit in P would be computed for nothing.
"""
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats_triton import cast, e2m1_of_word, e2m1_value, from_e4m3, native_e4m3, place_of, token_order
from .pages import Pool, TileLists
from .pools_triton import FP4, FP8, PLAIN, arguments_by_kind, check_queries, product_type
from .temporal import check

MOST_FRAMES = 64  # of queries, at once


def temporal_attention_triton(q: Tensor, pools: list[Pool], lists: list[TileLists], frames: int,
                              positions: Tensor | None = None, query_times: Tensor | None = None,
                              page_times: list[Tensor] | None = None, scale: float | None = None) -> Tensor:
    """As ``temporal.temporal_attention``, for at most one FP8, one FP4 and one other pool, bfloat16 or float32 queries
    with D contiguous, D a power of two from 16 to 128, and at most 64 query frames. The matrix products are in
    bfloat16, or in float32 if q or a pool is."""
    check(q, pools, lists, frames, positions, query_times, page_times)
    check_queries(q)
    (heads, dim), tokens, columns = q.shape[1:], pools[0].page_tokens, lists[0].query_tiles
    query_frames = len(q) // (columns * tokens) * frames
    if query_frames > MOST_FRAMES:
        raise ValueError(f'{query_frames} query frames: there can be {MOST_FRAMES} at once')
    # Without times, any tensor stands in for them.
    times = [table.pages for table in lists] if page_times is None else page_times
    arguments = arguments_by_kind(pools, [(table.starts, table.pages, table.lengths, time)
                                          for table, time in zip(lists, times, strict=True)])
    # Nothing is stored to the empty places of a tile.
    out = (torch.empty if positions is None else torch.zeros)(q.shape, dtype=q.dtype, device=q.device)
    rows = max(16, triton.next_power_of_2(query_frames))
    block = min(8, triton.next_power_of_2(tokens // frames), 8192 // (rows * dim))
    _temporal[(triton.cdiv(tokens // frames, block), columns, heads)](
        q, out, *arguments, positions, query_times, q.stride(0), q.stride(1), query_frames,
        (1.0 / math.sqrt(dim) if scale is None else scale) * math.log2(math.e), FRAMES=frames, T=tokens, H=heads, D=dim,
        BLOCK=block, ROWS=rows, TYPE=product_type(q, pools), NATIVE=native_e4m3(q.device), num_warps=8)
    return out


@triton.jit
def _temporal(q, out, plain, fp8, fp4, positions, query_times, q_token, q_head, query_frames, scale_log2,
              FRAMES: tl.constexpr, T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
              ROWS: tl.constexpr, TYPE: tl.constexpr, NATIVE: tl.constexpr):
    column, head = tl.program_id(1), tl.program_id(2)
    # Positions in the order of the values in quantised pages, if a frame is whole groups: then neighbouring threads
    # read neighbouring bytes.
    ORDERED: tl.constexpr = positions is None and T // FRAMES % 16 == 0
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    width = T // FRAMES
    if positions is not None:
        width = tl.load(positions + column)
    place = position
    if ORDERED:
        position = token_order(position)
    frame = tl.arange(0, ROWS)
    tile = (frame // FRAMES).to(tl.int64) * tl.num_programs(1) + column
    token = tile[None, :] * T + (frame % FRAMES)[None, :] * width + position[:, None]
    asked = ((frame < query_frames)[None, :] & (position < width)[:, None])[:, :, None]
    d = tl.arange(0, D)[None, None, :]
    queries = tl.load(q + token[:, :, None] * q_token + head * q_head + d, mask=asked, other=0.0).to(TYPE)
    last = frame  # no limit, unless there are times
    if query_times is not None:
        last = frame % FRAMES + tl.load(query_times + frame // FRAMES, mask=frame < query_frames, other=0)
    m = tl.full([BLOCK, ROWS], -float('inf'), tl.float32)
    total = tl.zeros([BLOCK, ROWS], tl.float32)
    acc = tl.zeros([BLOCK, ROWS, D], tl.float32)
    CAUSAL: tl.constexpr = query_times is not None
    if plain is not None:
        acc, m, total = _pool(acc, m, total, queries, last, plain, column, head, position, place, width, scale_log2,
                              PLAIN, ORDERED, CAUSAL, FRAMES, T, H, D, BLOCK, TYPE, NATIVE)
    if fp8 is not None:
        acc, m, total = _pool(acc, m, total, queries, last, fp8, column, head, position, place, width, scale_log2,
                              FP8, ORDERED, CAUSAL, FRAMES, T, H, D, BLOCK, TYPE, NATIVE)
    if fp4 is not None:
        acc, m, total = _pool(acc, m, total, queries, last, fp4, column, head, position, place, width, scale_log2,
                              FP4, ORDERED, CAUSAL, FRAMES, T, H, D, BLOCK, TYPE, NATIVE)
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, :, None]
    tl.store(out + (token[:, :, None] * H + head) * D + d, cast(acc, out.dtype.element_ty), mask=asked)


@triton.jit
def _pool(acc, m, total, queries, last, pool, column, head, position, place, width, scale_log2, KIND: tl.constexpr,
          ORDERED: tl.constexpr, CAUSAL: tl.constexpr, FRAMES: tl.constexpr, T: tl.constexpr, H: tl.constexpr,
          D: tl.constexpr, BLOCK: tl.constexpr, TYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Visit a column's row 16 frames at a time, whatever their pages: the least that a matrix product takes."""
    KEYS: tl.constexpr = 16
    starts, pages, lengths, times = pool[0], pool[1], pool[2], pool[3]
    begin = tl.load(starts + column)
    frames = (tl.load(starts + column + 1) - begin) * FRAMES
    for first in tl.range(0, frames, KEYS, num_stages=1 if KIND == FP4 else 3):
        index = first + tl.arange(0, KEYS)
        listed = index < frames
        entry = begin + index // FRAMES
        unit = tl.load(pages + entry, mask=listed, other=0).to(tl.int64) * H + head
        token = (index % FRAMES)[None, :] * width + position[:, None]
        there = (token < tl.load(lengths + entry, mask=listed, other=0)[None, :]) & (position < width)[:, None]
        v_place = (index % FRAMES)[:, None] * width + place[None, :]
        if ORDERED:
            # What a page holds beyond its valid tokens is finite, and has no weight. A mask would split the loads.
            v_there = listed[:, None]
            v_group = ((index % FRAMES) * width + tl.program_id(0) * BLOCK)[:, None]
        else:
            v_place = place_of(v_place)
            v_there = tl.trans(there)
            v_group = v_place
        keys, values = _load(pool, unit, token, there, v_place, v_there, v_group, KIND, T, D, BLOCK, KEYS, TYPE, NATIVE)
        logit_scale = scale_log2
        if KIND != PLAIN:
            logit_scale = (scale_log2 * tl.load(pool[6] + unit, mask=listed, other=0.0))[None, None, :]
        s = tl.dot(queries, tl.permute(keys, (0, 2, 1)), input_precision='ieee') * logit_scale
        visible = there[:, None, :]
        if CAUSAL:
            time = index % FRAMES + tl.load(times + entry, mask=listed, other=0)
            visible = visible & (time[None, None, :] <= last[None, :, None])
        s = tl.where(visible, s, -float('inf'))
        top = tl.maximum(m, tl.max(s, 2))
        # Where nothing was visible so far, -inf - -inf would be NaN.
        base = tl.where(top == -float('inf'), 0.0, top)
        p = tl.exp2(s - base[:, :, None])
        decay = tl.exp2(m - base)
        total = total * decay + tl.sum(p, 2)
        if KIND != PLAIN:
            p = p * tl.load(pool[7] + unit, mask=listed, other=0.0)[None, None, :]
        acc = tl.dot(cast(p, TYPE), values, acc * decay[:, :, None], input_precision='ieee')
        m = top
    return acc, m, total


@triton.jit
def _load(pool, unit, token, there, v_place, v_there, v_group, KIND: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
          BLOCK: tl.constexpr, KEYS: tl.constexpr, TYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Load keys and values (positions, frames, D) of the tokens (positions, frames) of units (frames,); zero where none.

    Quantised values lie at v_place (frames, positions), where ``v_there``; v_group is a place in the same eight, with a single
    column if all positions share it.
    """
    k, v = pool[4], pool[5]
    d = tl.arange(0, D)[None, None, :]
    k_row = (unit[None, :] * T + token)[:, :, None]
    v_row = unit[:, None, None] * D + tl.arange(0, D)[None, :, None]
    mask, v_mask = there[:, :, None], v_there[:, None, :]
    if KIND == PLAIN:
        keys = tl.load(k + k_row * D + d, mask=mask, other=0.0).to(TYPE)
        values = tl.load(v + k_row * D + d, mask=mask, other=0.0).to(TYPE)
    elif KIND == FP8:
        keys = from_e4m3(tl.load(k + k_row * D + d, mask=mask, other=0), TYPE, NATIVE)
        values = from_e4m3(tl.load(v + v_row * T + v_place[:, None, :], mask=v_mask, other=0), TYPE, NATIVE)
        values = tl.permute(values, (2, 0, 1))
    else:
        # As words of eight values, since a value's sign may be anywhere in its word.
        word = tl.load(k.to(tl.pointer_type(tl.uint32)) + k_row * (D // 8) + tl.arange(0, D // 8)[None, None, :],
                       mask=mask, other=0)
        power = tl.load(pool[8] + k_row * (D // 16) + tl.arange(0, D // 16)[None, None, :], mask=mask, other=0)
        code = e2m1_of_word(word[:, :, :, None], tl.arange(0, 8)[None, None, None, :])
        keys = e2m1_value(code.reshape(BLOCK, KEYS, D // 16, 16), power[:, :, :, None])
        keys = cast(keys.reshape(BLOCK, KEYS, D), TYPE)
        group, place = v_group[:, None, :], v_place[:, None, :]
        word = tl.load(v.to(tl.pointer_type(tl.uint32)) + v_row * (T // 8) + group // 8, mask=v_mask, other=0)
        power = tl.load(pool[9] + v_row * (T // 16) + group // 16, mask=v_mask, other=0)
        values = tl.permute(cast(e2m1_value(e2m1_of_word(word, place % 8), power), TYPE), (2, 0, 1))
    return keys, values
