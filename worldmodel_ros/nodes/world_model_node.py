"""
Drives a robot by a world model: images and executed actions in, commands and predicted futures out, on time.

The executor's thread only receives, and answers when the engine is late. The engine has a thread of its own,
as have the pictures and the services that take a while.
"""

import functools
import gc
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from geometry_msgs.msg import Twist, TwistStamped
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import String
from std_srvs.srv import Trigger

from worldmodel_ros import realtime
from worldmodel_ros.engine.answers import Answer, Prediction
from worldmodel_ros.engine.faults import FaultyBackend, Faults
from worldmodel_ros.engine.ladder import NS, Counts, Tier, Verdict
from worldmodel_ros.engine.responder import Responder
from worldmodel_ros.engine.worker import Worker
from worldmodel_ros.inputs import images
from worldmodel_ros.inputs.ticks import ExecutedActions
from worldmodel_ros.nodes import diagnostics
from worldmodel_ros.nodes.parameters import Parameters
from worldmodel_ros.nodes.qos import CAMERA, COMMAND, LATCHED
from worldmodel_ros.nodes.spin import run
from worldmodel_ros.nodes.world_model_camera import LargeImageAdvice
from worldmodel_ros.nodes.world_model_intake import Intake
from worldmodel_ros.nodes.world_model_outputs import Outputs
from worldmodel_ros.nodes.world_model_parameters import (
    ENGINE, inconsistency, ladder_settings, parameters, set_faults)
from worldmodel_ros.nodes.world_model_services import Context, SlowServices
from worldmodel_ros.nodes.world_model_statistics import Statistics
from worldmodel_ros.nodes.world_model_timer import OneShot
from worldmodel_ros.nodes.world_model_worker import make_worker
from worldmodel_ros.serve.failover import FailoverWorker

SUCCESS, FAILURE = TransitionCallbackReturn.SUCCESS, TransitionCallbackReturn.FAILURE
IMAGE_TOPIC = 'camera/image_raw'
SESSIONS = 2  # at a time: the robot's, and for a moment the one that takes its place; room for eight may not fit a GPU
_LOG_INTERVAL = 2.0  # s


def _contained(transition: Callable) -> Callable:
    """Log what a transition raises, undo it, and fail: rclpy would swallow the exception, and say nothing."""
    @functools.wraps(transition)
    def run_transition(node: 'WorldModelNode', state: LifecycleState) -> TransitionCallbackReturn:
        try:
            return transition(node, state)
        except Exception as error:
            node.get_logger().error(f'{transition.__name__[3:]} failed: {error}\n{traceback.format_exc()}')
            node.release(keep_engine=transition.__name__ == 'on_activate')
            return FAILURE
    return run_transition


class WorldModelNode(LifecycleNode):
    """
    The lifecycle node: configure loads the model, activate begins to observe and, once there is a goal, to
    command.

    `load_engine` is called in configure, with the parameters ENGINE by name; by default it is
    worldmodel_ros.engine.load.
    """

    def __init__(self, load_engine: Callable[..., Any] | None = None, **options: Any) -> None:
        super().__init__('world_model_node', **options)
        self.refusals = diagnostics.Refusals()
        self._load_engine = load_engine or _load
        self._engine: Any = None
        self._worker: Worker | FailoverWorker | None = None
        self._faults = Faults()
        self._settings = Parameters(
            self, parameters(lambda: self._engine is not None, self._goal_refusal), self._on_parameter,
            consistent=inconsistency)
        self._goal = self._settings['goal']
        self._trouble = ''
        self._warm_up = 0.0
        self._inputs: list = []
        self._answer_timer = OneShot(self, self._on_answer_due)
        self._camera_timer = OneShot(self, self._on_camera_silent)
        self._statistics = Statistics()
        diagnostics.Diagnostics(self, {'world model': self._report})
        self.create_service(Trigger, '~/reset', self._on_reset)
        self._slow_services = SlowServices(self, self._context_of_services)

    @_contained
    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Load the model and measure it; subscribe."""
        settings = self._settings
        start = time.monotonic()
        # Kept from here on, so that it is closed whatever fails below.
        engine = self._engine = self._load_engine(**{name: settings[name] for name in ENGINE})
        images.converter()
        loaded = time.monotonic()
        # After loading, which can take half a minute of a core, and before the warm-up, whose measured times it
        # changes. All threads: DDS receives in threads of its own, and an image that waits for a core there is
        # late already. The engine's thread inherits it.
        realtime.apply(self.get_logger(), settings['realtime_priority'], all_threads=True)
        engine.warm_up()
        self._warm_up = time.monotonic() - loaded
        engine.backend = FaultyBackend(engine.backend, self._faults)
        spec = engine.spec
        refusal = self._goal_refusal(self._goal)
        if refusal:
            raise ValueError(f'goal: {refusal}')
        set_faults(self._faults, settings)
        self._executed = ExecutedActions(len(spec.action_names), spec.step_period)
        self._outputs = Outputs(self, spec.action_names, spec.step_period, settings['base_frame'])
        self._subscribe()
        two, one = (engine.step_times.predict(steps) * 1e3 for steps in (2, 1))
        self.get_logger().info(
            f'model {spec.name} on {engine.backend.name}: loaded in {loaded - start:.1f} s, warmed up in '
            f'{self._warm_up:.1f} s; a tick takes {two:.1f} ms with two steps, {one:.1f} ms with one; goals: '
            f'{", ".join(spec.goals)}')
        return super().on_configure(state)

    @_contained
    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Begin a new episode with a session that knows nothing."""
        settings, spec = self._settings, self._engine.spec
        self._statistics = Statistics()
        self._intake = Intake(spec, settings, self._executed, lambda: self.get_clock().now().nanoseconds,
                              self.refusals, self._advice, self.get_logger())
        self._intake.goal = self._goal
        self._trouble = ''
        self._outputs.start()
        self._responder = Responder(self, ladder_settings(settings), spec.step_period)
        self._worker = make_worker(
            self, settings['server'], self._engine, self._executed.mean, self._responder, self)
        result = super().on_activate(state)
        self._worker.start()
        self._activated = time.monotonic()
        self._camera_timer.arm(settings['camera_timeout_s'])
        # What lives now lives until the node is deactivated; walking it again and again would cost
        # milliseconds.
        gc.collect()
        gc.freeze()
        return result

    @_contained
    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Ask for a stop, and cease to observe."""
        self.release(keep_engine=True)
        return super().on_deactivate(state)

    @_contained
    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Give the model back."""
        self.release(keep_engine=False)
        return SUCCESS

    @_contained
    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """As deactivate and cleanup, from whatever state."""
        self.release(keep_engine=False)
        return SUCCESS

    def destroy_node(self) -> None:
        """End the threads and destroy the node."""
        self.release(keep_engine=False)
        self._slow_services.stop()
        super().destroy_node()

    def release(self, keep_engine: bool) -> None:
        """Undo activate, and configure unless `keep_engine`, as far as they came."""
        self._answer_timer.cancel()
        self._camera_timer.cancel()
        if self._worker:
            worker, self._worker = self._worker, None
            self._halt(Tier.STOP if self._goal else Tier.NONE, Verdict.IDLE, 'the node is being deactivated')
            worker.stop()
            self._outputs.stop()
            gc.unfreeze()
        if keep_engine or self._engine is None:
            return
        for subscription in self._inputs:
            self.destroy_subscription(subscription)
        self._inputs.clear()
        if hasattr(self, '_outputs'):
            self._outputs.destroy()
        self._engine.close()
        self._engine = None
        gc.collect()

    def answered(self, answer: Answer) -> None:
        """Publish an answer, the command first. Called by the engine's thread or this one, one at a time."""
        self._outputs.command(answer)
        age = self.get_clock().now().nanoseconds / NS - answer.stamp / NS if answer.stamp else 0.0
        self._statistics.answered(answer, age)
        self._outputs.status(answer, age, self._intake.camera_frame)

    def predicted(self, prediction: Prediction) -> None:
        """Publish a predicted future."""
        self._outputs.prediction(prediction, self._intake.camera_frame)

    def failed(self, reason: str, error: Exception, restarted: bool) -> None:
        """Report a failure of the engine; it has been contained."""
        self.refusals.count(f'engine: {type(error).__name__}')
        self.get_logger().error(f'the engine failed: {reason}\n{"".join(traceback.format_exception(error))}',
                                throttle_duration_sec=_LOG_INTERVAL)
        if restarted:
            self._intake.begin_episode()

    def _subscribe(self) -> None:
        settings = self._settings
        topic = self.resolve_topic_name(IMAGE_TOPIC)
        compressed = settings['image_transport'] == 'compressed'
        if compressed:
            topic += '/compressed'
        self._advice = LargeImageAdvice(self, topic)
        kind, callback = ((TwistStamped, lambda message: self._on_executed(message.twist))
                          if settings['enable_stamped_cmd_vel'] else (Twist, self._on_executed))
        subscribe = self.create_subscription
        self._inputs += [
            subscribe(CompressedImage if compressed else Image, topic, self._on_image, CAMERA),
            subscribe(kind, settings['executed_action_topic'], callback, COMMAND),
            subscribe(String, 'goal', self._on_goal, LATCHED)]

    def _on_image(self, message: Image | CompressedImage) -> None:
        if self._worker is None:
            return
        self._intake.image_size = self._worker.image_size
        sound, observation = self._intake.take(message)
        if sound:
            self._camera_timer.arm(self._settings['camera_timeout_s'])
        if self._intake.frozen:
            self._suffer('the camera is frozen: the same picture again and again although the robot moves')
        if observation is None:
            return
        self._trouble = observation.stale
        self._statistics.image(observation.stamp, observation.received, self._intake.delay)
        self._statistics.dropped += self._worker.submit(observation)
        if observation.wants_answer:
            self._answer_timer.arm(observation.due - self._responder.settings.reserve - time.monotonic())

    def _on_answer_due(self) -> None:
        if self._worker:
            self._responder.overdue()

    def _on_camera_silent(self) -> None:
        if self._worker is None:
            return
        silent = self._settings['camera_timeout_s']
        self._camera_timer.arm(silent)
        self._suffer(f'no image that can be used has come for {silent:g} s')
        self._advice.silent(time.monotonic() - self._activated)

    def _suffer(self, trouble: str) -> None:
        """Stop for want of observations; once, but say so as long as it lasts."""
        first, self._trouble = trouble != self._trouble, trouble
        if first:
            self.get_logger().warning(f'{trouble}: commanding nothing but a stop')
        self._halt(Tier.STOP if first and self._goal else Tier.NONE, Verdict.STALE_INPUT, trouble)

    def _halt(self, tier: Tier, verdict: Verdict, reason: str) -> None:
        # The stamp of the newest observation keeps it in order with the commands before it.
        intake = self._intake
        self._responder.halt(
            Answer(intake.stamp, intake.episode, intake.next_sequence(), tier, verdict, reason, Counts()))

    def _on_executed(self, twist: Twist) -> None:
        action = (twist.linear.x, twist.angular.z)
        if not all(map(math.isfinite, action)):
            self.refusals.count('executed action: not finite')
            return
        self._executed.add(self.get_clock().now().nanoseconds, action)

    def _on_goal(self, message: String) -> None:
        goal = message.data.strip()
        refusal = self._goal_refusal(goal)
        if refusal:
            self.refusals.count('goal: unknown')
            self.get_logger().warning(f'goal refused: {refusal}', throttle_duration_sec=_LOG_INTERVAL)
        else:
            self._set_goal(goal)

    def _goal_refusal(self, goal: str) -> str | None:
        if self._engine is None or not goal or goal in self._engine.spec.goals:
            return None
        return f'{goal!r} is unknown; this model knows {", ".join(self._engine.spec.goals)}'

    def _set_goal(self, goal: str) -> None:
        if goal == self._goal:
            return
        self._goal = goal
        self.get_logger().info(f'goal: {goal or "none"}')
        if self._worker:
            self._intake.goal = goal
            if not goal:
                self._halt(Tier.STOP, Verdict.IDLE, 'the goal was cleared')

    def _on_reset(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        if self._worker is None:
            response.message = 'the node is not active, so there is no session: activate it'
            return response
        self._intake.begin_episode()
        response.success, response.message = True, 'a new episode begins with the next image'
        return response

    def _on_parameter(self, name: str, value: Any) -> None:
        if name == 'goal':
            self._set_goal(value)
        elif name.startswith('fault_'):
            set_faults(self._faults, self._settings)
        elif self._worker:
            self._responder.settings = ladder_settings(self._settings)

    def _context_of_services(self) -> Context | None:
        worker, settings = self._worker, self._settings
        if worker is None:
            return None
        ros_home = Path(os.environ.get('ROS_HOME') or Path.home() / '.ros')
        return Context(
            worker, self._engine.spec, self._goal, self._intake.camera_frame, settings['base_frame'],
            settings['what_if_horizon_s'], settings['what_if_timeout_s'],
            Path(settings['session_directory'] or ros_home / 'worldmodel_sessions'))

    def _report(self) -> diagnostics.Report:
        if self._engine is None:
            return diagnostics.Report(diagnostics.STALE, 'not configured', self.refusals.values())
        backend = self._worker.backend if self._worker else self._engine.backend.name
        values = {'model': self._engine.spec.name, 'backend': backend, 'goal': self._goal,
                  'warmup_s': self._warm_up, 'messages_skipped': self._outputs.skipped,
                  **self._statistics.values(time.monotonic(), self._engine.spec.step_period),
                  **self.refusals.values()}
        if self._worker is None:
            return diagnostics.Report(diagnostics.STALE, 'not active', values)
        best = self._responder.best
        if self._trouble:
            return diagnostics.Report(diagnostics.ERROR, self._trouble, values)
        if self._worker.trouble:
            return diagnostics.Report(
                diagnostics.WARN, f'driving with the own model: {self._worker.trouble}', values)
        if self._engine.trouble:
            return diagnostics.Report(diagnostics.WARN, f'the model is being restored: {self._engine.trouble}', values)
        if best is not Tier.TWO_STEP:
            return diagnostics.Report(diagnostics.WARN, f'degraded to {best.name.lower()}', values)
        doing = f'driving to {self._goal}' if self._goal else 'no goal'
        return diagnostics.Report(diagnostics.OK, doing, values)


def _load(**chosen: Any) -> Any:
    from worldmodel_ros.engine import load  # only now: the back ends are heavy
    return load(**chosen, sessions=SESSIONS)


def main() -> int:
    """Run the node until it is told to end."""
    # The engine's thread may hold the interpreter for so long while an answer is due in this one. With
    # Python's 5 ms the fallback came 7 ms late (p50, p99 21 ms) beside a thread that computes in Python; with
    # 0.5 ms, 0.7 ms (5 to 8 ms).
    sys.setswitchinterval(0.0005)
    return run(WorldModelNode)
