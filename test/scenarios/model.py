"""A model that fails: gives NaN, raises, is slow, is killed."""

import time

from scenarios.checks import (
    BRAKING_TIME,
    STOP_LATENCY,
    always_holds,
    comes_to_rest,
    drives_on,
    gate_gets_into,
    is_at_rest,
    stays_stopped,
    stopped_in_time,
    stopped_within,
    told_to_stop,
)
from scenarios.rig import GATE, MODEL, PATIENCE, ROBOT, START_TIMEOUT, Rig, answers, has_verdict, stands
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
    # The first late tick may be so late that the gate stops the robot before the last plan goes on.
    halted = rig.wait_for(
        'deadline_status', lambda m: m.tier == ActionChunk.TIER_STOP, 'the plan to end', since=start
    ).at
    gate_gets_into(rig, CommandStatus.STOPPED)
    rig.watch(1.0)
    tiers = [r.message.tier for r in rig.observer.since('deadline_status', start)]
    last_plan, halt = ActionChunk.TIER_LAST_PLAN, ActionChunk.TIER_STOP
    assert last_plan in tiers and halt in tiers[tiers.index(last_plan) :], (
        f'no last plan and then a stop, but tiers {tiers}'
    )
    stays_stopped(rig, halted + STOP_LATENCY)
    rig.set(MODEL, fault_delay_ms=0.0)
    drives_on(rig, RECOVERY)
    rig.wait_for(
        'deadline_status',
        lambda m: m.tier == ActionChunk.TIER_TWO_STEP,
        'the best tier to be served again',
        RECOVERY_OF_TIMES,
    )


def model_is_killed(rig: Rig) -> None:
    stopped_in_time(*kill_while_driving(rig), STOP_LATENCY)
    rig.wait_until_driving('driving to go on with a new process', time.monotonic(), START_TIMEOUT)


def kill_while_driving(rig: Rig) -> tuple[float, float]:
    """Kill the model when the stop is furthest away; return the steady times of the kill and of the stop [s]."""
    rig.drive()
    rig.watch(0.5)
    episode = rig.observer.newest('action_chunk').message.episode_id
    pid = rig.processes.pid(rig.full_name(MODEL))
    rig.wait_for('cmd_vel', answers, 'a command')  # the watchdog has just been satisfied
    start = rig.kill(MODEL)
    stop = told_to_stop(rig, start, PATIENCE)
    comes_to_rest(rig)
    stays_stopped(rig, stop)
    status = gate_gets_into(rig, CommandStatus.STOPPED)
    assert 'no command passed' in status.first_reason, status.first_reason
    again = rig.wait_for('action_chunk', lambda m: m.values, 'the model to come back', START_TIMEOUT).message
    assert again.episode_id != episode, 'a new process began no new episode'
    assert rig.processes.pid(rig.full_name(MODEL)) not in (None, pid)
    return start, stop


def gate_is_killed(rig: Rig) -> None:
    """
    Without a gate the robot brakes by itself, as a base must: a gate is away for longer than the base's time-out.

    It is started again after 0.2 s (config/bringup.yaml), and is there after the imports of a ROS node in Python: in 1.1 s,
    where two cores of an AMD EPYC have nothing else to do, and in 9 to 17 s where they are slowed and overloaded.
    """
    rig.drive()
    before = rig.next_report(ROBOT)
    # A robot that stands has nothing to brake: right after a command that moves it, which it then goes on with.
    rig.wait_until_driving('a command', time.monotonic())
    killed = rig.kill(GATE)
    again = rig.wait_for('cmd_vel', lambda m: True, 'the gate to come back', START_TIMEOUT, since=killed + 0.1).at
    last = [r for r in rig.observer.since('cmd_vel', killed - 1.0) if r.at < again][-1]
    if again - last.at > ROBOT_TIMEOUT + 0.2:
        with always_holds():
            assert not stands(last.message), 'the robot stood already when its gate was killed'
            after = rig.next_report(ROBOT)
            assert int(after['brakings']) > int(before['brakings']), 'without a gate, the robot did not brake by itself'
            # The simulated robot stands still, too, for the time that its machine had none for it.
            dropped = float(after['dropped_s']) - float(before['dropped_s'])
            braked = last.at + ROBOT_TIMEOUT + BRAKING_TIME + dropped
            moved = [r for r in rig.observer.since('sim/ground_truth', braked) if r.at < again and not is_at_rest(r.message)]
            assert not moved, (f'without a gate, the robot moved for {moved[-1].at - last.at:.2f} s, {braked - last.at:.1f} '
                               f'are allowed ({dropped:.2f} of them dropped), at last with '
                               f'{moved[-1].message.twist.twist}; the gate was back after {again - last.at:.2f} s')
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
