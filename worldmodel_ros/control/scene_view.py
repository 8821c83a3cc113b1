"""What is known of the scene at an observation, and its conversion from a forecast by slots.

A forecast gives places by slot, in base_link at the observation; terms refer to things by name, in one fixed frame, that of
the odometry.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from worldmodel_ros.motion import PERIOD, from_base, to_base
from .terms import Term, Thing, places

_LIKELY = 0.5  # probability from which on a thing counts as there
_IN_VIEW = math.radians(36.0)  # to either side: well within the camera's 90 degrees
_EDGE = math.radians(42.0)  # to either side: beyond it, the camera sees a thing partly at most
_NEAR, _FAR = 0.4, 2.0  # m: where a thing that is there is surely seen, unless something is in front of it
_SAME = 0.5  # m: largest distance of a thing from where it was expected
_LOST = 3.0  # s out of view, after which a thing that is no longer reported is no longer expected
_MISSED = 0.8  # s that a remembered thing may be in view without being seen before it is forgotten


@dataclass(frozen=True)
class View:
    """What is known at the newest observation, in one frame: pose (3,), twist (2,), walls as in ``Outcome``, and the known
    things, at the requested times."""

    pose: np.ndarray
    twist: np.ndarray
    things: dict[str, Thing]
    walls: np.ndarray


@dataclass(frozen=True)
class Slot:
    """The thing that a slot of a forecast stands for: its name, its colour, and its radius in m, which is not forecast.
    Things that are ``alike`` come in any order: the nearest one gets the first of their names."""

    name: str
    colour: str
    radius: float
    moves: bool
    alike: bool = False


@dataclass(frozen=True)
class Seen:
    """A forecast: the probability that the thing of each slot is there (S,), its places (T, S, 2) in m in base_link at
    ``times`` (T,), s from the observation on, and the walls (6,): cosine and sine of four times the first one's direction,
    and metres to each of four; ``unseen`` (S,): s since each place was in view, None: nothing is in doubt."""

    presence: np.ndarray
    places: np.ndarray
    walls: np.ndarray
    times: np.ndarray
    unseen: np.ndarray | None = None

    def at_present(self) -> Seen:
        """Return the same, as if everything stayed where it is."""
        return Seen(self.presence, np.broadcast_to(self.places[:1], self.places.shape), self.walls, self.times)

    def view(self, slots: Sequence[Slot | None], pose: np.ndarray, twist: np.ndarray, times: np.ndarray) -> View:
        """Return the things of ``slots`` that are there, in the frame of the robot's ``pose`` (3,), forecast for ``times``
        (T,)."""
        found, things = from_base(self.places, pose), {}
        likely = np.flatnonzero(self.presence > _LIKELY).tolist()
        alike = sorted((number for number in likely if slots[number] and slots[number].alike),
                       key=lambda number: float(np.hypot(*self.places[0, number])))
        meant = {number: slots[number] for number in likely}
        meant |= zip(alike, (slot for slot in slots if slot and slot.alike))
        for number, slot in meant.items():
            if slot:
                path = np.stack([np.interp(times, self.times, found[:, number, axis]) for axis in range(2)], 1)
                unseen = None if self.unseen is None or not slot.moves else float(self.unseen[number])
                things[slot.name] = Thing(path, slot.radius, slot.colour, slot.moves, float(self.presence[number]),
                                          unseen=unseen)
        return View(pose, twist, things, planes(self.walls, pose))


def with_places(view: View, terms: Sequence[Term], times: int) -> View:
    """Return a view with the places that terms name added to its things, for so many times."""
    named = places(terms, times)
    return replace(view, things={**view.things, **named}) if named else view


class StandingThings:
    """Last known places of things that do not move, in the odometry's frame, for when they are out of the camera's view.

    A forecast remembers for seconds, and tracks the robot's turns only roughly (docs/task_results.md); a robot that turns away
    from a goal and comes back a minute later needs this. A thing that is not seen where it should be is forgotten.
    Not thread-safe.
    """

    def __init__(self, slots: Sequence[Slot | None], period: float = PERIOD) -> None:
        """``period``: s between two ticks."""
        self._most_missed = round(_MISSED / period)  # ticks
        self._slots = [number for number, slot in enumerate(slots) if slot and not slot.moves]
        self._radii = np.array([slot.radius if slot else 0.0 for slot in slots])
        self._places: dict[int, tuple[np.ndarray, float]] = {}  # by slot: (2,), and the probability of being there
        self._missed: dict[int, int] = {}

    def remember(self, seen: Seen, pose: np.ndarray, mapped: Mapping[int, np.ndarray]) -> Seen:
        """Return what was seen from ``pose`` (3,), with remembered places for things that are out of view or no longer
        reported. ``mapped``: places (2,) by slot, in the frame of the pose, preferred to the last known ones out of view. In
        view, the camera is preferred: a thing reported elsewhere than its mapped place is believed if that is in view."""
        presence, places = seen.presence.copy(), seen.places.copy()
        likely, in_view = presence > _LIKELY, _looked_at(places[0])
        for slot in self._slots:
            place, sure = self._places.get(slot, (None, 0.0))
            here = None if place is None else to_base(mapped.get(slot, place), pose)
            looks = here is None or _looked_at(here)
            if likely[slot] and (in_view[slot] or looks):
                self._places[slot] = from_base(places[0, slot], pose), float(presence[slot])
                self._missed[slot] = 0
            elif place is not None:
                here = to_base(place, pose) if looks else here
                self._missed[slot] += self._would_be_seen(slot, here, places[0], likely)
                if self._missed[slot] > self._most_missed:
                    del self._places[slot]
                else:
                    presence[slot], places[:, slot] = sure, here
        return replace(seen, presence=presence, places=places)

    def move(self, before: np.ndarray, now: np.ndarray) -> None:
        """Change to a frame in which the pose (3,) that was ``before`` is ``now``."""
        self._places = {slot: (from_base(to_base(place, before), now), sure) for slot, (place, sure) in self._places.items()}

    def _would_be_seen(self, slot: int, here: np.ndarray, places: np.ndarray, likely: np.ndarray) -> bool:
        """Return whether the camera cannot miss a thing at ``here`` (2,), m in base_link: it is in view, and none of the
        ``likely`` things at ``places`` (S, 2) is in front of it."""
        away, bearing = math.hypot(*here), math.atan2(here[1], here[0])
        if abs(bearing) > _IN_VIEW or not _NEAR < away < _FAR:
            return False
        far = np.maximum(np.hypot(places[:, 0], places[:, 1]), 1e-6)
        apart = np.abs(np.arctan2(places[:, 1], places[:, 0]) - bearing)
        hides = likely & (far < away) & (apart < np.arcsin(np.minimum(1.0, self._radii / far)) + self._radii[slot] / away)
        return not hides.any()


class OutOfView:
    """Tracks how long each thing has been out of view: a forecast continues to place it, with an error that grows with
    time. Things that look alike change slots, and are matched by their expected places. Not thread-safe."""

    def __init__(self, slots: Sequence[Slot | None], period: float = PERIOD) -> None:
        """``period``: s between two ticks."""
        self._period = period
        self._alike = [number for number, slot in enumerate(slots) if slot and slot.alike]
        self._seconds = np.zeros(len(slots))
        self._expected: list[tuple[np.ndarray, float]] = []  # of things that look alike: place (2,), and s out of view

    def look(self, seen: Seen, pose: np.ndarray) -> Seen:
        """Take the forecast of the next tick, from ``pose`` (3,); return it with ``unseen`` set."""
        told = [slot for slot in self._alike if seen.presence[slot] > _LIKELY]
        unknown, here = set(told), from_base(seen.places[0], pose)
        seconds = self._seconds.copy()
        seconds[self._alike] = 0.0  # unless matched below
        lost = dict(enumerate(self._expected))
        for away, slot, number in sorted((math.hypot(*(here[slot] - place)), slot, number)
                                         for slot in told for number, (place, _) in lost.items()):
            if away < _SAME and number in lost and slot in unknown:
                _, seconds[slot] = lost.pop(number)
                unknown.remove(slot)
        self._seconds = np.where(_looked_at(seen.places[0]), 0.0, seconds + self._period)
        soon = [np.array([np.interp(self._period, seen.times, seen.places[:, slot, axis]) for axis in range(2)])
                for slot in told]
        self._expected = [(from_base(place, pose), self._seconds[slot]) for slot, place in zip(told, soon, strict=True)]
        # A thing may be missing from the forecast for a few ticks.
        self._expected += [(place, since + self._period) for place, since in lost.values() if since < _LOST]
        return replace(seen, unseen=self._seconds)

    def move(self, before: np.ndarray, now: np.ndarray) -> None:
        """Change to a frame of poses in which the pose (3,) that was ``before`` is ``now``."""
        self._expected = [(from_base(to_base(place, before), now), since) for place, since in self._expected]


def _looked_at(places: np.ndarray) -> np.ndarray:
    """Return whether each of ``places`` (..., 2), m in base_link, is in the camera's view."""
    return np.abs(np.arctan2(places[..., 1], places[..., 0])) < _EDGE


def planes(walls: np.ndarray, pose: np.ndarray) -> np.ndarray:
    """Convert walls as in a forecast, (6,), to rows of unit normal and offset, (4, 3), in the frame of the pose."""
    angles = math.atan2(walls[1], walls[0]) / 4.0 + np.arange(4) * math.pi / 2 + pose[2]
    normals = np.stack([np.cos(angles), np.sin(angles)], 1)
    return np.column_stack([normals, walls[2:] + normals @ pose[:2]])


def corners(walls: np.ndarray) -> np.ndarray:
    """Return where each of four walls, rows of unit normal and offset, (4, 3), meets the next one, (4, 2) in m."""
    pairs = np.stack([walls, np.roll(walls, -1, 0)], 1)
    return np.linalg.solve(pairs[..., :2], pairs[..., 2:])[..., 0]
