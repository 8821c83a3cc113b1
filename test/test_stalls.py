"""The watch that tells a machine that stood still from processes that did."""

import os
import signal
import time

import pytest

from scenarios import stalls as module
from scenarios.stalls import NOTICEABLE, PLAYS, Stalls, failure_of, played_again


def test_no_stall_is_as_long_as_the_watch_itself_while_the_machine_runs():
    with Stalls() as stalls:
        time.sleep(0.3)
    assert 0.0 <= stalls.longest < 0.3


def test_a_stall_is_noticed_and_its_length_is_right():
    with Stalls() as stalls:
        os.kill(stalls.process.pid, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(stalls.process.pid, signal.SIGCONT)
    assert stalls.noticeable
    assert 0.5 - 0.05 <= stalls.longest < 5.0
    assert NOTICEABLE < 0.5


class Seen:
    """A watch that saw the machine stand still as often as `noticeable` says, one play after the other."""

    longest = 0.01

    def __init__(self, noticeable):
        self._noticeable = iter(noticeable)

    def __call__(self):
        self.noticeable = next(self._noticeable)
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.mark.filterwarnings('ignore:.*while the machine stood still')
@pytest.mark.parametrize('noticeable, passes_at, plays, passes', [
    ([False], 2, 1, False),                   # it ran on, so a failure is one
    ([True, True], 2, 2, True),
    ([True, False], 3, 2, False),
    ([True] * PLAYS, PLAYS + 1, PLAYS, False),  # not for ever
    ([True], 1, 1, True)])
def test_what_fails_is_played_again_only_where_the_machine_stood_still(monkeypatch, noticeable, passes_at, plays, passes):
    monkeypatch.setattr(module, 'Stalls', Seen(noticeable))
    count = []

    def play():
        count.append(1)
        assert len(count) >= passes_at, f'play {len(count)}'
    failure = failure_of(play, 'play')
    assert (failure is None, len(count)) == (passes, plays)
    if not passes:
        count.clear()
        monkeypatch.setattr(module, 'Stalls', Seen(noticeable))
        with pytest.raises(AssertionError, match=f'play {plays}'):
            played_again(play)()
