"""Real-time scheduling of a process's threads, where the kernel refuses some or all of it; the thread of an engine."""
import contextlib
import os
import subprocess
import sys
import threading

import pytest

from worldmodel_ros import realtime
from worldmodel_ros.control.worker import Urgency, WorkThread

PATIENCE = 10.0  # s, for what takes milliseconds


class Log:
    def __init__(self):
        self.infos, self.warnings = [], []
        self.info, self.warning = self.infos.append, self.warnings.append


def test_a_thread_that_ends_meanwhile_keeps_no_other_from_its_priority(monkeypatch):
    def schedule(thread, policy, parameters):
        if thread == 11:
            raise ProcessLookupError(3, 'No such process')
        scheduled.append((thread, policy, parameters.sched_priority))
    scheduled, log = [], Log()
    monkeypatch.setattr(os, 'listdir', lambda folder: ['10', '11', '12'])
    monkeypatch.setattr(os, 'sched_setscheduler', schedule)
    assert realtime.apply(log, 20, all_threads=True)
    assert scheduled == [(10, os.SCHED_FIFO, 20), (12, os.SCHED_FIFO, 20)]
    assert not log.warnings


def test_what_is_started_later_does_not_inherit_a_priority_that_is_not_to_be_inherited():
    def run():
        if not realtime.apply(Log(), 1, inherited=False):
            return
        found.append(realtime.priority_of(0))
        thread = threading.Thread(target=lambda: found.append(realtime.priority_of(0)))
        thread.start()
        thread.join(PATIENCE)
    found = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE)
    assert found in ([1, 0], [])  # or it is not permitted here


def test_without_the_permission_the_remedy_is_told(monkeypatch):
    def schedule(*given):
        raise PermissionError(1, 'Operation not permitted')
    log = Log()
    monkeypatch.setattr(os, 'sched_setscheduler', schedule)
    assert not realtime.apply(log, 20, all_threads=True)
    assert '@realtime - rtprio 20' in log.warnings[0] and not log.infos


RECEIVING = '''
import resource, sys
from worldmodel_ros import realtime
kept = sys.argv[1] == 'kept' and realtime.keep_freed_memory()
for _ in range(100):
    images = [bytearray(196608) for _ in range(8)]  # what a message of 256 x 256 pixels is on its way, several times over
    del images
    if not _:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
'''


def test_memory_that_is_kept_costs_no_page_faults_for_each_image():
    faults = {}
    for how in ('kept', 'returned'):
        known, count = subprocess.run([sys.executable, '-c', RECEIVING, how], capture_output=True, text=True, check=True,
                                      timeout=60).stdout.split()
        if how == 'kept' and known != 'True':
            pytest.skip('a C library without mallopt')
        faults[how] = int(count)
    assert faults['kept'] < 1000 < faults['returned']


def test_a_thread_is_urgent_by_turns_if_it_was_so_at_first(monkeypatch):
    scheduled = []
    monkeypatch.setattr(os, 'sched_setscheduler', lambda *given: scheduled.append((*given[:2], given[2].sched_priority)))
    monkeypatch.setattr(os, 'setpriority', lambda *given: None)
    monkeypatch.setattr(realtime, 'priority_of', lambda process: 20)
    urgency = Urgency()
    for urgent in (True, False, False, True):
        urgency.urgent = urgent
    assert scheduled == [(0, os.SCHED_OTHER, 0), (0, os.SCHED_FIFO, 20)]
    monkeypatch.setattr(realtime, 'priority_of', lambda process: 0)
    urgency = Urgency()
    urgency.urgent = False
    assert len(scheduled) == 2 and not urgency.urgent


def test_what_is_handed_in_during_a_step_calls_for_another_and_a_failed_step_ends_nothing():
    steps, failures, done = [], [], threading.Event()

    def step():
        steps.append(len(steps))
        if len(steps) == 1:
            with thread.wake:
                thread.stir()
        elif len(steps) == 2:
            raise ValueError('of a step')
        elif len(steps) == 3:
            done.set()
        return None
    thread = WorkThread('test')
    thread.start(step, failures.append)
    assert done.wait(PATIENCE), 'it sleeps although something was handed in, or has ended'
    thread.stop()
    assert [str(error) for error in failures] == ['of a step']


def test_the_surroundings_of_the_steps_are_entered_first_and_left_last_in_their_thread():
    seen = []

    @contextlib.contextmanager
    def surroundings():
        seen.append(('entered', threading.current_thread().name))
        yield
        seen.append(('left', threading.current_thread().name))
    thread = WorkThread('test')
    thread.start(lambda: seen.append('step'), print, surroundings)
    thread.stop()
    assert [seen[0], seen[-1]] == [('entered', 'test'), ('left', 'test')]

    def failing():
        raise ValueError('no device')
    with pytest.raises(ValueError, match='no device'):
        thread.start(None, None, failing)


@pytest.fixture
def usual():
    """Python's default, whatever an earlier test of this process has left."""
    left = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield sys.getswitchinterval()
    sys.setswitchinterval(left)


def test_the_shortest_of_overlapping_switch_intervals_holds_and_the_usual_one_returns(usual):
    with realtime.switching_at(0.001):
        with pytest.raises(ValueError), realtime.switching_at(0.0001):
            assert sys.getswitchinterval() == pytest.approx(0.0001)
            raise ValueError
        assert sys.getswitchinterval() == pytest.approx(0.001)
        with realtime.switching_at(1.0):  # longer than the usual one: no thread shall wait longer
            assert sys.getswitchinterval() == pytest.approx(0.001)
    assert sys.getswitchinterval() == usual
    with realtime.switching_at(1.0):
        assert sys.getswitchinterval() == usual


def test_switch_intervals_of_several_threads_end_in_any_order(usual):
    first, second = realtime.switching_at(0.0001), realtime.switching_at(0.0002)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(0.0002)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == usual
