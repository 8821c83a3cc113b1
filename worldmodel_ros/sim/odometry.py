"""Wheel odometry of the simulated robot: encoders with noise and slip, and a pose integrated from them."""
from dataclasses import dataclass
import math

import numpy as np

from worldmodel_ros.motion import along_arc
from worldmodel_ros.sim.scene import TRACK, WHEEL_RADIUS
from worldmodel_ros.sim.world import World

_STREAM = 21  # keeps the errors independent of the scene of the same seed
_SLIP_TIME = 1.0  # s, correlation time of the slip


@dataclass(frozen=True)
class EncoderErrors:
    """Errors of wheel encoders. The defaults are those of a small robot on a hard floor.

    ``scale``: standard deviation of a wheel's radius relative to the nominal one, drawn once per episode. ``slip``: standard
    deviation of the share of a wheel's rotation that is slip, which changes slowly. ``noise``: standard deviation of a
    wheel's travel, rad per root of a second. ``ticks``: of an encoder per turn of the wheel.
    """

    scale: float = 0.01
    slip: float = 0.02
    noise: float = 0.01
    ticks: int = 1024


class WheelOdometry:
    """The pose in SE(2) integrated from the encoders of a world's robot, relative to where it started.

    The errors are determined by the world's seed, the time of each update and the wheels' rotation, so that an episode
    driven again measures the same. The world's own ``pose`` is the ground truth.

    ``pose``: x, y (m) and yaw (rad, -pi..pi) in the frame ``odom``, whose origin is where the robot started.
    ``twist``: m/s and rad/s over the last update's interval.
    """

    def __init__(self, world: World, errors: EncoderErrors = EncoderErrors()) -> None:
        self._errors, self._time, self._angles = errors, world.time, np.array(world.wheel_angles)
        self._seed = world.seed
        self._scale = 1.0 + errors.scale * self._rng(world.time).standard_normal(2)
        self._slip = np.zeros(2)
        self._travel = np.zeros(2)  # rad, of each wheel as its encoder has counted it, before rounding
        self._counted = np.zeros(2)  # rad, in whole ticks
        self.pose = (0.0, 0.0, 0.0)
        self.twist = (0.0, 0.0)

    def update(self, world: World) -> None:
        """Integrate the wheels' motion since the last update; ``world`` must be the same one."""
        interval = world.time - self._time
        if interval <= 0.0:
            return
        rng, errors = self._rng(world.time), self._errors
        angles = np.array(world.wheel_angles)
        keep = math.exp(-interval / _SLIP_TIME)
        self._slip = keep * self._slip + math.sqrt(1.0 - keep * keep) * errors.slip * rng.standard_normal(2)
        turned = angles - self._angles
        # Noise only while turning: an encoder at rest counts nothing.
        noise = errors.noise * math.sqrt(interval) * rng.standard_normal(2) * (np.abs(turned) > 1e-3)
        self._travel += turned * self._scale * (1.0 + self._slip) + noise
        tick = math.tau / errors.ticks
        counted = np.floor(self._travel / tick) * tick
        left, right = ((counted - self._counted) * WHEEL_RADIUS).tolist()
        self._time, self._angles, self._counted = world.time, angles, counted
        self._advance((left + right) / 2, (right - left) / TRACK, interval)

    def _advance(self, way: float, turn: float, interval: float) -> None:
        self.twist = (way / interval, turn / interval)
        (x, y, yaw), = along_arc(np.array([self.pose]), np.array([self.twist]), interval).tolist()
        self.pose = (x, y, math.remainder(yaw, math.tau))

    def _rng(self, time: float) -> np.random.Generator:
        return np.random.default_rng([self._seed, _STREAM, round(time * 1e6)])
