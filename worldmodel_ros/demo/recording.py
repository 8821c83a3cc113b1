"""The recording of a running system by an observer, as plain data.

Stamps are ROS time in integer nanoseconds, as in the messages; everything else is in SI units. Lists are append-only, so one
thread may append while another reads by index.
"""
from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import attrgetter

import numpy as np

from worldmodel_ros.control.ladder import Tier

NS = 1_000_000_000
TIERS = {int(tier): tier.name.lower() for tier in Tier if tier is not Tier.NONE}


@dataclass(frozen=True)
class Command:
    """A velocity command as the robot receives it."""

    stamp: int      # of the observation it answers [ns]; 0: a stop that answers none
    received: int   # ROS time of the receipt [ns]
    v: float        # [m/s]
    w: float        # [rad/s]

    @property
    def latency(self) -> float:
        """Age of the observation when the command arrived [s]; NaN for a command that answers none."""
        return (self.received - self.stamp) / NS if self.stamp else math.nan


@dataclass(frozen=True)
class Tick:
    """How one tick of the model was answered."""

    stamp: int      # of the observation [ns]
    tier: int       # a key of TIERS, or 0 if there was no answer
    late: bool      # ready only after its budget
    latency: float  # image received to command published [s]
    reason: str = ''  # why not the best tier; empty if it was
    age: float = 0.0  # of the image on receipt [s]
    silent: bool = False  # reports a silent camera rather than an image


@dataclass(frozen=True)
class Pose:
    """True pose and velocity of the robot in the world."""

    stamp: int
    x: float        # [m]
    y: float        # [m]
    yaw: float      # [rad]
    v: float        # [m/s]
    w: float        # [rad/s]


@dataclass(frozen=True)
class Future:
    """Frames that the model predicts from one observation."""

    stamp: int                  # of the observation [ns]
    step: float                 # time between frames [s]
    frames: tuple[bytes, ...]   # encoded images; frame k is for stamp + (k + 1) * step
    tier: int = int(Tier.TWO_STEP)
    age: float = 0.0            # from the observation's receipt to publication [s]

    @property
    def in_time(self) -> bool:
        """Whether it was published before the time of its first frame."""
        return self.age < self.step

    def target(self, k: int) -> int:
        """Return the stamp of frame ``k`` [ns]."""
        return self.stamp + round((k + 1) * self.step * NS)


@dataclass(frozen=True)
class PredictedThing:
    """An object as estimated by the robot, and its forecast positions at a choice's times."""

    name: str
    colour: str
    radius: float               # [m]
    path: np.ndarray            # (T, 2) in base_link at the observation [m]


@dataclass(frozen=True)
class Option:
    """A candidate: its score, the contribution of each term of the task, the ``contact`` for which it was vetoed ('': none),
    and its path."""

    name: str
    score: float
    terms: tuple[float, ...] = ()
    contact: str = ''
    path: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))  # (T, 2) in base_link at the observation [m]


@dataclass(frozen=True)
class Choice:
    """How a command was decided on a forecast of the scene: the name of the chosen option, and all compared ones."""

    stamp: int                  # of the observation [ns]
    chosen: str
    options: tuple[Option, ...] = ()
    passes: int = 1             # of the forecast
    terms: tuple[str, ...] = ()  # of the task, in words, in the order of Option.terms
    times: np.ndarray = field(default_factory=lambda: np.zeros(0))      # of the paths, since the observation [s]
    things: tuple[PredictedThing, ...] = ()
    walls: np.ndarray = field(default_factory=lambda: np.zeros((0, 3)))  # rows of normal and offset, in base_link
    forecast_time: float = 0.0  # [s]
    decision_time: float = 0.0  # [s]

    def option(self, name: str) -> Option | None:
        """Return the option of that name; None if it was not compared."""
        return next((option for option in self.options if option.name == name), None)

    def rejected_for(self, option: Option) -> str:
        """Return why an option was rejected: its contact, if vetoed, or the term by which it loses most against the chosen one;
        empty if it loses by no term."""
        if option.contact:
            return f'contact with {option.contact}'
        chosen = self.option(self.chosen)
        if chosen is None or not option.terms or option is chosen:
            return ''
        lost = [mine - its for mine, its in zip(chosen.terms, option.terms, strict=True)]
        most = int(np.argmax(lost))
        return self.terms[most] if lost[most] > 0.0 else ''


@dataclass(frozen=True)
class Branch:
    """One action sequence of a what-if answer and its outcome."""

    name: str
    frames: tuple[bytes, ...]
    risk: np.ndarray            # (T,) probability of contact per step
    progress: float             # [m]
    path: np.ndarray            # (T, 3) x [m], y [m], yaw [rad] in base_link at the observation
    terms: tuple[float, ...] = ()  # contribution of each of the answer's terms


@dataclass(frozen=True)
class WhatIf:
    """The model's answer to a what-if request, and the true outcomes, if the simulator was asked."""

    stamp: int                          # of the observation branched from [ns]
    goal: str
    step: float                         # [s]
    elapsed: float                      # time the model's node used [s]
    round_trip: float                   # request to answer, as the caller sees it [s]
    branches: tuple[Branch, ...]
    truth: tuple[Branch, ...] = ()      # from the simulator; same order, empty if it did not answer
    terms: tuple[str, ...] = ()         # of the robot's task, in words; none without a forecast
    left_out: str = ''                  # what is not answered, and why


@dataclass(frozen=True)
class Thing:
    """A wall or an object of the world, seen from above."""

    name: str                           # colour name of an object; empty: part of the room
    x: float                            # centre [m]
    y: float                            # centre [m]
    yaw: float                          # [rad]
    length: float                       # along its own x [m]
    width: float                        # along its own y [m]
    rgb: tuple[float, float, float]     # [0..1]
    round: bool = False


@dataclass(frozen=True)
class Sighting:
    """True positions of the movers."""

    stamp: int                  # [ns]
    movers: dict[str, Thing]    # by name


@dataclass
class Room:
    """One room of a task, from its start to its judgement."""

    task: str
    seed: int
    begun: int                          # ROS time at receipt of its first judgement message [ns]
    things: dict[str, Thing] = field(default_factory=dict)  # as first observed
    target: str = ''                    # what to reach, touch or keep a distance to
    succeeded: bool | None = None       # None: not over
    reason: str = ''
    seconds: float = 0.0                # duration [s]
    contacts: int = 0
    arrivals: int = 0

    @property
    def fate(self) -> str:
        """The outcome in words."""
        if self.succeeded is None:
            return 'goes on'
        what = 'done' if self.succeeded else self.reason or 'not done'
        return f'{what}, {self.seconds:.1f} s' + (f', {self.arrivals} arrivals' if self.arrivals else '')


@dataclass
class GoalAttempt:
    """One goal given to the robot; times are from the start of the run."""

    goal: str
    given: float                        # [s]
    reached: float | None = None        # [s]
    abandoned: float | None = None      # given up for the next goal [s]
    closest: float = math.inf           # [m]


@dataclass
class Recording:
    """Everything observed in one run."""

    image_stamps: list[int] = field(default_factory=list)
    images: list[np.ndarray] = field(default_factory=list)      # (H, W, 3) uint8 RGB, one per image stamp
    commands: list[Command] = field(default_factory=list)
    ticks: list[Tick] = field(default_factory=list)
    poses: list[Pose] = field(default_factory=list)
    futures: list[Future] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)         # none without a forecast
    what_ifs: list[WhatIf] = field(default_factory=list)
    things: dict[str, Thing] = field(default_factory=dict)      # newest state by marker key
    sightings: list[Sighting] = field(default_factory=list)     # if anything moves
    goals: list[GoalAttempt] = field(default_factory=list)
    rooms: list[Room] = field(default_factory=list)             # of a task; empty without one
    target: str = ''                                            # of the task
    robot_latencies: list[float] = field(default_factory=list)  # camera to command, measured by the robot [s]
    robot: dict[str, str] = field(default_factory=dict)         # the robot's own diagnostics, newest
    model: dict[str, str] = field(default_factory=dict)         # the model node's own diagnostics, newest

    def image_at(self, stamp: int, tolerance: float) -> np.ndarray | None:
        """Return the camera image nearest to ``stamp``; None if there is none within ``tolerance`` seconds."""
        i = bisect_left(self.image_stamps, stamp)
        near = [j for j in (i - 1, i) if 0 <= j < len(self.image_stamps)]
        if not near:
            return None
        j = min(near, key=lambda j: abs(self.image_stamps[j] - stamp))
        return self.images[j] if abs(self.image_stamps[j] - stamp) <= tolerance * NS else None

    def add_image(self, stamp: int, image: np.ndarray) -> None:
        """Append an image; drop it if it is not newer than the last, because look-ups rely on the order."""
        if not self.image_stamps or stamp > self.image_stamps[-1]:
            self.images.append(image)  # before the stamp: a reader that finds the stamp must find the image
            self.image_stamps.append(stamp)

    def pose_at(self, stamp: int) -> Pose | None:
        """Return the robot's true pose nearest to ``stamp``; None if there is none within 0.1 s."""
        return _nearest(self.poses, stamp, 0.1)

    def sighting_at(self, stamp: int) -> Sighting | None:
        """Return the true positions of movers nearest to ``stamp``; None if there are none within 0.1 s."""
        return _nearest(self.sightings, stamp, 0.1)

    @property
    def driven(self) -> list[Room]:
        """The rooms in which a command was received."""
        if not self.commands:
            return []
        first = self.commands[0].received
        return [room for room, following in zip_longest(self.rooms, self.rooms[1:]) if not following or following.begun > first]

    def room_at(self, stamp: int) -> Room | None:
        """Return the room that the robot was in; None without a task."""
        return next((room for room in reversed(self.rooms) if room.begun <= stamp), None)

    def mean_command(self, start: int, end: int) -> tuple[float, float]:
        """Return the time-weighted means of the commanded v [m/s] and w [rad/s] between two stamps."""
        by_receipt = attrgetter('received')
        first = bisect_right(self.commands, start, key=by_receipt) - 1
        last = bisect_left(self.commands, end, key=by_receipt)
        v = w = 0.0
        for i in range(max(first, 0), last):
            begin = max(self.commands[i].received, start)
            until = min(self.commands[i + 1].received if i + 1 < last else end, end)
            share = (until - begin) / (end - start)
            v += self.commands[i].v * share
            w += self.commands[i].w * share
        return v, w


def _nearest(found: list, stamp: int, tolerance: float):
    """Return the item nearest to ``stamp``, of items with ascending stamps; None if none is within ``tolerance`` seconds."""
    i = bisect_left(found, stamp, key=attrgetter('stamp'))
    near = min(found[max(i - 1, 0):i + 1], key=lambda each: abs(each.stamp - stamp), default=None)
    return near if near is not None and abs(near.stamp - stamp) <= tolerance * NS else None
