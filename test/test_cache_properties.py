"""The paged cache against a plain dict of frames, under any sequence of what can be done to it."""
import numpy as np
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from worldmodel_ros.cache import snapshot
from worldmodel_ros.cache.pool import NumpyStorage, OutOfPages, PagePool
from worldmodel_ros.cache.layout import TileLayout
from worldmodel_ros.cache.sequence import SequenceCache

LAYERS, HEADS, DIM, SLABS, GUARANTEED = 2, 1, 2, 10, 6
LAYOUTS = (TileLayout((1, 2, 2), (2, 2)), TileLayout((2, 2, 2), (3, 4)), TileLayout((4, 2, 2), (2, 3)))


class Failure(Exception):
    """What goes wrong in the middle of a tick."""


def contents(cache):
    """{frame: (observed, keys, values)} of all that a cache makes visible, read through its table."""
    layout, found = cache.layout, {}
    for row in cache.table.rows:
        slab, valid, observed, tier = row[:4]
        k, v = (part.transpose(1, 2, 0, 3, 4).reshape(LAYERS, HEADS, -1, DIM)
                for part in cache.pools[tier].storage.read(row[4:]))
        for frame in range(valid):
            places = layout.token_index[frame]
            found[int(slab) * layout.frames + frame] = frame < observed, k[:, :, places], v[:, :, places]
    return found


class Branch:
    """A cache and the dict that it must equal."""

    def __init__(self, cache, frames, fork=False):
        self.cache, self.frames, self.fork = cache, frames, fork

    @property
    def newest(self):
        return max(self.frames, default=-1)

    @property
    def newest_observed(self):
        return max((t for t, frame in self.frames.items() if frame[0]), default=-1)


class CacheMachine(RuleBasedStateMachine):

    @initialize(layout=st.sampled_from(LAYOUTS), sinks=st.integers(0, 2))
    def start(self, layout, sinks):
        self.layout, self.sinks, self.pages = layout, sinks, SLABS * layout.tiles
        self.pool = PagePool.of('pages', NumpyStorage(layout, LAYERS, HEADS, DIM, self.pages))
        # What was freed is not to be read by anyone.
        self.pool.storage.k[:] = self.pool.storage.v[:] = np.nan
        self.branches = [Branch(SequenceCache(layout, [self.pool], GUARANTEED, sinks), {})]
        self.values = np.random.default_rng(0)

    def draw(self, data):
        # By its number: a strategy over the branches themselves would keep the dropped ones alive.
        return self.branches[data.draw(st.integers(0, len(self.branches) - 1))]

    def frames_of(self, times):
        return [self.values.standard_normal((LAYERS, HEADS, len(times), self.layout.tokens, DIM)).astype(np.float32)
                for _ in 'kv']

    def write(self, branch, times, observed, fail=False):
        k, v = self.frames_of(times)
        try:
            with branch.cache.stage() as staged:
                staged.write(times[0], k, v, observed)
                if fail:
                    raise Failure
        except Failure:
            return
        except OutOfPages:
            assert branch.fork or self.needed(branch, times) > GUARANTEED, 'a session gets what it was guaranteed'
            return
        for index, time in enumerate(times):
            branch.frames[time] = observed, k[:, :, index], v[:, :, index]

    def needed(self, branch, times):
        """Slabs that a session holds at most while it writes."""
        slabs = {t // self.layout.frames for t in branch.frames}
        return len(slabs) + len({t // self.layout.frames for t in times})

    @rule(data=st.data(), count=st.integers(1, 5), fail=st.booleans())
    def commit(self, data, count, fail):
        branch = self.draw(data)
        start = branch.newest_observed + 1
        self.write(branch, range(start, start + count), True, fail)

    @rule(data=st.data(), count=st.integers(1, 5), fail=st.booleans())
    def predict(self, data, count, fail):
        branch = self.draw(data)
        start = data.draw(st.integers(branch.newest_observed + 1, max(branch.newest, branch.newest_observed) + 1))
        if start % self.layout.frames and start - 1 not in branch.frames:
            return  # would leave a gap in its slab, which is refused
        self.write(branch, range(start, start + count), False, fail)

    @precondition(lambda self: len(self.branches) < 6)
    @rule(data=st.data())
    def fork(self, data):
        branch = self.draw(data)
        self.branches.append(Branch(branch.cache.fork(), dict(branch.frames), fork=True))

    @precondition(lambda self: len(self.branches) > 1)
    @rule(data=st.data(), explicitly=st.booleans())
    def drop(self, data, explicitly):
        branch = self.branches.pop(data.draw(st.integers(1, len(self.branches) - 1)))
        if explicitly:
            branch.cache.close()

    @rule(data=st.data(), keep=st.integers(1, 12))
    def evict(self, data, keep):
        branch = self.draw(data)
        before = branch.newest + 1 - keep
        slabs = sorted({t // self.layout.frames for t in branch.frames})
        gone = {s for s in slabs[self.sinks:] if (s + 1) * self.layout.frames <= before}
        branch.cache.evict(before)
        branch.frames = {t: frame for t, frame in branch.frames.items() if t // self.layout.frames not in gone}

    @rule(data=st.data())
    def drop_predicted(self, data):
        branch = self.draw(data)
        branch.cache.drop_predicted()
        branch.frames = {t: frame for t, frame in branch.frames.items() if frame[0]}

    @rule(data=st.data())
    def save_and_restore(self, data):
        branch = self.draw(data)
        saved = snapshot.save(branch.cache)
        branch.cache.clear()
        try:
            snapshot.restore(branch.cache, saved)
        except OutOfPages:
            assert branch.fork
            branch.frames = {}
            return
        np.testing.assert_array_equal(branch.cache.table.rows[:, :4], saved['slabs'])

    @rule(data=st.data())
    def clear(self, data):
        branch = self.draw(data)
        branch.cache.clear()
        branch.frames = {}

    @invariant()
    def every_branch_equals_its_dict(self):
        if not hasattr(self, 'branches'):
            return
        assert not self.branches[0].cache.lost
        self.branches = [branch for branch in self.branches if not branch.cache.lost]
        for branch in self.branches:
            found = contents(branch.cache)
            assert found.keys() == branch.frames.keys()
            for time, (observed, k, v) in branch.frames.items():
                assert found[time][0] == observed, time
                np.testing.assert_array_equal(found[time][1], k)
                np.testing.assert_array_equal(found[time][2], v)

    @invariant()
    def pages_are_held_by_the_tables_and_by_nobody_else(self):
        if hasattr(self, 'branches'):
            held = np.concatenate([branch.cache.table.pages.ravel() for branch in self.branches])
            counts = np.bincount(held, minlength=self.pages)
            np.testing.assert_array_equal(self.pool.allocator.references(np.arange(self.pages)), counts)
            usage = self.pool.allocator.usage()
            assert usage.used == np.count_nonzero(counts) and usage.shared == np.count_nonzero(counts > 1)

    @invariant()
    def the_session_could_always_go_on(self):
        if hasattr(self, 'branches'):
            session = self.branches[0].cache
            room = GUARANTEED * self.layout.tiles - session.lease(0).held
            assert self.pool.allocator.usage().free >= room


CacheMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None,
                                          suppress_health_check=[HealthCheck.too_slow])
TestCacheAgainstADictOfFrames = CacheMachine.TestCase
