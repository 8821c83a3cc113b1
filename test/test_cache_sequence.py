"""One session's cache: what is staged, shared, copied on write, evicted and saved, and a tick's cost at any age."""
import gc
import sys

import numpy as np
import pytest

from worldmodel_ros.cache import sequence, snapshot
from worldmodel_ros.cache.pool import NumpyStorage, OutOfPages, PagePool
from worldmodel_ros.cache.layout import TileLayout
from worldmodel_ros.cache.sequence import SequenceCache
from worldmodel_ros.cache.tiers import move

LAYOUT = TileLayout((4, 2, 2), (4, 4))  # 4 tiles a slab
LAYERS, HEADS, DIM = 2, 2, 4


def pool_of(pages, layout=LAYOUT):
    return PagePool.of('pages', NumpyStorage(layout, LAYERS, HEADS, DIM, pages))


def values(count, fill=None, layout=LAYOUT):
    shape = LAYERS, HEADS, count, layout.tokens, DIM
    return np.full(shape, fill, np.float32) if fill is not None \
        else np.random.default_rng(count).standard_normal(shape).astype(np.float32)


def write(cache, first, count, fill=None, observed=True):
    with cache.stage() as staged:
        staged.write(first, values(count, fill, cache.layout), values(count, fill, cache.layout), observed)


def frame(cache, time):
    """Keys (layers, heads, tokens, dim) of a frame."""
    row = cache.table.find(time // cache.layout.frames)
    k = cache.pools[0].storage.read(row[4:])[0].transpose(1, 2, 0, 3, 4)
    return k.reshape(*k.shape[:2], -1, k.shape[-1])[:, :, cache.layout.token_index[time % cache.layout.frames]]


def test_frames_come_back_as_they_were_written():
    cache = SequenceCache(LAYOUT, [pool_of(32)], 4)
    k = values(6)
    with cache.stage() as staged:
        staged.write(0, k, k)
    for time in range(6):
        np.testing.assert_array_equal(frame(cache, time), k[:, :, time])
    np.testing.assert_array_equal(cache.table.rows[:, :3], [[0, 4, 4], [1, 2, 2]])


@pytest.mark.parametrize('tiers', [1, 2])
def test_pages_are_given_back_once_where_a_branch_is_closed_while_a_session_takes_them(tiers, monkeypatch):
    pools = [pool_of(16) for _ in range(tiers)]
    cache = SequenceCache(LAYOUT, pools, [4] * tiers)
    write(cache, 0, 16)
    if tiers > 1:
        move(cache, 1, 1)
    branch = cache.fork()
    shared, pages_of = branch.table, sequence.pages_of

    def closed_meanwhile(table, tier):
        ids = pages_of(table, tier)
        if table is shared:
            branch.close()  # as another thread may, or the garbage collector
        return ids
    monkeypatch.setattr(sequence, 'pages_of', closed_meanwhile)
    cache.evict(4)
    monkeypatch.undo()
    assert branch.lost
    for tier, pool in enumerate(pools):
        held = np.zeros(16, int)
        held[pages_of(cache.table, tier)] = 1
        np.testing.assert_array_equal(pool.allocator.references(np.arange(16)), held)
        assert pool.allocator.usage().used == held.sum()
    write(cache, 16, 4)


def test_nothing_is_visible_before_the_context_ends_and_nothing_stays_of_one_that_fails():
    pool = pool_of(32)
    cache = SequenceCache(LAYOUT, [pool], 4)
    write(cache, 0, 6, 1.0)
    before, used = cache.table, pool.allocator.usage()
    with pytest.raises(ZeroDivisionError):
        with cache.stage() as staged:
            staged.write(6, values(4, 2.0), values(4, 2.0))
            assert cache.table is before
            raise ZeroDivisionError
    assert cache.table is before and pool.allocator.usage() == used
    assert (frame(cache, 5) == 1.0).all()


def test_a_frame_behind_the_last_is_written_in_place():
    pool = pool_of(32)
    cache = SequenceCache(LAYOUT, [pool], 4)
    write(cache, 0, 1)
    pages = cache.table.pages.copy()
    for time in range(1, 4):
        write(cache, time, 1)
    np.testing.assert_array_equal(cache.table.pages, pages)
    assert pool.allocator.usage().used == LAYOUT.tiles


def test_what_is_unwritten_in_a_page_is_finite():
    """A masked token is still multiplied by zero, and zero times what a former owner left could be NaN."""
    pool = pool_of(32)
    pool.storage.k[:] = pool.storage.v[:] = np.nan
    cache = SequenceCache(LAYOUT, [pool], 4)
    write(cache, 0, 5)
    assert all(np.isfinite(part).all() for part in pool.storage.read(cache.table.pages.ravel()))


def test_a_fork_takes_no_page_and_a_write_to_it_takes_the_slab_that_it_changes():
    pool = pool_of(64)
    cache = SequenceCache(LAYOUT, [pool], 6)
    write(cache, 0, 18, 1.0)
    used = pool.allocator.usage().used
    branches = [cache.fork() for _ in range(3)]
    assert pool.allocator.usage().used == used
    for number, branch in enumerate(branches):
        write(branch, 18, 2, 10.0 + number, observed=False)
    assert pool.allocator.usage().used == used + 3 * LAYOUT.tiles
    write(cache, 18, 1, 5.0)
    assert (frame(cache, 18) == 5.0).all() and len(cache.table.find(4)) and cache.table.find(4)[1] == 3
    for number, branch in enumerate(branches):
        assert (frame(branch, 19) == 10.0 + number).all() and (frame(branch, 17) == 1.0).all()


def test_sixteen_branches_of_a_chunk_hold_sixteen_chunks():
    pool = pool_of(64 * LAYOUT.tiles)
    cache = SequenceCache(LAYOUT, [pool], 41)
    write(cache, 0, 160)
    session, bytes_before = pool.allocator.usage().used, pool.used_bytes
    branches = [cache.fork() for _ in range(16)]
    assert pool.used_bytes == bytes_before
    for branch in branches:
        write(branch, 160, 4, observed=False)
    assert pool.allocator.usage().used == session + 16 * LAYOUT.tiles
    del branches, branch
    assert pool.allocator.usage().used == session


def test_an_observation_replaces_what_was_predicted_for_it_and_leaves_what_was_for_later():
    cache = SequenceCache(LAYOUT, [pool_of(32)], 5)
    write(cache, 0, 4, 1.0)
    write(cache, 4, 4, 2.0, observed=False)
    write(cache, 4, 1, 3.0)
    assert [frame(cache, time).mean() for time in range(4, 8)] == [3.0, 2.0, 2.0, 2.0]
    np.testing.assert_array_equal(cache.table.rows[1, :3], [1, 4, 1])
    cache.drop_predicted()
    np.testing.assert_array_equal(cache.table.rows[1, :3], [1, 1, 1])


@pytest.mark.parametrize('first, observed, message', [
    (7, True, 'leaves a gap'), (7, False, 'leaves a gap'), (2, False, 'was observed'), (-1, True, 'numbered from 0')])
def test_a_frame_that_does_not_follow_is_refused_and_changes_nothing(first, observed, message):
    cache = SequenceCache(LAYOUT, [pool_of(32)], 4)
    write(cache, 0, 5)
    before = cache.table
    with pytest.raises(ValueError, match=message):
        write(cache, first, 1, observed=observed)
    assert cache.table is before


def test_eviction_drops_whole_slabs_and_spares_the_sinks():
    pool = pool_of(64)
    cache = SequenceCache(LAYOUT, [pool], 8, sinks=1)
    write(cache, 0, 24)
    cache.evict(before=15)
    np.testing.assert_array_equal(cache.table.slabs, [0, 3, 4, 5])
    assert pool.allocator.usage().used == 4 * LAYOUT.tiles


def test_two_stages_at_once_do_not_overwrite_each_other():
    cache = SequenceCache(LAYOUT, [pool_of(32)], 6)
    with pytest.raises(RuntimeError, match='changed while'):
        with cache.stage() as staged:
            staged.write(0, values(4, 1.0), values(4, 1.0))
            write(cache, 0, 4, 2.0)
    assert (frame(cache, 0) == 2.0).all()
    assert cache.pools[0].allocator.usage().used == LAYOUT.tiles


def test_a_branch_that_finds_no_pages_changes_nothing_and_the_session_goes_on():
    pool = pool_of(5 * LAYOUT.tiles)
    cache = SequenceCache(LAYOUT, [pool], 3)
    write(cache, 0, 8)
    branch = cache.fork()
    write(branch, 8, 8, observed=False)
    table = branch.table
    with pytest.raises(OutOfPages, match='drop branches'):
        write(branch, 16, 4, observed=False)
    assert branch.table is table


def test_a_session_that_needs_the_pages_of_a_branch_gets_them_and_the_branch_says_so():
    pool = pool_of(5 * LAYOUT.tiles)
    cache = SequenceCache(LAYOUT, [pool], 3)
    write(cache, 0, 8)
    branch = cache.fork()
    write(branch, 8, 8, observed=False)
    for time in range(8, 40):
        write(cache, time, 1)
        cache.evict(time - 7)
    for use in (lambda: branch.table, branch.fork, lambda: write(branch, 16, 4), lambda: branch.evict(8)):
        with pytest.raises(OutOfPages, match='branch again'):
            use()
    branch.close()
    assert pool.allocator.usage().used == len(cache.table) * LAYOUT.tiles


def test_a_saved_sequence_is_restored_with_its_table_and_its_bytes():
    pool = pool_of(64)
    cache, other = SequenceCache(LAYOUT, [pool], 6), SequenceCache(LAYOUT, [pool], 6)
    write(cache, 0, 10)
    write(cache, 10, 3, observed=False)
    write(other, 0, 2)
    snapshot.restore(other, snapshot.save(cache))
    np.testing.assert_array_equal(other.table.rows[:, :4], cache.table.rows[:, :4])
    for time in range(13):
        np.testing.assert_array_equal(frame(other, time), frame(cache, time))
    assert not set(other.table.pages.ravel()) & set(cache.table.pages.ravel())


@pytest.mark.parametrize('damage', [
    lambda saved: saved.pop('slabs'), lambda saved: saved.pop('pages.k'),
    lambda saved: saved.update({'other.k': saved['pages.k']}),
    lambda saved: saved.update({'pages.k': saved['pages.k'][1:]}),
    lambda saved: saved.update(slabs=saved['slabs'][::-1]),
    lambda saved: saved['slabs'].__setitem__((0, 1), 9), lambda saved: saved['slabs'].__setitem__((0, 3), 1)])
def test_arrays_that_do_not_fit_are_refused_and_change_nothing(damage):
    cache = SequenceCache(LAYOUT, [pool_of(64)], 6)
    write(cache, 0, 10, 1.0)
    saved = snapshot.save(cache)
    damage(saved)
    before = cache.table
    with pytest.raises(ValueError):
        snapshot.restore(cache, saved)
    assert cache.table is before


def test_more_slabs_than_a_session_has_room_for_are_refused():
    pool = pool_of(64)
    large, small = SequenceCache(LAYOUT, [pool], 6), SequenceCache(LAYOUT, [pool], 2)
    write(large, 0, 12)
    with pytest.raises(ValueError, match='3 slabs do not fit a session of 2'):
        snapshot.restore(small, snapshot.save(large))


def test_a_tick_costs_the_same_at_ten_minutes_as_at_ten_seconds_and_moves_nothing():
    layout = TileLayout((1, 4, 4), (4, 4))
    pool = pool_of(64, layout)
    cache, one = SequenceCache(layout, [pool], 17), values(1, layout=layout)
    written = []
    pool.storage.copy = None  # a tick that copied a page would raise

    def tick(time):
        with cache.stage() as staged:
            staged.write(time, one, one)
        cache.evict(time - 15)

    def cost(time):
        calls = [0]

        def count(frame, event, argument):
            calls[0] += event in ('call', 'c_call')
        before = {int(row[0]): row[4:] for row in cache.table.rows}
        gc.disable()  # what it would collect meanwhile is not the tick's
        sys.setprofile(count)
        try:
            tick(time)
        finally:
            sys.setprofile(None)
            gc.enable()
        kept = [row for row in cache.table.rows if int(row[0]) in before]
        assert len(kept) == 15 and all((row[4:] == before[int(row[0])]).all() for row in kept)
        written.append(pool.allocator.usage().used)
        return calls[0], len(cache.table)

    costs = []
    for time in range(6001):
        if time in (100, 6000):
            costs.append(cost(time))
        else:
            tick(time)
    assert costs[0] == costs[1] and written == [16, 16]
