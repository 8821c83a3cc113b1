"""One world, walked along poses: full chunks of the model are kept, a partial one is shown and later imagined again."""
from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np

from worldmodel_ros.engine.open_world.session import WorldSession
from worldmodel_ros.model.wan.camera import Intrinsics


class Walk:
    """A walk. Used by the thread of the networks only, except ``imagined``."""

    def __init__(self, session: WorldSession, frame_images: int) -> None:
        """``session``: has seen its image only; ends with this. ``frame_images``: images of one latent frame."""
        self._session, self._frame_images = session, frame_images
        self._left = np.zeros((0, 4, 4))  # newest poses, too few for a chunk
        self.imagined = 0                 # frames, those of ``_left`` included

    def along(self, poses: np.ndarray, intrinsics: np.ndarray) -> Iterator[WalkChunk]:
        """
        Yield the chunks of poses (N, 4, 4). Imagine each before asking for the next one, and exhaust the iterator.

        All poses of a chunk have the ``intrinsics`` (N, 4) of its first.
        """
        skipped = len(self._left)
        waiting = np.concatenate([self._left, poses])
        rows = np.concatenate([np.repeat(intrinsics[:1], skipped, 0), intrinsics])
        while len(waiting):
            count = self._session.images_of_chunk
            whole = len(waiting) >= count
            part = waiting[:count]
            yield WalkChunk(self._session, np.concatenate([part, np.repeat(part[-1:], count - len(part), 0)]),
                            Intrinsics(*map(float, rows[0])), self._frame_images, whole, skipped, len(part))
            if not whole:
                break
            waiting, rows, skipped = waiting[count:], rows[count:], 0
        self._left, self.imagined = waiting, self.imagined + len(poses)

    def close(self) -> None:
        """Free the pages."""
        self._session.close()


@dataclass(frozen=True)
class WalkChunk:
    """A chunk of a walk, of whose images those in [``first``, ``end``) are returned. If it is not ``whole``, it is imagined on
    a fork, and again when more poses have come."""

    session: WorldSession
    poses: np.ndarray
    intrinsics: Intrinsics
    frame_images: int
    whole: bool
    first: int
    end: int

    def imagining(self, steps: int) -> Generator[None, None, np.ndarray]:
        """As ``WorldSession.imagining``: uint8 (n, H, W, 3). Raises OutOfPages, after which the world is unusable."""
        session = self.session if self.whole else self.session.fork()
        try:
            frames = yield from session.imagining(self.poses[self.frame_images - 1::self.frame_images], self.intrinsics, steps)
        finally:
            if not self.whole:
                session.close()
        return frames[self.first:self.end]
