"""Scores predicted frames against the camera images that followed.

A predicted frame is compared with the camera image of its stamp, and with the trivial prediction that nothing changes
(copy-last: the image the prediction started from). Only predictions made while the robot moves count: while it stands still,
copying is perfect and the comparison is meaningless.
"""
from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from worldmodel_ros.demo.images import decode_rgb
from worldmodel_ros.demo.recording import NS, Future, Recording
from worldmodel_ros.evaluate.drive.pictures import is_moving, psnr


@dataclass(frozen=True)
class Match:
    """Comparison of one predicted frame with its camera image."""

    future: int         # index in Recording.futures
    k: int              # frame within the future, 0-based
    psnr: float         # of the prediction [dB]
    psnr_copy: float    # of copying the observation [dB]
    moving: bool


@dataclass
class PredictionScorer:
    """Matches futures with images as they arrive; each future is scored once, when its last frame is due."""

    recording: Recording
    tolerance: float = 0.03         # between a predicted stamp and the image's [s]
    matches: list[Match] = field(default_factory=list)
    unmatched: int = 0              # predicted frames without an image at their stamp
    unreadable: int = 0             # predicted frames that did not decode or have another size
    _next: int = 0

    def advance(self) -> None:
        """Score all futures whose frames are all due."""
        rec = self.recording
        while self._next < len(rec.futures) and rec.image_stamps:
            future = rec.futures[self._next]
            due = future.target(len(future.frames) - 1) + int(self.tolerance * NS)
            if rec.image_stamps[-1] < due:  # a nearer image may still come
                return
            self._score(self._next, future)
            self._next += 1

    def _score(self, index: int, future: Future) -> None:
        start = self.recording.image_at(future.stamp, self.tolerance)
        for k, encoded in enumerate(future.frames):
            target = future.target(k)
            image = self.recording.image_at(target, self.tolerance)
            if start is None or image is None:
                self.unmatched += 1
                continue
            try:
                value = psnr(decode_rgb(encoded), image)
            except ValueError:
                self.unreadable += 1
                continue
            v, w = self.recording.mean_command(future.stamp, target)
            self.matches.append(Match(index, k, value, psnr(start, image), is_moving(v, w)))

    def scores(self) -> dict:
        """Return means over the frames predicted while moving [dB], overall and by horizon; None if there is no match."""
        moving = [m for m in self.matches if m.moving]
        step = self.recording.futures[0].step if self.recording.futures else 0.0
        return {
            **_means(moving),
            'frames': len(moving),
            'frames_standing': len(self.matches) - len(moving),
            'frames_without_image': self.unmatched,
            'frames_unreadable': self.unreadable,
            'by_horizon': [
                {'horizon_s': round((k + 1) * step, 3), **_means([m for m in moving if m.k == k])}
                for k in sorted({m.k for m in moving})
            ],
        }


def _means(matches: list[Match]) -> dict:
    def mean(values: list[float]) -> float | None:
        return round(float(np.mean(values)), 2) if values else None
    return {'psnr_db': mean([m.psnr for m in matches]),
            'psnr_copy_last_db': mean([m.psnr_copy for m in matches])}
