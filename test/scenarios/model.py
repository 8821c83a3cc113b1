"""A model that fails: gives NaN, raises, is slow, is killed."""

import time

from scenarios.checks import (
    STOP_LATENCY,
    comes_to_rest,
    drives_on,
    gate_gets_into,
    stays_stopped,
    stopped_within,
)
from scenarios.rig import GATE, MODEL, ROBOT, START_TIMEOUT, Rig, answers, has_verdict
from worldmodel_ros.msg import ActionChunk, CommandStatus, DeadlineStatus

RECOVERY = 5.0  # s
ROBOT_TIMEOUT = 0.5  # s, cmd_vel_timeout_s of the robot
RECOVERY_OF_TIMES = 40.0  # s, until the measured times of the slow phase are forgotten


def model_gives_nan(rig: Rig) -> None:
    _fails(rig, fault_nan=True)


def model_raises(rig: Rig) -> None:
    before = rig.refused(MODEL)
    _fails(rig, fault_raise=True)
    assert sum(rig.refused(MODEL).values()) > sum(before.values()), 'the failure was not counted'


def model_is_slow(rig: Rig) -> None:
    rig.drive()
    start = time.monotonic()
    rig.set(MODEL, fault_delay_ms=80.0)
    gate_gets_into(rig, CommandStatus.STOPPED)
    stop = time.monotonic()
    rig.watch(1.0)
    tiers = [r.message.tier for r in rig.observer.since('deadline_status', start)]
    replan, halt = ActionChunk.TIER_REPLAN, ActionChunk.TIER_STOP
    assert replan in tiers and halt in tiers[tiers.index(replan) :], (
        f'no last plan and then a stop, but tiers {tiers}'
    )
    stays_stopped(rig, stop)
    rig.set(MODEL, fault_delay_ms=0.0)
    drives_on(rig, RECOVERY)
    rig.wait_for(
        'deadline_status',
        lambda m: m.tier == ActionChunk.TIER_TWO_STEP,
        'the best tier to be served again',
        RECOVERY_OF_TIMES,
    )


def model_is_killed(rig: Rig) -> None:
    kill_while_driving(rig)
    rig.wait_until_driving('driving to go on with a new process', time.monotonic(), START_TIMEOUT)


def kill_while_driving(rig: Rig) -> float:
    """Kill the model when the stop is furthest away; return the time from the kill to the stop [s]."""
    rig.drive()
    rig.watch(0.5)
    episode = rig.observer.newest('action_chunk').message.episode_id
    pid = rig.processes.pid(rig.full_name(MODEL))
    rig.wait_for('cmd_vel', answers, 'a command')  # the watchdog has just been satisfied
    start = rig.kill(MODEL)
    stop = stopped_within(rig, start, STOP_LATENCY)
    comes_to_rest(rig)
    stays_stopped(rig, stop)
    status = gate_gets_into(rig, CommandStatus.STOPPED)
    assert 'no command passed' in status.first_reason, status.first_reason
    again = rig.wait_for('action_chunk', lambda m: m.values, 'the model to come back', START_TIMEOUT).message
    assert again.episode_id > episode, 'a new process began no new episode'
    assert rig.processes.pid(rig.full_name(MODEL)) not in (None, pid)
    return stop - start


def gate_is_killed(rig: Rig) -> None:
    rig.drive()
    before = int(rig.next_report(ROBOT)['brakings'])
    start = rig.kill(GATE)
    again = rig.wait_for(
        'cmd_vel', lambda m: True, 'the gate to come back', START_TIMEOUT, since=start + 0.1
    ).at
    if again - start > ROBOT_TIMEOUT + 0.2:
        assert int(rig.next_report(ROBOT)['brakings']) > before, (
            'without a gate, the robot did not brake by itself'
        )
    drives_on(rig, RECOVERY)


def _fails(rig: Rig, **fault: bool) -> None:
    rig.drive()
    start = time.monotonic()
    rig.set(MODEL, **fault)
    # At the latest after two ticks: setting a parameter takes time too.
    stop = stopped_within(rig, start, 0.3)
    rig.wait_for(
        'deadline_status', has_verdict(DeadlineStatus.INVALID), 'a verdict on the model', since=start
    )
    comes_to_rest(rig)
    stays_stopped(rig, stop)
    ((name, _),) = fault.items()
    rig.set(MODEL, **{name: False})
    drives_on(rig, RECOVERY)
