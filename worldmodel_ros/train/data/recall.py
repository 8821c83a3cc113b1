"""Moments of an episode from which on the robot sees again what had left its view: what a memory of the window is for."""
from __future__ import annotations

import numpy as np

RECENT = 16  # frames before a moment in which what comes into view must not have been seen
LONGEST_AGO = 60  # frames before it in which it must have been
EDGE = 0.6  # rad from the middle of the view, inside its edge (a camera of 90 degrees sees 0.79)
OUTSIDE = 0.75  # rad from the middle, from where on little of it is in view


def recall_moments(headings: np.ndarray, frames: int) -> np.ndarray:
    """Frames (T,), bool, at which a chunk of ``frames`` may begin that turns to a direction which was in view before and no
    longer is; ``headings`` (T,) [rad] of the robot, whose way from place to place is left out."""
    total = len(headings)
    # The LONGEST_AGO headings before each frame; those before the first one are no numbers, and no comparison holds for them.
    padded = np.concatenate([np.full(LONGEST_AGO, np.nan), headings])
    before = np.lib.stride_tricks.sliding_window_view(padded, LONGEST_AGO)[:total]
    ahead = headings[np.minimum(np.arange(total) + frames - 1, total - 1)]
    found = np.zeros(total, bool)
    for edge in (-EDGE, EDGE):
        apart = np.abs((before - (ahead + edge)[:, None] + np.pi) % (2 * np.pi) - np.pi)
        found |= (apart[:, -RECENT:] > OUTSIDE).all(1) & (apart[:, :-RECENT] < EDGE).any(1)
    return found & (np.arange(total) <= total - frames)
