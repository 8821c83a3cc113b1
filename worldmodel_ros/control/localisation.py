"""Localises the robot by its commands and odometry, corrected for drift by walls and things that are seen again.

An extended Kalman filter over the robot's pose, the room's walls and the things that do not move (EKF-SLAM: Smith, Self and
Cheeseman, 1990; Thrun, Burgard and Fox, Probabilistic Robotics, chapter 10), and over what odometry and commands are
systematically wrong by (self-calibration: Martinelli et al., Simultaneous localization and odometry self calibration for mobile
robot, 2007). Its measurements come from a forecast, never from the simulator.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from worldmodel_ros.motion import MOTOR_LAG, PERIOD, to_base

# The state: x, y, yaw; direction of wall 0, offset of each wall; mean velocities over the last interval [m/s, rad/s]; the
# base's calibration; x and y of each thing.
_POSE, _WALLS, _VELOCITIES, _CALIBRATION, _THINGS = slice(0, 3), slice(3, 8), slice(8, 10), slice(10, 16), 16
_V, _W = 8, 9
# Calibration: what is wrong with a command's speed and with its turning [shares], and how much a base that should go straight
# turns [rad/m]; the same share for odometry, and how much slip it takes for a turn [rad/m]; by how much the body turns ahead of
# its wheels [s].
_SPEED, _TURNING, _CURVE, _SCALE, _SLIP, _LEAD = range(10, 16)
_DEVIATIONS = np.array((0.1, 0.1, 0.12, 0.02, 0.25, 0.1))  # of a base of which nothing has been learned yet
_UNKNOWN = 1e4            # m2 or rad2, variance of what was not seen yet
_KNOWN = 0.5 * _UNKNOWN   # a smaller one is of what was seen; a rotation rounds the other one a little
QUARTER = math.pi / 2
_CHANGES = 600.0          # s, in which a calibration may change by so much
_SLIP_TIME = 1.0          # s, correlation time of the slip
# Standard deviations of the velocities,
_FOLLOWS = (0.006, 0.03)  # m/s and rad/s, of a base that follows its commands, and
_FOLLOWS_CHANGE = 0.5     # as a share of how much these change, since its latency varies;
_COUNTED = (0.0003, 0.0015)  # m and rad, of what wheels count
# Growth of the pose's variances, in addition: more than the calibration leaves, so that what is in view soon counts more than
# what was. With a twentieth of it robots of ``recall`` touched nearly twice as much (docs/decisions.md).
_PER_METRE = (0.001, 0.0005, 0.02)  # along, across [m2], yaw [rad2], for each m
_TURN_CHANGE = 0.1                   # s, of the change of the angular velocity
# Standard deviations of a forecast, wider than measured (docs/task_results.md): errors of successive frames are correlated.
_ANGLE = math.radians(1.5)            # of the walls' direction
_WALL_SEEN, _WALL_ASIDE = 0.15, 0.5   # m, of a wall ahead, and of one that is barely in view
_AHEAD, _ASIDE = math.radians(35.0), math.radians(70.0)
BEARING = math.radians(1.5)
_RANGE = (0.05, 0.06)                 # m, and for each m
_IN_VIEW, _NEAR, _FAR = math.radians(38.0), 0.45, 3.5
_GATE = 3.0                           # standard deviations beyond which a measurement is rejected
_JUMP = 1.0, math.radians(120.0)      # m or rad between two frames, beyond which the odometry was reset,
_FASTEST = 5.0, 5.0                   # unless images are missing, with at least so many m/s or rad/s; no base is faster
_UNMEASURED = (0.05, 0.05, 0.1)       # m, m, rad: standard deviation of the motion in that time
_MOVED = 10                           # rejected measurements in a row, after which a thing has been moved


class Localiser:
    """The robot's pose in the frame in which its odometry started, or that ``start_at`` has set. That frame stays if the
    odometry is reset. Not thread-safe.

    ``slots``: indices of the forecast slots whose things do not move. ``pose`` (3,), m and rad: the estimate; ``sure`` (3,):
    its standard deviations.
    """

    def __init__(self, slots: list[int]) -> None:
        self._slots = slots
        size = _THINGS + 2 * len(slots)
        self._state, variances = np.zeros(size), np.full(size, _UNKNOWN)
        variances[_POSE] = variances[_VELOCITIES] = 0.0
        variances[_CALIBRATION] = _DEVIATIONS ** 2
        self._covariance = np.diag(variances)
        self._odometry: np.ndarray | None = None
        self._commanded = np.zeros(2)
        self._refused = dict.fromkeys(slots, 0)

    @property
    def pose(self) -> np.ndarray:
        return self._state[_POSE].copy()

    @property
    def sure(self) -> np.ndarray:
        return np.sqrt(np.maximum(np.diag(self._covariance)[_POSE], 0.0))

    @property
    def slots(self) -> list[int]:
        """Slots of the things that can be known."""
        return self._slots

    @property
    def count(self) -> int:
        """Number of things that can be known."""
        return len(self._slots)

    def things(self) -> dict[int, np.ndarray]:
        """Return the places (2,) of the things that were seen, by slot."""
        return {slot: self._state[at:at + 2].copy() for slot, at in zip(self._slots, range(_THINGS, len(self._state), 2))
                if self._covariance[at, at] < _KNOWN}

    def walls(self) -> tuple[float, np.ndarray] | None:
        """Return the direction of the first wall's normal, rad, and the offsets (4,) of it and of the walls at the next
        quarter turns, m, infinite for one not seen; None before any was seen."""
        variances = np.diag(self._covariance)
        if variances[3] >= _KNOWN:
            return None
        return float(self._state[3]), np.where(variances[4:8] < _KNOWN, self._state[4:8], np.inf)

    def start_at(self, pose: np.ndarray) -> None:
        """Set the estimate to ``pose`` (3,) and move all that is known along with it."""
        old, state = self.pose, self._state
        turn = pose[2] - old[2]
        rotation = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
        normals = self._normals() @ rotation.T
        shift = pose[:2] - rotation @ old[:2]
        state[_POSE] = pose
        state[3] += turn
        state[4:8] += normals @ shift
        for at in range(_THINGS, len(state), 2):
            state[at:at + 2] = rotation @ state[at:at + 2] + shift
        moved = np.eye(len(state))
        for at in (0, *range(_THINGS, len(state), 2)):
            moved[at:at + 2, at:at + 2] = rotation
        moved[4:8, 3] = normals @ (shift[1], -shift[0])  # an offset changes as its wall turns about the new origin
        self._covariance = moved @ self._covariance @ moved.T

    def moved(self, odometry: np.ndarray, seconds: float = PERIOD, commanded: np.ndarray | None = None) -> None:
        """Predict: take the odometry pose (3,) at the next frame, so many ``seconds`` after the one before, and the mean
        command (2,) in that time, m/s and rad/s; None: not known."""
        odometry = np.asarray(odometry, float)
        before, self._odometry = self._odometry, odometry
        if before is None:
            self._state[_POSE] = odometry
            return
        turn = math.remainder(odometry[2] - before[2], math.tau)
        way = to_base(odometry[:2], (*before[:2], before[2] + turn / 2))
        if any(each > max(jump, fastest * seconds)
               for each, jump, fastest in zip((math.hypot(*way), abs(turn)), _JUMP, _FASTEST)):
            self._covariance[_POSE, _POSE] += np.diag(np.square(_UNMEASURED))
            return
        turned = self._state[_W]
        self._drove(np.array([way[0], turn]) / seconds, seconds, commanded)
        self._go(way[1], seconds)
        self._covariance[2, 2] += (_TURN_CHANGE * (self._state[_W] - turned)) ** 2

    def _drove(self, measured: np.ndarray, seconds: float, commanded: np.ndarray | None) -> None:
        """Estimate the velocities over ``seconds`` from measured and commanded ones (2,). A base that does not do what was
        commanded, since something blocks or pushes it, is only measured."""
        self._age(seconds)
        if commanded is not None and (np.abs(commanded) <= _FASTEST).all():
            lag = min(MOTOR_LAG / seconds, 1.0)
            v, w = expected = lag * self._commanded + (1.0 - lag) * commanded
            change, self._commanded = np.abs(commanded - self._commanded), np.array(commanded, float)
            rows = np.zeros((2, len(self._state)))
            rows[0, _SPEED], rows[1, _TURNING], rows[1, _CURVE] = v, w, v
            self._set_velocities(expected + rows @ self._state, rows, np.square(np.add(_FOLLOWS, _FOLLOWS_CHANGE * change)))
            if self._counted(measured, seconds):
                return
        self._set_velocities(measured, np.zeros((2, len(self._state))), np.full(2, _UNKNOWN))
        self._counted(measured, seconds)

    def _age(self, seconds: float) -> None:
        """Let ``seconds`` pass for the calibration, and take from the yaw what the base turned ahead of its wheels."""
        state, change = self._state, np.eye(len(self._state))
        keep = math.exp(-seconds / _SLIP_TIME)
        change[2, _W], change[2, _LEAD], change[_SLIP, _SLIP] = -state[_LEAD], -state[_W], keep
        state[2] -= state[_LEAD] * state[_W]
        state[_SLIP] *= keep
        self._covariance = change @ self._covariance @ change.T
        growth = _DEVIATIONS ** 2 * seconds / _CHANGES
        growth[_SLIP - _SPEED] = _DEVIATIONS[_SLIP - _SPEED] ** 2 * (1.0 - keep * keep)
        self._covariance[_CALIBRATION, _CALIBRATION] += np.diag(growth)

    def _set_velocities(self, values: np.ndarray, rows: np.ndarray, variances: np.ndarray) -> None:
        """Set the velocities to ``values`` (2,), which depend on the state by ``rows`` (2, N), with further variances (2,)."""
        self._state[_VELOCITIES] = values
        common = rows @ self._covariance
        self._covariance[_VELOCITIES], self._covariance[:, _VELOCITIES] = common, common.T
        self._covariance[_VELOCITIES, _VELOCITIES] = common @ rows.T + np.diag(variances)

    def _counted(self, measured: np.ndarray, seconds: float) -> bool:
        """Update with velocities (2,) by the odometry; return whether they were accepted."""
        state, rows = self._state, np.zeros((2, len(self._state)))
        scale = 1.0 + state[_SCALE]
        rows[0, _V], rows[0, _SCALE] = scale, state[_V]
        rows[1, _W], rows[1, _SCALE], rows[1, _V], rows[1, _SLIP] = scale, state[_W], state[_SLIP], state[_V]
        expected = np.array([state[_V] * scale, state[_W] * scale + state[_SLIP] * state[_V]])
        # A wheel that stands still counts nothing, and has no noise.
        return self._update(measured - expected, rows, np.square(np.divide(_COUNTED, seconds)) * (measured != 0.0))

    def _go(self, aside: float, seconds: float) -> None:
        """Move the pose by the velocities over ``seconds``, and ``aside`` m to the left."""
        state, change = self._state, np.eye(len(self._state))
        v, w, lead = state[_V], state[_W], state[_LEAD]
        middle = state[2] + w * seconds / 2
        cos, sin = math.cos(middle), math.sin(middle)
        far = v * seconds
        step = cos * far - sin * aside, sin * far + cos * aside
        change[0, [2, _V, _W]] = -step[1], cos * seconds, -step[1] * seconds / 2
        change[1, [2, _V, _W]] = step[0], sin * seconds, step[0] * seconds / 2
        change[2, [_W, _LEAD]] = seconds + lead, w
        state[_POSE] += (*step, w * (seconds + lead))
        self._covariance = change @ self._covariance @ change.T
        rotation = np.array([[cos, -sin], [sin, cos]])
        self._covariance[:2, :2] += rotation @ np.diag(_PER_METRE[:2]) @ rotation.T * abs(far)
        self._covariance[2, 2] += _PER_METRE[2] * abs(far)

    def saw(self, presence: np.ndarray, places: np.ndarray, walls: np.ndarray) -> None:
        """Update with a forecast's present: presence (S,), places (S, 2) in m in base_link, walls (6,) as in ``Seen``."""
        self._saw_walls(math.atan2(walls[1], walls[0]) / 4.0, walls[2:])
        for number, slot in enumerate(self._slots):
            if presence[slot] > 0.5:
                self._saw_thing(slot, _THINGS + 2 * number, places[slot])

    def _saw_walls(self, angle: float, distances: np.ndarray) -> None:
        state = self._state
        if self._covariance[3, 3] >= _KNOWN:
            state[3] = state[2] + angle
        row = np.zeros(len(state))
        row[2], row[3] = -1.0, 1.0
        self._update(np.array([math.remainder(angle + state[2] - state[3], QUARTER)]), row[None], [_ANGLE ** 2])
        for k in range(4):
            deviation = wall_deviation(angle + k * QUARTER)
            if deviation is None:
                continue
            wall = round((angle + k * QUARTER + state[2] - state[3]) / QUARTER) % 4
            direction = state[3] + wall * QUARTER
            normal = np.array([math.cos(direction), math.sin(direction)])
            x, y = state[:2]
            along = normal @ (x, y)
            across = -normal[1] * x + normal[0] * y
            if self._covariance[4 + wall, 4 + wall] >= _KNOWN:
                state[4 + wall] = distances[k] + along
            row = np.zeros(len(state))
            row[:2], row[3], row[4 + wall] = -normal, -across, 1.0
            error = distances[k] - (state[4 + wall] - along)
            self._update(np.array([error]), row[None], [deviation ** 2])

    def _saw_thing(self, slot: int, at: int, place: np.ndarray) -> None:
        away, bearing = math.hypot(*place), math.atan2(place[1], place[0])
        if abs(bearing) > _IN_VIEW or not _NEAR < away < _FAR:
            return
        state = self._state
        x, y, yaw = state[_POSE]
        if self._covariance[at, at] >= _KNOWN or self._refused[slot] > _MOVED:
            state[at:at + 2] = x + away * math.cos(yaw + bearing), y + away * math.sin(yaw + bearing)
            self._covariance[at:at + 2] = self._covariance[:, at:at + 2] = 0.0
            self._covariance[at:at + 2, at:at + 2] = _UNKNOWN * np.eye(2)
            self._refused[slot] = 0
        dx, dy = state[at] - x, state[at + 1] - y
        far = max(math.hypot(dx, dy), 0.05)
        cos, sin = dx / far, dy / far
        rows = np.zeros((2, len(state)))
        rows[0, :2], rows[0, at:at + 2] = (-cos, -sin), (cos, sin)
        rows[1, :2], rows[1, 2], rows[1, at:at + 2] = (sin / far, -cos / far), -1.0, (-sin / far, cos / far)
        errors = np.array([away - far, math.remainder(bearing + yaw - math.atan2(dy, dx), math.tau)])
        believed = self._update(errors, rows, [range_deviation(away) ** 2, BEARING ** 2])
        self._refused[slot] = 0 if believed else self._refused[slot] + 1

    def _update(self, errors: np.ndarray, rows: np.ndarray, variances: Sequence[float]) -> bool:
        """Update with innovations (M,), whose Jacobian is ``rows`` (M, N); return whether they were accepted."""
        common = self._covariance @ rows.T
        spread = rows @ common
        spread.flat[::len(errors) + 1] += variances
        inverse = 1.0 / spread if len(errors) == 1 else np.linalg.inv(spread)
        if errors @ inverse @ errors > _GATE ** 2 * len(errors):
            return False
        gain = common @ inverse
        self._state += gain @ errors
        covariance = self._covariance - gain @ common.T
        # Symmetric, or the rounding errors of its two halves grow apart until the gains are wrong: after minutes of driving.
        self._covariance = (covariance + covariance.T) / 2
        return True

    def _normals(self) -> np.ndarray:
        angles = self._state[3] + np.arange(4) * QUARTER
        return np.stack([np.cos(angles), np.sin(angles)], 1)


def wall_deviation(bearing: float) -> float | None:
    """Return the standard deviation in m of the distance to a wall whose normal has this bearing; None if it is not seen."""
    bearing = abs(math.remainder(bearing, math.tau))
    return None if bearing > _ASIDE else _WALL_SEEN if bearing < _AHEAD else _WALL_ASIDE


def range_deviation(away: float) -> float:
    """Return the standard deviation in m of the distance to a thing ``away`` m away."""
    return _RANGE[0] + _RANGE[1] * away
