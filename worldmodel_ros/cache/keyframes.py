"""Selects the slabs that stay in a cache behind its window: those with the most distinct views.

The robot's pose decides. A full turn, or a path through the room, then stays in the cache however long ago it was, in a fixed
number of slabs: keyframes, as in visual SLAM (ORB-SLAM, Mur-Artal et al. 2015), here of keys and values.
"""
from __future__ import annotations

import math

import numpy as np

METRE, RADIAN = 1.0, 1.25  # a sideways move of 1 m shows as much new content as a turn of 0.8 rad, half a camera's view


def least_needed(poses: np.ndarray, observed: np.ndarray, metre: float = METRE, radian: float = RADIAN) -> int:
    """Return the index of the slab to drop of n >= 2, oldest first.

    ``poses`` (n, 3): x and y in m, heading in rad. ``observed`` bool (n,): slabs with only observed frames. Of the two most
    similar poses, the older is dropped. If some slabs are imagined, one of these is dropped: the one most similar to another
    slab, and of two imagined ones the newer, so that what was imagined does not change. An imagined error in place of an
    observation would last for as long as the session imagines. ``metre`` and ``radian``: how unlike poses are that are so far
    apart.
    """
    apart = poses[:, None] - poses
    turned = np.abs((apart[..., 2] + math.pi) % (2.0 * math.pi) - math.pi)
    unlike = metre * np.hypot(apart[..., 0], apart[..., 1]) + radian * turned
    unlike[np.tri(len(poses), dtype=bool)] = math.inf
    if not observed.all():
        unlike[observed[:, None] & observed] = math.inf
    older, newer = divmod(int(unlike.argmin()), len(poses))
    return older if observed[newer] else newer


def keyframes(poses: np.ndarray, observed: np.ndarray, count: int) -> list[list[int]]:
    """Return which of n slabs are the ``count`` keyframes, or all if there are fewer, when 0, 1, 2 ... n of them have left the
    window: indices, ascending. ``poses`` and ``observed`` as of ``least_needed``."""
    kept: list[int] = []
    found = [kept]
    for slab in range(len(poses)):
        kept = [*kept, slab]
        if len(kept) > count:
            del kept[least_needed(poses[kept], observed[kept])]
        found.append(kept)
    return found
