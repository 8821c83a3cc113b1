"""Pages: slabs lie together, nothing is freed while it is held, guarantees hold whatever branches do."""
import gc

import numpy as np
import pytest

from worldmodel_ros.cache.pool import OutOfPages, PageAllocator


def test_pages_of_one_allocation_lie_together_where_a_run_is_free():
    allocator = PageAllocator(16)
    lease = allocator.lease()
    slabs = [lease.allocate(4) for _ in range(4)]
    lease.release(slabs[1])
    lease.release(slabs[3])
    np.testing.assert_array_equal(lease.allocate(2), [4, 5])
    np.testing.assert_array_equal(lease.allocate(4), [12, 13, 14, 15])
    assert allocator.usage().scattered == 0


def test_pages_are_found_where_no_run_is_long_enough_and_that_is_counted():
    allocator = PageAllocator(8)
    lease = allocator.lease()
    lease.allocate(8)
    lease.release(np.array([1, 4, 5]))
    usage = allocator.usage()
    assert (usage.free, usage.longest_free_run) == (3, 2)
    assert usage.fragmentation == pytest.approx(1 / 3)
    np.testing.assert_array_equal(lease.allocate(3), [1, 4, 5])
    assert allocator.usage().scattered == 1


def test_a_shared_page_is_free_when_its_last_holder_lets_go():
    allocator = PageAllocator(4)
    first, second = allocator.lease(), allocator.lease()
    ids = first.allocate(3)
    second.share(ids[:2])
    first.release(ids)
    assert (allocator.usage().used, allocator.usage().shared) == (2, 0)
    second.release(ids[:2])
    assert allocator.usage().used == 0


def test_branches_cannot_take_what_is_guaranteed_to_a_session():
    allocator = PageAllocator(10)
    session, branch = allocator.lease(guaranteed=6), allocator.lease()
    branch.allocate(4)
    with pytest.raises(OutOfPages, match='of 10 only 0 are free and unreserved.*make the pool larger'):
        branch.allocate(1)
    session.allocate(6)
    with pytest.raises(OutOfPages, match='of the 6 guaranteed'):
        session.allocate(1)


class Branch:
    """Shares the pages of a session until they are needed."""

    def __init__(self, allocator, ids):
        self.lease, self.ids = allocator.lease(surrender=self.surrender), ids
        self.lease.share(ids)

    def surrender(self, lease):
        ids, self.ids = self.ids, None
        return ids


def test_sharing_the_pages_of_a_session_needs_no_room():
    allocator = PageAllocator(4)
    ids = allocator.lease(guaranteed=4).allocate(4)
    branches = [Branch(allocator, ids) for _ in range(5)]
    assert allocator.usage().used == 4 and (allocator.references(ids) == 1 + len(branches)).all()


def test_the_oldest_branches_lose_their_pages_when_the_session_rolls_on_and_there_is_no_other():
    allocator = PageAllocator(6)
    session = allocator.lease(guaranteed=4)
    ids = session.allocate(4)
    old = Branch(allocator, ids)
    session.release(ids[:2])
    ids = np.concatenate([ids[2:], session.allocate(2)])
    new = Branch(allocator, ids)
    assert allocator.usage().free == 0 and old.ids is not None
    session.release(ids[:1])
    assert old.ids is None and new.ids is not None
    session.allocate(1)
    assert allocator.usage().free == 1


def test_a_session_gets_its_pages_though_a_session_that_comes_has_shared_them_and_keeps_them():
    allocator = PageAllocator(6)
    session, coming = allocator.lease(guaranteed=2), [allocator.lease() for _ in range(3)]
    ids = session.allocate(2)
    uses = allocator.uses(ids)
    assert coming[0].share_unchanged(ids, uses)
    coming[1].share(ids)  # needs no more: one session needs others in their place, however many keep them
    own = coming[2].allocate(2)
    with pytest.raises(OutOfPages, match='2 more pages are needed, and of 6 only 0'):
        coming[2].allocate(2)
    session.release(ids)
    new = session.allocate(2)
    assert not {*new.tolist()} & {*ids.tolist(), *own.tolist()}
    for lease in coming[:2]:
        lease.release(ids)
    assert (allocator.usage().used, allocator.usage().shared) == (4, 0)


def test_a_session_that_comes_shares_no_pages_in_place_of_which_there_would_be_no_others():
    allocator = PageAllocator(4)
    session, coming = allocator.lease(guaranteed=2), allocator.lease()
    ids = session.allocate(2)
    coming.allocate(2)
    with pytest.raises(OutOfPages, match='2 more pages are needed in place of shared ones'):
        allocator.lease().share_unchanged(ids, allocator.uses(ids))
    session.release(ids)
    np.testing.assert_array_equal(session.allocate(2), ids)


@pytest.mark.parametrize('seed', range(20))
def test_guarantees_hold_whatever_shares_pages(seed):
    rng = np.random.default_rng(seed)
    allocator = PageAllocator(24)
    held = {allocator.lease(guaranteed=int(rng.integers(1, 6))): set() for _ in range(3)}
    sessions = list(held)
    held |= {allocator.lease(): set() for _ in range(3)}
    for _ in range(200):
        lease = list(held)[int(rng.integers(len(held)))]
        others = sorted(set().union(*held.values()) - held[lease])
        count = int(rng.integers(1, 4))
        what = rng.choice(['allocate', 'share', 'release'])
        try:
            if what == 'allocate':
                held[lease] |= set(lease.allocate(count).tolist())
            elif what == 'share' and others:
                ids = rng.choice(others, min(count, len(others)), replace=False)
                lease.share(ids)
                held[lease] |= set(ids.tolist())
            elif what == 'release' and held[lease]:
                ids = rng.choice(sorted(held[lease]), min(count, len(held[lease])), replace=False)
                lease.release(ids)
                held[lease] -= set(ids.tolist())
        except OutOfPages:
            assert lease not in sessions or what != 'allocate' or len(held[lease]) + count > lease.guaranteed
        used = set().union(*held.values())
        assert allocator.usage().used == len(used) and all(len(ids) == each.held for each, ids in held.items())
        own = set().union(*(held[session] for session in sessions))
        kept = set().union(*(ids for each, ids in held.items() if each not in sessions))
        needed = sum(session.guaranteed for session in sessions) - len(own - kept)
        assert allocator.usage().free >= needed, 'the sessions could not replace all that they share'
    for lease, ids in held.items():
        lease.release(np.array(sorted(ids), int))
    assert allocator.usage().used == 0


def test_a_guarantee_that_cannot_be_kept_is_not_given_and_one_that_is_given_up_is_free_again():
    allocator = PageAllocator(8)
    first = allocator.lease(guaranteed=6)
    with pytest.raises(OutOfPages, match='3 more pages are to be guaranteed'):
        allocator.lease(guaranteed=3)
    first.close()
    allocator.lease(guaranteed=8)


def test_what_a_finalizer_gives_back_is_free_with_the_next_call():
    allocator = PageAllocator(4)
    lease = allocator.lease(guaranteed=4)
    lease.abandon(lease.allocate(3))
    del lease
    gc.collect()
    assert (allocator.usage().used, allocator.usage().guaranteed) == (0, 0)
    allocator.lease(guaranteed=4)


@pytest.mark.parametrize('need', ['branch', 'guarantee', 'promise'])
def test_pages_that_are_held_ahead_of_their_use_are_for_who_needs_them(need):
    allocator = PageAllocator(8)
    session, ahead = allocator.lease(guaranteed=4), [allocator.lease() for _ in range(2)]
    ids = session.allocate(2)
    held = [ahead[0].allocate(2), ahead[1].allocate(2)]
    given = []

    def give():
        if len(given) == 2:
            return False
        ahead[len(given)].abandon(held[len(given)])
        given.append(need)
        return True
    allocator.givers.append(give)
    if need == 'branch':
        allocator.lease().allocate(3)  # more than one has
    elif need == 'guarantee':
        allocator.lease(guaranteed=3)
    else:  # a session lets go of pages that another holds on to, and is to have others for them
        other = allocator.lease()
        other.share(ids)
        session.release(ids)
        assert len(given) == 1
        session.allocate(4)
    assert len(given) == (1 if need == 'promise' else 2)
    with pytest.raises(OutOfPages):
        allocator.lease().allocate(8)
    assert len(given) == 2
    allocator.givers.remove(give)
