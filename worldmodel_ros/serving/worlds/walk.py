"""One world, walked along poses: what fills a chunk of the model is kept, what does not is shown and imagined again."""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from worldmodel_ros.engine.open_world.session import WorldSession
from worldmodel_ros.model.wan.camera import Intrinsics


class Walk:
    """Belongs to the thread of the networks, but for ``imagined``."""

    def __init__(self, session: WorldSession, frame_images: int) -> None:
        """``session``: with its image alone; ends with this. ``frame_images``: of one latent frame."""
        self._session, self._frame_images = session, frame_images
        self._left = np.zeros((0, 4, 4))  # newest poses, too few for a chunk
        self.imagined = 0                 # frames, those of ``_left`` included

    def along(self, poses: np.ndarray, intrinsics: np.ndarray) -> Iterator[np.ndarray]:
        """
        Yield the frames of poses (N, 4, 4), chunk by chunk, uint8 (n, H, W, 3); to be gone through to the end.

        All poses of a chunk have the ``intrinsics`` (N, 4) of its first. Raises OutOfPages, after which the world is of no use.
        """
        every, skipped = self._frame_images, len(self._left)
        waiting = np.concatenate([self._left, poses])
        rows = np.concatenate([np.repeat(intrinsics[:1], skipped, 0), intrinsics])
        while len(waiting):
            count = self._session.images_of_chunk
            whole = len(waiting) >= count
            part = waiting[:count]
            part = np.concatenate([part, np.repeat(part[-1:], count - len(part), 0)])
            session = self._session if whole else self._session.fork()
            try:
                frames = session.imagine(part[every - 1::every], Intrinsics(*map(float, rows[0])))
            finally:
                if not whole:
                    session.close()
            yield frames[skipped:len(waiting)]
            if not whole:
                break
            waiting, rows, skipped = waiting[count:], rows[count:], 0
        self._left, self.imagined = waiting, self.imagined + len(poses)

    def close(self) -> None:
        """Give the pages back."""
        self._session.close()
