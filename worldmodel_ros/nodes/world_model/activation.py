"""What the world model node does while it is active: from an image to its answer, and to a stop where none comes."""

import gc
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
from rclpy.clock import Clock, ClockType
from rclpy.lifecycle import LifecycleNode
from rclpy.node import Node
from sensor_msgs.msg import CompressedImage, Image

from worldmodel_ros.control.ladder import Counts, Tier, Verdict
from worldmodel_ros.control.responder import Answer, Listener, Prediction, Responder
from worldmodel_ros.control.worker import Worker
from worldmodel_ros.engine.device_failure import end_if_lost
from worldmodel_ros.nodes.common.diagnostics import Refusals
from worldmodel_ros.nodes.common.messages import NS
from worldmodel_ros.nodes.world_model.camera import Intake, IntakeSettings, LargeImageAdvice
from worldmodel_ros.nodes.world_model.executed import ExecutedTopic
from worldmodel_ros.nodes.world_model.outputs import Outputs
from worldmodel_ros.nodes.world_model.parameters import ladder_settings
from worldmodel_ros.nodes.world_model.statistics import Statistics
from worldmodel_ros.serving.client.failover import FailoverWorker
from worldmodel_ros.serving.transport.address import socket_path

_LOG_INTERVAL = 2.0  # s


class Activation:
    """
    One activation of a node: a new episode, with a session that knows nothing.

    `settings` are the node's parameters, read here and in `settings_changed`. Where the making of it fails, nothing is left
    of it. Its methods belong to the executor's thread, but those of a control.responder.Listener, which it is.
    """

    def __init__(self, node: LifecycleNode, engine: Any, settings: Mapping[str, Any], goal: str,
                 executed: ExecutedTopic, outputs: Outputs, advice: LargeImageAdvice, refusals: Refusals) -> None:
        self._node, self._settings, self.executed = node, settings, executed
        self._outputs, self._advice, self._refusals = outputs, advice, refusals
        self.missing_input = ''  # why the robot is stopped for want of observations
        self.statistics = Statistics()
        self.intake = Intake(engine.spec, IntakeSettings.of(settings), executed.actions,
                             lambda: node.get_clock().now().nanoseconds, refusals, advice, node.get_logger())
        self.intake.goal = goal
        self.responder = Responder(self, ladder_settings(settings), engine.spec.step_period)
        self._camera_timeout = settings['camera_timeout_s']
        self.worker = make_worker(node, settings['server'], engine, executed.actions.mean, self.responder, self)
        self._undo = ExitStack()

    def start(self) -> None:
        """Begin to answer; `stop` also undoes a start that has failed half-way."""
        undo = self._undo
        undo.callback(self._outputs.stop)
        self._outputs.start()
        undo.callback(self.worker.stop)
        self.worker.start()
        self._begun = time.monotonic()
        self._answer_timer = OneShot(self._node, self.responder.overdue)
        undo.callback(self._answer_timer.destroy)
        self._camera_timer = OneShot(self._node, self._on_camera_silent)
        undo.callback(self._camera_timer.destroy)
        self._camera_timer.arm(self._camera_timeout)
        # What lives now lives until the node is deactivated; walking it again and again would cost milliseconds.
        gc.collect()
        gc.freeze()
        undo.callback(gc.unfreeze)

    def stop(self) -> None:
        """Ask for a stop, if there is a goal, and end the threads."""
        with self._undo:
            self._halt(Tier.STOP if self.intake.goal else Tier.NONE, Verdict.IDLE, 'the node is being deactivated')

    def take(self, message: Image | CompressedImage) -> None:
        """Have an image observed, if it is a tick."""
        self.intake.frames.size = self.worker.image_size
        sound, observation = self.intake.take(message)
        if sound:
            self._camera_timer.arm(self._camera_timeout)
        if self.intake.frames.frozen:
            self._stop_for_missing_input('the camera is frozen: it repeats one image although the robot moves, or although '
                                         'its images have differed by noise before')
        if observation is None:
            return
        self.missing_input = observation.stale
        self.statistics.image(observation, self.intake.delay)
        self.statistics.dropped += self.worker.submit(observation)
        if observation.wants_answer:
            self._answer_timer.arm(observation.due - self.responder.settings.reserve - time.monotonic())

    def set_goal(self, goal: str) -> None:
        """Drive to another goal from the next image on; stop at once where it is empty."""
        self.intake.goal = goal
        if not goal:
            self._halt(Tier.STOP, Verdict.IDLE, 'the goal was cleared')

    def settings_changed(self) -> None:
        """Go on by the parameters as they are now."""
        self.intake.settings = IntakeSettings.of(self._settings)
        self.responder.settings = ladder_settings(self._settings)
        self._camera_timeout = self._settings['camera_timeout_s']

    def answered(self, answer: Answer) -> None:
        """Publish an answer, the command first. Called by the engine's thread or the executor's, one at a time."""
        self._outputs.command(answer)
        age = self._node.get_clock().now().nanoseconds / NS - answer.stamp / NS if answer.stamp else 0.0
        self.executed.commanded(answer, time.monotonic())
        self.statistics.answered(answer, age)
        self._outputs.status(answer, age, self.intake.camera_frame)

    def predicted(self, prediction: Prediction) -> None:
        """Publish a predicted future."""
        self.statistics.predicted(time.monotonic())
        self._outputs.prediction(prediction, self.intake.camera_frame)

    def failed(self, reason: str, error: Exception, restarted: bool) -> None:
        """Report a failure of the engine; it has been contained. Does not return where the GPU is lost."""
        end_if_lost(error)
        self._refusals.count(f'engine: {type(error).__name__}')
        self._node.get_logger().error(
            f'the engine failed: {reason}\n{"".join(traceback.format_exception(error))}',
            throttle_duration_sec=_LOG_INTERVAL)
        if restarted:
            self.intake.begin_episode()

    def _on_camera_silent(self) -> None:
        silent = self._camera_timeout
        self._camera_timer.arm(silent)
        self._stop_for_missing_input(f'no image that can be used has come for {silent:g} s')
        self._advice.silent(time.monotonic() - self._begun)

    def _stop_for_missing_input(self, reason: str) -> None:
        """Stop once, but say why as long as it lasts."""
        first, self.missing_input = reason != self.missing_input, reason
        if first:
            self._node.get_logger().warning(f'{reason}: commanding nothing but a stop')
        self._halt(Tier.STOP if first and self.intake.goal else Tier.NONE, Verdict.STALE_INPUT, reason)

    def _halt(self, tier: Tier, verdict: Verdict, reason: str) -> None:
        # The stamp of the newest observation keeps it in order with the commands before it.
        intake = self.intake
        self.responder.halt(
            Answer(intake.stamp, intake.episode, intake.next_sequence(), tier, verdict, reason, Counts()))


class OneShot:
    """
    Calls back from the node's executor, on the steady clock: whatever ROS time does, what is due is due.

    It costs nothing while it waits, unlike a periodic timer that looks whether it is time.
    """

    def __init__(self, node: Node, callback: Callable[[], None]) -> None:
        self._node, self._callback = node, callback
        self._timer = node.create_timer(3600.0, self._fire, clock=Clock(clock_type=ClockType.STEADY_TIME))
        self._timer.cancel()

    def arm(self, seconds: float) -> None:
        """Go off in so many seconds, and not when it was to before. From the executor's thread."""
        self._timer.timer_period_ns = max(1, round(seconds * NS))
        self._timer.reset()

    def destroy(self) -> None:
        """Never go off again."""
        self._timer.cancel()
        self._node.destroy_timer(self._timer)

    def _fire(self) -> None:
        self._timer.cancel()
        self._callback()


def make_worker(node: Node, server: str, engine: Any, executed: Callable[[int | None, int], np.ndarray],
                responder: Responder, listener: Listener) -> Worker | FailoverWorker:
    """Return what observations go to, an engine of the robot's own or a shared one; `server` as the parameter says."""
    own = Worker(engine, executed, responder, listener)
    if not server:
        return own
    logger = node.get_logger()

    def say(text: str) -> None:
        if worker.degraded_reason:
            logger.warning(text)
        else:
            logger.info(text)

    worker = FailoverWorker(socket_path(server), node.get_fully_qualified_name(), own, engine.spec, executed, responder,
                            listener, say)
    return worker
