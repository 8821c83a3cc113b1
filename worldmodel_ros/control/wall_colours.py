"""Colours of a room's walls, as far as the robot has seen them: they tell apart walls with nothing in front of them.

A forecast tells where a wall is in an image; its colour is compared, never named: no colour is known in advance.
"""
from __future__ import annotations

import math
from collections import deque

import numpy as np

from .localisation import QUARTER

SHOWN = 0.15                # share of an image's columns from which on it shows a wall and how far away that is
_SEEN = 0.05                # the same, from which on its colour is seen
_BAND = (0.35, 0.45)        # of the height, from the top: above the floor, and below a wall's upper edge
_KEPT = 200                 # frames of a wall
_THING = 0.25               # m, half of a thing's width at most, plus the error of its place
_DARK = 8.0                 # of 255, added so that noise of dark pixels does not count


def columns(walls: np.ndarray, width: int) -> np.ndarray:
    """Return which of four walls, as in ``Seen``, each of ``width`` columns of a camera with 90 degrees shows, (width,)."""
    angle = math.atan2(walls[1], walls[0]) / 4.0
    towards = np.cos(_bearings(width)[:, None] - angle - np.arange(4) * QUARTER)
    return np.where(towards > 0.05, walls[2:] / np.maximum(towards, 0.05), np.inf).argmin(1)


def uncovered(presence: np.ndarray, places: np.ndarray, width: int) -> np.ndarray:
    """Return which of ``width`` columns have no thing in front of the wall; presence (S,) and places (S, 2) as in ``Seen``."""
    bearings, free = _bearings(width), np.ones(width, bool)
    for x, y in places[presence > 0.5]:
        half = math.asin(min(1.0, _THING / max(math.hypot(x, y), 1e-6)))
        free &= np.abs(np.remainder(bearings - math.atan2(y, x) + math.pi, math.tau) - math.pi) > half
    return free


def shown(walls: np.ndarray, width: int) -> list[int]:
    """Return which of the walls take up enough of an image."""
    return np.flatnonzero(np.bincount(columns(walls, width), minlength=4) >= SHOWN * width).tolist()


def colours(image: np.ndarray) -> np.ndarray:
    """Return the colour (W, 3) of each column of an image uint8 (H, W, 3) just above the horizon, independent of brightness:
    logarithms, less their mean."""
    first, end = (round(share * len(image)) for share in _BAND)
    light = np.log(image[first:end].mean(0) + _DARK)
    return light - light.mean(1, keepdims=True)


class WallColours:
    """The colours of a room's four walls, numbered as a ``Localiser`` does. Not thread-safe."""

    def __init__(self) -> None:
        self._seen: list[deque[np.ndarray]] = [deque(maxlen=_KEPT) for _ in range(4)]

    def saw(self, image: np.ndarray, presence: np.ndarray, places: np.ndarray, walls: np.ndarray, turn: float) -> None:
        """Take an image uint8 (H, W, 3) with its forecast, presence (S,), places (S, 2) and walls (6,), from a camera turned by
        ``turn``, rad, from the normal of the room's wall 0."""
        angle = math.atan2(walls[1], walls[0]) / 4.0
        first = round((angle + turn) / QUARTER)
        seen, width = colours(image), image.shape[1]
        here = np.where(uncovered(presence, places, width), columns(walls, width), -1)
        for wall in range(4):
            if np.count_nonzero(here == wall) >= _SEEN * width:
                self._seen[(first + wall) % 4].append(np.median(seen[here == wall], 0))

    def known(self) -> np.ndarray:
        """Return the walls' colours (4, 3), medians over frames; infinite for a wall that was not seen yet."""
        return np.array([np.median(frames, 0) if frames else np.full(3, np.inf) for frames in self._seen])


def _bearings(width: int) -> np.ndarray:
    return np.arctan(1.0 - (2.0 * np.arange(width) + 1.0) / width)
