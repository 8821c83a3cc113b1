"""Tiers: what a slab holds survives its moves, within its precision; prefetched slabs are there when needed."""
import gc
import math

import numpy as np
import pytest
import torch

from worldmodel_ros.cache import snapshot
from worldmodel_ros.cache.pool import NumpyStorage, OutOfPages, PagePool
from worldmodel_ros.cache.layout import TileLayout
from worldmodel_ros.cache.sequence import SequenceCache
from worldmodel_ros.cache.tiers import Prefetch, TierPolicy, move
from worldmodel_ros.cache.torch_storage import TorchStorage, _words
from worldmodel_ros.kernels.pages import Precision

LAYOUT = TileLayout((2, 4, 4), (8, 8))  # 4 pages of 32 tokens a slab
LAYERS, HEADS, DIM, SLABS = 2, 2, 16, 12


DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'


def pool(name, precision, device=DEVICE, slabs=SLABS):
    storage = TorchStorage(LAYOUT, LAYERS, HEADS, DIM, slabs * LAYOUT.tiles, precision, device,
                           pinned=device != DEVICE)
    return PagePool.of(name, storage)


def tiered():
    return SequenceCache(LAYOUT, [pool('recent', Precision.FP8), pool('distant', Precision.FP4),
                                  pool('host', Precision.FP4, 'cpu')], 8, sinks=1)


def driven(cache, frames=16):
    k = np.random.default_rng(0).standard_normal((LAYERS, HEADS, frames, LAYOUT.tokens, DIM)).astype(np.float32)
    for first in range(0, frames, LAYOUT.frames):
        with cache.stage() as staged:
            part = k[:, :, first:first + LAYOUT.frames]
            staged.write(first, part, -part)
    return k


def slab(cache, number):
    """Keys (layers, heads, tokens of the slab, dim) of a slab, wherever it lies."""
    row = cache.table.find(number)
    k = cache.pools[row[3]].storage.read(row[4:])[0].transpose(1, 2, 0, 3, 4)
    return k.reshape(LAYERS, HEADS, -1, DIM)[:, :, LAYOUT.token_index.ravel()]


def error(cache, number, k):
    truth = k.reshape(LAYERS, HEADS, -1, LAYOUT.frames * LAYOUT.tokens, DIM)[:, :, number]
    return np.sqrt(np.mean((slab(cache, number) - truth) ** 2) / np.mean(truth ** 2))


def test_a_slab_goes_down_the_tiers_as_it_ages_and_sinks_stay():
    cache = tiered()
    driven(cache)
    policy = TierPolicy((3, 9))
    assert policy.apply(cache, newest=15) == 5
    np.testing.assert_array_equal(cache.table.tiers, [0, 2, 2, 1, 1, 1, 0, 0])
    assert policy.apply(cache, newest=15) == 0
    used = [p.allocator.usage().used // LAYOUT.tiles for p in cache.pools]
    assert used == [3, 3, 2]


@pytest.mark.parametrize('way', ['move', 'prefetch'])
def test_a_slab_whose_copy_fails_stays_where_it_was_and_costs_no_pages(way, monkeypatch):
    cache = tiered()
    k = driven(cache, 8)
    before, held = cache.table, [p.allocator.usage().used for p in cache.pools]

    def full(*_):
        raise MemoryError('the device has none left')
    monkeypatch.setattr(cache.pools[1].storage, 'copy', full)
    monkeypatch.setattr(cache.pools[1].storage, 'copy_later', full)
    for _ in range(SLABS + 1):  # more often than there are pages
        with pytest.raises(MemoryError):
            if way == 'move':
                move(cache, 2, 1)
            else:
                Prefetch(cache, 1).begin(2)
    gc.collect()
    assert cache.table is before and [p.allocator.usage().used for p in cache.pools] == held
    monkeypatch.undo()
    move(cache, 2, 1)
    assert error(cache, 2, k) < 0.12


def test_by_default_the_newest_quarter_of_a_window_stays_in_the_first_tier():
    assert TierPolicy.by_window(16) == TierPolicy((4,))
    assert TierPolicy.by_window(2) == TierPolicy((1,))


def test_fewer_bits_keep_what_they_promise_and_take_fewer_bytes():
    cache = tiered()
    k = driven(cache)
    assert 0.01 < error(cache, 3, k) < 0.035  # FP8: 2.6 % of normally distributed values
    move(cache, 3, 1)
    assert 0.05 < error(cache, 3, k) < 0.14  # FP4: 11 %
    recent, distant = (p.storage.page_bytes for p in cache.pools[:2])
    assert distant < 0.6 * recent < 0.6 * 2 * LAYERS * HEADS * LAYOUT.page_tokens * DIM * 1.02


def test_pages_come_back_from_the_host_bit_by_bit():
    cache = tiered()
    driven(cache)
    move(cache, 2, 1)
    before = slab(cache, 2)
    for tier in (2, 1):
        move(cache, 2, tier)
        np.testing.assert_array_equal(slab(cache, 2), before)


def test_moving_a_slab_leaves_the_forks_theirs():
    cache = tiered()
    driven(cache)
    branch = cache.fork()
    before = slab(branch, 4)
    move(cache, 4, 1)
    np.testing.assert_array_equal(slab(branch, 4), before)
    assert branch.table.find(4)[3] == 0


def test_prefetched_slabs_are_there_when_they_are_needed_and_others_are_brought_late():
    cache = tiered()
    driven(cache)
    TierPolicy((3, 9)).apply(cache, newest=15)
    before = slab(cache, 1), slab(cache, 2)
    prefetch = Prefetch(cache, target=1)
    prefetch.begin(1)
    assert cache.table.find(1)[3] == 2
    assert prefetch.need([1, 2, 3]) == 1
    np.testing.assert_array_equal(cache.table.tiers[1:4], [1, 1, 1])
    for number, keys in zip((1, 2), before):
        np.testing.assert_array_equal(slab(cache, number), keys)
    assert cache.pools[2].allocator.usage().used == 0


@pytest.mark.parametrize('ended', ['cancelled', 'evicted', 'forgotten'])
def test_a_prefetch_that_comes_to_nothing_leaves_no_page_behind(ended):
    cache = tiered()
    driven(cache)
    TierPolicy((3, 9)).apply(cache, newest=15)
    prefetch = Prefetch(cache, target=1)
    prefetch.begin(1)
    if ended == 'cancelled':
        prefetch.cancel()
    elif ended == 'evicted':
        cache.evict(before=6)
        with pytest.raises(KeyError):
            prefetch.need([1])
    del prefetch
    gc.collect()
    held = np.bincount(cache.table.tiers, minlength=3)
    assert [p.allocator.usage().used for p in cache.pools] == (held * LAYOUT.tiles).tolist()


def test_a_slab_that_was_written_meanwhile_is_copied_anew():
    host = PagePool.of('host', NumpyStorage(LAYOUT, LAYERS, HEADS, DIM, 32))
    cache = SequenceCache(LAYOUT, [PagePool.of('device', NumpyStorage(LAYOUT, LAYERS, HEADS, DIM, 32)), host], 5)
    k = np.ones((LAYERS, HEADS, 1, LAYOUT.tokens, DIM), np.float32)
    with cache.stage() as staged:
        staged.write(0, k, k)
    move(cache, 0, 1)
    prefetch = Prefetch(cache)
    prefetch.begin(0)
    with cache.stage() as staged:  # goes to the device, with what the host has of the slab
        staged.write(1, 2 * k, 2 * k)
    move(cache, 0, 1)
    assert prefetch.need([0]) == 1
    assert (slab(cache, 0)[:, :, :LAYOUT.tokens] == 1.0).all() and (slab(cache, 0)[:, :, LAYOUT.tokens:] == 2.0).all()


def test_a_full_tier_is_said_and_the_slab_stays_where_it_was():
    cache = SequenceCache(LAYOUT, [pool('recent', Precision.FP8), pool('distant', Precision.FP4, slabs=1)], 8)
    driven(cache)
    with pytest.raises(OutOfPages, match='make the pool larger'):
        TierPolicy((3,)).apply(cache, newest=15)
    np.testing.assert_array_equal(cache.table.tiers, [1] + [0] * 7)


def test_a_sequence_that_one_tier_refuses_leaves_nothing_guaranteed_in_the_others():
    pools = [pool('recent', Precision.FP8), pool('distant', Precision.FP4, slabs=1)]
    for _ in range(3):
        with pytest.raises(OutOfPages, match='to be guaranteed'):
            SequenceCache(LAYOUT, pools, (2, 2))
        assert [each.allocator.usage().guaranteed for each in pools] == [0, 0]


def test_a_quantised_page_is_written_as_a_whole_or_not_at_all():
    cache = tiered()
    k = np.ones((LAYERS, HEADS, 1, LAYOUT.tokens, DIM), np.float32)
    with pytest.raises(ValueError, match='whole slabs of 2 frames'):
        with cache.stage() as staged:
            staged.write(0, k, k)
    assert len(cache.table) == 0 and cache.pools[0].allocator.usage().used == 0


def test_a_sequence_in_several_tiers_is_saved_and_restored_bit_by_bit():
    cache = tiered()
    driven(cache)
    TierPolicy((3, 9)).apply(cache, newest=15)
    saved, before = snapshot.save(cache), [slab(cache, number) for number in range(8)]
    cache.clear()
    snapshot.restore(cache, saved)
    for number, keys in enumerate(before):
        np.testing.assert_array_equal(slab(cache, number), keys)


@pytest.mark.parametrize('ages', [(0,), (9, 3), (3, 3)])
def test_ages_that_do_not_ascend_are_refused(ages):
    with pytest.raises(ValueError, match='ascend'):
        TierPolicy(ages)


def test_more_ages_than_tiers_are_refused():
    cache = tiered()
    with pytest.raises(ValueError, match='2 ages between them'):
        TierPolicy((1, 2, 3)).apply(cache, 0)


@pytest.mark.parametrize('precision, damage', [
    (Precision.FP32, math.nan), (Precision.FP32, -math.inf), (Precision.BF16, math.nan), (Precision.BF16, math.inf),
    (Precision.FP8, math.nan)])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(precision, damage):
    storage = TorchStorage(LAYOUT, 2, 2, 16, 4, precision)
    whole = storage.dump(np.arange(3))['k']
    assert storage.finite('k', whole)
    dtype = storage.pool.k.dtype
    for place in (0, 17, whole.nbytes // dtype.itemsize - 1):
        damaged = whole.copy()
        torch.from_numpy(damaged).view(dtype).flatten()[place] = damage
        assert not storage.finite('k', damaged)


@pytest.mark.parametrize('precision', [Precision.BF16, Precision.FP8])
def test_of_all_numbers_that_there_are_the_finite_ones_are_told_from_the_others(precision):
    storage = TorchStorage(LAYOUT, 2, 2, 16, 4, precision)
    dtype = storage.pool.k.dtype
    bits = np.arange(2 ** (8 * dtype.itemsize), dtype=f'u{dtype.itemsize}').view(np.uint8).reshape(-1, dtype.itemsize)
    expected = torch.from_numpy(bits).view(dtype).float().isfinite().flatten().tolist()
    assert [storage.finite('k', number) for number in bits] == expected and not all(expected)


def test_arrays_of_a_store_which_nothing_may_write_to_are_read_without_a_warning(recwarn):
    storage, warned_always = TorchStorage(LAYOUT, 2, 2, 16, 4, Precision.BF16), torch.is_warn_always_enabled()
    storage.pool.k.normal_()
    protected = {name: np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)
                 for name, array in storage.dump(np.arange(2)).items()}
    torch.set_warn_always(True)  # else only once in a process, which may have been before
    try:
        assert storage.finite('k', protected['k'])
        storage.load(np.arange(2, 4), protected)
    finally:
        torch.set_warn_always(warned_always)
    assert [str(warning.message) for warning in recwarn] == [] and not protected['k'].flags.writeable
    np.testing.assert_array_equal(storage.dump(np.arange(2, 4))['k'], protected['k'])


@pytest.mark.parametrize('loads', ['load', 'load_later', 'layer by layer'])
@pytest.mark.parametrize('precision, dim, words', [
    (Precision.FP32, 3, torch.int32), (Precision.FP32, 16, torch.int64), (Precision.BF16, 16, torch.int64),
    (Precision.FP8, 16, torch.int64), (Precision.FP4, 16, torch.int64)])
def test_pages_are_copied_in_words_and_every_byte_arrives(precision, dim, words, loads):
    storage = TorchStorage(LAYOUT, 2, 2, dim, 8, precision, DEVICE)
    pools = storage.pool.tensors()
    assert _words(pools['k']).dtype is words
    for seed, tensor in enumerate(pools.values()):
        tensor.view(torch.uint8).random_(0, 120, generator=torch.Generator(DEVICE).manual_seed(seed))
    ids, to = np.array([4, 1, 6]), np.array([0, 5, 2])

    def read(pages):
        return {name: tensor.view(torch.uint8).cpu()[:, torch.from_numpy(pages)].numpy() for name, tensor in pools.items()}
    before = read(ids)
    dumped = storage.dump(ids)
    for name, array in dumped.items():
        assert (array.shape[1:], array.dtype) == storage.forms()[name]
        np.testing.assert_array_equal(array.swapaxes(0, 1).view(np.uint8), before[name])
    if loads == 'load':
        storage.load(to, storage.staged(dumped))
    else:
        groups = [dumped] if loads == 'load_later' else [
            {name: array[:, layer:layer + 1].copy() for name, array in dumped.items()} for layer in range(2)]
        storage.load_later(to, [storage.staged(arrays) for arrays in groups])()()
    storage.copy(np.array([3, 7]), storage, ids[:2])
    for name in pools:
        np.testing.assert_array_equal(read(to)[name], before[name])
        np.testing.assert_array_equal(read(np.array([3, 7]))[name], before[name][:, :2])
        np.testing.assert_array_equal(read(ids)[name], before[name])
    storage.clear(to)
    assert not any(array.any() for array in read(to).values())
