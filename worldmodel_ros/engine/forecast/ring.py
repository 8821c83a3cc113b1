"""The window of a stream whose passes have fixed shapes: a ring, in which the newest frame replaces the oldest."""
from __future__ import annotations

import numpy as np

from worldmodel_ros.model.presets import Preset
from worldmodel_ros.motion import along_arc

_UNSEEN = np.float32(-1e4)  # additive mask


class Ring:
    """The other inputs of passes over a window, besides its keys and values: pose and time of the newest frame, and the
    attention mask."""

    def __init__(self, preset: Preset, per_frame: int, queries: int, rates: np.ndarray) -> None:
        """A frame has ``per_frame`` tokens, the last ``queries`` of which are slots; ``rates`` of the rotation by time, rad per
        frame."""
        self._period, self._frames, self._own, self._queries = preset.step_period, preset.window_frames, per_frame, queries
        self._rates, self._pose = rates, np.zeros(3)
        self.seen = 0  # frames

    @property
    def first(self) -> int:
        """Index of the newest frame's first token."""
        return self.seen % self._frames * self._own

    def enter(self, measured: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the pose (3,) of a frame and the rotation (2, pairs) by its time, given the wheels' twist (2,) since the
        previous frame."""
        twist = np.asarray(measured, np.float32).astype(float)  # in the precision that the network gets
        self._pose, = along_arc(self._pose[None], twist[None], self._period)
        angle = self.seen * self._rates
        return self._pose.astype(np.float32), np.array([np.cos(angle), np.sin(angle)], np.float32)

    def bias(self) -> np.ndarray:
        """Return the mask (N, W * N + N) from a frame's tokens to those of the ring, as far as it is filled, and of the frame:
        image tokens see no slots."""
        own = self._own
        slot = np.arange(own) >= own - self._queries
        unseen = ~slot[:, None] & np.tile(slot, self._frames + 1)
        unseen[:, self.seen * own:self._frames * own] = True
        return np.where(unseen, _UNSEEN, np.float32(0.0))

    def bias_again(self) -> np.ndarray:
        """Return the mask of a second pass, which sees everything available."""
        bias = np.zeros((self._queries, (self._frames + 1) * self._own + self._queries), np.float32)
        bias[:, self.seen * self._own:self._frames * self._own] = _UNSEEN
        return bias
