"""
The action ``drive_to``: drives to a goal given by colour, pose, image or task and stops there; and the topic ``goal_image``.

It has its own executor and thread, like the slow services, so that no tick waits for it or for a network that evaluates a goal
image; changes to the node's state are made on the node's executor. Goals from topics and services preempt those of the action,
and vice versa.
"""

import math
import time
from collections.abc import Callable
from concurrent.futures import Future as Promise, TimeoutError as TimeUp
from dataclasses import dataclass
from typing import Any, Protocol

from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.action.server import ServerGoalHandle
from rclpy.clock import Clock, ClockType
from rclpy.lifecycle import LifecycleNode
from rclpy.task import Future
from sensor_msgs.msg import Image

from worldmodel_ros.action import DriveTo
from worldmodel_ros.control.deciding_worker import Decided
from worldmodel_ros.control.pilot import STANDING
from worldmodel_ros.control.task import Task, TaskError, to_goal
from worldmodel_ros.control.terms import FACED, ROBOT_RADIUS, KeepDistance, Reach, Term, Touch
from worldmodel_ros.nodes.common.qos import STATUS
from worldmodel_ros.nodes.common.spin import ServiceThread
from worldmodel_ros.nodes.common.tasks import read_task

NAME, IMAGES = 'drive_to', 'goal_image'
FEEDBACK_PERIOD = 0.1   # s
_PATIENCE = 1.0         # s, for the node's executor to accept a goal
_TOUCHED = 0.03         # m, gap between surfaces that counts as a touch: contact is estimated, not sensed


class Driver(Protocol):
    """What the action requires of the node; call ``drive`` and ``stand`` on the node's executor only."""

    goals_set: int           # incremented with every goal and task, whatever its source

    def drive(self, goal: str, task: Task) -> None:
        """Drive by a task from the next image on. Raises TaskError."""

    def stand(self) -> None:
        """Clear the goal and stop at once."""

    def place_of(self, pose: Any) -> Task:
        """Return the task of driving to a PoseStamped. Raises TaskError."""

    def task_of_image(self, image: Image) -> Task:
        """Return the task of driving to where the camera sees ``image``. Thread-safe. Raises TaskError."""

    def newest_decision(self) -> Decided | None:
        """Return how the newest command was decided; None while the node is not active."""


@dataclass
class _Driving:
    """The active goal. ``number``: ``goals_set`` when it was set; ``after``: the newest decision before it. ``driver`` is also
    there once the node is not active, and must not drive to the goal when it is active again."""

    handle: ServerGoalHandle
    driver: Driver
    task: Task
    number: int
    began: float
    ended: Future
    after: Decided | None
    distance: float = math.nan


class DriveToServer(ServiceThread):
    """Serves the action for a node that has a forecast; rejects goals while there is no ``driver``."""

    def __init__(self, node: LifecycleNode) -> None:
        super().__init__(node, f'_{node.get_name()}_goals', 'goals')
        self.driver: Driver | None = None
        self._of = node
        self._driving: _Driving | None = None
        self._accepted: tuple[Driver, Task, int, Decided | None] | None = None
        self._ends: dict[bytes, Future] = {}
        self._server = ActionServer(
            self.node, DriveTo, node.resolve_service_name(NAME), self._execute, goal_callback=self._on_goal,
            handle_accepted_callback=self._on_accepted, cancel_callback=self._on_cancel)
        self.node.create_subscription(Image, node.resolve_topic_name(IMAGES), self._on_image, STATUS)
        self._timer = self.node.create_timer(FEEDBACK_PERIOD, self._look, clock=Clock(clock_type=ClockType.STEADY_TIME))
        self._timer.cancel()  # runs only while there is a goal
        self.start()

    def _on_goal(self, request: DriveTo.Goal) -> GoalResponse:
        try:
            shown = self._shown(request.image) if request.image.data else None
            self._accepted = self._on_executor(lambda: self._begin(request, shown))
        except TaskError as error:
            self._of.get_logger().warning(f'{NAME} refused: {error}')
            return GoalResponse.REJECT
        except Exception as error:  # of the network, say: the client must have its answer
            self._errors.report(error)
            return GoalResponse.REJECT
        return GoalResponse.ACCEPT

    def _on_image(self, image: Image) -> None:
        try:
            shown = self._shown(image)
            self._on_executor(lambda: self._active().drive('', shown))
        except TaskError as error:
            self._of.get_logger().warning(f'{IMAGES} refused: {error}')

    def _shown(self, image: Image) -> Task:
        return self._active().task_of_image(image)

    def _active(self) -> Driver:
        if (driver := self.driver) is None:
            raise TaskError('the node is not active, or has no forecast: set the parameter forecast, and activate it')
        return driver

    def _begin(self, request: DriveTo.Goal, shown: Task | None) -> tuple[Driver, Task, int, Decided | None]:
        driver = self._active()
        before = driver.newest_decision()
        task = self._task_of(request, shown, driver)
        driver.drive(request.goal, task)
        return driver, task, driver.goals_set, before

    def _task_of(self, request: DriveTo.Goal, shown: Task | None, driver: Driver) -> Task:
        given = [name for name, is_there in (('goal', request.goal), ('pose', request.pose.header.frame_id),
                                             ('image', shown), ('task', request.task.terms)) if is_there]
        if len(given) != 1:
            raise TaskError(f'give a goal, a pose with a frame, an image, or a task: this has {" and ".join(given) or "none"}')
        if not 0.0 <= request.timeout < math.inf:  # false for a NaN, too
            raise TaskError(f'timeout is {request.timeout}: it must be a time in s, or 0 for none')
        if given == ['pose']:
            return driver.place_of(request.pose)
        if given == ['image']:
            return shown
        return read_task(request.task) if given == ['task'] else to_goal(request.goal)

    def _on_accepted(self, handle: ServerGoalHandle) -> None:
        (driver, task, number, before), former = self._accepted, self._driving
        if former:
            self._end(former, DriveTo.Result.PREEMPTED, 'another goal has taken its place')
        ended = self._ends[bytes(handle.goal_id.uuid)] = Future(executor=self._executor)
        self._driving = _Driving(handle, driver, task, number, time.monotonic(), ended, before)
        self._timer.reset()
        handle.execute()

    def _on_cancel(self, handle: ServerGoalHandle) -> CancelResponse:
        self._executor.create_task(self._look)  # as soon as the goal is cancelling, not a timer period later
        return CancelResponse.ACCEPT

    async def _execute(self, handle: ServerGoalHandle) -> DriveTo.Result:
        key = bytes(handle.goal_id.uuid)
        try:
            return await self._ends[key]
        finally:
            del self._ends[key]

    def _look(self) -> None:
        """Publish feedback, and end the goal if it is due."""
        driving = self._driving
        if driving is None:
            return
        driver, result, elapsed = driving.driver, DriveTo.Result, time.monotonic() - driving.began
        if driving.handle.is_cancel_requested:
            self._stand(driving)
            self._end(driving, 0, 'cancelled')
            return
        if self.driver is None:
            # Not waited for: the node may be ending, and does nothing any more.
            if executor := self._of.executor:
                executor.create_task(self._forget, driving)
            self._end(driving, result.STOPPED, 'the node was deactivated')
            return
        if driver.goals_set != driving.number:
            self._end(driving, result.PREEMPTED, 'another goal was given by a topic, a service or a parameter')
            return
        decided = driver.newest_decision()
        # None while the node is being deactivated.
        if decided and decided is not driving.after and decided.observation.task == driving.task:
            told = feedback(decided)
            driving.distance = told.distance
            driving.handle.publish_feedback(told)
            if is_done(decided):
                self._stand(driving)
                self._end(driving, result.REACHED, f'reached: {told.distance:.2f} m{said_of(decided)}')
                return
        timeout = driving.handle.request.timeout
        if timeout and elapsed > timeout:
            self._stand(driving)
            self._end(driving, result.TIMEOUT, f'not reached within {timeout:g} s')

    def _stand(self, driving: _Driving) -> None:
        try:
            self._on_executor(lambda: self._forget(driving), even_late=True)
        except TaskError as error:
            self._of.get_logger().error(f'{NAME}: the robot could not be told to stand in time: {error}')

    def _forget(self, driving: _Driving) -> None:
        if driving.driver.goals_set == driving.number:  # otherwise another goal is active and must go on
            driving.driver.stand()

    def _end(self, driving: _Driving, code: int, reason: str) -> None:
        handle = driving.handle
        if code == 0:
            handle.canceled()
        elif code == DriveTo.Result.REACHED:
            handle.succeed()
        else:
            handle.abort()
        if self._driving is driving:
            self._driving = None
            self._timer.cancel()
        driving.ended.set_result(DriveTo.Result(
            code=code, reason=reason, distance=driving.distance, seconds=time.monotonic() - driving.began))

    def _on_executor(self, work: Callable[[], Any], even_late: bool = False) -> Any:
        """
        Run ``work`` on the node's executor; return its result or raise its exception. Raises TaskError on a timeout; the work
        is then not done later, unless ``even_late``.
        """
        promise: Promise = Promise()

        def run() -> None:
            if not promise.set_running_or_notify_cancel():
                return
            try:
                promise.set_result(work())
            except Exception as error:  # raised in the caller's thread
                promise.set_exception(error)
        executor = self._of.executor
        if executor is None:
            raise TaskError('the node does not spin')
        executor.create_task(run)
        try:
            return promise.result(_PATIENCE)
        except TimeUp:
            if even_late or promise.cancel():
                raise TaskError('the node does not answer') from None
        return promise.result()  # in progress


def feedback(decided: Decided) -> DriveTo.Feedback:
    """Return the distance to the goal, the similarity to a goal image, and what was decided."""
    choice, aim = decided.choice, _aim(decided.observation.task.terms)
    left = _left(decided, aim)
    return DriveTo.Feedback(
        distance=left, similarity=_similarity(decided, aim), tier=int(decided.tier), chosen=choice.name,
        predicted=_time_to(decided, aim), risk=len(choice.vetoed) / len(choice.scores) if choice.scores else 0.0)


def is_done(decided: Decided) -> bool:
    """Return whether the aim of a decision's task is reached at its observation."""
    aim = _aim(decided.observation.task.terms)
    left = _left(decided, aim)
    if not math.isfinite(left) or left > _within(decided, aim):
        return False
    *_, yaw = _target(decided, aim)
    return yaw is None or abs(math.remainder(decided.view.pose[2] - yaw, math.tau)) < FACED


def said_of(decided: Decided) -> str:
    """Return a caveat for a goal image that matches many places, else ''."""
    sight = getattr(_aim(decided.observation.task.terms), 'sight', None)
    if sight is None or not sight.is_of_one_wall(STANDING):
        return ''
    return '; the image shows one wall alone, which looks the same along its length: this is one of the places that see it so'


def _aim(terms: tuple[Term, ...]) -> Term | None:
    return next((term for term in terms if isinstance(term, Touch | Reach | KeepDistance)), None)


def _within(decided: Decided, aim: Term) -> float:
    match aim:
        case Reach():
            return aim.within
        case Touch():
            return decided.view.things[aim.target].radius + ROBOT_RADIUS + _TOUCHED
    return -math.inf  # never done: a distance is kept until another goal is given


def _target(decided: Decided, aim: Term | None) -> tuple[float, float, float | None] | None:
    """Return x and y of the centre of the aim at the observation, and the required yaw, if any; None if unknown."""
    if place := getattr(aim, 'place', None):
        return (*place[:2], place[2] if len(place) > 2 else None)
    thing = decided.view.things.get(aim.target) if aim else None
    return (*thing.path[0], thing.yaw) if thing else None


def _left(decided: Decided, aim: Term | None) -> float:
    """Return the distance [m] from the robot to the centre of the aim at the observation; NaN if unknown."""
    target = _target(decided, aim)
    return math.dist(decided.view.pose[:2], target[:2]) if target else math.nan


def _similarity(decided: Decided, aim: Term | None) -> float:
    """Return the similarity of the observation's image to the goal image; NaN if there is none."""
    sight = getattr(aim, 'sight', None)
    return sight.similarity(decided.observation.image) if sight else math.nan


def _time_to(decided: Decided, aim: Term | None) -> float:
    """Return the time [s] until the chosen candidate reaches the aim; NaN if it does not, or nothing was compared."""
    choice = decided.choice
    if not len(choice.poses) or choice.name not in choice.scores or not isinstance(aim, Touch | Reach):
        return math.nan
    place = getattr(aim, 'place', None)
    path = place[:2] if place else decided.view.things[aim.target].path
    way = choice.poses[list(choice.scores).index(choice.name), :, :2] - path
    there = (way[:, 0] ** 2 + way[:, 1] ** 2) ** 0.5 <= _within(decided, aim)
    return float(choice.times[int(there.argmax())]) if there.any() else math.nan
