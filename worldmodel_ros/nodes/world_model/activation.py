"""What the world model node does while it is active: from an image to its answer, and to a stop where none comes."""

import gc
import time
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from rclpy.lifecycle import LifecycleNode
from sensor_msgs.msg import CompressedImage, Image

from worldmodel_ros.control.ladder import NS, Counts, Tier, Verdict
from worldmodel_ros.control.responder import Answer, Prediction, Responder
from worldmodel_ros.engine.device_failure import end_if_lost
from worldmodel_ros.nodes.common.diagnostics import Refusals
from worldmodel_ros.nodes.world_model.camera import LargeImageAdvice
from worldmodel_ros.nodes.world_model.executed import ExecutedTopic
from worldmodel_ros.nodes.world_model.intake import Intake
from worldmodel_ros.nodes.world_model.outputs import Outputs
from worldmodel_ros.nodes.world_model.parameters import ladder_settings
from worldmodel_ros.nodes.world_model.statistics import Statistics
from worldmodel_ros.nodes.world_model.timer import OneShot
from worldmodel_ros.nodes.world_model.worker import make_worker

_LOG_INTERVAL = 2.0  # s


class Activation:
    """
    One activation of a node: a new episode, with a session that knows nothing.

    `settings` are the node's parameters, read anew whenever they matter. Where the making of it fails, nothing is left
    of it. Its methods belong to the executor's thread, but those of an engine.answers.Listener, which it is.
    """

    def __init__(self, node: LifecycleNode, engine: Any, settings: Mapping[str, Any], goal: str,
                 executed: ExecutedTopic, outputs: Outputs, advice: LargeImageAdvice, refusals: Refusals) -> None:
        self._node, self._settings, self.executed = node, settings, executed
        self._outputs, self._advice, self._refusals = outputs, advice, refusals
        self.trouble = ''  # why the robot is stopped for want of observations
        self.statistics = Statistics()
        self._intake = Intake(engine.spec, settings, executed.actions, lambda: node.get_clock().now().nanoseconds,
                              refusals, advice, node.get_logger())
        self._intake.goal = goal
        self._responder = Responder(self, ladder_settings(settings), engine.spec.step_period)
        self.worker = make_worker(node, settings['server'], engine, executed.actions.mean, self._responder, self)
        self._undo = ExitStack()

    @property
    def goal(self) -> str:
        """What is driven to; empty: nothing is commanded."""
        return self._intake.goal

    @property
    def best(self) -> Tier:
        """The best tier allowed at present."""
        return self._responder.best

    @property
    def camera_frame(self) -> str:
        """Frame of the newest image."""
        return self._intake.camera_frame

    def start(self) -> None:
        """Begin to answer; `stop` also undoes a start that has failed half-way."""
        undo = self._undo
        undo.callback(self._outputs.stop)
        self._outputs.start()
        undo.callback(self.worker.stop)
        self.worker.start()
        self._begun = time.monotonic()
        self._answer_timer = OneShot(self._node, self._responder.overdue)
        undo.callback(self._answer_timer.destroy)
        self._camera_timer = OneShot(self._node, self._on_camera_silent)
        undo.callback(self._camera_timer.destroy)
        self._camera_timer.arm(self._settings['camera_timeout_s'])
        # What lives now lives until the node is deactivated; walking it again and again would cost milliseconds.
        gc.collect()
        gc.freeze()
        undo.callback(gc.unfreeze)

    def stop(self) -> None:
        """Ask for a stop, if there is a goal, and end the threads."""
        with self._undo:
            self._halt(Tier.STOP if self.goal else Tier.NONE, Verdict.IDLE, 'the node is being deactivated')

    def take(self, message: Image | CompressedImage) -> None:
        """Have an image observed, if it is a tick."""
        self._intake.image_size = self.worker.image_size
        sound, observation = self._intake.take(message)
        if sound:
            self._camera_timer.arm(self._settings['camera_timeout_s'])
        if self._intake.frozen:
            self._suffer('the camera is frozen: it repeats one image although the robot moves, or although its images '
                         'have differed by noise before')
        if observation is None:
            return
        self.trouble = observation.stale
        self.statistics.image(observation, self._intake.delay)
        self.statistics.dropped += self.worker.submit(observation)
        if observation.wants_answer:
            self._answer_timer.arm(observation.due - self._responder.settings.reserve - time.monotonic())

    def set_goal(self, goal: str) -> None:
        """Drive to another goal from the next image on; stop at once where it is empty."""
        self._intake.goal = goal
        if not goal:
            self._halt(Tier.STOP, Verdict.IDLE, 'the goal was cleared')

    def begin_episode(self) -> None:
        """Forget what was seen, with the next image. From any thread."""
        self._intake.begin_episode()

    def settings_changed(self) -> None:
        """Go on by the parameters as they are now."""
        self._responder.settings = ladder_settings(self._settings)

    def answered(self, answer: Answer) -> None:
        """Publish an answer, the command first. Called by the engine's thread or the executor's, one at a time."""
        self._outputs.command(answer)
        age = self._node.get_clock().now().nanoseconds / NS - answer.stamp / NS if answer.stamp else 0.0
        self.executed.commanded(answer, time.monotonic())
        self.statistics.answered(answer, age)
        self._outputs.status(answer, age, self.camera_frame)

    def predicted(self, prediction: Prediction) -> None:
        """Publish a predicted future."""
        self.statistics.predicted(time.monotonic())
        self._outputs.prediction(prediction, self.camera_frame)

    def failed(self, reason: str, error: Exception, restarted: bool) -> None:
        """Report a failure of the engine; it has been contained. Does not return where the GPU is lost."""
        end_if_lost(error)
        self._refusals.count(f'engine: {type(error).__name__}')
        self._node.get_logger().error(
            f'the engine failed: {reason}\n{"".join(traceback.format_exception(error))}',
            throttle_duration_sec=_LOG_INTERVAL)
        if restarted:
            self.begin_episode()

    def _on_camera_silent(self) -> None:
        silent = self._settings['camera_timeout_s']
        self._camera_timer.arm(silent)
        self._suffer(f'no image that can be used has come for {silent:g} s')
        self._advice.silent(time.monotonic() - self._begun)

    def _suffer(self, trouble: str) -> None:
        """Stop for want of observations; once, but say so as long as it lasts."""
        first, self.trouble = trouble != self.trouble, trouble
        if first:
            self._node.get_logger().warning(f'{trouble}: commanding nothing but a stop')
        self._halt(Tier.STOP if first and self.goal else Tier.NONE, Verdict.STALE_INPUT, trouble)

    def _halt(self, tier: Tier, verdict: Verdict, reason: str) -> None:
        # The stamp of the newest observation keeps it in order with the commands before it.
        intake = self._intake
        self._responder.halt(
            Answer(intake.stamp, intake.episode, intake.next_sequence(), tier, verdict, reason, Counts()))
