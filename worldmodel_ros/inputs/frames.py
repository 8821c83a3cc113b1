"""Makes ticks of images: finds those that are one step apart, reads them, and notices a camera that froze."""
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from . import images
from .ticks import FramePacer, FrozenCamera, Pace


@dataclass(frozen=True)
class FrameSettings:
    """What the world model node's parameters of the same names say. Times in s."""

    tick_tolerance: float = 0.05   # a tick may come so much earlier than one step period after the last one
    time_jump: float = 1.0         # a gap or a step back of the stamps of more than this begins a new episode
    frozen_timeout: float = 0.5    # the same image for so long in motion, or despite noise: the camera is frozen; 0: never
    frozen_recovery: int = 3       # images to wait, once the picture changes again
    every_image: bool = False      # read those between two ticks, too: no parameter, but for who sorts them later


class Frame(NamedTuple):
    """`image`, uint8 (H, W, 3) RGB, is given for a TICK, the first of a NEW_EPISODE and, if asked for, one BETWEEN."""

    pace: Pace
    image: np.ndarray | None = None


class Frames:
    """The images of one camera, in the order of their receipt, at a `size` (H, W) [pixels] that may be changed."""

    def __init__(self, step_period: float, size: tuple[int, int]) -> None:
        """`step_period` [s] and `size` are those of the model."""
        self.size = size
        self._pacer, self._frozen = FramePacer(step_period), FrozenCamera()

    @property
    def frozen(self) -> bool:
        """Whether the camera repeats one image although images should differ: the robot moves, or they are noisy."""
        return self._frozen.frozen

    def forget(self) -> None:
        """Make the next image the first of an episode, and trust the camera again."""
        self._pacer.forget()
        self._frozen.forget()

    def take(self, message: images.Image | images.CompressedImage, stamp: int, moving: bool, now: float,
             settings: FrameSettings) -> Frame:
        """
        Judge an image with the given `stamp` [ns], received at the steady time `now` [s]; only a tick is
        decoded, unless every image is asked for.

        `moving`: whether the command in force moves the robot. Raises ImageError for a tick that cannot be
        read; the pace goes on as if it had not come.
        """
        pace = self._pacer.classify(stamp, settings.tick_tolerance, settings.time_jump)
        if pace.refused:
            return Frame(pace)
        if pace is Pace.BETWEEN and not settings.every_image:
            self._pacer.take(stamp, pace)
            return Frame(pace)
        image = images.read(message, self.size)
        was_frozen = self._frozen.frozen
        if self._frozen.update(
                message.data, moving, now, settings.frozen_timeout, settings.frozen_recovery):
            return Frame(Pace.FROZEN)
        if was_frozen:
            pace = Pace.NEW_EPISODE  # what was shown in between is not what happened
        self._pacer.take(stamp, pace)
        return Frame(pace, image)
