"""Things that move by themselves: balls that roll and bounce, and shuttles that go back and forth on a line.

Both are bodies on slide joints, which the robot can hit. A ball's state is in the physics. A shuttle is driven along a
reference that is a function of time alone, so that snapshots, forks and replays are exact.
"""
from collections.abc import Iterator
from dataclasses import dataclass
import math

import numpy as np

# RGB of movers. RED is the red goal object's colour, for what is to be avoided; the others are no goal's and no wall's.
MAGENTA, CYAN, VIOLET, RED = (0.88, 0.12, 0.62), (0.10, 0.72, 0.74), (0.42, 0.18, 0.72), (0.85, 0.10, 0.10)

BALL_RADIUS, BALL_MASS = 0.10, 0.3  # m, kg
SHUTTLE_MASS, SHUTTLE_FORCE = 3.0, 30.0  # kg; N, greatest actuator force
_BOUNCE_S = 0.04  # duration of a ball's contact: 8 physics steps; with fewer, the restitution depends on the phase
_SHUTTLE_RATE = 20.0  # rad/s, of the loop that keeps a shuttle on its reference


@dataclass(frozen=True)
class Ball:
    """A ball of BALL_RADIUS that rolls without resistance and bounces.

    ``x``, ``y`` (m) and ``velocity`` (m/s, along x and y) are those at time 0. ``restitution``: ratio of the speeds after and
    before a bounce off something that does not move, 0 to 1.
    """

    name: str
    colour: str
    rgb: tuple[float, float, float]
    x: float
    y: float
    velocity: tuple[float, float]
    restitution: float

    radius = BALL_RADIUS
    height = 2 * BALL_RADIUS

    def contact_parameters(self) -> tuple[float, float]:
        """Return stiffness (1/s^2) and damping (1/s) of a contact: a damped spring with the given restitution."""
        log = math.log(max(self.restitution, 0.05))
        ratio = -log / math.hypot(math.pi, log)
        rate = math.pi / _BOUNCE_S / math.sqrt(1.0 - ratio * ratio)
        return rate * rate, 2.0 * ratio * rate


@dataclass(frozen=True)
class Shuttle:
    """A cylinder that goes back and forth on a line through ``x``, ``y`` (m), at most ``reach`` m to either side.

    ``axis``: 0 for x, 1 for y. ``phase``: where it is at time 0, as a share of a whole period (0: at the line's middle, in
    the positive direction). ``stops``: start and duration in s of its stops, in order, without overlap.
    """

    name: str
    colour: str
    rgb: tuple[float, float, float]
    x: float
    y: float
    axis: int
    reach: float
    speed: float
    phase: float
    stops: tuple[tuple[float, float], ...] = ()
    radius: float = 0.14
    height: float = 0.45

    def reference(self, time: float) -> tuple[float, float]:
        """Return offset (m) from the line's middle and velocity (m/s) along it at ``time`` s."""
        stood = sum(min(duration, max(0.0, time - begin)) for begin, duration in self.stops)
        stands = any(begin <= time < begin + duration for begin, duration in self.stops)
        # A triangle wave in four quarters: out, back to the middle, out on the other side, back.
        quarter = (4.0 * self.phase + (time - stood) * self.speed / self.reach) % 4.0
        if quarter < 1.0:
            share, sign = quarter, 1.0
        elif quarter < 3.0:
            share, sign = 2.0 - quarter, -1.0
        else:
            share, sign = quarter - 4.0, 1.0
        return share * self.reach, 0.0 if stands else sign * self.speed


Mover = Ball | Shuttle


def random_stops(rng: np.random.Generator, seconds: float) -> tuple[tuple[float, float], ...]:
    """Return stops of 0.3 to 1 s, with 0.8 to 3 s of motion between them."""
    stops, time = [], float(rng.uniform(0.3, 2.0))
    while time < seconds:
        duration = float(rng.uniform(0.3, 1.0))
        stops.append((time, duration))
        time += duration + float(rng.uniform(0.8, 3.0))
    return tuple(stops)


def body_mjcf(mover: Mover, solid: str, visual: str) -> Iterator[str]:
    """Yield the MJCF lines of a mover's body; ``solid``, ``visual``: attributes of geoms that collide, or are only seen."""
    rgba = ' '.join(f'{value:.17g}' for value in (*mover.rgb, 1.0))
    centre = mover.height / 2
    yield f'<body name="{mover.name}" pos="{mover.x:.17g} {mover.y:.17g} {centre:.17g}">'
    if isinstance(mover, Ball):
        stiffness, damping = mover.contact_parameters()
        yield f'<joint name="{mover.name}_x" type="slide" axis="1 0 0"/>'
        yield f'<joint name="{mover.name}_y" type="slide" axis="0 1 0"/>'
        # With the higher priority the ball's parameters apply to each of its contacts.
        yield (f'<geom name="{mover.name}" type="sphere" size="{mover.radius}" mass="{BALL_MASS}" material="glossy" '
               f'rgba="{rgba}" {solid} priority="1" condim="1" solref="{-stiffness:.17g} {-damping:.17g}" '
               'solimp="0.99 0.99 0.001"/>')
    else:
        axis = '0 1 0' if mover.axis else '1 0 0'
        yield f'<joint name="{mover.name}" type="slide" axis="{axis}"/>'
        yield (f'<geom name="{mover.name}" type="cylinder" size="{mover.radius:.17g} {centre:.17g}" '
               f'mass="{SHUTTLE_MASS}" material="glossy" rgba="{rgba}" {solid} friction="0.3 0.005 0.0001"/>')
    yield (f'<geom type="cylinder" size="{mover.radius * 1.1:.17g} 0.0015" rgba="0 0 0 0.28" {visual} '
           f'group="1" pos="0 0 {0.002 - centre:.17g}"/>')
    yield '</body>'


def actuator_mjcf(shuttle: Shuttle) -> str:
    """Return the MJCF actuators that keep a shuttle on its reference: one for its position, one for its velocity."""
    stiffness, damping = SHUTTLE_MASS * _SHUTTLE_RATE ** 2, 2.0 * SHUTTLE_MASS * _SHUTTLE_RATE
    bound = f'forcerange="{-SHUTTLE_FORCE} {SHUTTLE_FORCE}"'
    return (f'<position name="{shuttle.name}_place" joint="{shuttle.name}" kp="{stiffness}" {bound}/>'
            f'<velocity name="{shuttle.name}_velocity" joint="{shuttle.name}" kv="{damping}" {bound}/>')
