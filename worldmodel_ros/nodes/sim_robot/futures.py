"""The simulated robot's ``~/what_if``: the true outcome of actions, simulated on forks of its state."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from rclpy.node import Node
from std_srvs.srv import Trigger

from worldmodel_ros import realtime
from worldmodel_ros.msg import ActionChunk, WhatIfBranch
from worldmodel_ros.nodes.common import what_if_request
from worldmodel_ros.nodes.common.messages import header, nanoseconds, time_message, to_jpeg
from worldmodel_ros.nodes.common.spin import ServiceThread
from worldmodel_ros.nodes.common.what_if_request import BASE, Askable, RequestError
from worldmodel_ros.nodes.sim_robot.messages import CAMERA_FRAME, relative_pose
from worldmodel_ros.sim.world import LIMITS, World
from worldmodel_ros.srv import WhatIf

STEP_PERIOD = 0.1        # s, of the actions and frames of a branch
FRAME_SIZE = (64, 64)    # pixels
MAX_STEPS = 640          # of all branches of a request together, which take some seconds
ACTION_NAMES = list(BASE)
_SHARE = 0.25             # of a core, at most, for simulating branches


@dataclass(frozen=True)
class Observation:
    """The state shown by an image: its stamp [ns], ``World.snapshot()``, and a world of that episode to fork."""

    stamp: int
    snapshot: np.ndarray
    episode: World

    def world(self) -> World:
        """Return a new world in this state."""
        world = self.episode.fork()
        world.restore(self.snapshot)
        return world


class Observations:
    """The newest observations. Written by the simulation, read by the what-if service."""

    def __init__(self, keep: int) -> None:
        self._kept: deque[Observation] = deque(maxlen=keep)
        self._lock = threading.Lock()

    def add(self, observation: Observation) -> None:
        with self._lock:
            self._kept.append(observation)

    def find(self, stamp: int) -> Observation:
        """Return the observation with ``stamp`` [ns], or the newest for 0. Raises RequestError if it is not kept."""
        with self._lock:
            kept = list(self._kept)
        if not kept:
            raise RequestError('there is no observation yet: try again when the camera publishes')
        if not stamp:
            return kept[-1]
        for observation in reversed(kept):
            if observation.stamp == stamp:
                return observation
        raise RequestError(
            f'observation_stamp {stamp / 1e9:.9f} is none of the newest {len(kept)} images, which are from '
            f'{kept[0].stamp / 1e9:.3f} to {kept[-1].stamp / 1e9:.3f}: copy the stamp of an image')

    def clear(self) -> None:
        """Discard all observations."""
        with self._lock:
            self._kept.clear()


class TrueFutures(ServiceThread):
    """
    Serves ``~/what_if`` and ``~/reset`` of a robot from a separate thread and executor.

    Simulating a branch takes many control periods. It works on forks, so the simulation goes on, and sleeps most of the time,
    because ground truth is for the observer and must not slow down the observed system. A low priority instead would let the
    model preempt this thread while it holds the GIL, and the robot's command callbacks would wait for that.
    """

    def __init__(self, robot: Node, observations: Observations, default_horizon: float,
                 reset: Callable[[], int]) -> None:
        """
        :param reset: begins the next episode and returns its seed; may take a while.
        :param default_horizon: of named sequences, for requests that give none [s].
        """
        self._observations = observations
        axes = LIMITS.axes()
        self._askable = Askable(
            STEP_PERIOD, BASE, axes.low, axes.high, tuple(World.colours), MAX_STEPS, default_horizon,
            max_branches=MAX_STEPS)
        self._reset = reset
        super().__init__(robot, f'{robot.get_name()}_services', 'true futures', partial(_prepare, robot.get_logger()))
        name = robot.get_fully_qualified_name()
        self.node.create_service(WhatIf, f'{name}/what_if', self._on_what_if)
        self.node.create_service(Trigger, f'{name}/reset', self._on_reset)

    def _on_reset(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        try:
            response.message = f'seed {self._reset()}'
            response.success = True
        except TimeoutError as error:
            response.message = str(error)
        return response

    def _on_what_if(self, request: WhatIf.Request, response: WhatIf.Response) -> WhatIf.Response:
        start = time.monotonic()
        response.step_period = STEP_PERIOD
        try:
            self._answer(request, response, start)
        except RequestError as error:
            response.success, response.message = False, str(error)
        except Exception as error:  # uncaught, it would end the executor and with it the service
            self.node.get_logger().error(f'what_if failed: {error!r}')
            response.success, response.message = False, f'internal error: {error!r}'
        response.elapsed = time.monotonic() - start
        return response

    def _answer(self, request: WhatIf.Request, response: WhatIf.Response, start: float) -> None:
        observation = self._observations.find(nanoseconds(request.observation_stamp))
        goal = what_if_request.goal(request, self._askable)
        allowed = what_if_request.allowed_time(request)
        deadline = start + allowed if allowed else math.inf
        branches = [branch for branch in what_if_request.branches(request, self._askable) if branch.actions is not None]
        if not branches:
            raise RequestError("no branch to play, policy is the model's: give other names or explicit actions")
        if sum(branch.steps for branch in branches) > MAX_STEPS:
            raise RequestError(
                f'more than {MAX_STEPS} steps in all branches together: ask for fewer or shorter ones')
        response.header = header(observation.stamp, CAMERA_FRAME)
        for branch in branches:
            played = _play(observation, branch.name, branch.actions, goal, deadline)
            if played is None:
                response.deadline_exceeded = True
                response.message = (
                    f'the deadline passed after {len(response.branches)} of {len(branches)} branches')
                break
            response.branches.append(played)
        response.success = bool(response.branches)
        if what_if_request.POLICY in request.names:
            response.message = '; '.join(
                filter(None, [response.message, "policy left out: the plan is the model's"]))


def _prepare(logger: realtime.Logger) -> None:
    # Below the robot's command callbacks, like the simulation, and above the model, which could otherwise delay them by
    # preempting this thread.
    realtime.apply(logger, realtime.priority_of(0) - 1)
    # Now, because creating the thread's OpenGL context holds the GIL for a tenth of a second.
    World().render(FRAME_SIZE)


def _play(observation: Observation, name: str, actions: np.ndarray, goal: str,
          deadline: float) -> WhatIfBranch | None:
    """Simulate one branch; return None if the steady time ``deadline`` [s] passes before it is finished."""
    world = observation.world()
    origin = world.pose
    distance = world.goal_distance(goal) if goal else math.nan
    branch = WhatIfBranch(name=name, score=math.nan)
    branch.actions = ActionChunk(header=header(observation.stamp, 'base_link'), step_period=STEP_PERIOD,
                                 names=ACTION_NAMES, values=actions.ravel().tolist())
    for k, action in enumerate(actions):
        if (begun := time.monotonic()) > deadline:
            return None
        world.step(action, STEP_PERIOD)
        stamp = observation.stamp + round((k + 1) * STEP_PERIOD * 1e9)
        branch.frames.append(to_jpeg(world.render(FRAME_SIZE), time_message(stamp), CAMERA_FRAME))
        branch.collision_risk.append(float(world.collided))
        x, y, yaw = relative_pose(world.pose, origin)
        branch.x.append(x)
        branch.y.append(y)
        branch.yaw.append(yaw)
        time.sleep((time.monotonic() - begun) * (1.0 / _SHARE - 1.0))
    branch.progress = distance - world.goal_distance(goal) if goal else math.nan
    return branch
