"""The images that a report shows, chosen in one pass over the recording, in bounded memory."""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .windows import Scene

_BUCKET_S = 1.0   # of scenes this close together, the best is kept
_BUCKETS = 64     # kept at most; some 100 KB each at 64x64


class Best:
    """The scenes of highest score, one for each second of the recording, the best _BUCKETS of them."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], tuple[float, Scene]] = {}

    def offer(self, score: float, scene: Scene) -> None:
        """Keep the scene if it is among the best."""
        key = scene.window.episode, int(scene.window.time_s // _BUCKET_S)
        if key in self._kept and self._kept[key][0] >= score:
            return
        self._kept[key] = score, scene
        if len(self._kept) > _BUCKETS:
            del self._kept[min(self._kept, key=lambda k: self._kept[k][0])]

    def best(self, count: int, apart_s: float) -> list[Scene]:
        """Return the best scenes, at least ``apart_s`` apart, in the order of the recording."""
        chosen: list[Scene] = []
        for _, scene in sorted(self._kept.values(), key=lambda kept: (-kept[0], kept[1].window.index)):
            near = any(abs(scene.window.time_s - other.window.time_s) < apart_s for other in chosen)
            if not near and len(chosen) < count:
                chosen.append(scene)
        return sorted(chosen, key=lambda scene: scene.window.index)

    def __iter__(self) -> Iterator[Scene]:
        return (scene for _, scene in self._kept.values())


class Highlights:
    """What is shown of a recording: the strongest changes, the worst surprises, one what-if for each maneuver."""

    def __init__(self) -> None:
        self.changes, self.surprises = Best(), Best()
        self.what_ifs: dict[str, Scene] = {}

    def offer(self, scene: Scene) -> None:
        """Consider the next scene of the recording."""
        window = scene.window
        # By the camera alone, never by how good the prediction was: the strip should be a fair sample.
        if len(scene.seen) and all(window.moving):
            self.changes.offer(-float(np.mean(window.copy_psnr_db)), scene)
        if scene.surprise is not None:
            self.surprises.offer(scene.surprise, scene)
        if window.branches and window.branches.decisive and any(window.moving):
            name = window.branches.nearest
            if name not in self.what_ifs or window.branches.margin > self.what_ifs[name].window.branches.margin:
                self.what_ifs[name] = scene

    def surprise(self, index: int) -> Scene | None:
        """Return the scene that should have predicted the image of the tick after ``index``."""
        return next((scene for scene in self.surprises if scene.window.index == index), None)
