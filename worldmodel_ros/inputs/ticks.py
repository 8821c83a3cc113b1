"""
Makes ticks from a camera's images and the commands that the robot was given in between.

Selects and reads images that are one model step apart, and keeps the executed commands, each for as long as a base obeys it.
Also judges whether the camera's rate suits the model, and whether the camera is alive.
"""
from __future__ import annotations

import enum
import sys
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from . import images

NS = 1_000_000_000
GAP = 1.5  # step periods between two ticks; with more, images are missing

# Ticks are due on a grid that follows the camera by a fraction (1 / _FOLLOW) of its offset: a camera of 29.97 Hz then gives
# every third image for ever. On a fixed grid it would slip by an image every 33 s, with a step of 67 ms, and one of
# 30.03 Hz with a step of 133 ms, at which the gate stops the robot. With a fifth, the grid follows if a whole number of
# images makes a step to within a tenth of their spacing (10 Hz within 10 %, 20 Hz 5 %, 30 Hz 3 %, 60 Hz 1.7 %); it does not
# lock to other rates, for which the mean step is the model's.
_FOLLOW = 5
_SPACINGS = 3  # of images, whose median is the camera's; so few because cameras change their rate in the dark
# A tick that comes so many spacings late means that an image was lost, and the grid restarts at it: one step is wrong.
# Returning to the old grid would make the next step wrong, too.
_LOST = 0.75

_CHOICE = 0.6  # of the step period: largest spacing of images for which a tick can be chosen from several
_CALM = 5      # ticks between two that come earlier

_OFF = 0.1     # of the step period, that the mean step may be off; also the share of steps that may be exceptions
_FEWEST = 10   # steps needed to judge a rate
_MARGIN = 0.03  # s, by which the gate's default time-out exceeds the step of the model that it is made for
_SETTLED = 1.0  # s without a command that moves the robot, after which it stands
# A camera counts as noisy once so many images in a row of a standing robot have differed from the one before in such a
# share of their bytes. Simulators without noise show the same image for as long as nothing moves.
_NOISY_IMAGES, _NOISY_SHARE = 30, 0.3
_LATENCY_VARIES = 0.007  # s, from one command to the next (p99 - p50 of the demo, camera to command)
EXECUTED_TIMEOUT = 0.5   # s; bases brake by themselves after about so long without a command
_LARGEST = 1e6  # m/s and rad/s; squares and sums of more overflow float32, and no robot moves like that
_KEPT = 10 * NS  # longer than any interval between two ticks of one episode


class Pace(enum.Enum):
    """
    What an image is to the model. The values of the refused kinds are reasons, for counters.

    FROZEN is judged by the image, the others by the stamp.
    """

    TICK = 'tick'
    NEW_EPISODE = 'first of a new episode'
    BETWEEN = 'between two ticks'
    ZERO = 'zero stamp'
    DUPLICATE = 'duplicate stamp'
    BACKWARD = 'stamp out of order'
    FROZEN = 'frozen camera'

    @property
    def refused(self) -> bool:
        return self in (Pace.ZERO, Pace.DUPLICATE, Pace.BACKWARD)


class FramePacer:
    """
    Selects online the images nearest to a grid of the model's steps.

    The spacing of the last images predicts whether the next one will be nearer. An image is taken sooner if at the next
    one more than ``gap`` steps would have passed since the last tick. So all images of a camera of up to 13 Hz are taken:
    the steps of 12 Hz are then 17 % short, each of them. With every sixth image left out they would be right on
    average, but each would be wrong (17 % short or 67 % long), and the gate would stop the robot at the long ones.
    ``misfit`` reports either. Where nothing is commanded, a larger ``gap`` keeps the model's time at more rates.

    A jump of the stamps by more than ``time_jump`` s, either way, begins a new episode: what the model has seen is then
    not the past of what it sees (a bag that starts over, a simulation that was reset, a camera that was disconnected).

    ``come_earlier`` shifts ticks to earlier images from then on, one image at a time: a step is once short by the spacing
    of two images, never long, since the gate stops the robot at long ones.
    """

    def __init__(self, step_period: float, gap: float = GAP) -> None:
        """``step_period``: of the model [s]. ``gap``: step periods that may pass between two ticks so that one is nearer."""
        self._period, self._gap = round(step_period * NS), gap
        self._wanted = self._moved = 0  # ns, by which ticks have yet to come earlier, and already do
        self._early = 0   # ns, by which the next tick may come earlier than others
        self._calm = 0    # ticks until it may again
        self._spacings: deque[int] = deque(maxlen=_SPACINGS - 1)  # ns, without that to the image being judged
        self.forget()

    def forget(self) -> None:
        """Make the next image the first of an episode."""
        self._tick: int | None = None
        self._seen = self._due = self._wanted = self._early = 0

    def classify(self, stamp: int, tolerance: float, time_jump: float) -> Pace:
        """
        Judge an image by its stamp [ns], without changing any state.

        ``tolerance`` [s]: by how much a tick may come earlier than one step period after the last one.
        """
        if stamp == 0:
            return Pace.ZERO
        if self._tick is None or abs(stamp - self._seen) > time_jump * NS:
            return Pace.NEW_EPISODE
        if stamp <= self._seen:
            return Pace.DUPLICATE if stamp == self._seen else Pace.BACKWARD
        if stamp - self._tick < self._period - tolerance * NS - self._early:
            return Pace.BETWEEN
        spacing = self._spacing(stamp)
        is_nearest = 2 * (stamp - self._due) >= -spacing
        return Pace.TICK if is_nearest or stamp + spacing - self._tick > self._gap * self._period else Pace.BETWEEN

    def take(self, stamp: int, pace: Pace) -> None:
        """Record an image that was judged so and could be used: the grid continues from it."""
        if pace is Pace.NEW_EPISODE:
            self._spacings.clear()
            self._due = stamp
        spacing, off = self._spacing(stamp), stamp - self._due
        if pace is not Pace.NEW_EPISODE:
            self._spacings.append(stamp - self._seen)
        self._seen = stamp
        if pace is Pace.BETWEEN:
            return
        self._tick = stamp
        self._moved += self._early
        self._early = 0
        if 2 * abs(off) > self._period or off > _LOST * spacing:
            self._due = stamp + self._period
        else:
            self._due += self._period + off // _FOLLOW
        self._calm -= self._calm > 0
        if self._wanted and not self._calm:
            self._shift(spacing)

    def come_earlier(self, seconds: float) -> None:
        """Make ticks come earlier by about ``seconds``, as far as there are images. Thread-safe."""
        self._wanted = round(seconds * NS)

    @property
    def spacing(self) -> float:
        """Time between two images [s], if a tick can be chosen from several; else 0."""
        if len(self._spacings) < _SPACINGS - 1:
            return 0.0
        spacing = sorted(self._spacings)[len(self._spacings) // 2]
        return spacing / NS if spacing <= _CHOICE * self._period else 0.0

    @property
    def moved(self) -> float:
        """By how much ticks come earlier than they would have without ``come_earlier`` [s], since the start."""
        return self._moved / NS

    def _shift(self, spacing: int) -> None:
        """Make the next tick come one image earlier, if that is wanted."""
        if spacing > _CHOICE * self._period or 2 * self._wanted < spacing:
            self._wanted = 0
            return
        self._due -= spacing
        self._early, self._wanted, self._calm = spacing, max(0, self._wanted - spacing), _CALM

    def _spacing(self, stamp: int) -> int:
        """Return the camera's spacing of images [ns], given the stamp of the newest one."""
        spacings = sorted((*self._spacings, stamp - self._seen))
        return spacings[len(spacings) // 2]


class FrozenCamera:
    """
    Detects a camera that repeats one image for ever, with new stamps.

    It adds up the time for which the image has stayed exactly the same while a command moved the robot. While the robot
    stands the count pauses, since its image may well stay the same; but if the camera's images have shown sensor noise
    while it stood, they must continue to do so, and standing counts as well. Only a different image resets the count.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start over with a camera that is assumed to be alive, and of which nothing is known."""
        self.frozen = False
        self._last: np.ndarray | None = None
        self._last_at = 0.0
        self._repeats = 0
        self._same_for = 0.0  # s, that count
        self._moved_at: float | None = None
        self._noise: deque[bool] = deque(maxlen=_NOISY_IMAGES)  # whether images of a standing robot differed everywhere
        self._alive = 0

    def update(self, data: Sequence[int], moving: bool, now: float, timeout: float, recovery: int) -> bool:
        """
        Take the bytes of the next image, received at the steady time ``now`` [s]; return whether the camera is frozen.

        It is frozen once the same image has counted for ``timeout`` s (0: never), until the image has changed and
        ``recovery`` more have come. ``moving``: whether the command in force moves the robot.
        """
        data = np.frombuffer(data, np.uint8)
        last, self._last = self._last, data
        elapsed, self._last_at = now - self._last_at, now
        same = last is not None and np.array_equal(data, last)
        if moving or self._moved_at is None:
            self._moved_at = now
        if self.frozen:
            # The robot stands by now, so after the first change the images may well stay the same.
            self._alive += not same or self._alive > 0
            if self._alive > recovery or timeout == 0.0:
                self.frozen, self._same_for, self._repeats = False, 0.0, 0
                self._noise.clear()
            return self.frozen
        if not same:
            if last is not None and now - self._moved_at > _SETTLED:
                # A camera that repeated an image before it changed does not show noise in each.
                self._noise.append(not self._repeats and _differ_all_over(data, last))
            self._same_for, self._repeats = 0.0, 0
            return False
        self._repeats += 1
        if (moving or self._is_noisy) and self._repeats > 1:  # the command may have come just before the first one
            self._same_for += elapsed
        if timeout and self._same_for >= timeout:
            self.frozen, self._alive = True, 0
        return self.frozen

    @property
    def _is_noisy(self) -> bool:
        return len(self._noise) == _NOISY_IMAGES and all(self._noise)


def _differ_all_over(data: np.ndarray, last: np.ndarray) -> bool:
    """Return whether two images differ as by noise, not only in part, as when something moves in front of the camera."""
    return len(data) != len(last) or np.count_nonzero(data != last) >= _NOISY_SHARE * len(data)


@dataclass(frozen=True)
class FrameSettings:
    """Settings from the world model node's parameters of the same names. Times in s."""

    tick_tolerance: float = 0.05   # a tick may come so much earlier than one step period after the last one
    time_jump: float = 1.0         # a gap or a step back of the stamps of more than this begins a new episode
    frozen_timeout: float = 0.5    # the same image for so long in motion, or despite noise: the camera is frozen; 0: never
    frozen_recovery: int = 3       # images to wait, once the image changes again
    every_image: bool = False      # read those between two ticks, too: not a parameter, for callers that sort them later


class Frame(NamedTuple):
    """``image``, uint8 (H, W, 3) RGB, is set for a TICK, a NEW_EPISODE and, with ``every_image``, for one BETWEEN."""

    pace: Pace
    image: np.ndarray | None = None


class Frames:
    """
    The images of one camera, in order of receipt, at ``size`` (H, W) [pixels]; ``size`` and ``view``, which brings images to
    that size, may be changed.
    """

    def __init__(self, step_period: float, size: tuple[int, int], gap: float = GAP) -> None:
        """``step_period`` [s] and ``size`` are those of the model; ``gap`` is as of ``FramePacer``."""
        self.size = size
        self.view: images.Fit = images.fit
        self._pacer, self._frozen = FramePacer(step_period, gap), FrozenCamera()

    @property
    def frozen(self) -> bool:
        """Whether the camera repeats one image although images should differ: the robot moves, or they are noisy."""
        return self._frozen.frozen

    def come_earlier(self, seconds: float) -> None:
        """As ``FramePacer.come_earlier``."""
        self._pacer.come_earlier(seconds)

    @property
    def spacing(self) -> float:
        """As ``FramePacer.spacing``."""
        return self._pacer.spacing

    @property
    def moved(self) -> float:
        """As ``FramePacer.moved``."""
        return self._pacer.moved

    def forget(self) -> None:
        """Make the next image the first of an episode, and trust the camera again."""
        self._pacer.forget()
        self._frozen.forget()

    def take(self, message: images.Image | images.CompressedImage, stamp: int, moving: bool, now: float,
             settings: FrameSettings) -> Frame:
        """
        Judge an image with the given ``stamp`` [ns], received at the steady time ``now`` [s]; only ticks are decoded,
        unless ``every_image`` is set.

        ``moving``: whether the command in force moves the robot. Raises ImageError for a tick that cannot be read; the
        pace continues as if it had not come.
        """
        pace = self._pacer.classify(stamp, settings.tick_tolerance, settings.time_jump)
        if pace.refused:
            return Frame(pace)
        if pace is Pace.BETWEEN and not settings.every_image:
            self._pacer.take(stamp, pace)
            return Frame(pace)
        image = images.read(message, self.size, self.view)
        was_frozen = self._frozen.frozen
        if self._frozen.update(
                message.data, moving, now, settings.frozen_timeout, settings.frozen_recovery):
            return Frame(Pace.FROZEN)
        if was_frozen:
            pace = Pace.NEW_EPISODE  # the frozen images did not show what happened
        self._pacer.take(stamp, pace)
        return Frame(pace, image)


def misfit(steps: Sequence[float], step_period: float, gate_timeout: float) -> str:
    """
    Return, in one sentence, why a camera's rate does not suit the model, and what to do; '' if nothing is wrong with it.

    ``steps`` [s]: times between successive ticks. ``step_period`` [s]: of the model. ``gate_timeout`` [s]: silence after
    which the command gate stops the robot. Isolated steps that are too long do not count against the rate.
    """
    if len(steps) < _FEWEST:
        return ''
    taken = np.asarray(steps)
    gaps = taken > GAP * max(step_period, float(np.median(taken)))
    loses = gaps.mean() > _OFF
    if not loses:
        taken = taken[~gaps]
    mean, longest, period = taken.mean() * 1e3, taken.max() * 1e3, step_period * 1e3
    wrong = []
    remedy = ('look for what loses images' if loses else
              f'let the camera give {1.0 / step_period:.4g} images a second or a multiple of that')
    late = (taken > gate_timeout - _LATENCY_VARIES).mean()
    if late > _OFF:
        wrong.append(f'{late:.0%} of the steps take up to {longest:.0f} ms, and by default the gate stops the robot after '
                     f'{gate_timeout * 1e3:.4g} ms without a command')
    if abs(mean - period) > _OFF * period:
        wrong.append(f'the images that are used are {mean:.0f} ms apart on average and the model\'s step is '
                     f'{period:.4g} ms, so that it takes the world to move '
                     f'{"faster" if mean > period else "slower"} than it does')
    elif wrong:
        remedy += f', or set the gate\'s command_timeout_s to {longest / 1e3 + _MARGIN:.2f}'
    return f'{"; ".join(wrong)}: {remedy}' if wrong else ''


def is_usable(action: Iterable[float]) -> bool:
    """Return whether all numbers of an action are finite, and not so large that the model cannot compute with them."""
    return all(abs(value) <= _LARGEST for value in action)  # of a NaN, every comparison is false


class Executed(NamedTuple):
    stamp: int  # ns, when it was received
    action: tuple[float, ...]


class ExecutedActions:
    """
    History of the commands given to the robot. A command is in force from its receipt until the next one.

    But no longer than a time-out, after which the base brakes by itself: the command's publisher may be dead.

    Written by one thread and read by another.
    """

    def __init__(self, actions: int, step_period: float, timeout: float = EXECUTED_TIMEOUT) -> None:
        """
        ``actions``: numbers in an action; ``step_period``: of the model [s]; ``timeout`` [s], 0: a command is in force
        until the next one comes, as on a topic that only publishes changes.
        """
        self._size, self._period = actions, round(step_period * NS)
        self._timeout = round(timeout * NS) or sys.maxsize
        self._lock = threading.Lock()
        self._kept: deque[Executed] = deque()

    def add(self, stamp: int, action: tuple[float, ...]) -> None:
        """Add a command received at ``stamp`` [ns, ROS time]."""
        with self._lock:
            if self._kept and stamp < self._kept[-1].stamp:
                self._kept.clear()  # ROS time was set back: earlier commands have no place on the new timeline
            self._kept.append(Executed(stamp, action))
            while len(self._kept) > 1 and self._kept[1].stamp < stamp - _KEPT:
                self._kept.popleft()

    def moving(self, now: int) -> bool:
        """Return whether the newest command moves the robot, and is in force at ``now`` [ns, ROS time]."""
        newest = self._newest
        return newest is not None and any(newest.action) and now - newest.stamp < self._timeout

    def ran_out(self, now: int) -> bool:
        """Return whether the newest command moved the robot, and has timed out at ``now`` [ns, ROS time]."""
        newest = self._newest
        return newest is not None and any(newest.action) and now - newest.stamp >= self._timeout

    def mean(self, start: int | None, end: int) -> np.ndarray:
        """
        Return the time-weighted mean action between two stamps [ns], float32 (A,); zeros while no command was in
        force.

        ``start`` None means one step period before ``end``.
        """
        start = end - self._period if start is None else start
        total = np.zeros(self._size)
        with self._lock:
            until = end
            for stamp, action in reversed(self._kept):
                begin, over = max(stamp, start), min(until, stamp + self._timeout)
                if begin < over:
                    total += np.asarray(action) * (over - begin)
                until = min(until, begin)
                if stamp <= start:
                    break
        return (total / max(1, end - start)).astype(np.float32)

    def held(self, start: int, end: int) -> list[tuple[float, np.ndarray]]:
        """
        Return the actions (A,) in force from one stamp to a later one [ns], in order, each with its duration in s; the
        newest one lasts until ``end``, which may be in the future. Zeros while none was in force.
        """
        with self._lock:
            kept = [each for each in self._kept if each.stamp < end]
        found, until = [], end
        for stamp, action in reversed(kept):
            begin, over = max(stamp, start), min(until, stamp + self._timeout)
            if over < until and until > start:
                found.append((max(over, start), until, np.zeros(self._size)))
            if begin < over:
                found.append((begin, over, np.asarray(action, float)))
            until = min(until, begin)
            if stamp <= start:
                break
        if until > start or not found:
            found.append((start, until, np.zeros(self._size)))
        return [((over - begin) / NS, action) for begin, over, action in reversed(found)]

    def first(self, start: int, end: int) -> tuple[float, ...] | None:
        """
        Return the first command received from the stamp ``start`` until ``end`` [ns], else the one in force at
        ``start``, or zeros if it had timed out; None before the first command.
        """
        with self._lock:
            found = None
            for stamp, action in reversed(self._kept):
                if stamp < end and (stamp >= start or found is None):
                    found = action if start - stamp < self._timeout else (0.0,) * self._size
                if stamp < start:
                    break
            return found

    @property
    def _newest(self) -> Executed | None:
        with self._lock:
            return self._kept[-1] if self._kept else None
