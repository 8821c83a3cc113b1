"""
Rows of the fault matrix (test/faults/, docs/faults.md), one of each kind: ``make faults`` plays all of them.

What holds in every row: the outcome that is expected and no other, in time; no late command; nothing lost that had been
accepted; and all processes live on that were not to end.
"""
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from nav_msgs.msg import Odometry

from faults import stage as stage_of_faults
from faults.catalogue import CASES
from faults.disk import TOPIC, Recording, WaitedForACore
from faults.link import Link
from faults.matrix import Result
from faults.run import summary
from faults.seen import rest
from faults.soak import by_tenths
from faults.stage import Stage
from faults.table import of_cases
from scenarios import speed
from scenarios.observer import Received
from scenarios.stalls import Missed

DOCUMENT = Path(__file__).resolve().parents[1] / 'docs' / 'faults.md'
PLAYED = ('model_sigstop', 'gate_sigstop', 'driver_sigterm', 'weights_bit_flip', 'recorder_disk_full', 'session_bit_flip',
          'camera_encoding', 'stopped_subscriber')


@pytest.fixture(scope='module')
def stage(tmp_path_factory):
    stage = Stage(tmp_path_factory.mktemp('faults'))
    yield stage
    stage.end()


@pytest.mark.ros
@pytest.mark.parametrize('row', [row for row in CASES if row.name in PLAYED], ids=lambda row: row.name)
def test_fault(stage, row):
    result = stage.play(row)
    if result.skipped:
        pytest.skip(result.skipped)
    assert not result.failures, '; '.join(result.failures)


def test_the_matrix_has_the_rows_that_are_played_here_and_the_document_has_all():
    assert len(CASES) >= 40 and set(PLAYED) <= {row.name for row in CASES}
    assert of_cases(CASES) in DOCUMENT.read_text(), 'run python test/faults/run.py --table, and put it into docs/faults.md'


def test_every_row_says_what_happens_and_what_is_expected():
    for row in CASES:
        assert row.what and row.reaction and row.bound > 0.0, row.name
        assert row.outcome in ('recovered', 'refused') or row.outcome.startswith('degraded to '), row.name


def test_what_became_of_a_row_that_missed_its_bound_is_written():
    result = Result('server_sigkill', failures=['took 700 ms, 500 are allowed'], reaction_ms=700.0, bound_ms=500.0,
                    missed=Missed('took 700 ms, 500 are allowed', 0.2, 1.0, 2.0))
    written = json.loads(json.dumps(result.as_dict()))
    assert written['name'] == 'server_sigkill' and written['failures'] and written['reaction_ms'] == 700.0
    assert 'missed' not in written


@pytest.mark.parametrize('tick, plays', [(0.024, True), (0.030, False)])
def test_two_robots_with_an_engine_are_not_played_where_the_machine_has_no_time_for_them(tmp_path, monkeypatch, tick, plays):
    row = next(row for row in CASES if row.name == 'server_sigterm')
    monkeypatch.setattr(speed, 'measured', lambda: speed.Speed(tick, 0.001))
    monkeypatch.setattr(stage_of_faults, 'play', lambda row, running: Result(row.name, 'played'))
    monkeypatch.setattr(Stage, '_get', lambda self, system: None)
    result = Stage(tmp_path).play(row)
    assert (result.outcome == 'played') is plays and ('at most 25 ms; here it takes 30' in result.skipped) is not plays


def test_what_became_of_all_rows_is_counted():
    results = [Result('a', late=1, lost=0), Result('b', failures=['took long'], late=0, lost=2), Result('c', skipped='no root')]
    assert summary(results) == {'rows': 3, 'as_expected': 1, 'not_as_expected': 1, 'skipped': 1, 'played_again': 0, 'late': 1,
                                'lost': 2}


def test_the_memory_of_what_lives_through_is_told_by_tenths_so_that_a_leak_differs_from_what_comes_to_an_end():
    leak, plateau = [float(k) for k in range(100)], [min(float(k), 20.0) for k in range(100)]
    assert by_tenths(leak) == pytest.approx([4.5 + 10.0 * k for k in range(10)])
    assert by_tenths(plateau) == pytest.approx([4.5, 14.5] + [20.0] * 8)
    assert by_tenths([7.0, 8.0]) == [7.0, 8.0]


def test_a_robot_has_braked_that_stands_for_the_short_time_until_a_new_gate_drives_it():
    speeds = [0.5] * 18 + [0.0] * 4 + [0.4] * 20  # in reports at 20 Hz, after the gate was killed
    reports = []
    for k, speed_then in enumerate(speeds):
        truth = Odometry()
        truth.twist.twist.linear.x = speed_then
        reports.append(Received(0.05 * k, truth))

    def wait(condition, what, timeout):
        for count in range(len(reports)):
            rig.observer = SimpleNamespace(since=lambda topic, start, count=count: reports[:count])
            if value := condition():
                return value
        raise AssertionError(what)
    rig = SimpleNamespace(wait=wait)
    assert rest(rig, 0.0, 1.5) == pytest.approx(0.9)


@pytest.mark.parametrize('program, waits', [('while True: pass', True), ('import time; time.sleep(60)', False)])
def test_what_a_process_waits_for_a_core_is_told_from_what_it_sleeps(program, waits):
    core = min(os.sched_getaffinity(0))
    busy = 'while True: pass'
    processes = [subprocess.Popen(
        [sys.executable, '-c', f'import os\nos.sched_setaffinity(0, {{{core}}})\nos.nice({nice})\nprint(flush=True)\n{code}'],
        stdout=subprocess.PIPE) for nice, code in ((0, busy), (0, busy), (10, program))]
    try:
        for process in processes:
            process.stdout.readline()
        waited, began = WaitedForACore(processes[-1].pid), time.monotonic()
        time.sleep(1.0)
        waited.look()
        took = time.monotonic() - began
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert (0.4 * took < waited.seconds < 1.5 * took) if waits else waited.seconds < 0.3 * took


@pytest.fixture
def link():
    """A link, and what it has put out."""
    ends = [os.pipe() for _ in range(2)]
    link = Link([write for _, write in ends])

    def put_out(end, now):
        link.deliver(now)
        os.set_blocking(ends[end][0], False)
        try:
            return os.read(ends[end][0], 1 << 16)
        except BlockingIOError:
            return b''
    yield link, put_out
    for pair in ends:
        for descriptor in pair:
            os.close(descriptor)


FRAME = bytes(range(100))


@pytest.mark.parametrize('does, out', [
    ({}, FRAME), ({'loss': 1.0}, b''), ({'duplicate': 1.0}, FRAME * 2), ({'delay': 0.5}, b'')])
def test_a_link_does_to_packets_what_it_is_told(link, does, out):
    link, put_out = link
    link.does = does
    link.take(0, FRAME, 10.0)
    assert put_out(1, 10.0) == out and put_out(0, 10.0) == b''


def test_a_link_delays_flips_one_bit_and_is_as_wide_as_it_is_told(link):
    link, put_out = link
    link.does = {'delay': 0.5}
    link.take(1, FRAME, 10.0)
    assert put_out(0, 10.4) == b'' and put_out(0, 10.6) == FRAME
    link.does = {'corrupt': 1.0}
    link.take(0, FRAME, 20.0)
    changed = [a ^ b for a, b in zip(put_out(1, 20.0), FRAME, strict=True) if a != b]
    assert len(changed) == 1 and changed[0].bit_count() == 1
    link.does = {'rate': 1000.0}
    for _ in range(3):
        link.take(0, FRAME, 30.0)
    assert put_out(1, 30.25) == FRAME * 2 and put_out(1, 30.35) == FRAME


def told(missed):
    values = [SimpleNamespace(key=key, value=str(missed)) for key in ('missed', f'missed: /{TOPIC}')]
    return SimpleNamespace(status=[SimpleNamespace(values=values)])


def test_a_recorder_that_never_catches_up_fails_its_row_and_does_not_hold_it_up(monkeypatch):
    recording = Recording.__new__(Recording)
    reports = iter([told(3), told(5), told(5)])
    recording.rig = SimpleNamespace(wait_for=lambda *arguments, **options: Received(time.monotonic(), next(reports)))
    assert recording.has_caught_up()[1] == 5
    monkeypatch.setattr('faults.disk.CATCHES_UP', 0.2)
    reports = (told(number) for number in range(10**6))
    recording.rig.wait_for = lambda *arguments, **options: time.sleep(0.01) or Received(time.monotonic(), next(reports))
    with pytest.raises(AssertionError, match='has not caught up'):
        recording.has_caught_up()
