"""The stand-in for a slower machine: that it ends, whatever happens, and takes what it says."""
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import slow_host

pytestmark = pytest.mark.realtime  # it slows down whatever runs next to it

COMMAND = [sys.executable, slow_host.__file__]


@pytest.fixture
def permitted():
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        pytest.skip('SCHED_FIFO is not permitted here')
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@pytest.mark.parametrize('factor', [0.5, 1.0, 11.0, float('nan')])
def test_a_factor_that_makes_no_machine_slower_is_refused(factor):
    with pytest.raises(ValueError, match='must be above 1 and at most 10'):
        slow_host.SlowHost(factor)


def test_it_takes_its_share_of_every_core_and_no_more_after_its_end(permitted):
    if slow_host.SLOWED in os.environ:
        pytest.skip('slow_host.py already slows this machine: below it, another one cannot take what it says')
    with slow_host.SlowHost(2.0, at_most=5.0) as slow:
        processes = [process.pid for process in slow._processes]
        assert len(processes) == len(os.sched_getaffinity(0))
        time.sleep(1.0)
        took = [sum(map(int, Path(f'/proc/{pid}/stat').read_text().split()[13:15])) for pid in processes]
    for ticks in took:
        assert 0.35 <= ticks / os.sysconf('SC_CLK_TCK') <= 0.75
    assert not any(Path(f'/proc/{pid}').exists() for pid in processes)


def test_its_life_is_bounded_also_where_its_parent_is_stopped(permitted):
    with slow_host.SlowHost(2.0, at_most=0.3) as slow:
        time.sleep(1.0)
        assert all(process.poll() == 0 for process in slow._processes)


def test_a_command_is_run_and_its_exit_code_returned(permitted):
    code = 'import os, sys; sys.exit(3 if os.environ["WORLDMODEL_SLOWED"] == "1.5" else 4)'
    done = subprocess.run([*COMMAND, '1.5', '--', sys.executable, '-c', code])
    assert done.returncode == 3


def test_a_command_that_takes_too_long_is_interrupted(permitted):
    start = time.monotonic()
    done = subprocess.run([*COMMAND, '1.5', '--at-most', '0.5', '--', 'sleep', '20'], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 124 and 'has not ended within 0.5 s' in done.stderr and time.monotonic() - start < 10.0
