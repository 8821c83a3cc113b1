"""Which slabs stay in a cache when its window has left them behind: those that show what no other does.

The robot's pose tells. A turn all around, or a way through the room, is then in the cache however long ago it was, in a fixed
number of slabs: keyframes, as in visual SLAM (ORB-SLAM, Mur-Artal et al. 2015), here of keys and values.
"""
from __future__ import annotations

import math

import numpy as np

METRE, RADIAN = 1.0, 1.25  # a step of 1 m aside shows as much that is new as a turn of 0.8 rad, half a camera's view


def least_needed(poses: np.ndarray, observed: np.ndarray) -> int:
    """Index of the slab to be dropped of n >= 2, in the order in which they came.

    ``poses`` (n, 3): x and y in m, heading in rad. ``observed`` bool (n,): of observed frames alone. Of the two that were taken
    most alike, the older is dropped. Where some are imagined, one of these is: that which is most like another slab, and of two
    that are alike the newer, so that what was imagined stays what it was. An error that is imagined in the place of what was
    seen would last for as long as the session imagines.
    """
    apart = poses[:, None] - poses
    turned = np.abs((apart[..., 2] + math.pi) % (2.0 * math.pi) - math.pi)
    unlike = METRE * np.hypot(apart[..., 0], apart[..., 1]) + RADIAN * turned
    unlike[np.tri(len(poses), dtype=bool)] = math.inf
    if not observed.all():
        unlike[observed[:, None] & observed] = math.inf
    older, newer = divmod(int(unlike.argmin()), len(poses))
    return older if observed[newer] else newer


def keyframes(poses: np.ndarray, observed: np.ndarray, count: int) -> list[list[int]]:
    """Which of n slabs are the ``count`` keyframes, or all where there are fewer, when none of them has left the window, one,
    two and so on to all n: indices, ascending. ``poses`` and ``observed`` of all, as above."""
    kept: list[int] = []
    found = [kept]
    for slab in range(len(poses)):
        kept = [*kept, slab]
        if len(kept) > count:
            del kept[least_needed(poses[kept], observed[kept])]
        found.append(kept)
    return found
