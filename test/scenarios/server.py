"""Two robots on one engine: both drive by it, and neither stops when it dies or hangs."""

import os
import signal
import time
from itertools import pairwise
from typing import NamedTuple

from builtin_interfaces.msg import Duration

from scenarios.rig import MODEL, PATIENCE, ROBOT, START_TIMEOUT, Rig, answers, nanoseconds, stands
from scenarios.speed import question_time
from scenarios.stalls import Missed
from worldmodel_ros.msg import ActionChunk
from worldmodel_ros.srv import SessionFile, WhatIf

SERVER = '/engine_server'
BACK = 60.0  # s, to load the model, calibrate, and be tried
APART = (0.35, 0.65)  # periods between the pictures of two cameras, so that one core has time for both in turn
TICKS = 40  # that both are watched for
MODEL_TIERS = (ActionChunk.TIER_TWO_STEP, ActionChunk.TIER_ONE_STEP)


def both_drive_by_one_server(rig: Rig, other: Rig) -> None:
    _get_ready(rig, other)
    for one in (rig, other):
        one.drive()
    start = rig.watch(TICKS * rig.budget.period)
    faults = [fault for one in (rig, other) for fault in _faults_of_driving(one, start)]
    assert not faults, '; '.join(faults)


def the_server_answers_questions_and_keeps_sessions(rig: Rig, other: Rig) -> None:
    rig.drive()
    seconds = question_time(rig.budget.tick, robots=2)
    request = WhatIf.Request(names=['left', 'right', 'policy'], horizon=0.8, deadline=Duration(sec=seconds))
    answer = rig.call(WhatIf, f'{MODEL}/what_if', request, PATIENCE + seconds, attempt=2.0 + seconds)
    assert answer.success and [branch.name for branch in answer.branches] == request.names, answer.message
    assert all(len(branch.frames) == len(branch.collision_risk) == 8 for branch in answer.branches)
    file = SessionFile.Request(path='of_the_server.safetensors')
    saved = rig.call(SessionFile, f'{MODEL}/save_session', file, attempt=6.0)
    assert saved.success and saved.message == file.path, saved.message
    loaded = rig.call(SessionFile, f'{MODEL}/load_session', file, attempt=6.0)
    assert loaded.success, loaded.message


def the_server_is_killed(rig: Rig, other: Rig) -> None:
    _get_ready(rig, other)
    for one, pause in zip((rig, other), kill_while_driving(rig, other).pauses):
        _no_tick_is_missed(one, pause)
    for one in (rig, other):
        wait_for_server(one, BACK)


class Loss(NamedTuple):
    """When the server was killed, and the longest time for which each robot then had no command to move."""

    at: float
    pauses: list['Pause']


class Pause(NamedTuple):
    """A time between two commands that move a robot: steady times [s]."""

    start: float
    end: float

    @property
    def length(self) -> float:
        """Return how long it was [s]."""
        return self.end - self.start


def kill_while_driving(*rigs: Rig) -> Loss:
    """Kill the server while it drives, and see what the robots do in the next 2 s."""
    for rig in rigs:
        rig.drive()
    rigs[0].watch(0.5)
    _wait_for_plans(*rigs)
    killed, start = rigs[0].processes.pid(SERVER), time.monotonic()
    rigs[0].processes.kill(SERVER)
    rigs[0].watch(2.0)
    pauses = [_longest_pause(rig, start) for rig in rigs]
    for rig in rigs:
        backend, serving = rig.next_report(MODEL)['backend'], rigs[0].processes.pid(SERVER)
        # A launcher may have started the next one, which is there within 2 s.
        assert 'of the server' not in backend or serving not in (None, killed), 'a dead server drives'
    return Loss(start, pauses)


def the_server_hangs(rig: Rig, other: Rig) -> None:
    _get_ready(rig, other)
    for one in (rig, other):
        one.drive()
    rig.watch(0.5)
    _wait_for_plans(rig, other)
    pid, start = rig.processes.pid(SERVER), time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    try:
        rig.watch(1.5)
    finally:
        os.kill(pid, signal.SIGCONT)
    for one in (rig, other):
        _no_tick_is_missed(one, _longest_pause(one, start))


def _no_tick_is_missed(rig: Rig, pause: Pause) -> None:
    """Check that each observation was answered by a command to move within its deadline."""
    bound = rig.budget.period + rig.budget.deadline
    if pause.length > bound:
        what = f'nothing moved {rig.namespace} for {pause.length * 1e3:.0f} ms, {bound * 1e3:.0f} are allowed'
        raise Missed(what, pause.length - bound, *pause)


def _faults_of_driving(rig: Rig, start: float) -> list[str]:
    """What is wrong with how a robot has been driven since ``start``, by the server."""
    faults = []
    backend = rig.next_report(MODEL)['backend']
    if 'of the server' not in backend:
        faults.append(f'{rig.namespace} is driven by {backend}')
    commands = [r for r in rig.observer.since('cmd_vel', start) if answers(r.message) and not stands(r.message)]
    if len(commands) < 0.75 * TICKS:
        faults.append(f'{len(commands)} commands moved {rig.namespace} in {TICKS} ticks')
    tiers = [r.message.tier for r in rig.observer.since('deadline_status', start)]
    by_model = sum(tier in MODEL_TIERS for tier in tiers)
    if by_model < 0.5 * len(tiers):
        faults.append(f'{by_model} of {len(tiers)} ticks of {rig.namespace} were answered by the model itself')
    if not rig.observer.since('predicted_future', start):
        faults.append(f'no pictures of {rig.namespace} come from the server')
    return faults


def _get_ready(rig: Rig, other: Rig) -> None:
    spread_cameras(rig, other)
    for one in (rig, other):
        wait_for_server(one, START_TIMEOUT)


def spread_cameras(rig: Rig, other: Rig) -> None:
    """Have the second camera begin again until its pictures come between those of the first."""
    for attempt in range(30):
        stamps = [nanoseconds(one.wait_for('camera/image_raw', lambda m: True, 'an image').message.header.stamp)
                  for one in (rig, other)]
        if APART[0] <= (stamps[1] - stamps[0]) * 1e-9 / rig.budget.period % 1.0 <= APART[1]:
            return
        # Any other rate makes the camera begin again; the difference is no drift that could be noticed.
        other.try_to_set(ROBOT, camera_rate_hz=1.0 / rig.budget.period * (1.0 + 1e-7 * (attempt + 1)))
        other.watch(1.5 * rig.budget.period)
    raise AssertionError('the cameras could not be spread')


def _wait_for_plans(*rigs: Rig) -> None:
    """
    Wait until each robot's newest tick has a plan of the model's own.

    That plan is what bridges a loss. A server that has refused the ticks before it is lost, as a busy one may, leaves a robot
    with fewer actions, which stops when they are used up.
    """
    for rig in rigs:
        rig.wait(lambda rig=rig: rig.observer.newest('deadline_status').message.tier in MODEL_TIERS, 'a plan of the model')


def _longest_pause(rig: Rig, start: float) -> Pause:
    moving = [start, *(r.at for r in rig.observer.since('cmd_vel', start) if not stands(r.message)), time.monotonic()]
    return max((Pause(*pair) for pair in pairwise(moving)), key=lambda pause: pause.length)


def wait_for_server(rig: Rig, timeout: float) -> None:
    """Wait until the server drives a robot."""
    rig.wait(lambda: 'of the server' in rig.report(MODEL).get('backend', ''), 'the server to drive', timeout)
