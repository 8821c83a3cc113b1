"""Moments of an episode from which the robot sees again what had left its view, which takes memory."""
from __future__ import annotations

import numpy as np

from worldmodel_ros.cache.keyframes import keyframes
from worldmodel_ros.model.presets import Preset
from worldmodel_ros.model.rotary import poses_along
from worldmodel_ros.model.tile_mask import FOR_GOOD, FrameOrder

RECENT = 16  # what comes into view must not have been seen in this many frames before a moment
LONGEST_AGO = 60  # but in this many, unless it stays as a keyframe
EDGE = 0.6  # rad from the middle of the view, inside its edge (a camera of 90 degrees sees 0.79)
OUTSIDE = 0.75  # rad from the middle, beyond which little of it is in view


def recall_moments(headings: np.ndarray, frames: int, longest_ago: int = LONGEST_AGO) -> np.ndarray:
    """Return at which frames, bool (T,), a chunk of ``frames`` may begin that turns to a direction which has left the view but
    was seen in the ``longest_ago`` frames before; ``headings`` (T,) [rad] of the robot, whose translation is ignored."""
    total = len(headings)
    # The headings before each frame; those before the first one are NaN, for which no comparison holds.
    padded = np.concatenate([np.full(longest_ago, np.nan), headings])
    before = np.lib.stride_tricks.sliding_window_view(padded, longest_ago)[:total]
    ahead = headings[np.minimum(np.arange(total) + frames - 1, total - 1)]
    found = np.zeros(total, bool)
    for edge in (-EDGE, EDGE):
        apart = np.abs((before - (ahead + edge)[:, None] + np.pi) % (2 * np.pi) - np.pi)
        found |= (apart[:, -RECENT:] > OUTSIDE).all(1) & (apart[:, :-RECENT] < EDGE).any(1)
    return found & (np.arange(total) <= total - frames)


def moments_of(preset: Preset, actions: np.ndarray) -> np.ndarray:
    """Return ``recall_moments`` of an episode (T, A), for what a session of the preset may still have in its cache."""
    longest = len(actions) if preset.keyframe_slabs else LONGEST_AGO
    turned = preset.step_period * actions[:, preset.turn].astype(np.float64)
    return recall_moments(turned.cumsum(), preset.chunk_frames, longest)


def stay_until(preset: Preset, actions: np.ndarray) -> np.ndarray:
    """Return for each frame of an episode with ``actions`` (T, A) the number of the first frame that no longer finds it in a
    session's cache, see ``tile_mask.FrameOrder``: int64 (T,)."""
    size, frames = preset.tile[0], len(actions)
    found = FrameOrder.committed(preset, np.arange(frames)).until
    if preset.keyframe_slabs:
        kept = keyframes_of(preset, actions)
        for slab in range(preset.sink_slabs, len(kept) - 1):
            gone = [out for out in range(slab + 1, len(kept)) if slab not in kept[out]]
            found[slab * size:][:size] = gone[0] * size + preset.window_frames if gone else FOR_GOOD
    return found


def keyframes_of(preset: Preset, actions: np.ndarray) -> list[list[int]]:
    """Return which slabs of an episode with ``actions`` (T, A) are a session's keyframes once the slabs before the n-th have
    left its window, for each n up to all."""
    size, sinks = preset.tile[0], preset.sink_slabs
    poses = poses_along(preset, actions)[size - 1::size][sinks:]
    found = keyframes(poses, np.ones(len(poses), bool), preset.keyframe_slabs)
    return [[]] * sinks + [[sinks + slab for slab in each] for each in found]
