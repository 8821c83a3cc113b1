"""
The slow services of the world model: what-if requests, and saving and loading sessions.

They are served by a separate executor and thread. The work itself is done by the engine's thread, between ticks.
"""

import math
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future as Promise, TimeoutError as TimeUp
from dataclasses import dataclass
from typing import Any

from rclpy.lifecycle import LifecycleNode

from worldmodel_ros.control.deciding_worker import DecidingWorker
from worldmodel_ros.control.task import Task, term_in_words
from worldmodel_ros.control.worker import Worker
from worldmodel_ros.engine.session import NothingObserved
from worldmodel_ros.engine.session_folder import SessionFileError, SessionFolder
from worldmodel_ros.engine.what_if import MAX_STEPS, Answer, Question, QuestionError
from worldmodel_ros.motion import path
from worldmodel_ros.msg import ActionChunk, WhatIfBranch
from worldmodel_ros.nodes.common import what_if_request
from worldmodel_ros.nodes.common.messages import float32s, frames, header, nanoseconds
from worldmodel_ros.nodes.common.spin import ServiceThread
from worldmodel_ros.nodes.common.what_if_request import BASE, Askable, RequestError
from worldmodel_ros.nodes.world_model.inputs import Intake
from worldmodel_ros.srv import SessionFile, WhatIf

_FILE_TIMEOUT = 5.0      # s, for the engine's part of saving or loading a session
_GRACE = 0.2             # s after the deadline, for the engine to return the branches that it has finished


class _NotYet(Exception):
    """A promise has no result yet."""


@dataclass(frozen=True)
class Context:
    """
    What an active node answers with. ``intake`` has the goal and the camera's frame. ``horizon`` and ``timeout``: defaults for
    requests that give none [s]; ``denoising_steps``: of the predictions. ``sessions`` returns the folder of saved sessions.
    """

    worker: Worker
    intake: Intake
    spec: object
    base_frame: str
    horizon: float
    timeout: float
    denoising_steps: int
    sessions: Callable[[], SessionFolder]


class SlowServices(ServiceThread):
    """Serves ``~/what_if``, ``~/save_session`` and ``~/load_session`` of a node; ``context`` is None while it is inactive."""

    def __init__(self, node: LifecycleNode) -> None:
        super().__init__(node, f'_{node.get_name()}_services', 'services')
        self.context: Context | None = None
        for kind, name, answer in (
                (WhatIf, 'what_if', self._what_if), (SessionFile, 'save_session', self._save),
                (SessionFile, 'load_session', self._load)):
            self.node.create_service(kind, node.resolve_service_name(f'~/{name}'), self._contained(answer))
        self.start()

    def _contained(self, answer: Callable) -> Callable:
        def serve(request: object, response: object) -> object:
            try:
                context = self.context
                if context is None:
                    raise RequestError(
                        'the node is not active: ros2 lifecycle set NODE configure, then activate')
                answer(context, request, response)
            except (RequestError, QuestionError, SessionFileError) as error:
                response.success, response.message = False, str(error)
            except CancelledError:
                response.success, response.message = False, 'the node was deactivated meanwhile'
            except Exception as error:  # uncaught, it would end the executor and with it the services
                self.node.get_logger().error(f'{type(request).__qualname__} failed: {error!r}')
                response.success, response.message = False, f'{type(error).__name__}: {error}'
            return response
        return serve

    def _what_if(self, context: Context, request: WhatIf.Request, response: WhatIf.Response) -> None:
        start = time.monotonic()
        response.step_period = context.spec.step_period
        question = to_question(context, request, start)
        promise = context.worker.ask(question)
        try:
            answer = _result(promise, max(0.0, question.due - time.monotonic()) + _GRACE)
        except _NotYet:  # the engine is busy; it drops a question whose deadline has passed
            promise.cancel()
            answer = Answer(0)
        response.header = header(answer.stamp, context.intake.camera_frame)
        task = context.intake.task if isinstance(context.worker, DecidingWorker) else Task()
        response.terms = [term_in_words(term) for term in task.terms]
        response.branches = [_branch(context, name, future, answer.stamp, question.goal, task)
                             for name, future in answer.branches]
        response.deadline_exceeded = not answer.complete
        response.success = bool(answer.branches)
        if response.deadline_exceeded:
            response.message = (
                f'the deadline passed after {len(answer.branches)} of {len(question.branches)} branches: '
                'allow more time, or ask for fewer or shorter ones')
            if not answer.branches:
                response.message += (
                    '; where that does not help, ticks leave no time over: lower the load or the rate of the camera '
                    '(/diagnostics has latency_p99_ms and expected_frequency)')
        response.elapsed = time.monotonic() - start

    def _save(self, context: Context, request: SessionFile.Request, response: SessionFile.Response) -> None:
        try:
            took = context.worker.save(context.sessions(), request.path, _FILE_TIMEOUT)
        except NothingObserved:
            raise RequestError('nothing has been observed yet: save when the camera publishes') from None
        self.node.get_logger().info(f'session {request.path} saved: {took}')
        response.success, response.message = True, request.path

    def _load(self, context: Context, request: SessionFile.Request, response: SessionFile.Response) -> None:
        took = context.worker.load(context.sessions(), request.path, _FILE_TIMEOUT)
        self.node.get_logger().info(f'session {request.path} loaded: {took}')
        response.success, response.message = True, request.path


def to_question(context: Context, request: WhatIf.Request, now: float) -> Question:
    """Return the question of a request received at ``now`` (steady, s). Raises RequestError."""
    spec = context.spec
    askable = Askable(spec.step_period, spec.action_names, spec.action_low, spec.action_high, spec.goals, MAX_STEPS,
                      context.horizon)
    goal = what_if_request.goal(request, askable, context.intake.goal)
    allowed = what_if_request.allowed_time(request)
    branches = what_if_request.branches(request, askable)
    return Question(branches, goal, now + (allowed or context.timeout),
                    nanoseconds(request.observation_stamp), context.denoising_steps)


def _branch(context: Context, name: str, future: object, stamp: int, goal: str, task: Task) -> WhatIfBranch:
    spec = context.spec
    branch = WhatIfBranch(
        name=name, frames=frames(future.frames, stamp, spec.step_period, context.intake.camera_frame),
        collision_risk=float32s(future.collision_risk), progress=future.progress.get(goal, math.nan))
    branch.actions = ActionChunk(
        header=header(stamp, context.base_frame), step_period=spec.step_period,
        names=list(spec.action_names), values=float32s(future.actions))
    if tuple(spec.action_names) == BASE:
        branch.x, branch.y, branch.yaw = map(float32s, path(future.actions, spec.step_period).T)
    if task.terms:
        branch.terms = float32s(context.worker.utilities(task, future.actions, stamp))
    branch.score = math.fsum(branch.terms) if len(branch.terms) else math.nan
    return branch


def _result(promise: Promise, timeout: float) -> Any:
    """Return the result of a promise or raise its exception; raise _NotYet after ``timeout`` s."""
    try:
        return promise.result(timeout)
    except TimeUp:
        if promise.done():  # the TimeoutError may be the work's own, of a network disk, say
            return promise.result()
        raise _NotYet from None
