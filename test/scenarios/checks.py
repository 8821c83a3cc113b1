"""What must hold for the robot's safety, in scenarios and after each of them."""

import math
import time
from collections.abc import Iterable

from scenarios.rig import NODES, ROBOT, Processes, Rig, answers, stands
from worldmodel_ros.msg import CommandStatus

# From the last command that passed: command_timeout_s (0.13 s), the watchdog's period (5 ms), delivery.
STOP_LATENCY = 0.150  # s
STANDSTILL = 0.02  # m/s and rad/s, by the simulator's truth
BRAKING_TIME = 1.0  # s, from full speed, with the friction of the room
LIMITS = {'v_min': -0.3, 'v_max': 0.6, 'w_max': 1.5}  # m/s, rad/s


def stopped_within(rig: Rig, start: float, latency: float) -> float:
    """Check that the robot was told to stop within `latency` s of `start`; return when it was."""
    stop = rig.wait_for(
        'cmd_vel', lambda m: stands(m) and not answers(m), 'a stop', latency + 1.0, since=start
    )
    took = stop.at - start
    assert took <= latency, f'told to stop after {took * 1e3:.0f} ms, {latency * 1e3:.0f} ms are allowed'
    return stop.at


def stopped_after_last_command(rig: Rig, since: float) -> float:
    """Check that a stop came, and within STOP_LATENCY of the last command before it; return when it came."""
    stop = rig.wait_for('cmd_vel', lambda m: stands(m) and not answers(m), 'a stop', since=since).at
    passed = [r.at for r in rig.observer.since('cmd_vel', since - 2.0) if answers(r.message) and r.at < stop]
    silence = stop - passed[-1]
    assert silence <= STOP_LATENCY, f'told to stop only {silence * 1e3:.0f} ms after the last command'
    return stop


def comes_to_rest(rig: Rig) -> None:
    """Check that the robot stands soon, by the simulator's truth."""
    rig.wait_for(
        'sim/ground_truth',
        lambda m: abs(m.twist.twist.linear.x) < STANDSTILL and abs(m.twist.twist.angular.z) < STANDSTILL,
        'the robot to stand',
        BRAKING_TIME,
    )


def stays_stopped(rig: Rig, since: float) -> None:
    """Check that nothing has moved the robot since then, nor does for a while."""
    rig.watch(0.5)
    moving = [r for r in rig.observer.since('cmd_vel', since) if not stands(r.message)]
    assert not moving, f'{len(moving)} commands moved the robot although it was to stand'


def drives_on(rig: Rig, timeout: float) -> None:
    """Check that the robot is driven again within `timeout` s from now."""
    rig.wait_until_driving('driving to go on', time.monotonic(), timeout)


def gate_gets_into(rig: Rig, state: int, timeout: float = 2.0) -> CommandStatus:
    """Check that the gate gets into a state; return the status that says so."""
    return rig.wait_for(
        'command_status', lambda m: m.state == state, f'state {state} of the gate', timeout
    ).message


class Invariants:
    """What holds in every scenario, whatever it does to the robot; between the making of this and `check`."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._start = time.monotonic()
        self._pids = self._present()
        self._late = int(rig.next_report(ROBOT)['late'])
        self._failures = self._failed_callbacks()

    def check(self, killed: Iterable[str] = ()) -> None:
        """Check that no command came late or out of bounds, and that all nodes live that were not killed."""
        rig, report = self._rig, self._rig.next_report(ROBOT)
        late = int(report['late']) - self._late
        assert not late, (
            f'{late} commands came late to the robot; the latest after {report["latency_max_ms"]} ms'
        )
        for command in (r.message for r in rig.observer.since('cmd_vel', self._start) if answers(r.message)):
            v, w = command.twist.linear.x, command.twist.angular.z
            assert math.isfinite(v) and math.isfinite(w), f'the gate let ({v}, {w}) through'
            assert LIMITS['v_min'] <= v <= LIMITS['v_max'] and abs(w) <= LIMITS['w_max'], (
                f'({v}, {w}) is too fast'
            )
        present = self._present()
        gone = [node for node in NODES if node not in killed and present[node] != self._pids[node]]
        assert not gone, f'{gone} ended'
        failures = self._failed_callbacks()
        assert failures <= self._failures, f'callbacks failed: {failures - self._failures}'

    def _failed_callbacks(self) -> set[tuple[str, str, int]]:
        return {
            (node, reason, count)
            for node in NODES
            for reason, count in self._rig.refused(node).items()
            if reason.startswith('exception')
        }

    def _present(self) -> dict[str, int | None]:
        return {node: self._rig.processes.pid(self._rig.full_name(node)) for node in NODES}


def ended_in_good_order(processes: Processes, nodes: Iterable[str], kills: dict[str, int]) -> None:
    """Check, after a shutdown by SIGINT, that each process ended with code 0, and before only by kills."""
    for node in nodes:
        codes, expected = processes.exit_codes(node), [-9] * kills.get(node, 0) + [0]
        assert codes == expected, f'{node} ended with {codes} and should have with {expected}'
