"""What the engine answers, as messages."""

import math
import time
from array import array

import numpy as np
from builtin_interfaces.msg import Time
from geometry_msgs.msg import Point
from rclpy.duration import Duration
from std_msgs.msg import ColorRGBA, Header
from visualization_msgs.msg import Marker, MarkerArray

from worldmodel_ros.control.maneuvers import path
from worldmodel_ros.control.responder import Answer, Prediction
from worldmodel_ros.msg import ActionChunk, DeadlineStatus, PredictedFuture, Timings
from worldmodel_ros.nodes.common.images import to_jpeg

_NS = 1_000_000_000
_LINE_WIDTH = 0.03  # m
_GAP = 2  # pixels, between two pictures of a strip


def time_message(stamp: int) -> Time:
    """Return `stamp` [ns] as a message."""
    return Time(sec=stamp // _NS, nanosec=stamp % _NS)


def nanoseconds(time: Time) -> int:
    """Return a time message in ns."""
    return time.sec * _NS + time.nanosec


def header(stamp: int, frame_id: str) -> Header:
    """Return a header for `stamp` [ns]."""
    return Header(stamp=time_message(stamp), frame_id=frame_id)


def float32s(values: np.ndarray) -> array:
    """Return an array of any shape as the value of a float32[] field."""
    return array('f', np.ascontiguousarray(values, np.float32).tobytes())


def action_chunk(answer: Answer, names: list[str], step_period: float, frame_id: str) -> ActionChunk:
    """Return the command of an answer; without values for a stop."""
    return ActionChunk(
        header=header(answer.stamp, frame_id), episode_id=answer.episode, sequence=answer.sequence,
        tier=int(answer.tier), step_period=step_period, names=names,
        values=array('f') if answer.actions is None else float32s(answer.actions))


def deadline_status(answer: Answer, age: float, frame_id: str) -> DeadlineStatus:
    """Return how a tick stood; `age` is that of the observation at the answer, by ROS time [s]."""
    counts = answer.counts
    return DeadlineStatus(
        header=header(answer.stamp, frame_id), episode_id=answer.episode, sequence=answer.sequence,
        tier=int(answer.tier), verdict=int(answer.verdict), budget=answer.budget, latency=answer.latency,
        observation_age=age, predicted=answer.predicted, reason=answer.reason, two_step=counts.two_step,
        one_step=counts.one_step, smaller=counts.smaller, plan_only=counts.plan_only, last_plan=counts.last_plan,
        stop=counts.stop, late=counts.late)


def frames(pictures: np.ndarray, stamp: int, step_period: float, frame_id: str) -> list:
    """
    Return RGB, uint8 (T, H, W, 3), as JPEG, each stamped with the time it shows; `stamp` [ns]: the
    observation's.
    """
    return [to_jpeg(picture, time_message(stamp + round((k + 1) * step_period * _NS)), frame_id)
            for k, picture in enumerate(pictures)]


def predicted_future(prediction: Prediction, names: list[str], step_period: float, base_frame: str,
                     camera_frame: str) -> PredictedFuture:
    """Return a decoded prediction."""
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


def predicted_path(prediction: Prediction, step_period: float, frame_id: str) -> MarkerArray:
    """
    Return where the plan leads, from green (safe) to red (a contact is certain), in the base frame.

    It is shown for as long as the plan has actions: what stays on a screen longer would be nobody's plan.
    """
    future = prediction.future
    poses = path(future.actions, step_period)
    marker = Marker(header=header(prediction.observation.stamp, frame_id), ns='plan', type=Marker.LINE_STRIP,
                    action=Marker.ADD, lifetime=Duration(seconds=len(future.actions) * step_period).to_msg())
    marker.pose.orientation.w = 1.0
    marker.scale.x = _LINE_WIDTH
    risks = np.clip(np.concatenate([future.collision_risk[:1], future.collision_risk]), 0.0, 1.0)
    for (x, y), risk in zip([(0.0, 0.0), *poses[:, :2]], risks):
        marker.points.append(Point(x=float(x), y=float(y)))
        marker.colors.append(ColorRGBA(r=float(risk), g=float(1.0 - risk), a=1.0))
    return MarkerArray(markers=[marker])
