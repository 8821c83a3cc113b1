"""The watch that tells a machine that stood still from processes that did, and what it excuses."""

import os
import signal
import time

import pytest
from scenarios import stalls as module
from scenarios.stalls import PLAYS, InvariantViolation, Missed, Stall, Unexplained, Watch, past, play_out

from worldmodel_ros.demo.load import CpuLoad


@pytest.fixture(scope='module')
def watch():
    with Watch() as watch:
        yield watch


def stop_for(process, seconds):
    """Stop a process as a machine that stands still would; return its steady times [s]."""
    start = time.monotonic()
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGCONT)
    return start, time.monotonic()


def test_a_stall_of_one_core_is_seen_with_its_time_and_length(watch):
    start, end = stop_for(watch.processes[-1], 0.4)
    assert 0.4 - 0.05 <= watch.longest(start, end + 0.05) <= end - start + 0.05
    assert 0.4 - 0.05 <= watch.stood_still(start, end) <= end - start
    # Of two instants in it, what lies between them; before it, no more of it than the watch had waited for its core.
    middle = (start + end) / 2
    assert watch.stood_still(middle, middle + 0.1) == pytest.approx(0.1, abs=0.01)
    assert watch.stood_still(start - 0.5, start) < 0.2


def test_stalls_of_two_cores_at_once_are_one_time(watch):
    if len(watch.processes) == 1:
        return  # on one core there is nothing to add up
    for process in watch.processes:
        os.kill(process.pid, signal.SIGSTOP)
    start = time.monotonic()
    time.sleep(0.3)
    for process in watch.processes:
        os.kill(process.pid, signal.SIGCONT)
    end = time.monotonic()
    assert watch.stood_still(start, end + 0.05) <= end - start + 0.05
    assert len([stall for stall in watch.stalls(start, end) if stall.end - stall.start > 0.2]) == len(watch.processes)


def test_load_is_no_stall(watch):
    """Other programs on every core, three for each, make this process wait, but no time is missing."""
    start = time.monotonic()
    with CpuLoad(3 * len(os.sched_getaffinity(0))):
        time.sleep(2.0)
    end = time.monotonic()
    waited = watch.stood_still(start, end)
    assert waited < 0.25 * (end - start), f'{waited:.2f} s of {end - start:.1f} s are taken for stalls'


def test_a_watch_that_has_died_excuses_nothing():
    with Watch() as watch:
        for process in watch.processes:
            process.kill()
            process.wait()
        now = time.monotonic()
        assert watch.stalls(now + 1.0, now + 2.0) == []


class Seen:
    """A watch that saw the machine stand still at these times."""

    def __init__(self, *stalls):
        self.seen = [Stall(*stall) for stall in stalls]

    stood_still, longest = Watch.stood_still, Watch.longest

    def stalls(self, start, end):
        return [stall for stall in self.seen if stall.end > start and stall.start < end]


@pytest.mark.parametrize('end, stalls, kept', [
    (0.149, [], True),
    (0.151, [], False),
    (0.170, [(0.135, 0.160)], True),    # in the time for the reaction
    (0.170, [(0.135, 0.150)], False),   # shorter than what was missed
    (0.170, [(0.050, 0.110)], False),   # over before it was due: it would have come too late without it, too
    (0.170, [(0.100, 0.135)], False),   # of which 5 ms count
    (0.170, [(0.131, 0.145), (0.140, 0.153)], True)])
def test_a_bound_is_judged_without_the_stalls_that_overlap_its_end(monkeypatch, end, stalls, kept):
    monkeypatch.setattr(module, '_running', Seen(*stalls))
    assert (past(0.0, end, 0.150, 0.020) <= 0.0) is kept


def test_an_image_that_was_never_taken_is_excused_by_nothing(monkeypatch):
    monkeypatch.setattr(module, '_running', Seen((0.0, 100.0)))
    assert not past(float('nan'), 50.0, 0.05, 0.006) <= 0.0


def test_without_a_watch_a_bound_is_what_it_says(monkeypatch):
    monkeypatch.setattr(module, '_running', None)
    assert past(0.0, 0.151, 0.150, 0.020) == pytest.approx(0.001)


def missed(by):
    return Missed('late', by, 10.0, 11.0)


@pytest.mark.parametrize('failures, stalls, plays, replays, passes', [
    ([], [(10.0, 10.5)], 1, 0, True),
    ([missed(0.2)], [], 1, 0, False),                        # the machine ran on
    ([missed(0.2)], [(10.4, 10.5)], 1, 0, False),            # it stood still for less than what was missed
    ([missed(0.2)], [(12.0, 12.5)], 1, 0, False),            # at another time
    ([missed(0.2)], [(10.1, 10.25), (10.3, 10.45)], 1, 0, False),  # in two pieces
    ([Unexplained('no commands')], [(10.4, 10.7)], 1, 0, False),
    ([missed(0.2)], [(10.4, 10.7)], 2, 1, True),
    ([missed(0.2)] * PLAYS, [(10.4, 10.7)], PLAYS, PLAYS - 1, False),  # not for ever
    ([AssertionError('wrong')], [(0.0, 100.0)], 1, 0, False),  # has no time that could be explained
    ([InvariantViolation('too fast')], [(0.0, 100.0)], 1, 0, False),
    ([missed(0.2), InvariantViolation('late')], [(10.4, 10.7)], 2, 1, False)])
def test_only_what_was_missed_by_less_than_an_overlapping_stall_is_played_again(
        monkeypatch, failures, stalls, plays, replays, passes):
    monkeypatch.setattr(module, '_running', Seen(*stalls))
    monkeypatch.setattr(module, 'REPLAYS', [])
    monkeypatch.setattr(module, 'UNEXPLAINED', 0)
    left, played, prepared = list(failures), [], []

    def play():
        played.append(1)
        if left:
            raise left.pop(0)
    try:
        play_out(play, 'one_robot: drives', lambda: prepared.append(1))
        assert passes
    except AssertionError as failure:
        assert not passes and failure is failures[plays - 1]
    assert len(played) == len(prepared) == plays
    assert [replay.name for replay in module.REPLAYS] == ['one_robot: drives'] * replays
    assert all('missed by 200 ms' in replay.reason and '300 ms' in replay.reason for replay in module.REPLAYS)
    module.REPLAYS.clear()  # else the table of this run would name them


def test_what_nothing_explains_is_played_again_a_few_times_in_a_run(monkeypatch):
    monkeypatch.setattr(module, '_running', Seen())
    monkeypatch.setattr(module, 'REPLAYS', [])
    monkeypatch.setattr(module, 'UNEXPLAINED', 3)
    monkeypatch.setattr(module, '_unexplained', 0)

    def plays(*failures):
        left = list(failures)

        def play():
            if left:
                raise left.pop(0)
        play_out(play, 'one_robot: drives')
        return len(failures) - len(left)
    assert plays(Unexplained('no commands'), missed(0.2)) == 2
    assert all(replay.reason.startswith('nothing that was measured explains it: ') for replay in module.REPLAYS)
    with pytest.raises(Missed):
        plays(*[missed(0.2)] * PLAYS)  # the first of them is the last that this run plays again
    with pytest.raises(InvariantViolation):
        plays(InvariantViolation('too fast'))
    assert len(module.REPLAYS) == 3
    module.REPLAYS.clear()  # else the table of this run would name them
