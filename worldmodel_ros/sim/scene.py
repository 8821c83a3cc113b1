"""Samples a room from a seed: layout, looks and dynamics, within the ranges of the domain randomisation."""
import colorsys
from dataclasses import dataclass
import math

import numpy as np

from worldmodel_ros.sim.movers import Mover

COLOURS = ('red', 'green', 'blue', 'yellow')
SHAPES = ('box', 'cylinder', 'capsule')

GOAL_DISTANCE = 0.45  # m, robot centre to object centre: nearer than this, the goal is reached
ROBOT_RADIUS = 0.16  # m
WHEEL_RADIUS = 0.06  # m
TRACK = 0.26  # m, between the wheels
CAMERA_FOV_DEG = 90.0  # vertical, and horizontal of a square image
CAMERA_X, CAMERA_Z, CAMERA_PITCH = 0.10, 0.25, math.radians(8.0)  # in base_link; the pitch is downwards

# Hue, saturation, value of the goal objects, and the largest change of the hue.
_OBJECT_HSV = {'red': (0.0, 0.88, 0.85), 'green': (0.37, 0.82, 0.62), 'blue': (0.61, 0.85, 0.85),
               'yellow': (0.135, 0.90, 0.95)}
_OBJECT_HUE_JITTER = 0.02
# Walls are far less saturated than any goal, so that no wall can be mistaken for one.
_WALL_HUES = (0.08, 0.27, 0.55, 0.80)

_WALL_CLEARANCE = 0.62  # m, object centre to wall: the robot fits between
_OBJECT_SPACING = 0.95  # m, between centres
_START_CLEARANCE = 0.65  # m, robot centre to object centre


@dataclass(frozen=True)
class Prop:
    """A movable goal object: radius (m) of the circle around its footprint, height (m), mass (kg)."""

    colour: str
    shape: str
    radius: float
    height: float
    x: float
    y: float
    yaw: float
    mass: float
    friction: float
    rgb: tuple[float, float, float]


@dataclass(frozen=True)
class Panel:
    """A coloured rectangle on a wall: centre along the wall and above the floor, half sizes (m), RGB 0..1."""

    along: float
    above: float
    half_width: float
    half_height: float
    rgb: tuple[float, float, float]


@dataclass(frozen=True)
class Wall:
    rgb: tuple[float, float, float]
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Scene:
    """All that the seed determines about one world. Lengths in m, angles in rad, colours RGB in 0..1."""

    seed: int
    width: float  # inside, along x
    depth: float  # inside, along y
    wall_height: float
    walls: tuple[Wall, Wall, Wall, Wall]  # at +x, +y, -x, -y
    floor: int  # which of the floor materials
    floor_rgb: tuple[float, float, float]
    props: tuple[Prop, ...]
    start: tuple[float, float, float]
    light_position: tuple[float, float, float]
    light_diffuse: float
    light_ambient: float
    wall_friction: float
    base_mass: float
    wheel_friction: float
    wheel_gain: tuple[float, float]  # ratio of executed to commanded speed, left and right
    camera_offset: tuple[float, float, float] = (0.0, 0.0, 0.0)
    camera_rotation: tuple[float, float] = (0.0, 0.0)  # added to yaw and pitch
    camera_noise: float = 0.0  # standard deviation, of 255
    movers: tuple[Mover, ...] = ()


def _rgb(hue: float, saturation: float, value: float) -> tuple[float, float, float]:
    return tuple(round(c, 4) for c in colorsys.hsv_to_rgb(hue % 1.0, min(saturation, 1.0), min(value, 1.0)))


def _walls(rng: np.random.Generator, lengths: tuple[float, ...], height: float) -> tuple[Wall, ...]:
    walls = []
    for hue, length in zip(rng.permutation(_WALL_HUES), lengths, strict=True):
        hue += rng.uniform(-0.04, 0.04)
        saturation, value = rng.uniform(0.18, 0.32), rng.uniform(0.74, 0.92)
        accent = _rgb(hue, saturation * rng.uniform(0.8, 1.5), value * rng.uniform(0.70, 0.86))
        pattern = rng.integers(4)
        if pattern == 0:  # a band all along
            panels = [Panel(0.0, rng.uniform(0.3, 0.7) * height, length / 2, rng.uniform(0.05, 0.12), accent)]
        elif pattern == 1:  # panelling to half height
            panels = [Panel(0.0, 0.22 * height, length / 2, 0.22 * height, accent)]
        elif pattern == 2:  # broad vertical panels
            count = int(rng.integers(2, 5))
            pitch = length / count
            panels = [Panel((i + 0.5) * pitch - length / 2, height / 2, pitch / 4, height / 2, accent)
                      for i in range(count)]
        else:  # a door or a poster
            half_width = rng.uniform(0.35, 0.7)
            along = rng.uniform(-0.25, 0.25) * length
            panels = [Panel(along, height * 0.46, half_width, height * 0.38, accent)]
        walls.append(Wall(_rgb(hue, saturation, value), tuple(panels)))
    return tuple(walls)


def _place(
    rng: np.random.Generator, width: float, depth: float
) -> tuple[np.ndarray, tuple[float, float, float]]:
    """Return the positions of the objects, (4, 2), and the start pose; the spacing is relaxed if it does not fit."""
    half = np.array([width, depth]) / 2
    for attempt in range(1000):
        relax = 0.98 ** (attempt // 20)
        props = rng.uniform(-1.0, 1.0, (len(COLOURS), 2)) * (half - _WALL_CLEARANCE)
        start = rng.uniform(-1.0, 1.0, 2) * (half - 0.35)
        gaps = np.linalg.norm(props[:, None] - props[None], axis=-1)[np.triu_indices(len(props), 1)]
        if gaps.min() >= _OBJECT_SPACING * relax and \
                np.linalg.norm(props - start, axis=-1).min() >= _START_CLEARANCE * relax:
            return props, (*start, rng.uniform(-math.pi, math.pi))
    raise RuntimeError(f'no layout found for a room of {width:.2f} x {depth:.2f} m')


def sample_scene(seed: int, randomise: bool = True) -> Scene:
    """Draw the scene of a seed: the same on every call and machine.

    Without ``randomise`` the layout still follows the seed, while colours, shapes, light, friction, masses, motor
    gains and camera keep their nominal values and the camera has no noise.
    """
    rng = np.random.default_rng(seed)
    width, depth = rng.uniform(3.5, 5.0, 2)
    positions, start = _place(rng, width, depth)
    yaws = rng.uniform(-math.pi, math.pi, len(COLOURS))
    looks = rng if randomise else np.random.default_rng(0)

    def vary(low: float, high: float) -> float:
        return float(looks.uniform(low, high)) if randomise else (low + high) / 2

    def jitter(scale: float) -> float:
        return vary(-scale, scale)

    wall_height = vary(0.7, 1.0)
    walls = _walls(looks, (depth, width, depth, width), wall_height)
    props = []
    for i, colour in enumerate(COLOURS):
        hue, saturation, value = _OBJECT_HSV[colour]
        shape = SHAPES[int(looks.integers(len(SHAPES)))] if randomise else SHAPES[i % len(SHAPES)]
        radius = vary(0.15 if shape == 'box' else 0.12, 0.20)
        props.append(Prop(
            colour=colour, shape=shape, radius=radius, height=vary(0.34, 0.5),
            x=positions[i][0], y=positions[i][1], yaw=yaws[i], mass=vary(0.6, 2.0), friction=vary(0.25, 0.5),
            rgb=_rgb(hue + jitter(_OBJECT_HUE_JITTER), saturation + jitter(0.06), value + jitter(0.06))))
    return Scene(
        seed=seed, width=width, depth=depth, wall_height=wall_height, walls=walls,
        floor=int(looks.integers(3)) if randomise else 1,
        floor_rgb=_rgb(vary(0.04, 0.14), vary(0.05, 0.24), vary(0.76, 0.98)),
        props=tuple(props), start=start,
        light_position=(jitter(1.2), jitter(1.2), vary(2.6, 3.4)), light_diffuse=vary(0.45, 0.7),
        light_ambient=vary(0.54, 0.68), wall_friction=vary(0.2, 0.6), base_mass=vary(4.0, 6.0),
        wheel_friction=vary(0.9, 1.3), wheel_gain=(1.0 + jitter(0.03), 1.0 + jitter(0.03)),
        camera_offset=(jitter(0.01), jitter(0.01), jitter(0.01)),
        camera_rotation=(jitter(0.015), jitter(0.025)),
        camera_noise=vary(0.0, 3.0) if randomise else 0.0)
