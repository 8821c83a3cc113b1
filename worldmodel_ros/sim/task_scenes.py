"""Rooms with movers for the tasks of ``evaluate.control``, sampled from a seed for each kind of scene.

Looks, size and dynamics are those of ``sample_scene``; if something moves, objects, start and movers are placed again.
Movers start ahead of the robot: with a camera of 90 degrees, nothing can predict what comes from behind. The scenes of some
seeds are pinned by their SHA-256 (``task_scenes.json``), so that it can be checked later what a model was trained on.
"""
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
import hashlib
import json
import math

import numpy as np

from worldmodel_ros.sim.movers import BALL_RADIUS, CYAN, MAGENTA, RED, VIOLET, Ball, Mover, Shuttle, random_stops
from worldmodel_ros.sim.scene import COLOURS, Prop, Scene, sample_scene

BAND = 1.3  # m, width of the street's band in which shuttles cross
_STREAMS = {'intercept': 11, 'street': 12, 'follow': 13, 'second_ball': 14, 'avoid_red': 15, 'pass_behind': 16}
_STOP_HORIZON = 40.0  # s, for which random stops are drawn: longer than any task
_WALL_GAP = 0.62  # m, from an object's centre to a wall
_MOVER_GAP = 0.40  # m, from a mover's centre to an object's, at the start
_TRIES = 2000


@dataclass(frozen=True)
class Variant:
    """Differences from the scenes that training may use: faster, more and differently bouncing movers (``shifted``), or
    shuttles that stop at random for 0.3 to 1 s (``stops``)."""

    shifted: bool = False
    stops: bool = False

    def speed(self, rng: np.random.Generator) -> float:
        return float(rng.uniform(0.8, 1.0) if self.shifted else rng.uniform(0.4, 0.8))

    def restitution(self, rng: np.random.Generator) -> float:
        return float(rng.uniform(0.5, 0.65) if self.shifted else rng.uniform(0.8, 0.95))


class NoLayout(RuntimeError):
    """A room has no space for what a task needs; the generator redraws its size and layout."""


def task_scene(kind: str, seed: int, variant: Variant = Variant()) -> Scene:
    """Return the scene of a seed (an integer from 0) in one of SCENES: the same on every call and machine.

    ``rooms`` and ``recall`` are the rooms of ``sample_scene``, which have no variants. Raises ValueError for an unknown kind.
    """
    if kind not in SCENES:
        raise ValueError(f'unknown kind of scene {kind!r}: choose one of {", ".join(SCENES)}')
    base = sample_scene(seed)
    if kind not in _STREAMS:
        return base
    rng = np.random.default_rng([seed, _STREAMS[kind]])
    for _ in range(_TRIES):
        try:
            return SCENES[kind](base, rng, variant)
        except NoLayout:
            continue
    raise RuntimeError(f'no layout found for {kind} in the room of seed {seed}')


def goal_colour(kind: str, seed: int) -> str:
    """Return the goal object of a seed's scene: the one behind the street or the mover; in static rooms any."""
    if kind not in _STREAMS:
        return COLOURS[int(np.random.default_rng(seed).integers(len(COLOURS)))]
    choices = COLOURS[1:] if kind == 'avoid_red' else COLOURS
    return choices[int(np.random.default_rng([seed, _STREAMS[kind], 1]).integers(len(choices)))]


def fingerprint(kind: str, seeds: range, variant: Variant = Variant()) -> str:
    """Return the SHA-256 of the scenes and goals of ``seeds``, with lengths to a micrometre: below that, libraries may
    differ."""
    def rounded(value):
        if isinstance(value, float):
            return round(value, 6) + 0.0  # no negative zero
        if isinstance(value, Mapping):
            return {key: rounded(item) for key, item in value.items()}
        return [rounded(item) for item in value] if isinstance(value, list | tuple) else value
    digest = hashlib.sha256()
    for seed in seeds:
        digest.update(json.dumps([goal_colour(kind, seed), rounded(asdict(task_scene(kind, seed, variant)))]).encode())
    return digest.hexdigest()


def _intercept(base: Scene, rng: np.random.Generator, variant: Variant) -> Scene:
    return _with_balls(base, rng, variant, (('ball', 'magenta', MAGENTA),), (1.2, 2.4))


def _follow(base: Scene, rng: np.random.Generator, variant: Variant) -> Scene:
    return _with_balls(base, rng, variant, (('ball', 'magenta', MAGENTA),), (1.0, 1.8))


def _second_ball(base: Scene, rng: np.random.Generator, variant: Variant) -> Scene:
    balls = ('first ball', 'magenta', MAGENTA), ('second ball', 'cyan', CYAN)
    return _with_balls(base, rng, variant, balls, (1.0, 2.4))


def _with_balls(base: Scene, rng: np.random.Generator, variant: Variant, balls: tuple, distances: tuple[float, float]
                ) -> Scene:
    """Return the room of ``base`` with balls ahead of its robot, at ``distances`` (m, least and most), within 32 degrees and
    with nothing in between; each rolls in any direction."""
    start, yaw = np.array(base.start[:2]), float(rng.uniform(-math.pi, math.pi))
    movers: list[Mover] = []
    for name, colour, rgb in balls:
        place = start + rng.uniform(*distances) * _unit(yaw + rng.uniform(-0.56, 0.56))
        others = [(mover.x, mover.y) for mover in movers]
        if not _inside(base, place, 0.3) or _nearest(base.props, place) < _MOVER_GAP or \
                any(math.dist(place, other) < 0.7 for other in others) or not _clear_view(base.props, start, place):
            raise NoLayout
        velocity = variant.speed(rng) * _unit(rng.uniform(-math.pi, math.pi))
        movers.append(Ball(name, colour, rgb, *map(float, place), tuple(map(float, velocity)), variant.restitution(rng)))
    return replace(base, start=(*base.start[:2], yaw), movers=tuple(movers))


def _street(base: Scene, rng: np.random.Generator, variant: Variant) -> Scene:
    """Return a room with start and goal on either side of a band across its longer side, in which the lanes lie."""
    goal = COLOURS.index(goal_colour('street', base.seed))
    room = _Street(base, goal, rng, BAND / 2)
    count = 5 if variant.shifted else 3
    lanes = (np.arange(count) + 0.5) / count * BAND - BAND / 2
    movers = []
    for i, lane in enumerate(lanes[rng.permutation(count)].tolist()):
        radius = float(rng.uniform(0.10, 0.12) if variant.shifted else rng.uniform(0.12, 0.15))
        middle = float(rng.uniform(-0.15, 0.15))
        reach = min(1.3, room.half_across - abs(middle) - radius - 0.12)
        movers.append(room.shuttle(f'shuttle {i + 1}', lane, middle, reach, variant, rng, radius))
    return room.scene(tuple(movers))


def _pass_behind(base: Scene, rng: np.random.Generator, variant: Variant) -> Scene:
    """Return a room like the street, with a single shuttle."""
    goal = COLOURS.index(goal_colour('pass_behind', base.seed))
    room = _Street(base, goal, rng, BAND / 2)
    radius = float(rng.uniform(0.12, 0.15))
    reach = min(1.3, room.half_across - radius - 0.12)
    return room.scene((room.shuttle('mover', float(rng.uniform(-0.2, 0.2)), 0.0, reach, variant, rng, radius),))


def _avoid_red(base: Scene, rng: np.random.Generator, variant: Variant) -> Scene:
    """Return a room with a red object next to the straight way to the goal, and a red ball that rolls across it."""
    goal = COLOURS.index(goal_colour('avoid_red', base.seed))
    room = _Street(base, goal, rng, 0.45)
    way = np.array(room.goal) - room.start
    beside = np.array([-way[1], way[0]]) / np.linalg.norm(way)
    side = math.copysign(1.0, rng.uniform(-1.0, 1.0))
    red = np.array(room.start) + rng.uniform(0.45, 0.6) * way + side * rng.uniform(0.15, 0.4) * beside
    props = list(room.props)
    props[0] = replace(props[0], x=float(red[0]), y=float(red[1]))
    ball = np.array(room.start) + rng.uniform(0.4, 0.7) * way - side * rng.uniform(0.5, 0.9) * beside
    others = [*props[:goal], *props[goal + 1:]]
    if not _inside(base, ball, 0.25) or _nearest(tuple(props), ball) < _MOVER_GAP or not _inside(base, red, 0.4) or \
            _nearest((props[goal],), red) < 0.75 or _nearest(tuple(others[1:]), red) < 0.6:
        raise NoLayout
    direction = math.atan2(side * beside[1], side * beside[0]) + rng.uniform(-0.6, 0.6)
    velocity = variant.speed(rng) * _unit(direction)
    mover = Ball('red ball', 'red', RED, *map(float, ball), tuple(map(float, velocity)), variant.restitution(rng))
    return replace(room.scene((mover,)), props=tuple(props))


class _Street:
    """A room laid out along its longer side: the start, a band of +- ``half_band`` m in the middle, the goal behind it."""

    def __init__(self, base: Scene, goal: int, rng: np.random.Generator, half_band: float) -> None:
        self._base, self._flip = base, base.depth > base.width
        half_along, self.half_across = sorted((base.width / 2, base.depth / 2), reverse=True)
        start = -rng.uniform(min(half_band + 0.3, half_along - 0.3), half_along - 0.25), rng.uniform(-0.5, 0.5)
        far = min(half_along - _WALL_GAP, half_band + 0.9)
        target = rng.uniform(min(half_band + 0.3, far), far), rng.uniform(-0.5, 0.5)
        if half_along - _WALL_GAP < half_band + 0.25:
            raise NoLayout
        places: list[tuple[float, float]] = [target]
        for i in range(len(COLOURS) - 1):  # one behind the band, at the side of the goal, the others behind the start
            if i == 0:
                place = target[0] + rng.uniform(-0.1, 0.2), rng.choice((-1.0, 1.0)) * rng.uniform(0.9, 1.5)
            else:
                place = -rng.uniform(half_band + 0.25, half_along - 0.3), rng.choice((-1.0, 1.0)) * rng.uniform(0.8, 1.6)
            if abs(place[0]) > half_along - 0.3 or abs(place[1]) > self.half_across - 0.3 or \
                    math.dist(place, start) < 0.65 or min(math.dist(place, other) for other in places) < 0.75:
                raise NoLayout
            places.append(place)
        order = [goal, *(i for i in range(len(COLOURS)) if i != goal)]
        at = {index: self._point(*map(float, place)) for index, place in zip(order, places, strict=True)}
        self.props = tuple(replace(prop, x=at[i][0], y=at[i][1]) for i, prop in enumerate(base.props))
        self.start, self.goal = self._point(*map(float, start)), at[goal]
        ahead = math.atan2(self.goal[1] - self.start[1], self.goal[0] - self.start[0])
        self._yaw = ahead + float(rng.uniform(-0.3, 0.3))

    def _point(self, along: float, across: float) -> tuple[float, float]:
        return (across, along) if self._flip else (along, across)

    def shuttle(self, name: str, lane: float, middle: float, reach: float, variant: Variant,
                rng: np.random.Generator, radius: float) -> Shuttle:
        """Return a shuttle that crosses at ``lane`` m along the room, ``reach`` m to either side of ``middle``."""
        speed, phase = variant.speed(rng), float(rng.uniform())
        stops = random_stops(rng, _STOP_HORIZON) if variant.stops else ()
        return Shuttle(name, 'violet', VIOLET, *self._point(lane, middle), 0 if self._flip else 1, reach, speed, phase,
                       stops, radius)

    def scene(self, movers: tuple[Mover, ...]) -> Scene:
        return replace(self._base, props=self.props, start=(*self.start, self._yaw), movers=movers)


def _unit(angle: float) -> np.ndarray:
    return np.array([math.cos(angle), math.sin(angle)])


def _inside(scene: Scene, place: np.ndarray, gap: float) -> bool:
    """Return whether a place is at least ``gap`` m from every wall."""
    return abs(place[0]) < scene.width / 2 - gap and abs(place[1]) < scene.depth / 2 - gap


def _nearest(props: tuple[Prop, ...], place: np.ndarray) -> float:
    """Return the distance in m to the nearest object's centre."""
    return min(math.dist((prop.x, prop.y), place) for prop in props)


def _clear_view(props: tuple[Prop, ...], start: np.ndarray, place: np.ndarray) -> bool:
    """Return whether no object stands between two places."""
    way = place - start
    for prop in props:
        share = float(np.clip(np.dot((prop.x, prop.y) - start, way) / np.dot(way, way), 0.0, 1.0))
        if math.dist(start + share * way, (prop.x, prop.y)) < prop.radius + BALL_RADIUS:
            return False
    return True


SCENES: Mapping[str, Callable[[Scene, np.random.Generator, Variant], Scene] | None] = {
    'rooms': None, 'recall': None, 'intercept': _intercept, 'street': _street, 'follow': _follow,
    'second_ball': _second_ball, 'avoid_red': _avoid_red, 'pass_behind': _pass_behind}
