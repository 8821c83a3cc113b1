"""Patterns: which tiles a query visits, against their definition tile by tile, and the attention over the lists."""
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from worldmodel_ros.cache.layout import TileLayout
from worldmodel_ros.cache.patterns import EVERYTHING, SPATIAL, TEMPORAL, Pattern, page_lists, window
from worldmodel_ros.cache.pool import NumpyStorage, PagePool
from worldmodel_ros.cache.sequence import SequenceCache, Table
from worldmodel_ros.cache.torch_storage import TorchStorage, kernel_lists
from worldmodel_ros.kernels.pages import Precision
from worldmodel_ros.kernels.reference import paged_attention

LAYOUT = TileLayout((4, 2, 2), (6, 7))  # a plane of 3 by 4 tiles; the last column is half as wide


def table_of(slabs, valid=None, tiers=None, layout=LAYOUT):
    pages = np.random.default_rng(0).permutation(len(slabs) * layout.tiles).reshape(len(slabs), -1)
    count = len(slabs)
    head = [slabs, [4] * count if valid is None else valid, [0] * count, [0] * count if tiers is None else tiers]
    return Table(np.concatenate([np.array(head).T.reshape(count, 4), pages], 1))


def visited(lists, table, layout=LAYOUT):
    """For each query tile the set of (slab, row, column) whose pages it lists."""
    place = {int(page): (int(slab), *layout.positions[tile].tolist()) for slab, pages in zip(table.slabs, table.pages)
             for tile, page in enumerate(pages)}
    return [{place[int(page)] for page in lists.pages[a:b]} for a, b in zip(lists.starts, lists.starts[1:])]


def interval(centre, size, first, last, shifted):
    low = centre - size // 2
    if shifted:
        low = max(first, min(low, last - size + 1))
    return range(low, low + size)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=8, unique=True), st.one_of(st.none(), st.integers(1, 5)),
       st.one_of(st.none(), st.tuples(st.integers(1, 5), st.integers(1, 5))), st.booleans(), st.integers(0, 2))
def test_a_pattern_visits_the_tiles_of_its_definition_and_no_other(slabs, size, plane, shifted, sinks):
    slabs = sorted(slabs)
    table, queries = table_of(slabs), (slabs[0], slabs[-1])
    lists = page_lists(table, LAYOUT, queries, Pattern(size, plane, shifted), sinks)[0]
    recent = slabs[min(sinks, len(slabs) - 1):]
    expected = []
    for query in queries:
        times = set(slabs) if size is None else \
            set(slabs) & ({*interval(query, size, recent[0], recent[-1], shifted)} | set(slabs[:sinks]))
        for row, column in LAYOUT.positions.tolist():
            rows = range(3) if plane is None else interval(row, plane[0], 0, 2, shifted)
            columns = range(4) if plane is None else interval(column, plane[1], 0, 3, shifted)
            expected.append({(t, y, x) for t in times for y in rows if 0 <= y < 3 for x in columns if 0 <= x < 4})
    assert visited(lists, table) == expected


def test_the_named_patterns_are_plane_column_neighbourhood_and_all():
    table, tile = table_of(range(5)), LAYOUT.numbers[1, 2]

    def of(pattern):
        return visited(page_lists(table, LAYOUT, (3,), pattern)[0], table)[tile]
    assert of(SPATIAL) == {(3, y, x) for y in range(3) for x in range(4)}
    assert of(TEMPORAL) == {(t, 1, 2) for t in range(5)}
    assert of(window((3, 3, 3))) == {(t, y, x) for t in (2, 3, 4) for y in range(3) for x in (1, 2, 3)}
    assert len(of(EVERYTHING)) == 60


def test_a_shifted_window_has_its_size_at_every_border():
    table = table_of(range(6))
    lists = page_lists(table, LAYOUT, (0, 5), window((3, 3, 3), shifted=True))[0]
    assert set(np.diff(lists.starts)) == {27}


def test_full_pages_come_first_and_lengths_are_the_valid_tokens():
    table = table_of([0, 1], valid=[4, 3])
    lists = page_lists(table, LAYOUT, (1,), EVERYTHING)[0]
    full = sum(LAYOUT.tokens_per_frame == 4)
    assert (lists.full == full).all()
    rows = lists.lengths.reshape(LAYOUT.tiles, -1)
    assert (rows[:, :full] == 16).all() and (rows[:, full:] < 16).all()
    assert rows.sum() == LAYOUT.tiles * LAYOUT.tokens * 7


def test_each_tier_has_its_lists():
    table = table_of(range(4), tiers=[1, 1, 0, 0])
    lists = page_lists(table, LAYOUT, (3,), TEMPORAL)
    assert {tier: set(np.diff(part.starts)) for tier, part in lists.items()} == {0: {2}, 1: {2}}


def test_the_same_table_is_not_worked_out_twice():
    table = table_of(range(4))
    assert page_lists(table, LAYOUT, (3,), SPATIAL) is page_lists(table, LAYOUT, (3,), SPATIAL)
    assert page_lists(Table(table.rows), LAYOUT, (3,), SPATIAL) is not page_lists(table, LAYOUT, (3,), SPATIAL)


def test_an_empty_neighbourhood_is_refused():
    with pytest.raises(ValueError, match='at least one tile'):
        window((3, 0, 3))


def test_attention_over_the_lists_is_dense_attention_over_the_tokens_that_they_stand_for():
    layout, heads, dim = TileLayout((2, 2, 4), (4, 6)), 2, 16
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 1, heads, 5, layout.tokens, dim)).astype(np.float32)
    storage = TorchStorage(layout, 1, heads, dim, 32, Precision.FP32)
    cache = SequenceCache(layout, [PagePool.of('pages', storage)], 4)
    with cache.stage() as staged:
        staged.write(0, k, v)
    tokens = layout.tiles * layout.page_tokens
    q = torch.from_numpy(rng.standard_normal((tokens, heads, dim)).astype(np.float32))
    lists = kernel_lists(page_lists(cache.table, layout, (2,), EVERYTHING)[0], 'cpu')
    out = paged_attention(q, [storage.layer(0)], [lists])
    keys, values = (torch.from_numpy(part[0].reshape(heads, -1, dim)) for part in (k, v))
    dense = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), keys, values).transpose(0, 1)
    torch.testing.assert_close(out, dense, rtol=1e-5, atol=1e-5)


def test_both_storages_hold_the_same():
    layout, rng = TileLayout((2, 2, 2), (3, 4)), np.random.default_rng(0)
    stores = [NumpyStorage(layout, 2, 2, 4, 8), TorchStorage(layout, 2, 2, 4, 8, Precision.FP32)]
    k = rng.standard_normal((2, 2, layout.tokens, 4)).astype(np.float32)
    ids = np.array([5, 1, 6, 2])
    for store in stores:
        store.write(ids, layout.token_index[1], k, -k)
        store.copy(np.array([0, 3]), store, ids[:2])
    for a, b in zip(*(store.read(np.arange(8)) for store in stores)):
        np.testing.assert_array_equal(a, b)
    for store in stores:
        rows, index = np.asarray(store.rows()[0]), store.row_index(ids)
        np.testing.assert_array_equal(rows[index], store.read(ids)[0].transpose(1, 2, 0, 3, 4))
        found = stores[0].dump(ids)
        assert {name: (array.shape[1:], array.dtype) for name, array in found.items()} == store.forms()
