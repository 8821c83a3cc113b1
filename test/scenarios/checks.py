"""What must hold for the robot's safety, in scenarios and after each of them."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from nav_msgs.msg import Odometry

from scenarios.observer import Received
from scenarios.rig import GATE, NODES, ROBOT, Processes, Rig, answers, stands
from scenarios.stalls import InvariantViolation, past
from worldmodel_ros.msg import CommandStatus

# From the last command that passed: command_timeout_s (0.13 s), the watchdog's period (5 ms), delivery.
STOP_RESERVE = 0.020  # s, of that: what is not command_timeout_s
STOP_LATENCY = 0.130 + STOP_RESERVE  # s
STANDSTILL = 0.02  # m/s and rad/s, by the simulator's truth
SILENT = 3.0  # s, for diagnostics, which come once a second
UNREAD = 1.0  # s, for this process to come to what has arrived
BRAKING_TIME = 1.0  # s, from full speed, with the friction of the room
LIMITS = {'v_min': -0.3, 'v_max': 0.6, 'w_max': 1.5}  # m/s, rad/s


def told_to_stop(rig: Rig, start: float, timeout: float) -> float:
    """Wait until the robot is told to stop; return when it was."""
    with always_holds():
        return rig.wait_for(
            'cmd_vel', lambda m: stands(m) and not answers(m), 'a stop', timeout, since=start
        ).at


def stopped_within(rig: Rig, start: float, latency: float) -> float:
    """Check that the robot was told to stop within ``latency`` s of ``start``; return when it was."""
    stop = told_to_stop(rig, start, latency + 1.0)
    stopped_in_time(start, stop, latency)
    return stop


def stopped_in_time(start: float, stop: float, latency: float) -> None:
    """Check that a stop came within ``latency`` s of ``start``."""
    if past(start, stop, latency, STOP_RESERVE) > 0.0:
        raise InvariantViolation(
            f'told to stop after {(stop - start) * 1e3:.0f} ms, {latency * 1e3:.0f} ms are allowed'
        )


def stopped_after_last_command(rig: Rig, since: float) -> float:
    """Check that a stop came, and within STOP_LATENCY of the last command before it; return when it came."""
    with always_holds():
        stop = rig.wait_for('cmd_vel', lambda m: stands(m) and not answers(m), 'a stop', since=since).at
        passed = [
            r.at for r in rig.observer.since('cmd_vel', since - 2.0) if answers(r.message) and r.at < stop
        ]
        late = past(passed[-1], stop, STOP_LATENCY, STOP_RESERVE)
        assert late <= 0.0, f'told to stop only {(stop - passed[-1]) * 1e3:.0f} ms after the last command'
    return stop


def comes_to_rest(rig: Rig) -> None:
    """Check that the robot stands soon, by the simulator's truth."""
    with always_holds():
        rig.wait_for('sim/ground_truth', is_at_rest, 'the robot to stand', BRAKING_TIME)


def is_at_rest(truth: Odometry) -> bool:
    """Whether the robot stands, by the simulator's truth."""
    return abs(truth.twist.twist.linear.x) < STANDSTILL and abs(truth.twist.twist.angular.z) < STANDSTILL


def stays_stopped(rig: Rig, since: float) -> None:
    """Check that nothing has moved the robot since then, nor does for a while."""
    rig.watch(0.5)
    moving = [r for r in rig.observer.since('cmd_vel', since) if not stands(r.message)]
    if moving:
        raise InvariantViolation(f'{len(moving)} commands moved the robot although it was to stand')


@contextmanager
def always_holds() -> Iterator[None]:
    """Make what fails inside a violated invariant, which is final."""
    try:
        yield
    except AssertionError as error:
        raise InvariantViolation(*error.args) from error


def drives_on(rig: Rig, timeout: float) -> None:
    """Check that the robot is driven again within ``timeout`` s from now."""
    rig.wait_until_driving('driving to go on', time.monotonic(), timeout)


def gate_gets_into(rig: Rig, state: int, timeout: float = 2.0) -> CommandStatus:
    """Check that the gate gets into a state; return the status that says so."""
    return rig.wait_for(
        'command_status', lambda m: m.state == state, f'state {state} of the gate', timeout
    ).message


def silences(rig: Rig, node: str, start: float, end: float) -> list[tuple[float, float]] | None:
    """
    Return the silences that overlap the time from ``start`` to ``end`` by a node's own diagnostics; None: it does not tell.

    It tells of them once they are over, in the next report; so that is waited for. What they are: ``safety.motion.Silences``.
    """
    with suppress(AssertionError):
        rig.wait(lambda: rig.reports(node, end), f'a report of {node}', SILENT)
    # Times of arrival: a report that arrives after the end was made after it, or is followed by one that was.
    with suppress(AssertionError):
        rig.wait(lambda: len(rig.reports(node, end)) > 1, f'a second report of {node}', SILENT)
    reports = rig.reports(node, start)
    after = [at for at, _ in reports if at > end]
    if len(after) < 2 or not all('silences' in values for _, values in reports):
        return None
    told = [tuple(map(float, silence.split(':'))) for _, values in reports for silence in values['silences'].split()]
    return [(begun, over) for begun, over in told if begun < end and over > start]


def _in_ms(found: Iterable[tuple[float, float]]) -> str:
    return ', '.join(f'{(over - begun) * 1e3:.0f} ms' for begun, over in found)


class LateCommands:
    """
    Counts the commands that came late to a robot, by the robot's own reports, over restarts of its driver.

    ``late``: those for which no stall of the machine accounts. ``in_stalls``: the others. ``ages_ms``: of both.
    """

    def __init__(self, rig: Rig) -> None:
        report = rig.next_report(ROBOT)
        # Only now: a report of before tells of commands of before.
        self._rig, self._heard, self._before = rig, time.monotonic(), int(report['late'])
        self._reserve = rig.get(GATE, 'delivery_reserve_s')
        self.late = self.in_stalls = 0
        self.ages_ms: list[float] = []

    def read(self) -> None:
        """Take in what the robot has reported since the last time."""
        for at, values in self._rig.reports(ROBOT, self._heard):
            self._heard, before = at, self._before
            self._before = counted = int(values['late'])
            new = counted - before if counted >= before else counted  # a driver that was started again begins at 0
            told = [tuple(map(float, command.split(':'))) for command in values.get('late_commands', '').split()]
            # The gate lets nothing pass that is older than the deadline less its reserve: what comes late must have been
            # held up after that. NaN, the capture of an image that the robot has not taken, is excused by nothing.
            deadline = float(values['deadline_ms']) * 1e-3
            excused = sum(past(captured, received, deadline, self._reserve) <= 0.0 for captured, received in told)
            self.late += max(0, new - excused)
            self.in_stalls += min(new, excused)
            self.ages_ms += [round((received - captured) * 1e3, 1) for captured, received in told]


class Invariants:
    """
    What holds in every scenario, whatever it does to the robot; between the making of this and ``check``.

    They are checked also where the scenario has failed, and what is violated is final. ``late_commands``: as of ``check``.
    """

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._pids = self._present()
        self.late_commands = LateCommands(rig)
        self._start = time.monotonic()
        self._failures = self._failed_callbacks()
        self.late_here: list[tuple[float, float]] = []  # silences that only the observer saw, by its steady clock [s]
        self._silence = rig.get(GATE, 'command_timeout_s') + STOP_RESERVE

    def check(self, killed: Iterable[str] = ()) -> None:
        """
        Raise ``InvariantViolation``, which names all that was violated.

        ``killed``: nodes that the scenario was to kill. They may be other processes, or still away.
        """
        found = [
            *self._late_commands(ROBOT in killed),
            *self._commands_beyond_limits(),
            *([] if GATE in killed else self._late_stops()),
            *self._lost_processes(killed),
        ]
        if found:
            raise InvariantViolation('; '.join(found))

    def _late_commands(self, restarted: bool) -> list[str]:
        """The robot counts, by the steady clock, and says of each late command when the image was taken."""
        if restarted:
            return []
        try:
            self._rig.next_report(ROBOT)
        except AssertionError as error:
            return [f'the robot does not report any more: {error}']
        self.late_commands.read()
        late, ages = self.late_commands.late, sorted(self.late_commands.ages_ms)
        return [f'{late} commands came late to the robot; the late ones after {ages} ms'] if late else []

    def _commands_beyond_limits(self) -> list[str]:
        for command in (r.message for r in self._rig.observer.since('cmd_vel', self._start) if answers(r.message)):
            v, w = command.twist.linear.x, command.twist.angular.z
            if not (LIMITS['v_min'] <= v <= LIMITS['v_max'] and abs(w) <= LIMITS['w_max']):  # so with NaN
                return [f'the gate let ({v}, {w}) through']
        return []

    def _late_stops(self) -> list[str]:
        """After a command that moves the robot the next one, or a stop, comes in time."""
        newest = self._rig.observer.newest('cmd_vel')
        if newest is not None and not stands(newest.message):
            # What answers it may have arrived, and this process not have come to it yet.
            with suppress(AssertionError):
                self._rig.wait_for('cmd_vel', lambda _: True, 'what follows', UNREAD, since=newest.at)
        heard = self._rig.observer.since('cmd_vel', self._start)
        after = [*heard[1:], Received(time.monotonic(), None)]
        late = [
            (earlier.at, later.at)
            for earlier, later in zip(heard, after)
            if not stands(earlier.message) and past(earlier.at, later.at, self._silence, STOP_RESERVE) > 0.0
        ]
        found = [silence for silence in late if not self._only_seen_here(*silence)]
        if not found:
            return []
        start, end = max(found, key=lambda silence: silence[1] - silence[0])
        where = {node: silences(self._rig, node, start, end) for node in (GATE, ROBOT)}
        told = ', '.join(f'{node}: {"no report" if its is None else _in_ms(its) or "in time"}' for node, its in where.items())
        return [f'no stop for {(end - start) * 1e3:.0f} ms after a command that moves the robot (by their own clocks, {told})']

    def _only_seen_here(self, start: float, end: float) -> bool:
        """
        Whether this process alone was late: the gate says that what followed left it in time, the robot that it came so.

        A robot or a gate that does not say so, because it was started again for one, clears nothing.
        """
        present = self._present()
        told = [silences(self._rig, node, start, end) if present[node] == self._pids[node] else None for node in (GATE, ROBOT)]
        if any(its is None or any(past(*silence, self._silence, STOP_RESERVE) > 0.0 for silence in its) for its in told):
            return False
        self.late_here.append((start, end))
        print(f'the observer, and neither the gate nor the robot, was late: {(end - start) * 1e3:.0f} ms', flush=True)
        return True

    def _lost_processes(self, killed: Iterable[str]) -> list[str]:
        present = self._present()
        gone = [node for node in NODES if node not in killed and present[node] != self._pids[node]]
        failures = self._failed_callbacks() - self._failures
        return [
            *([f'{gone} ended'] if gone else []),
            *([f'callbacks failed: {sorted(failures)}'] if failures else []),
        ]

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
    found = []
    for node in nodes:
        codes, expected = processes.exit_codes(node), [-9] * kills.get(node, 0) + [0]
        if codes != expected:
            found.append(f'{node} ended with {codes} and should have with {expected}')
    if found:
        raise InvariantViolation('; '.join(found))
