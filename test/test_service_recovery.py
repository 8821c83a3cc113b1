"""A service that refuses everything finds out by itself that the device is fast again."""
from hypothesis import given, settings
from hypothesis import strategies as st
from timed_backend import Rig

from worldmodel_ros.serving.scheduler import Tier

BEGIN, RECOVERED = 1.0, 3.5  # s
SEQUENCE = st.tuples(st.integers(1, 8), st.floats(1.5, 40.0), st.floats(0.1, 1.0), st.integers(1, 5))


def play(robots, factor, seconds, every, until):
    """
    Replies as (time since the burst was over [s], tier): ``robots`` at 10 Hz, of whose networks, from BEGIN on and for so
    many seconds, each ``every``-th is slower by a factor.
    """
    rig = Rig(pictures=False, sessions=9)
    run, calls, start = rig.backend.run, iter(range(10**6)), rig.clock.now
    end = start + BEGIN + seconds

    def slow(network, batch):
        if start + BEGIN <= rig.clock.now < end and next(calls) % every == 0:
            rig.clock.sleep((factor - 1.0) * rig.backend.costs[network])
        return run(network, batch)
    rig.backend.run = slow
    clients = [rig.open() for _ in range(robots)]
    sequence = 0
    while rig.clock.now < end + until:
        sequence += 1
        for session, _ in clients:
            rig.tick(session, sequence)
            rig.run(0.1 / robots)
    rig.settle()
    return [(reply.finish - end, reply.tier) for _, listener in clients for reply in listener.replies]


@given(SEQUENCE)
@settings(max_examples=25, deadline=None)
def test_after_any_burst_of_slow_steps_it_serves_again_within_seconds(burst):
    replies = play(*burst, until=RECOVERED + 0.5)
    served = [time for time, tier in replies if tier is not Tier.NONE and time > 0.0]
    assert served and min(served) < RECOVERED
    last = [tier for time, tier in replies if time > RECOVERED]
    assert sum(tier is not Tier.NONE for tier in last) > 0.5 * len(last)


def test_many_sessions_that_begin_together_are_served_from_the_first_second_on():
    """First frames are as fast as others, and what was slow at the start does not bar the rest."""
    replies = play(8, 1.0, 0.0, 1, until=1.0)
    assert sum(tier is not Tier.NONE for _, tier in replies) > 0.6 * len(replies)
