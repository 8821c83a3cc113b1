"""The two clocks of the machine, read by a thread that may have to wait between them."""
import time
from types import SimpleNamespace

import pytest
from rclpy.clock import ClockType
from rclpy.logging import get_logger

from worldmodel_ros import clocks
from worldmodel_ros.nodes.common import spin
from worldmodel_ros.nodes.common.logs import at_most_every


class Clocks:
    """A wall clock 1000 s ahead of the steady one; each reading takes a microsecond, and some a ``pause`` [ns] besides."""

    def __init__(self, pauses):
        self.now, self.pauses = 5_000_000_000, list(pauses)

    def _read(self):
        self.now += 1000 + (self.pauses.pop(0) if self.pauses else 0)
        return self.now

    monotonic_ns = _read

    def time_ns(self):
        return self._read() + 1_000_000_000_000


def test_how_long_ago_a_moment_was_is_told_by_the_time_since_boot():
    before = clocks.Moment.from_dict(clocks.Moment.now().to_dict())
    time.sleep(0.02)
    assert before.boot and 0.02 <= before.ago() < 60.0
    assert clocks.Moment(before.at - 1000.0, before.since_boot, before.boot).ago() < 60.0
    assert clocks.Moment(before.at - 1000.0, before.since_boot, 'another').ago() > 900.0


@pytest.mark.parametrize('pauses', [
    [], [0, 50_000_000], [0, 0, 50_000_000], [50_000_000], [0, 3_000_000, 3_000_000, 0, 0, 9_000_000]])
def test_a_thread_that_waits_between_the_clocks_is_not_misled(monkeypatch, pauses):
    monkeypatch.setattr(clocks, 'time', Clocks(pauses))
    assert clocks.wall_minus_steady() == pytest.approx(1_000_000_000_000, abs=2000)


class Woken:
    def wake(self):
        pass


def test_the_guard_takes_no_pause_of_its_own_for_a_clock_that_was_set_back(monkeypatch):
    monkeypatch.setattr(clocks, 'time', Clocks([0, 0, 0, 0, 20_000_000] * 50))
    monkeypatch.setattr(spin, '_GUARD_PERIOD', 0.001)
    guard = spin._ClockGuard(Woken())
    time.sleep(0.3)
    guard.stop()
    assert not guard.set_back


def test_what_is_logged_at_most_every_so_often_is_logged_by_the_steady_clock(monkeypatch):
    """By the wall clock, a place that has logged before would be silent for as long as that is set back."""
    def logged():
        return [logger.info('again', **at_most_every(0.05)) for _ in range(3)]
    logger = get_logger('often')
    monkeypatch.setattr(at_most_every(0.05)['throttle_time_source_type'], 'now', lambda: SimpleNamespace(nanoseconds=now))
    now = 10**9
    assert logged() == [True, False, False]
    now += 40_000_000
    assert logged() == [False, False, False]
    now += 10_000_000
    assert logged() == [True, False, False]
    assert at_most_every(0.05)['throttle_time_source_type'].clock_type == ClockType.STEADY_TIME
