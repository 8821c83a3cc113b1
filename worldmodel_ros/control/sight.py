"""Image goals: finds the pose from which the camera sees what an image shows.

The forecast of an image, as of any frame, says which things are where and how the walls lie. Those whose places the robot
knows give a pose: the walls give its yaw up to quarter turns, and each quarter turn has one position that fits best.

If an image shows only walls, their colours tell which ones, and the forecast how far away they are. A single wall looks the
same all along: every pose on that line sees what the image shows, and the nearest one is taken.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from worldmodel_ros.motion import to_base
from .localisation import BEARING, QUARTER, Localiser, range_deviation, wall_deviation
from .wall_colours import WallColours, colours, columns, shown, uncovered

if TYPE_CHECKING:
    from .pilot import Forecast

NAME = 'what the image shows'
_IN_VIEW = math.radians(43.0)   # to either side: within the camera's 90 degrees
_CLEARER = 4.0                  # chi-squared by which the best pose must fit better than the next one
_WORST = 30.0                   # chi-squared up to which a pose is accepted
_MISSING = 8.0                  # chi-squared of a thing that should be in view and is not
_SURELY_IN_VIEW, _NEAR, _FAR = math.radians(36.0), 0.5, 2.5  # rad, m
_WIDTH = 0.4                    # m, of a thing that hides another
_SHARPER = 0.5                  # share of the deviations used over many successive frames: one frame's errors count once
_LIKELY = 0.5
_UNLIKE = 0.1   # difference of log wall colours from which on an image is of no known wall
_ALIKE = 0.06   # the same, below which it is of this wall, whatever those not yet seen look like
_STEP = 0.1  # m, between poses along a wall
_FROM_WALL, _FROM_THING = 0.3, 0.45  # m, least distances at which a robot can stand
_BLOCK = 4  # pixels, a side


@dataclass(frozen=True, eq=False)
class Sight:
    """Forecast of an ``image`` uint8 (H, W, 3): presence (S,), places (S, 2) in m in base_link, walls (6,) as in ``Seen``."""

    presence: np.ndarray
    places: np.ndarray
    walls: np.ndarray
    image: np.ndarray

    @classmethod
    def of(cls, forecast: Forecast, image: np.ndarray) -> Sight:
        """Return the forecast that a new stream makes of an image uint8 (H, W, 3)."""
        still = np.zeros(2)
        presence, places, walls = forecast.observe(image, still, still, 1)
        return cls(presence, places[0], walls, image)

    def similarity(self, image: np.ndarray) -> float:
        """Return the correlation, -1 to 1, of another image of the same size with this one; NaN if one of them has a single
        colour. Both are averaged over ``_BLOCK`` pixels, since a robot hardly ever returns to the same pixel."""
        one, other = (_blocks(each) for each in (self.image, image))
        spread = math.sqrt(float((one ** 2).sum() * (other ** 2).sum()))
        return float((one * other).sum()) / spread if spread > 0.0 else math.nan

    def in_view(self, slots: list[int]) -> list[int]:
        """Return those of the slots whose things the image shows."""
        return [slot for slot in slots if self.presence[slot] > _LIKELY
                and abs(math.atan2(self.places[slot, 1], self.places[slot, 0])) < _IN_VIEW]

    def walls_in_view(self) -> list[int]:
        """Return the numbers of the walls that the image shows."""
        return shown(self.walls, self.image.shape[1])

    def is_of_one_wall(self, slots: list[int]) -> bool:
        """Return whether the image shows one wall alone and none of the slots' things: it looks the same all along the wall."""
        return not self.in_view(slots) and len(self.walls_in_view()) == 1

    def pose(self, known: Localiser, wall_colours: WallColours | None = None) -> np.ndarray | None:
        """Return the pose (3,) that sees this, in the frame of ``known``; None while there is none, or more than one. An image
        of walls alone needs ``wall_colours``; along a single wall, the pose is one near the robot."""
        things, walls = known.things(), known.walls()
        if wall_colours and walls and not self.in_view(known.slots):
            return self._pose_by_walls(known.pose, things, *walls, wall_colours.known())
        seen = [slot for slot in self.in_view(list(things)) if slot in things]
        if not seen or walls is None:
            return None
        fits = self._fits(seen, things, walls)
        if fits[0][0] > _WORST and len(seen) > 1:  # one of them may be misidentified
            without = [self._fits([slot for slot in seen if slot != wrong], things, walls) for wrong in seen]
            fits = min(without, key=lambda fits: fits[0][0])
        if fits[0][0] > _WORST:
            return None
        all_known = len(things) == known.count and np.isfinite(walls[1]).all()  # looking around cannot add anything
        return fits[0][1] if all_known or fits[1][0] - fits[0][0] > _CLEARER else None

    def _pose_by_walls(self, robot: np.ndarray, things: dict[int, np.ndarray], direction: float, offsets: np.ndarray,
                       known: np.ndarray) -> np.ndarray | None:
        if not np.isfinite(offsets).all():
            return None
        width = self.image.shape[1]
        free = uncovered(self.presence, self.places, width)
        seen, here = colours(self.image)[free], columns(self.walls, width)[free]
        unlike = [float(np.abs(seen - known[(here + quarter) % 4]).mean()) for quarter in range(4)]
        quarter = int(np.argmin(unlike))
        if not unlike[quarter] < (_UNLIKE if np.isfinite(known).all() else _ALIKE):
            return None
        yaw = math.remainder(direction + quarter * QUARTER - math.atan2(self.walls[1], self.walls[0]) / 4.0, math.tau)
        normals = np.array([(math.cos(direction + axis * QUARTER), math.sin(direction + axis * QUARTER)) for axis in range(2)])
        farthest = np.maximum(offsets - _FROM_WALL, -np.roll(offsets, 2) + _FROM_WALL)  # along each wall's normal
        found, open_axes = np.clip(normals @ robot[:2], -farthest[2:], farthest[:2]), [True, True]
        for number in self.walls_in_view():
            wall = (number + quarter) % 4
            found[wall % 2] = (offsets[wall] - self.walls[2 + number]) * (1 if wall < 2 else -1)
            open_axes[wall % 2] = False
        if not any(open_axes):
            return np.array([*found @ normals, yaw])
        axis = open_axes.index(True)
        places = []
        for along in np.arange(-farthest[axis + 2], farthest[axis] + _STEP / 2, _STEP):
            place = found.copy()
            place[axis] = along
            pose = np.array([*place @ normals, yaw])
            blocked = any(math.dist(pose[:2], thing) < _FROM_THING for thing in things.values())
            places.append((blocked + self._missing(pose, things), abs(along - found[axis]), pose))
        return min(places, key=lambda each: each[:2])[2] if places else None

    def _fits(self, seen: list[int], things: dict[int, np.ndarray], walls: tuple[float, np.ndarray]
              ) -> list[tuple[float, np.ndarray]]:
        return sorted((self._fit(quarter, seen, things, *walls) for quarter in range(4)), key=lambda fit: fit[0])

    def _missing(self, pose: np.ndarray, things: dict[int, np.ndarray]) -> int:
        """Return how many things that should be in view from a pose are not in the image."""
        seen = {slot: to_base(place, pose) for slot, place in things.items()}
        polar = {slot: (math.hypot(*place), math.atan2(place[1], place[0])) for slot, place in seen.items()}
        return sum(abs(bearing) < _SURELY_IN_VIEW and _NEAR < away < _FAR and self.presence[slot] <= _LIKELY
                   and not any(nearer < away and abs(math.remainder(other - bearing, math.tau)) < _WIDTH / max(nearer, _WIDTH)
                               for nearer, other in polar.values())
                   for slot, (away, bearing) in polar.items())

    def _fit(self, quarter: int, seen: list[int], things: dict[int, np.ndarray], direction: float, offsets: np.ndarray
             ) -> tuple[float, np.ndarray]:
        """Return the chi-squared of the best pose of a quarter turn, and the pose."""
        angle = math.atan2(self.walls[1], self.walls[0]) / 4.0
        yaw = direction + quarter * QUARTER - angle
        cos, sin = math.cos(yaw), math.sin(yaw)
        rotation = np.array([[cos, -sin], [sin, cos]])
        rows, values = [], []
        for number in range(4):
            bearing, offset = angle + number * QUARTER, offsets[(number + quarter) % 4]
            deviation = wall_deviation(bearing)
            if deviation is not None and math.isfinite(offset):
                deviation *= _SHARPER
                rows.append(np.array([math.cos(yaw + bearing), math.sin(yaw + bearing)]) / deviation)
                values.append((offset - self.walls[2 + number]) / deviation)
        for slot in seen:
            away = math.hypot(*self.places[slot])
            along = rotation @ self.places[slot] / away
            at = things[slot] - rotation @ self.places[slot]
            across = np.array([-along[1], along[0]])
            for axis, deviation in ((along, _SHARPER * range_deviation(away)), (across, away * BEARING)):
                rows.append(axis / deviation)
                values.append(axis @ at / deviation)
        matrix, vector = np.array(rows), np.array(values)
        place = np.linalg.solve(matrix.T @ matrix, matrix.T @ vector)
        error = matrix @ place - vector
        pose = np.array([*place, math.remainder(yaw, math.tau)])
        return float(error @ error) + _MISSING * self._missing(pose, things), pose


def _blocks(image: np.ndarray) -> np.ndarray:
    """Return the means of blocks of _BLOCK x _BLOCK pixels, less the image's mean in each colour."""
    height, width = (extent // _BLOCK for extent in image.shape[:2])
    means = image[:height * _BLOCK, :width * _BLOCK].reshape(height, _BLOCK, width, _BLOCK, -1).mean((1, 3))
    return means - means.mean((0, 1))
