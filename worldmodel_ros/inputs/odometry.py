"""Wheel odometry from a topic, evaluated at the moment of a frame."""
from __future__ import annotations

import math
import threading
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from .ticks import NS

_FEWEST, _MOST = 64, 4096  # readings that are kept
_KEPT = 2 * NS    # ns, for which more than the fewest are: a recorded frame is judged a step after its receipt
_OLDEST = 0.25    # s, oldest reading used for a frame


class Reading(NamedTuple):
    """``stamp`` [ns, ROS time]; pose x, y [m] and yaw [rad]; twist [m/s, rad/s]."""

    stamp: int
    pose: tuple[float, float, float]
    twist: tuple[float, float]

    @classmethod
    def of(cls, message: Any) -> Reading:
        """Return the reading in a nav_msgs/Odometry."""
        stamp, pose, twist = message.header.stamp, message.pose.pose, message.twist.twist
        return cls(stamp.sec * NS + stamp.nanosec, (pose.position.x, pose.position.y, yaw_of(pose.orientation)),
                   (twist.linear.x, twist.angular.z))


def yaw_of(q: Any) -> float:
    """Return the yaw, rad, of a geometry_msgs/Quaternion."""
    return math.atan2(2.0 * (q.w * q.z + q.x * q.y), 1.0 - 2.0 * (q.y * q.y + q.z * q.z))


class WheelReadings:
    """
    The newest readings of an odometry. Written by one thread and read by another.

    A frame gets the mean velocities over the period before it, as in training, and the pose at its stamp, extrapolated from
    the reading before it.
    """

    def __init__(self, step_period: float) -> None:
        self._period = round(step_period * NS)
        self._lock = threading.Lock()
        self._kept: deque[Reading] = deque(maxlen=_MOST)

    def add(self, reading: Reading) -> bool:
        """Add a reading if it is finite; return whether it is."""
        if not all(map(math.isfinite, (*reading.pose, *reading.twist))):
            return False
        with self._lock:
            if self._kept and reading.stamp == self._kept[-1].stamp:
                self._kept.pop()  # published twice
            elif self._kept and reading.stamp < self._kept[-1].stamp:
                self._kept.clear()  # time was set back, or the odometry has started again
            self._kept.append(reading)
            while len(self._kept) > _FEWEST and self._kept[0].stamp < reading.stamp - _KEPT:
                self._kept.popleft()
        return True

    @property
    def newest(self) -> int | None:
        """Stamp of the newest reading [ns]; None before the first."""
        with self._lock:
            return self._kept[-1].stamp if self._kept else None

    def at(self, stamp: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the pose (3,) at a frame's stamp [ns] and the mean velocities (2,) over the period before it; None without a
        recent enough reading before it."""
        lately: list[Reading] = []  # the newest first
        with self._lock:
            for reading in reversed(self._kept):
                if lately and reading.stamp <= lately[0].stamp - self._period:
                    break
                if reading.stamp <= stamp:
                    lately.append(reading)
        if not lately or stamp - lately[0].stamp > _OLDEST * NS:
            return None
        newest = lately[0]
        v, w = newest.twist
        since = (stamp - newest.stamp) / NS
        x, y, yaw = newest.pose
        heading = yaw + w * since / 2
        pose = x + v * since * math.cos(heading), y + v * since * math.sin(heading), yaw + w * since
        return np.array(pose), np.mean([reading.twist for reading in reversed(lately)], 0)
