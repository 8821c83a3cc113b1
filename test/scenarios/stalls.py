"""
Notices when the machine itself stands still, as a shared host makes it do when it takes the CPU away.

A scenario's bounds are milliseconds of real processes. Where none of them ran for a while, a missed bound says
nothing of them. A process of its own watches, under real-time priority where that is permitted, so that
neither load nor this interpreter's lock look like a stall.
"""

import functools
import os
import subprocess
import sys
import time
import warnings

PERIOD = 0.01  # s between two looks at the clock
NOTICEABLE = 0.005  # s late for a look; 6 ms are what a command has left of its deadline when it leaves the gate
PRIORITY = 40  # above the nodes and the observer
PLAYS = 3  # of what fails while the machine stands still


class Stalls:
    """Watches while it is entered. `longest`: the longest time for which the machine stood still [s], afterwards."""

    def __init__(self) -> None:
        self.longest = 0.0

    def __enter__(self) -> 'Stalls':
        self.process = subprocess.Popen(
            [sys.executable, '-S', __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.process.stdout.readline()  # it watches
        return self

    def __exit__(self, *exception: object) -> None:
        self.longest = float(self.process.communicate()[0])

    @property
    def noticeable(self) -> bool:
        """Whether the machine stood still long enough to spoil a scenario."""
        return self.longest > NOTICEABLE


def failure_of(play, name: str, prepare=lambda: None) -> AssertionError | None:
    """
    What `play()` fails by. Where the machine stood still meanwhile it is played again, with a warning.

    `prepare()` goes before each play; what that raises is raised.
    """
    for _ in range(PLAYS):
        with Stalls() as stalls:
            prepare()
            try:
                play()
                return None
            except AssertionError as error:
                failure = error
        if not stalls.noticeable:
            break
        warnings.warn(f'{name} failed while the machine stood still for {stalls.longest:.2f} s: {failure}', stacklevel=1)
    return failure


def played_again(test):
    """Decorate a test whose bounds are milliseconds of real processes: it fails by `failure_of`."""
    @functools.wraps(test)
    def play(*args, **kwargs):
        if failure := failure_of(lambda: test(*args, **kwargs), test.__name__):
            raise failure
    return play


def watch() -> None:
    """Print a line at the start, and when the standard input is closed the longest delay of a look [s]."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    except PermissionError:
        pass  # load then counts as a stall as well, which is the best that can be known there
    os.set_blocking(0, False)
    print('watching', flush=True)
    longest, last = 0.0, time.monotonic()
    while True:
        time.sleep(PERIOD)
        now = time.monotonic()
        longest, last = max(longest, now - last - PERIOD), now
        try:
            if not os.read(0, 1):
                break
        except BlockingIOError:
            pass
    print(longest)


if __name__ == '__main__':
    watch()
