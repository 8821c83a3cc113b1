"""Signals, and want of memory, for the model's node, the gate and the robot's driver."""

import signal
import time
from collections.abc import Mapping
from functools import partial

from faults.matrix import DEGRADED, RECOVERED, Seen, case
from faults.memory import cannot_limit, out_of_memory
from faults.seen import RESTART, afterwards, rest, rest_or_command, right_after_a_command, stop
from faults.systems import GATE, MODEL, ONE_ROBOT, ROBOT, Running
from scenarios.checks import BRAKING_TIME, STOP_LATENCY, always_holds, stays_stopped, stopped_within
from scenarios.rig import Rig
from worldmodel_ros.msg import DeadlineStatus

ENDING = {'sigkill': signal.SIGKILL, 'sigterm': signal.SIGTERM, 'sigint': signal.SIGINT}
ROBOT_TIMEOUT = 0.5  # s, cmd_vel_timeout_s of the robot: without a gate it brakes by itself
HANG = 1.5           # s
NOTICED = 0.1        # s, after which a node's main loop has seen a signal at the latest (nodes/common/spin.py)
STOPPED = f'{DEGRADED}a stop'
_WITHOUT_A_GATE = "from its end to standstill, or to the next gate's command"


def _model_ends(number: int, running: Running) -> Seen:
    rig = running.rig
    right_after_a_command(rig)
    pid = running.processes.pid(f'/{MODEL}')
    took = stop(rig, running.send(f'/{MODEL}', number), STOP_LATENCY + NOTICED)
    outcome = afterwards(rig, RESTART)
    assert running.processes.pid(f'/{MODEL}') not in (None, pid)
    return Seen(outcome, took)


def _gate_ends(number: int, running: Running) -> Seen:
    rig = running.rig
    before = rig.next_report(ROBOT)
    right_after_a_command(rig)
    return _without_a_gate(rig, running.send(f'/{GATE}', number), before)


def _without_a_gate(rig: Rig, ended: float, before: Mapping[str, str]) -> Seen:
    """See a robot without a gate brake by itself, also where a gate is back before it has come to rest."""
    took, commanded = rest_or_command(rig, ended, ROBOT_TIMEOUT + BRAKING_TIME)
    if commanded and took > ROBOT_TIMEOUT + 0.2:  # later than its base waits for a command, and its report takes
        with always_holds():
            assert int(rig.next_report(ROBOT)['brakings']) > int(before['brakings']), (
                f'without a gate for {took:.2f} s, the robot did not brake by itself')
    return Seen(afterwards(rig, RESTART), took)


def _driver_ends(number: int, running: Running) -> Seen:
    right_after_a_command(running.rig)
    return _without_a_driver(running, running.send(f'/{ROBOT}', number), STOP_LATENCY + NOTICED)


def _without_a_driver(running: Running, ended: float, bound: float) -> Seen:
    """See what becomes of a robot whose driver has ended: nobody starts it but a person, who may have to look first."""
    rig = running.rig
    at = stopped_within(rig, ended, bound)
    stays_stopped(rig, at)
    rig.wait_for('deadline_status', lambda m: m.verdict == DeadlineStatus.STALE_INPUT and 'no image' in m.reason,
                 'the missing camera to be named', since=ended)
    rig.watch(1.0)
    outcome = STOPPED if running.processes.pid(f'/{ROBOT}') is None else 'started again by itself'
    running.start_again(f'/{ROBOT}')
    rig.wait_for('camera/image_raw', lambda m: True, 'the camera', RESTART)
    again = afterwards(rig, RESTART)
    return Seen(outcome if again == RECOVERED else again, at - ended)


for _name, _number in ENDING.items():
    case(ONE_ROBOT, RECOVERED, 'to the stop', STOP_LATENCY + (0.0 if _name == 'sigkill' else NOTICED),
         ends=(f'/{MODEL}',), name=f'model_{_name}', what=f'{_name.upper()} to the model node, right after a command')(
        partial(_model_ends, _number))
    case(ONE_ROBOT, RECOVERED, _WITHOUT_A_GATE, ROBOT_TIMEOUT + BRAKING_TIME, ends=(f'/{GATE}',), name=f'gate_{_name}',
         what=f'{_name.upper()} to the gate, right after a command')(partial(_gate_ends, _number))
    case(ONE_ROBOT, STOPPED, 'to the stop', STOP_LATENCY + NOTICED, ends=(f'/{ROBOT}',), name=f'driver_{_name}',
         what=f"{_name.upper()} to the robot's driver, camera included; started again by hand")(
        partial(_driver_ends, _number))


@case(ONE_ROBOT, RECOVERED, 'to the stop', STOP_LATENCY)
def model_sigstop(running: Running) -> Seen:
    """SIGSTOP to the model node for 1.5 s"""
    rig = running.rig
    right_after_a_command(rig)
    took = stop(rig, running.send(f'/{MODEL}', signal.SIGSTOP), STOP_LATENCY)
    rig.watch(HANG - 1.0)
    running.send(f'/{MODEL}', signal.SIGCONT)
    return Seen(afterwards(rig), took)


@case(ONE_ROBOT, RECOVERED, 'to standstill', ROBOT_TIMEOUT + BRAKING_TIME, stops=(f'/{GATE}',))
def gate_sigstop(running: Running) -> Seen:
    """SIGSTOP to the gate for 1.5 s"""
    rig = running.rig
    right_after_a_command(rig)
    start = running.send(f'/{GATE}', signal.SIGSTOP)
    took = rest(rig, start, ROBOT_TIMEOUT + BRAKING_TIME)
    rig.watch(max(0.0, start + HANG - time.monotonic()))
    running.send(f'/{GATE}', signal.SIGCONT)
    return Seen(afterwards(rig), took)


@case(ONE_ROBOT, RECOVERED, 'to the stop', STOP_LATENCY)
def driver_sigstop(running: Running) -> Seen:
    """SIGSTOP to the robot's driver, camera included, for 1.5 s"""
    rig = running.rig
    right_after_a_command(rig)
    start = running.send(f'/{ROBOT}', signal.SIGSTOP)
    at = stopped_within(rig, start, STOP_LATENCY)
    rig.watch(HANG - STOP_LATENCY)
    stays_stopped(rig, at)
    running.send(f'/{ROBOT}', signal.SIGCONT)
    return Seen(afterwards(rig), at - start)


@case(ONE_ROBOT, RECOVERED, 'from its end to the stop', STOP_LATENCY, ends=(f'/{MODEL}',), needs=cannot_limit)
def model_out_of_memory(running: Running) -> Seen:
    """The model node has no more memory (a control group's limit): the kernel ends it"""
    rig = running.rig
    right_after_a_command(rig)
    took = stop(rig, out_of_memory(running, f'/{MODEL}'), STOP_LATENCY)
    return Seen(afterwards(rig, RESTART), took)


@case(ONE_ROBOT, RECOVERED, _WITHOUT_A_GATE, ROBOT_TIMEOUT + BRAKING_TIME, ends=(f'/{GATE}',),
      needs=cannot_limit)
def gate_out_of_memory(running: Running) -> Seen:
    """The gate has no more memory: the kernel ends it"""
    rig = running.rig
    before = rig.next_report(ROBOT)
    right_after_a_command(rig)
    return _without_a_gate(rig, out_of_memory(running, f'/{GATE}'), before)


@case(ONE_ROBOT, STOPPED, 'from its end to the stop', STOP_LATENCY, ends=(f'/{ROBOT}',), needs=cannot_limit)
def driver_out_of_memory(running: Running) -> Seen:
    """The robot's driver has no more memory: the kernel ends it; started again by hand"""
    right_after_a_command(running.rig)
    return _without_a_driver(running, out_of_memory(running, f'/{ROBOT}'), STOP_LATENCY)
