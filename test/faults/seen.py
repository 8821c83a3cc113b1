"""What is seen of a robot while something happens to the system that drives it."""

import math
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

from nav_msgs.msg import Odometry

from faults.matrix import RECOVERED
from scenarios.checks import STANDSTILL, comes_to_rest, stays_stopped, stopped_within
from scenarios.rig import MODEL, Rig, answers, stands
from scenarios.stalls import Missed

RECOVERY = 8.0      # s, until a robot whose system is sound again is driven
RESTART = 40.0      # s, until it is by a process that was started again
MOVING = 0.1        # m/s and rad/s
STANDING = 3        # of the simulator's reports in a row (20 Hz) of a robot that stands; a gate may be back soon after
IN_A_ROOM = 4.0     # s, or until the goal is reached, where the robot may stand
DELIVERED = 0.1     # s, in which the last command of a gate that has ended has arrived
PAUSE = 0.5         # s, the longest without a command that moves a robot which is said to drive on: it would brake by itself


def right_after_a_command(rig: Rig, speed: float = MOVING) -> None:
    """Drive at some speed (m/s or rad/s), and return when the gate's watchdog has longest to wait."""
    rig.drive()
    rig.wait_for('sim/ground_truth', lambda m: not _at_rest(m, speed), 'the robot to move')
    rig.wait_for('cmd_vel', lambda m: answers(m) and not stands(m), 'a command')


def stop(rig: Rig, start: float, bound: float) -> float:
    """Check that the robot is told to stop, comes to rest and stays so; return how long after ``start`` it was told [s]."""
    at = stopped_within(rig, start, bound)
    comes_to_rest(rig)
    stays_stopped(rig, at)
    return at - start


def rest(rig: Rig, start: float, timeout: float) -> float:
    """Wait until the robot stands, by the simulator's truth; return how long after ``start`` that began [s]."""
    return rig.wait(partial(_standstill, rig, start), 'the robot to brake', timeout + STANDING / 20.0) - start


def rest_or_command(rig: Rig, start: float, timeout: float) -> tuple[float, bool]:
    """Wait until the robot stands, or a gate that was started again commands it; return how long after ``start`` [s], and
    whether it was commanded first."""
    def first() -> tuple[float, bool] | None:
        commanded = next((r.at for r in rig.observer.since('cmd_vel', start + DELIVERED)), math.inf)
        stood = _standstill(rig, start) or math.inf
        return None if stood == commanded == math.inf else (min(stood, commanded) - start, commanded < stood)

    return rig.wait(first, 'the robot to brake', timeout + STANDING / 20.0)


def _standstill(rig: Rig, start: float) -> float | None:
    """When the robot came to the rest in which it is now, if that is since ``start``."""
    truth = rig.observer.since('sim/ground_truth', start)
    standing = next((k for k, r in enumerate(reversed(truth)) if not _at_rest(r.message)), len(truth))
    return truth[-standing].at if standing >= STANDING else None


def afterwards(rig: Rig, timeout: float = RECOVERY) -> str:
    """Return the outcome for a robot that should be driven again within ``timeout`` s."""
    try:
        rig.wait_until_driving('driving to go on', time.monotonic(), timeout)
    except AssertionError as error:
        return f'not driven again: {error}; refused: {rig.refused(MODEL)}'
    return RECOVERED


def longest_pause(rig: Rig, start: float) -> float:
    """Return the longest time since ``start`` without a command that moves the robot [s]."""
    moving = [r.at for r in rig.observer.since('cmd_vel', start) if not stands(r.message)]
    return max(b - a for a, b in pairwise([start, *moving, time.monotonic()]))


def drives_through(rig: Rig, start: float) -> float:
    """Check that the robot has been driven all the time since ``start``; return the longest pause [s]."""
    pause = longest_pause(rig, start)
    if pause > PAUSE:
        raise Missed(f'nothing moved the robot {rig.namespace} for {pause * 1e3:.0f} ms', pause - PAUSE, start,
                     time.monotonic())
    return pause


def drives_while(rig: Rig, busy: Callable[[], bool], timeout: float) -> float:
    """
    Drive from goal to goal while something else goes on, for ``timeout`` s at most; check that the robot is driven all the
    time to each of them, and return the longest pause [s].
    """
    longest, end = 0.0, time.monotonic() + timeout
    while busy() and time.monotonic() < end:
        rig.drive()
        start = time.monotonic()
        while busy() and time.monotonic() < min(end, start + IN_A_ROOM) and rig.arrival(start) == math.inf:
            time.sleep(0.02)
        longest = max(longest, drives_through(rig, start))
    return longest


def _at_rest(truth: Odometry, speed: float = STANDSTILL) -> bool:
    return abs(truth.twist.twist.linear.x) < speed and abs(truth.twist.twist.angular.z) < speed
