"""Moments of an episode from which on the robot sees again what had left its view: what a memory of the window is for."""
from __future__ import annotations

import numpy as np

from worldmodel_ros.cache.keyframes import keyframes
from worldmodel_ros.model.presets import Preset
from worldmodel_ros.model.rotary import poses_along
from worldmodel_ros.model.tile_mask import FOR_GOOD, FrameOrder

RECENT = 16  # frames before a moment in which what comes into view must not have been seen
LONGEST_AGO = 60  # frames before it in which it must have been, where it does not stay as a keyframe
EDGE = 0.6  # rad from the middle of the view, inside its edge (a camera of 90 degrees sees 0.79)
OUTSIDE = 0.75  # rad from the middle, from where on little of it is in view


def recall_moments(headings: np.ndarray, frames: int, longest_ago: int = LONGEST_AGO) -> np.ndarray:
    """Frames (T,), bool, at which a chunk of ``frames`` may begin that turns to a direction which was in view before and no
    longer is; ``headings`` (T,) [rad] of the robot, whose way from place to place is left out. It must have been seen in the
    ``longest_ago`` frames before."""
    total = len(headings)
    # The headings before each frame; those before the first one are no numbers, and no comparison holds for them.
    padded = np.concatenate([np.full(longest_ago, np.nan), headings])
    before = np.lib.stride_tricks.sliding_window_view(padded, longest_ago)[:total]
    ahead = headings[np.minimum(np.arange(total) + frames - 1, total - 1)]
    found = np.zeros(total, bool)
    for edge in (-EDGE, EDGE):
        apart = np.abs((before - (ahead + edge)[:, None] + np.pi) % (2 * np.pi) - np.pi)
        found |= (apart[:, -RECENT:] > OUTSIDE).all(1) & (apart[:, :-RECENT] < EDGE).any(1)
    return found & (np.arange(total) <= total - frames)


def moments_of(preset: Preset, actions: np.ndarray) -> np.ndarray:
    """``recall_moments`` of an episode (T, A): of what a session of the preset may still have in its cache."""
    longest = len(actions) if preset.keyframe_slabs else LONGEST_AGO
    turned = preset.step_period * actions[:, preset.turn].astype(np.float64)
    return recall_moments(turned.cumsum(), preset.chunk_frames, longest)


def stay_until(preset: Preset, actions: np.ndarray) -> np.ndarray:
    """By frame of an episode whose actions (T, A) are given, the number of the first one that no longer finds it in a session's
    cache, see ``tile_mask.FrameOrder``: int64 (T,)."""
    size, frames = preset.tile[0], len(actions)
    found = FrameOrder.committed(preset, np.arange(frames)).until
    if preset.keyframe_slabs:
        kept = keyframes_of(preset, actions)
        for slab in range(preset.sink_slabs, len(kept) - 1):
            gone = [out for out in range(slab + 1, len(kept)) if slab not in kept[out]]
            found[slab * size:][:size] = gone[0] * size + preset.window_frames if gone else FOR_GOOD
    return found


def keyframes_of(preset: Preset, actions: np.ndarray) -> list[list[int]]:
    """Which slabs of an episode, whose actions (T, A) are given, are keyframes of a session from whose window the slabs before
    the n-th have left, for each n up to all."""
    size, sinks = preset.tile[0], preset.sink_slabs
    poses = poses_along(preset, actions)[size - 1::size][sinks:]
    found = keyframes(poses, np.ones(len(poses), bool), preset.keyframe_slabs)
    return [[]] * sinks + [[sinks + slab for slab in each] for each in found]
