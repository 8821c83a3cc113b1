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

from ..cache.keyframes import least_needed
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
        poses, seen = np.array([each.pose for each in kept]), np.ones(len(kept), bool)
        del kept[least_needed(poses, seen, 1.0 / preset.action_high[preset.forward], 1.0 / preset.action_high[preset.turn])]
    return tuple(kept)


def nearest(anchors: Sequence[Moment], pose: Pose, preset: Preset, below: int) -> tuple[Moment, np.ndarray] | None:
    """Return the anchor from which the shortest way leads to a pose, and that way's actions; None if none is shorter than
    ``below`` frames."""
    found = None
    for anchor in reversed(anchors):  # of equally near ones the newest, whose keyframes know more
        if not anchor.cache.lost and (frames := _frames(preset, _moves(preset, anchor.pose, pose))) < below:
            found, below = anchor, frames
    return None if found is None else (found, way_between(preset, found.pose, pose))


def way_between(preset: Preset, start: Pose, goal: Pose) -> np.ndarray:
    """Return actions (T, A), whole chunks, that lead from a pose to another: turn, drive straight, turn; forwards or backwards,
    whichever is shorter, within the actions' limits. Shorter ways stand still first."""
    moves = _moves(preset, start, goal)
    way = np.zeros((_frames(preset, moves), preset.actions), np.float32)
    begin = len(way) - sum(count for *_, count in moves)
    for action, amount, count in moves:
        way[begin:begin + count, action] = amount / max(count, 1) / preset.step_period
        begin += count
    return way


def _moves(preset: Preset, start: Pose, goal: Pose) -> list[tuple[int, float, int]]:
    """Return the parts of ``way_between``: index of the action, m or rad, and frames."""
    x, y = goal[0] - start[0], goal[1] - start[1]
    away, direction = math.hypot(x, y), math.atan2(y, x)
    away = away if away > STANDS else 0.0
    ways = []
    for way, face in ((away, direction), (-away, direction + math.pi)):
        if way < 0.0 and preset.action_low[preset.forward] >= 0.0:  # a robot that cannot drive backwards
            continue
        first = math.remainder(face - start[2], math.tau) if away else 0.0
        last = math.remainder(goal[2] - start[2] - first, math.tau)
        parts = (preset.turn, first), (preset.forward, way), (preset.turn, last)
        ways.append([(action, amount, _frames_of(preset, action, amount)) for action, amount in parts])
    return min(ways, key=lambda moves: sum(count for *_, count in moves))


def _frames_of(preset: Preset, action: int, amount: float) -> int:
    if not amount:
        return 0
    fastest = preset.action_high[action] if amount > 0.0 else -preset.action_low[action]
    return math.ceil(abs(amount) / (fastest * preset.step_period) - 1e-9)


def _frames(preset: Preset, moves: Sequence[tuple[int, float, int]]) -> int:
    """Return the frames of moves, in whole chunks."""
    return -(-sum(count for *_, count in moves) // preset.chunk_frames) * preset.chunk_frames
