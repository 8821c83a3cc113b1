"""The loading warps of the Hopper attention: they copy tiles from pages to shared memory, and expand FP4 to FP8.

One warp walks the list of pages and starts the tensor memory accelerator for queries, keys and values. FP4 tiles go into their
own ring, from which four more warps expand them into the ring that the attending warps read.
"""
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

# Of all threads of a partition; renamed between Triton 3.6 and 3.7.
barrier = getattr(gl, 'barrier', None) or gl.thread_barrier

# Blocks in the ring of raw FP4 tiles.
RAW_STAGES = gl.constexpr(2)


@gluon.jit
def row_of(lists, tile, HAS_FP4: gl.constexpr):
    """Return a query tile's row: its start in the first list and entries there, its start in the second, all entries."""
    starts, pages, lengths, full, fp4_starts, fp4_pages, fp4_lengths, fp4_full = lists
    first = gl.load(starts + tile)
    count = gl.load(starts + tile + 1) - first
    if HAS_FP4:
        fp4_first = gl.load(fp4_starts + tile)
        return first, count, fp4_first, count + gl.load(fp4_starts + tile + 1) - fp4_first
    else:
        return first, count, 0, count


@gluon.jit
def next_item(item, lists, work, ADD: gl.constexpr, HAS_FP4: gl.constexpr):
    """Return a program's first item from ``item`` on that has something to do. Without ADD, that is every one."""
    if ADD:
        while _is_empty(item, lists, work, HAS_FP4):
            item += gl.num_programs(0)
    return item


@gluon.jit
def _is_empty(item, lists, work, HAS_FP4: gl.constexpr):
    items, q_blocks, heads, tile_blocks = work
    head, block = place_of(gl.minimum(item, items - 1), work, True)
    return (item < items) & (row_of(lists, block // tile_blocks, HAS_FP4)[3] == 0)


@gluon.jit
def place_of(item, work, ADD: gl.constexpr):
    """Return head and block of queries of an item.

    Head by head, so that a head's pages stay in the second-level cache; with ADD block by block, since the few blocks that list
    pages at all follow each other, and are to be spread evenly over the programs.
    """
    items, q_blocks, heads, tile_blocks = work
    if ADD:
        return item % heads, item // heads
    else:
        return item // q_blocks, item % q_blocks


@gluon.jit
def own_row(row, work, BM: gl.constexpr, REPEATS: gl.constexpr):
    """Return where a row is read from, if the queries are repeated, each time with other lists."""
    items, q_blocks, heads, tile_blocks = work
    if REPEATS == 1:
        return row
    else:
        return row % (q_blocks // REPEATS * BM)


@gluon.jit
def page_of(lists, row, entry, HAS_FP4: gl.constexpr):
    """Return the page of entry 0 <= entry < total of a row, or -1 - page if it is FP4."""
    starts, pages, lengths, full, fp4_starts, fp4_pages, fp4_lengths, fp4_full = lists
    first, count, fp4_first, total = row
    if HAS_FP4:
        page = gl.load(pages + first + entry, mask=entry < count, other=0)
        return page - gl.load(fp4_pages + fp4_first + entry - count, mask=entry >= count, other=-1) - 1
    else:
        return gl.load(pages + first + entry)


@gluon.jit
def length_of(lists, row, entry, HAS_FP4: gl.constexpr):
    """Return the valid tokens of the page of entry 0 <= entry < total of a row."""
    starts, pages, lengths, full, fp4_starts, fp4_pages, fp4_lengths, fp4_full = lists
    first, count, fp4_first, total = row
    if HAS_FP4:
        length = gl.load(lengths + first + entry, mask=entry < count, other=0)
        return length + gl.load(fp4_lengths + fp4_first + entry - count, mask=entry >= count, other=0)
    else:
        return gl.load(lengths + first + entry)


@gluon.jit
def _issue(desc, row, column, ready, free, tiles, turn, STAGES: gl.constexpr, BYTES: gl.constexpr):
    """Wait for a free stage of a ring, then start the copy of one tile into it."""
    stage = turn % STAGES
    mbarrier.wait(free.index(stage), ((turn // STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(stage), BYTES)
    tma.async_copy_global_to_shared(desc, [row, column], ready.index(stage), tiles.index(stage))


@gluon.jit
def load_tiles(descs, raw_descs, lists, smem, bars, raw_smem, raw_bars, work,
               PAGE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
               QUANTISED: gl.constexpr, HAS_FP4: gl.constexpr, ADD: gl.constexpr, REPEATS: gl.constexpr):
    q_desc, k_desc, v_desc = descs
    q_smem, k_smem, v_smem = smem
    q_ready, q_free, k_ready, k_free, v_ready, v_free = bars
    items, q_blocks, heads, tile_blocks = work
    WIDTH: gl.constexpr = 1 if QUANTISED else 2
    BLOCK_BYTES: gl.constexpr = BN * D * WIDTH
    SUB: gl.constexpr = PAGE // BN
    ring = 0
    raw = 0
    turn = 0
    item = next_item(gl.program_id(0), lists, work, ADD, HAS_FP4)
    while item < items:
        head, block = place_of(item, work, ADD)
        slot = turn % 2
        mbarrier.wait(q_free.index(slot), ((turn // 2) & 1) ^ 1)
        mbarrier.expect(q_ready.index(slot), BM * D * WIDTH)
        for half in gl.static_range(2):
            first_row = own_row(block * BM, work, BM, REPEATS) + half * (BM // 2)
            tma.async_copy_global_to_shared(q_desc, [first_row, head * D], q_ready.index(slot),
                                            q_smem.index(2 * slot + half))
        turn += 1
        row = row_of(lists, block // tile_blocks, HAS_FP4)
        following = next_item(item + gl.num_programs(0), lists, work, ADD, HAS_FP4)  # early: its loads take time
        last = gl.maximum(row[3] - 1, 0)
        page = 0
        if row[3] > 0:
            page = page_of(lists, row, 0, HAS_FP4)
        # The values of a block are requested after the keys of the next one, in the order of their use.
        waiting = False
        v_row = 0
        v_column = 0
        for entry in range(row[3]):
            now_fp4 = page < 0
            part = gl.where(now_fp4, -1 - page, page) * heads + head
            page = page_of(lists, row, gl.minimum(entry + 1, last), HAS_FP4)
            for sub in gl.static_range(SUB):
                if HAS_FP4:
                    if now_fp4:
                        _issue(raw_descs[0], part * PAGE + sub * BN, 0, raw_bars[0], raw_bars[1], raw_smem[0],
                               raw, RAW_STAGES, BN * D // 2 + BN * D // 16)
                        tma.async_copy_global_to_shared(
                            raw_descs[1], [(part * PAGE + sub * BN) * D // 256, 0],
                            raw_bars[0].index(raw % RAW_STAGES), raw_smem[1].index(raw % RAW_STAGES))
                    else:
                        _issue(k_desc, part * PAGE + sub * BN, 0, k_ready, k_free, k_smem, ring, STAGES, BLOCK_BYTES)
                else:
                    _issue(k_desc, part * PAGE + sub * BN, 0, k_ready, k_free, k_smem, ring, STAGES, BLOCK_BYTES)
                if waiting:
                    _issue(v_desc, v_row, v_column, v_ready, v_free, v_smem, ring - 1, STAGES, BLOCK_BYTES)
                v_row = part * D if QUANTISED else part * PAGE + sub * BN
                v_column = sub * BN if QUANTISED else 0
                if HAS_FP4:
                    waiting = now_fp4 == 0
                    if now_fp4:
                        _issue(raw_descs[2], part * D, sub * (BN // 2), raw_bars[2], raw_bars[3], raw_smem[2],
                               raw, RAW_STAGES, BN * D // 2 + PAGE * D // 16)
                        tma.async_copy_global_to_shared(
                            raw_descs[3], [part * D, 0],
                            raw_bars[2].index(raw % RAW_STAGES), raw_smem[3].index(raw % RAW_STAGES))
                        raw += 1
                else:
                    waiting = True
                ring += 1
        if waiting:
            _issue(v_desc, v_row, v_column, v_ready, v_free, v_smem, ring - 1, STAGES, BLOCK_BYTES)
        item = following


@gluon.jit
def _expand(raw, exponents, tile, COLUMNS: gl.constexpr):
    """Expand e2m1 (rows, COLUMNS / 8 words of eight) and exponents (rows, COLUMNS / 16 bytes) to e4m3 (rows, COLUMNS / 4)."""
    ROWS: gl.constexpr = 32  # at a time, so that the registers suffice
    WORDS: gl.constexpr = COLUMNS // 8
    # Two words of a row share an exponent and belong to one thread.
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 2, 2], [8, 4, 1], [4, 1, 1], [2, 1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    for part in gl.static_range(raw.shape[0] // ROWS):
        exponent = exponents.slice(part * ROWS, ROWS).load(gl.SliceLayout(2, PAIRS)).to(gl.int32)
        exponent = gl.expand_dims(exponent, 2).broadcast_to([ROWS, WORDS // 2, 2]).reshape([ROWS, WORDS])
        exponent = gl.convert_layout(exponent, FLAT)
        words = raw.slice(part * ROWS, ROWS).load(FLAT)
        # The eight magnitudes at this exponent are the bytes of a table in two registers, where ``prmt`` looks up four
        # nibbles at once. Two words at a time share the table. For the order of the signs see quantise.to_e2m1.
        low, high = gl.inline_asm_elementwise(
            """{
            .reg .b32 t0, t1, magnitude, sign;
            mad.lo.u32 t0, $6, 0x08080800, 0x0c080000;
            mad.lo.u32 t1, $6, 0x08080808, 0x1c181410;
            and.b32 magnitude, $4, 0x77777777;
            prmt.b32 $0, t0, t1, magnitude;
            shr.u32 magnitude, magnitude, 16;
            prmt.b32 $2, t0, t1, magnitude;
            shl.b32 sign, $4, 4;
            lop3.b32 $0, $0, sign, 0x80808080, 0xf8;
            lop3.b32 $2, $2, $4, 0x80808080, 0xf8;
            and.b32 magnitude, $5, 0x77777777;
            prmt.b32 $1, t0, t1, magnitude;
            shr.u32 magnitude, magnitude, 16;
            prmt.b32 $3, t0, t1, magnitude;
            shl.b32 sign, $5, 4;
            lop3.b32 $1, $1, sign, 0x80808080, 0xf8;
            lop3.b32 $3, $3, $5, 0x80808080, 0xf8;
            }""", '=&r,=&r,=&r,=&r,r,r,r,r', [words, exponent], dtype=(gl.int32, gl.int32), is_pure=True, pack=2)
        tile.slice(part * ROWS, ROWS).store(gl.join(low, high).reshape([ROWS, 2 * WORDS]))


@gluon.jit
def _expand_block(raw, exponents, first_column, raw_ready, raw_free, raw_turn, tiles, ready, free, turn,
                  COLUMNS: gl.constexpr, STAGES: gl.constexpr):
    """``first_column``: of the exponents, if their rows hold more than those of this block."""
    ROWS: gl.constexpr = tiles.shape[1]
    GROUPS: gl.constexpr = exponents.shape[1] * exponents.shape[2] // ROWS
    RAW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS // 8], gl.int32)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS // 4], gl.int32)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    from_stage = raw_turn % RAW_STAGES
    stage = turn % STAGES
    source = raw.index(from_stage)._reinterpret(gl.int32, [ROWS, COLUMNS // 8], RAW)
    powers = exponents.index(from_stage)._reinterpret(gl.uint8, [ROWS, GROUPS], PLAIN)
    target = tiles.index(stage)._reinterpret(gl.int32, [ROWS, COLUMNS // 4], TILE)
    mbarrier.wait(raw_ready.index(from_stage), (raw_turn // RAW_STAGES) & 1)
    mbarrier.wait(free.index(stage), ((turn // STAGES) & 1) ^ 1)
    _expand(source, powers.slice(first_column, COLUMNS // 16, dim=1), target, COLUMNS)
    fence_async_shared()
    barrier()
    mbarrier.arrive(ready.index(stage), count=1)
    mbarrier.arrive(raw_free.index(from_stage), count=1)


@gluon.jit
def expand_tiles(lists, smem, bars, raw_smem, raw_bars, work,
                 PAGE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
                 HAS_FP4: gl.constexpr):
    q_smem, k_smem, v_smem = smem
    q_ready, q_free, k_ready, k_free, v_ready, v_free = bars
    items, q_blocks, heads, tile_blocks = work
    SUB: gl.constexpr = PAGE // BN
    ring = 0
    raw = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row = row_of(lists, item % q_blocks // tile_blocks, HAS_FP4)
        ring += row[1] * SUB  # the blocks of the first list come ready
        for entry in range(row[1], row[3]):
            for sub in gl.static_range(SUB):
                _expand_block(raw_smem[0], raw_smem[1], 0, raw_bars[0], raw_bars[1], raw, k_smem, k_ready, k_free,
                              ring, D, STAGES)
                _expand_block(raw_smem[2], raw_smem[3], sub * (BN // 16), raw_bars[2], raw_bars[3], raw, v_smem,
                              v_ready, v_free, ring, BN, STAGES)
                raw += 1
                ring += 1
