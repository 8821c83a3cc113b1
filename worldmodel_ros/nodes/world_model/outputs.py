"""The world model node's outputs: commands, published at once, everything else from a separate thread; and statistics."""

import math
import queue
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from geometry_msgs.msg import Point
from rclpy.duration import Duration
from rclpy.lifecycle import LifecycleNode
from sensor_msgs.msg import CompressedImage
from std_msgs.msg import ColorRGBA
from visualization_msgs.msg import Marker, MarkerArray

from worldmodel_ros.control.deciding_worker import Decided, DecidingWorker
from worldmodel_ros.control.ladder import Counts, Tier
from worldmodel_ros.control.responder import Answer, Observation, Prediction
from worldmodel_ros.inputs.ticks import misfit
from worldmodel_ros.motion import path
from worldmodel_ros.msg import ActionChunk, DeadlineStatus, Decision, PredictedFuture, Timings
from worldmodel_ros.nodes.common.diagnostics import ERROR, OK, WARN
from worldmodel_ros.nodes.common.logs import at_most_every
from worldmodel_ros.nodes.common.messages import NS, float32s, frames, header, time_message, to_jpeg
from worldmodel_ros.nodes.common.qos import COMMAND, STATUS
from worldmodel_ros.nodes.world_model import decisions
from worldmodel_ros.safety.gate import Policy

if TYPE_CHECKING:
    from worldmodel_ros.nodes.world_model.node import Activation

_WAITING = 8  # length of the publishing queue
_LINE_WIDTH = 0.03  # m
_GAP = 2  # pixels, between two images of a strip
_RATE_WINDOW = 30  # images
_FEW_PREDICTIONS = 0.5  # fraction of the tick rate, below which the diagnostics warn
_PREDICTIONS_SETTLED = 3.0  # s of ticks, before which the rate of predictions is not meaningful
_LATENCY_WINDOW = 1000  # ticks
_RATE_TOLERANCE = 0.1  # relative, of the expected frequency


class Outputs:
    """
    The publishers of an engine's results. ``command`` publishes before it returns; ``status``, ``decided`` and ``prediction``
    only queue. All four are thread-safe.
    """

    def __init__(self, node: LifecycleNode, action_names: tuple[str, ...], step_period: float,
                 base_frame: str) -> None:
        self._node, self._names = node, list(action_names)
        self._period, self._base_frame = step_period, base_frame
        make = node.create_lifecycle_publisher
        self._publishers = [
            make(ActionChunk, 'action_chunk', COMMAND), make(DeadlineStatus, 'deadline_status', STATUS),
            make(PredictedFuture, 'predicted_future', STATUS),
            make(CompressedImage, 'predicted_image/compressed', STATUS),
            make(MarkerArray, 'predicted_path', STATUS), make(Decision, 'decision', STATUS),
            make(MarkerArray, 'decision_paths', STATUS)]
        (self._command, self._status, self._future, self._image, self._path, self._decision,
         self._decision_paths) = self._publishers
        self._told: tuple[Decided | None, Decision] = None, Decision()  # the newest decision and its message
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None
        self.skipped = 0

    def start(self) -> None:
        """Start the publishing thread."""
        thread = threading.Thread(target=self._run, name='publishing', daemon=True)
        thread.start()
        self._thread = thread

    def stop(self) -> None:
        """Publish queued messages and end the thread."""
        if self._thread:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def destroy(self) -> None:
        """Destroy the publishers."""
        for publisher in self._publishers:
            self._node.destroy_lifecycle_publisher(publisher)

    def command(self, answer: Answer) -> None:
        """Publish the command of an answer, if it has one, before returning."""
        if answer.tier is not Tier.NONE:
            self._command.publish(action_chunk(answer, self._names, self._period, self._base_frame))

    def status(self, answer: Answer, age: float, camera_frame: str) -> None:
        """Publish the deadline status of a tick; ``age`` as in ``deadline_status``."""
        self._later(lambda: self._status.publish(deadline_status(answer, age, camera_frame)))

    def decided(self, decided: Decided) -> None:
        """Publish how a command was decided."""
        def publish() -> None:
            self._decision.publish(self._message_of(decided))
            if self._decision_paths.get_subscription_count():
                self._decision_paths.publish(decisions.markers(decided, self._base_frame))
        self._later(publish)

    def prediction(self, prediction: Prediction, camera_frame: str) -> None:
        """Publish a predicted future and its images."""
        def publish() -> None:
            future = predicted_future(prediction, self._names, self._period, self._base_frame, camera_frame)
            if prediction.decided:
                future.decision = self._message_of(prediction.decided)
            self._future.publish(future)
            stamp = time_message(prediction.observation.stamp)
            self._path.publish(predicted_path(prediction.future, prediction.observation.stamp, self._period, self._base_frame))
            if self._image.get_subscription_count():
                self._image.publish(to_jpeg(strip(prediction), stamp, camera_frame))
        self._later(publish)

    def _message_of(self, decided: Decided) -> Decision:
        """Return how a command was decided, as a message. Call it on the publishing thread."""
        if self._told[0] is not decided:
            self._told = decided, decisions.decision(decided, self._base_frame)
        return self._told[1]

    def _later(self, publish: Callable[[], None]) -> None:
        try:
            self._queue.put_nowait(publish)
        except queue.Full:
            self.skipped += 1  # never block control on visualisation

    def _run(self) -> None:
        while (publish := self._queue.get()) is not None:
            try:
                publish()
            except Exception as error:
                self._node.get_logger().error(f'publishing failed: {error!r}', **at_most_every(5.0))


def action_chunk(answer: Answer, names: list[str], step_period: float, frame_id: str) -> ActionChunk:
    """Return the command of an answer; without values for a stop."""
    return ActionChunk(
        header=header(answer.stamp, frame_id), episode_id=answer.episode, sequence=answer.sequence,
        tier=int(answer.tier), step_period=step_period, names=names,
        values=array('f') if answer.actions is None else float32s(answer.actions))


def deadline_status(answer: Answer, age: float, frame_id: str) -> DeadlineStatus:
    """Return the deadline status of a tick; ``age``: of the observation at the answer, by ROS time [s]."""
    counts = answer.counts
    return DeadlineStatus(
        header=header(answer.stamp, frame_id), episode_id=answer.episode, sequence=answer.sequence,
        tier=int(answer.tier), verdict=int(answer.verdict), budget=answer.budget, latency=answer.latency,
        observation_age=age, predicted=answer.predicted, reason=answer.reason, two_step=counts.two_step,
        one_step=counts.one_step, smaller=counts.smaller, plan_only=counts.plan_only, last_plan=counts.last_plan,
        stop=counts.stop, late=counts.late)


def predicted_future(prediction: Prediction, names: list[str], step_period: float, base_frame: str,
                     camera_frame: str) -> PredictedFuture:
    """Return a decoded prediction as a message."""
    observation, future = prediction.observation, prediction.future
    return PredictedFuture(
        header=header(observation.stamp, camera_frame), episode_id=observation.episode,
        sequence=observation.sequence, tier=int(prediction.tier), command_tier=int(prediction.command_tier),
        age=time.monotonic() - observation.received, step_period=step_period,
        frames=frames(future.frames, observation.stamp, step_period, camera_frame),
        actions=ActionChunk(
            header=header(observation.stamp, base_frame), episode_id=observation.episode,
            sequence=observation.sequence, tier=int(prediction.tier), step_period=step_period, names=names,
            values=float32s(future.actions)),
        collision_risk=float32s(future.collision_risk),
        progress=future.progress.get(observation.goal, math.nan), goal=observation.goal,
        timings=Timings(**prediction.timings))


def strip(prediction: Prediction) -> np.ndarray:
    """Return the observation and the predicted frames side by side, uint8 (H, W', 3) RGB."""
    pictures = [prediction.observation.image, *prediction.future.frames]
    gap = np.full((pictures[0].shape[0], _GAP, 3), 255, np.uint8)
    return np.hstack([part for picture in pictures for part in (picture, gap)][:-1])


def predicted_path(future: Any, stamp: int, step_period: float, frame_id: str) -> MarkerArray:
    """
    Return the path of a future's actions, from green (safe, or contacts unknown) to red (contact certain), in the base frame.

    The marker's lifetime is the duration of the plan, so that no outdated plan is shown.
    """
    poses = path(future.actions, step_period)
    marker = Marker(header=header(stamp, frame_id), ns='plan', type=Marker.LINE_STRIP,
                    action=Marker.ADD, lifetime=Duration(seconds=len(future.actions) * step_period).to_msg())
    marker.pose.orientation.w = 1.0
    marker.scale.x = _LINE_WIDTH
    risks = future.collision_risk if len(future.collision_risk) else np.zeros(len(poses))
    risks = np.clip(np.concatenate([risks[:1], risks]), 0.0, 1.0)
    for (x, y), risk in zip([(0.0, 0.0), *poses[:, :2]], risks):
        marker.points.append(Point(x=float(x), y=float(y)))
        marker.colors.append(ColorRGBA(r=float(risk), g=float(1.0 - risk), a=1.0))
    return MarkerArray(markers=[marker])


class Statistics:
    """Statistics since activation, without warm-up. Images come from one thread and answers from several."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._received: deque[float] = deque(maxlen=_RATE_WINDOW)
        self._stamps: deque[float] = deque(maxlen=_RATE_WINDOW)
        self._steps: deque[float] = deque(maxlen=_RATE_WINDOW)  # s, between consecutive ticks of an episode
        self._newest = 0, 0  # episode and stamp [ns] of the newest tick
        self._latencies: deque[float] = deque(maxlen=_LATENCY_WINDOW)
        self._delay = 0.0
        self._age = self._oldest = 0.0
        self._predicted: deque[float] = deque()  # s, of the last _PREDICTIONS_SETTLED
        self._first: float | None = None  # s, receipt of the first tick
        self.predictions = 0
        self.counts = Counts()
        self.dropped = 0

    def image(self, observation: Observation, delay: float) -> None:
        """Count a tick; ``delay``: its age on receipt, by ROS time [s]."""
        with self._lock:
            self._first = observation.received if self._first is None else self._first
            self._received.append(observation.received)
            self._stamps.append(observation.stamp * 1e-9)
            self._delay = delay
            (episode, stamp), self._newest = self._newest, (observation.episode, observation.stamp)
            if episode == observation.episode:
                self._steps.append((observation.stamp - stamp) / NS)

    def misfit(self, step_period: float) -> str:
        """Return why the camera's recent rate does not suit the model, and what to do; '' if it does."""
        with self._lock:
            steps = list(self._steps)
        return misfit(steps, step_period, Policy().command_timeout)

    def answered(self, answer: Answer, age: float) -> None:
        """Count an answer to an observation that was ``age`` s old, by ROS time, when the answer went out."""
        with self._lock:
            self.counts = answer.counts
            if answer.tier is not Tier.NONE and answer.latency:
                self._latencies.append(answer.latency)
                self._age, self._oldest = age, max(self._oldest, age)

    def predicted(self, now: float) -> None:
        """Count a prediction published at the steady time ``now`` [s]."""
        with self._lock:
            self.predictions += 1
            self._predicted.append(now)
            while now - self._predicted[0] >= _PREDICTIONS_SETTLED:
                self._predicted.popleft()

    def few_predictions(self, now: float, fastest: float) -> str:
        """
        Return a warning if predictions come at a far lower rate than ticks, else ''.

        ``fastest``: the rate that the machine could sustain, by its measured times [Hz].
        """
        with self._lock:
            ticks, predictions = _rate([*self._received, now]), self._prediction_rate(now)
            settled = self._first is not None and now - self._first > _PREDICTIONS_SETTLED
        if not settled or predictions >= _FEW_PREDICTIONS * ticks:
            return ''
        return (f'predictions come at {predictions:.1f} Hz, ticks at {ticks:.1f} Hz: this machine has time for '
                f'{fastest:.1f} Hz by its measured step times; take a faster one, a smaller model or a lower load')

    def _prediction_rate(self, now: float) -> float:
        recent = [at for at in self._predicted if now - at < _PREDICTIONS_SETTLED]
        since = now - _PREDICTIONS_SETTLED if self._first is None else max(self._first, now - _PREDICTIONS_SETTLED)
        return len(recent) / (now - since) if now > since else 0.0

    def values(self, now: float, step_period: float) -> dict[str, Any]:
        """Return the key-value pairs of a report at the steady time ``now`` [s], and reset the largest age."""
        with self._lock:
            counts = self.counts
            p50, p99, largest = (np.percentile(self._latencies, (50, 99, 100)) * 1e3 if self._latencies
                                 else (0.0, 0.0, 0.0))
            values = {
                'frame_rate_node': _rate([*self._received, now]), 'frame_rate_msg': _rate(self._stamps),
                'current_delay_from_realtime_ms': self._delay * 1e3, 'expected_frequency': 1.0 / step_period,
                'tolerance': _RATE_TOLERANCE, 'deadline_miss_count': counts.late,
                'latency_p50_ms': float(p50), 'latency_p99_ms': float(p99), 'latency_max_ms': float(largest),
                'observation_age_ms': self._age * 1e3,
                'observation_age_max_ms': self._oldest * 1e3, 'two_step': counts.two_step,
                'one_step': counts.one_step, 'smaller': counts.smaller, 'plan_only': counts.plan_only,
                'last_plan': counts.last_plan, 'stop': counts.stop, 'predictions': self.predictions,
                'predictions_rate': self._prediction_rate(now),
                'dropped_images': self.dropped}
            self._oldest = 0.0
            return values


def _rate(times: Sequence[float]) -> float:
    """Return the mean rate of events [Hz] at ``times`` [s]."""
    span = times[-1] - times[0] if len(times) > 1 else 0.0
    return (len(times) - 1) / span if span > 0.0 else 0.0


def judge(engine: Any, activation: 'Activation') -> tuple[bytes, str]:
    """Return level and message of a diagnostic_msgs/DiagnosticStatus: what stops the robot, else all warnings."""
    if refusal := activation.camera.correction.refusal:
        return ERROR, refusal
    if activation.missing_input:
        return ERROR, activation.missing_input
    warnings = []
    if differences := activation.camera.differences():
        warnings.append(differences)
    if activation.worker.degraded_reason:
        does = 'imagining' if isinstance(activation.worker, DecidingWorker) else 'driving'
        warnings.append(f'{does} with the own model: {activation.worker.degraded_reason}')
    if engine.degraded_reason:
        warnings.append(f'the model is being restored: {engine.degraded_reason}')
    if unheard := activation.executed.degraded_reason(time.monotonic()):
        warnings.append(unheard)
    if misfit := activation.statistics.misfit(engine.spec.step_period):
        warnings.append(misfit)
    if few := activation.statistics.few_predictions(
            time.monotonic(), engine.step_times.prediction_rate(engine.spec.step_period)):
        warnings.append(few)
    if activation.responder.best is not Tier.TWO_STEP:
        warnings.append(f'degraded to {activation.responder.best.name.lower()}')
    if warnings:
        return WARN, '; '.join(warnings)
    aim = activation.intake.goal or activation.intake.task.name
    return OK, f'driving to {aim}' if aim else 'no goal'
