"""The attending warps of the Hopper attention: two groups of four warps, each with 64 rows of the queries.

The schedule is that of FlashAttention-3 (Shah et al. 2024): while the tensor cores multiply the weights of one block by its
values, the softmax of the next block runs, and the two groups fill each other's gaps. With FP8 pages alone, the accumulator is
scaled while the queries are multiplied by the next keys.
"""
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait)

from .attention_hopper_load import barrier, length_of, next_item, own_row, page_of, place_of, row_of


@gluon.jit
def _weights(p, QUANTISED: gl.constexpr, OPERAND: gl.constexpr):
    """Convert float32 weights to the operand of a product, without leaving the thread's registers."""
    ROWS: gl.constexpr = p.shape[0]
    COLUMNS: gl.constexpr = p.shape[1]
    if QUANTISED:
        # The order of the tokens in the pages' values: see quantise.token_order.
        p = p.reshape([ROWS, COLUMNS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, COLUMNS])
        p = gl.convert_layout(p, OPERAND, assert_trivial=True)
        packed = gl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""", '=r,f,f,f,f', [p], dtype=gl.uint8, is_pure=True, pack=4)
        return packed.to(gl.float8e4nv, bitcast=True)
    else:
        return gl.convert_layout(p.to(gl.bfloat16), OPERAND)


@gluon.jit
def _values(tile, QUANTISED: gl.constexpr):
    """Return values as (tokens, D); quantised ones are stored transposed."""
    if QUANTISED:
        return tile.permute((1, 0))
    else:
        return tile


@gluon.jit
def _scales(scales, page, head, heads, QUANTISED: gl.constexpr, HAS_FP4: gl.constexpr):
    """Return the scales of the keys and the values of a page of ``page_of``; ones for bf16."""
    k_scale, v_scale, fp4_k_scale, fp4_v_scale = scales
    if HAS_FP4:
        index = gl.where(page < 0, -1 - page, page) * heads + head
        return (gl.load(gl.where(page < 0, fp4_k_scale, k_scale) + index),
                gl.load(gl.where(page < 0, fp4_v_scale, v_scale) + index))
    elif QUANTISED:
        return gl.load(k_scale + page * heads + head), gl.load(v_scale + page * heads + head)
    else:
        return 1.0, 1.0


@gluon.jit
def row_by_frame(row, PAGE: gl.constexpr, FRAMES: gl.constexpr, TILES: gl.constexpr):
    """Return where a row of the tiles of a group lies among those of its frames."""
    RUN: gl.constexpr = PAGE // FRAMES
    tile = row // PAGE
    frame = tile // TILES * FRAMES + row % PAGE // RUN
    return (frame * TILES + tile % TILES) * RUN + row % RUN


@gluon.jit
def attend(half: gl.constexpr, q_scale, scales, out, lists, smem, bars, work, scale_log2,
           PAGE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
           QUANTISED: gl.constexpr, HAS_FP4: gl.constexpr, ADD: gl.constexpr, FRAMES: gl.constexpr,
           TILES: gl.constexpr, REPEATS: gl.constexpr):
    """``out``: the result's pointer, the distance of its rows, its descriptor, its staging buffer; the log-sum-exp
    (H, queries), base 2.

    With ADD, result and log-sum-exp already hold the attention to other pages, and are merged with this one's where there is
    something to add: most tiles list none of the few pages in bf16. The result is stored frame by frame, with FRAMES frames in
    a page and TILES tiles in a frame; 1 and 1: in the order of the queries.
    """
    o, o_stride, o_desc, o_smem, lse = out
    q_smem, k_smem, v_smem = smem
    q_ready, q_free, k_ready, k_free, v_ready, v_free = bars
    items, q_blocks, heads, tile_blocks = work
    ROWS: gl.constexpr = BM // 2
    SUB: gl.constexpr = PAGE // BN
    K_STEP: gl.constexpr = 32 if QUANTISED else 16
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, K_STEP])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, K_STEP])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 4 if QUANTISED else 2)
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    # Whether the accumulator is scaled, and values are freed, while the next product with keys runs, instead of before it.
    # With FP4 pages, which leave fewer registers, the compiler would spill more of them; with bf16 alone it was not measured.
    LATE: gl.constexpr = QUANTISED and not HAS_FP4
    # e4m3 weights are at most 2^8, at the true maximum, so that they neither clip nor underflow early.
    SHIFT: gl.constexpr = 8.0 if QUANTISED else 0.0
    ring = 0
    turn = 0
    item = next_item(gl.program_id(0), lists, work, ADD, HAS_FP4)
    while item < items:
        head, block = place_of(item, work, ADD)
        slot = turn % 2
        row = row_of(lists, block // tile_blocks, HAS_FP4)
        following = next_item(item + gl.num_programs(0), lists, work, ADD, HAS_FP4)  # early: its loads take time
        # All blocks, those of the first list, the full ones among these, and up to where those of the second are full.
        blocks = row[3] * SUB
        first_blocks = row[1] * SUB
        full_blocks = gl.load(lists[3] + block // tile_blocks) * SUB
        fp4_full_blocks = blocks
        if HAS_FP4:
            fp4_full_blocks = first_blocks + gl.load(lists[7] + block // tile_blocks) * SUB
        q = q_smem.index(2 * slot + half)
        first_row = block * BM + half * ROWS
        rows = first_row + gl.arange(0, ROWS, layout=S_ROW)
        row_scale = gl.full([ROWS], 1.0, gl.float32, layout=S_ROW) * scale_log2
        if QUANTISED:
            row_scale *= gl.load(q_scale + own_row(rows, work, BM, REPEATS) * heads + head)
        zero = gl.full([ROWS, BN], 0.0, gl.float32, layout=S_LAYOUT)
        token = gl.expand_dims(gl.arange(0, BN, layout=gl.SliceLayout(0, S_LAYOUT)), 0)
        m = gl.full([ROWS], -float('inf'), gl.float32, layout=S_ROW)
        l = gl.full([ROWS], 0.0, gl.float32, layout=S_ROW)
        acc = gl.full([ROWS, D], 0.0, gl.float32, layout=O_LAYOUT)
        v_unit = 1.0  # scale of the accumulator
        mbarrier.wait(q_ready.index(slot), (turn // 2) & 1)
        if blocks > 0:
            # A page's scales are read one block before they are needed, and its list entry one block earlier still.
            k_unit, v_unit = _scales(scales, page_of(lists, row, 0, HAS_FP4), head, heads, QUANTISED, HAS_FP4)
            next_k_unit, next_v_unit = _scales(scales, page_of(lists, row, gl.minimum(1, blocks - 1) // SUB, HAS_FP4),
                                               head, heads, QUANTISED, HAS_FP4)
            page = page_of(lists, row, gl.minimum(2, blocks - 1) // SUB, HAS_FP4)

            stage = ring % STAGES
            mbarrier.wait(k_ready.index(stage), (ring // STAGES) & 1)
            product = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(k_free.index(stage), count=1)
            if (0 >= full_blocks) & ((0 < first_blocks) | (0 >= fp4_full_blocks)):
                s = gl.where(token < length_of(lists, row, 0, HAS_FP4), s, -float('inf'))
            c = row_scale * k_unit
            m = gl.max(s, 1) * c
            p = gl.exp2(s * gl.expand_dims(c, 1) - gl.expand_dims(m - SHIFT, 1))
            l = gl.sum(p, 1)
            if LATE:
                factor = gl.full([ROWS], 1.0, gl.float32, layout=S_ROW)  # the accumulator is still to be scaled by it
            ring += 1
            mbarrier.wait(k_ready.index(ring % STAGES), (ring // STAGES) & 1, pred=blocks > 1)
            for j in range(1, blocks):
                c = row_scale * next_k_unit
                new_v_unit = next_v_unit
                next_k_unit, next_v_unit = _scales(scales, page, head, heads, QUANTISED, HAS_FP4)
                page = page_of(lists, row, gl.minimum(j + 2, blocks - 1) // SUB, HAS_FP4)
                if LATE:
                    v_ratio = v_unit / new_v_unit
                    v_unit = new_v_unit

                stage = ring % STAGES
                before = (ring - 1) % STAGES
                before_phase = ((ring - 1) // STAGES) & 1
                older = (ring - 2) % STAGES
                product = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
                if LATE:
                    mbarrier.arrive(v_free.index(older), count=1, pred=j > 1)
                mbarrier.wait(v_ready.index(before), before_phase)
                if LATE:  # ptxas moves nothing across the wait, a loop, so this overlaps with the tensor cores
                    acc *= gl.expand_dims(gl.convert_layout(factor, O_ROW), 1)
                added = warpgroup_mma(_weights(p, QUANTISED, OPERAND), _values(v_smem.index(before), QUANTISED), acc,
                                      is_async=True)
                s = warpgroup_mma_wait(1, deps=[product])
                mbarrier.arrive(k_free.index(stage), count=1)
                if (j >= full_blocks) & ((j < first_blocks) | (j >= fp4_full_blocks)):
                    length = length_of(lists, row, j // SUB, HAS_FP4) - j % SUB * BN
                    s = gl.where(token < length, s, -float('inf'))
                new_m = gl.maximum(m, gl.max(s, 1) * c)
                shrink = gl.exp2(m - new_m)
                p = gl.exp2(s * gl.expand_dims(c, 1) - gl.expand_dims(new_m - SHIFT, 1))
                l = l * shrink + gl.sum(p, 1)
                m = new_m
                # This wait is a loop, which ptxas moves no exponential across: they overlap with the tensor cores.
                ring += 1
                mbarrier.wait(k_ready.index(ring % STAGES), (ring // STAGES) & 1, pred=j + 1 < blocks)
                if LATE:
                    factor = shrink * v_ratio
                acc, p = warpgroup_mma_wait(0, deps=[added, p])
                if not LATE:
                    mbarrier.arrive(v_free.index(before), count=1)
                    if QUANTISED:
                        shrink *= v_unit / new_v_unit
                        v_unit = new_v_unit
                    acc *= gl.expand_dims(gl.convert_layout(shrink, O_ROW), 1)
            before = (ring - 1) % STAGES
            before_phase = ((ring - 1) // STAGES) & 1
            older = (ring - 2) % STAGES
            if LATE:
                mbarrier.arrive(v_free.index(older), count=1, pred=blocks > 1)
                acc *= gl.expand_dims(gl.convert_layout(factor, O_ROW), 1)
            mbarrier.wait(v_ready.index(before), before_phase)
            added = warpgroup_mma(_weights(p, QUANTISED, OPERAND), _values(v_smem.index(before), QUANTISED), acc,
                                  is_async=True)
            acc = warpgroup_mma_wait(0, deps=[added])
            mbarrier.arrive(v_free.index(before), count=1)
        mbarrier.arrive(q_free.index(slot), count=1)
        some = l > 0.0
        l = gl.where(some, l, 1.0)
        total = gl.where(some, m + gl.log2(l) - SHIFT, -float('inf'))
        norm = gl.where(some, v_unit / l, 0.0)
        lse_at = lse + head * q_blocks * BM + rows
        out_row = row_by_frame(first_row, PAGE, FRAMES, TILES)
        if ADD:
            o_rows = gl.expand_dims(out_row + gl.arange(0, ROWS, layout=O_ROW), 1)
            o_columns = head * D + gl.arange(0, D, layout=gl.SliceLayout(0, O_LAYOUT))
            others = gl.load(o + o_rows * o_stride + gl.expand_dims(o_columns, 0)).to(gl.float32)
            other = gl.load(lse_at)
            top = gl.maximum(other, total)
            top = gl.where(top == -float('inf'), 0.0, top)
            mine = gl.exp2(total - top)
            theirs = gl.exp2(other - top)
            both = gl.where(mine + theirs > 0.0, mine + theirs, 1.0)
            acc = acc * gl.expand_dims(gl.convert_layout(norm * mine / both, O_ROW), 1) \
                + others * gl.expand_dims(gl.convert_layout(theirs / both, O_ROW), 1)
            total = gl.where(mine + theirs > 0.0, top + gl.log2(both), -float('inf'))
        else:
            acc *= gl.expand_dims(gl.convert_layout(norm, O_ROW), 1)
        tma.store_wait(0)  # of the previous item; one thread waits, and all are to write
        barrier()
        o_smem.index(half).store(acc.to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(o_desc, [out_row, head * D], o_smem.index(half))
        gl.store(lse_at, total)
        turn += 1
        item = following
    tma.store_wait(0)
