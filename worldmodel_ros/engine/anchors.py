"""Observed moments from which what is far ahead is imagined again.

A rollout sees what it imagined before: its errors grow with its length, and after ten seconds it shows walls, whatever stays in
the cache. Rooms stand still, though, and a view depends on the pose alone, not on the time or the way there. So a session can
keep *anchors*, moments that it observed at different poses. As soon as a shorter way leads from one of them to where the robot
is by now, that way is imagined from there, unseen, and the rollout continues at its end: errors grow with the way from what was
observed, and no longer with time. A world model that retrieves observed frames by their poses (WorldMem, Xiao et al. 2025) puts
them into one window; here a copy-on-write fork of the whole window is what is gone back to.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..model.presets import FORWARD, TURN, Preset

if TYPE_CHECKING:
    from .futures import Moment

STANDS = 0.03  # m: nearer than this, a place is the same
Pose = Sequence[float]  # x and y [m], heading [rad]


def check_anchors(preset: Preset, count: int) -> None:
    """Raise ValueError if sessions of the preset cannot keep ``count`` anchors."""
    if count < 0:
        raise ValueError(f'anchors is {count}: give how many observed moments a session keeps, or 0')
    if count and not {TURN, FORWARD} <= set(preset.action_names):
        raise ValueError(f'anchors is {count}, and only the actions {FORWARD} and {TURN} tell where the robot is; '
                         f'{preset.name!r} has {", ".join(preset.action_names)}')


def add_anchor(anchors: tuple[Moment, ...], moment: Moment, count: int, preset: Preset) -> tuple[Moment, ...]:
    """Return the anchors and the new moment. If these are more than ``count``, of the two between which a robot drives for the
    shortest time the older one is left out."""
    kept = [each for each in anchors if not each.cache.lost] + [moment]
    if len(kept) > count:
        poses = np.array([each.pose for each in kept])
        apart = poses[:, None] - poses
        seconds = (np.hypot(apart[..., 0], apart[..., 1]) / preset.action_high[preset.forward]
                   + np.abs(_wrapped(apart[..., 2])) / preset.action_high[preset.turn])
        seconds[np.tri(len(kept), dtype=bool)] = math.inf
        del kept[int(seconds.argmin()) // len(kept)]
    return tuple(kept)


def nearest(anchors: Sequence[Moment], pose: Pose, preset: Preset, below: int) -> tuple[Moment, np.ndarray] | None:
    """Return the anchor from which the shortest way leads to a pose, and that way's actions; None if none is shorter than
    ``below`` frames."""
    found = None
    for anchor in reversed(anchors):  # of equally near ones the newest, whose keyframes know more
        if not anchor.cache.lost and len(way := way_between(preset, anchor.pose, pose)) < below:
            found, below = (anchor, way), len(way)
    return found


def way_between(preset: Preset, start: Pose, goal: Pose) -> np.ndarray:
    """Return actions (T, A), whole chunks, that lead from a pose to another: turn, drive straight, turn; forwards or backwards,
    whichever is shorter, within the actions' limits. Shorter ways stand still first."""
    away, direction = math.hypot(goal[0] - start[0], goal[1] - start[1]), math.atan2(goal[1] - start[1], goal[0] - start[0])
    low, high = (np.array(limits)[[preset.forward, preset.turn]] * preset.step_period
                 for limits in (preset.action_low, preset.action_high))
    away = away if away > STANDS else 0.0
    ways = []
    for way, face in ((away, direction), (-away, direction + math.pi)):
        if way < 0.0 and low[0] >= 0.0:  # a robot that cannot drive backwards
            continue
        first = _wrapped(face - start[2]) if away else 0.0
        moves = []
        for axis, amount in ((1, first), (0, way), (1, _wrapped(goal[2] - start[2] - first))):
            count = math.ceil(abs(amount) / (high[axis] if amount > 0.0 else -low[axis]) - 1e-9)
            move = np.zeros((count, preset.actions), np.float32)
            move[:, (preset.forward, preset.turn)[axis]] = amount / max(count, 1) / preset.step_period
            moves.append(move)
        ways.append(np.concatenate(moves))
    shortest = min(ways, key=len)
    return np.concatenate([np.zeros((-len(shortest) % preset.chunk_frames, preset.actions), np.float32), shortest])


def _wrapped(angle: float) -> float:
    return (angle + math.pi) % (2.0 * math.pi) - math.pi
