"""Summary of episodes: means by task and controller, and McNemar's test for pairs."""
from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from .episode import Episode
from .tasks import TASKS

DEFINITIONS = {
    'success': 'share of the episodes; null for recall, which has goals_per_minute instead',
    'contacts': 'share of the episodes with a contact that the task does not ask for',
    'seconds': 'mean time to the success, of the episodes that succeed; null without one',
    'goals_per_minute': 'arrivals, of recall alone',
    'n': 'episodes, the same seeds for every controller',
    'p_values': 'exact two-sided McNemar test, on the seeds that both have driven',
    'of_expert': 'share of the episodes in which oracle succeeds that the controller succeeds in, too',
    'alike': 'of tasks by an image, share of the episodes that succeed or, where it shows walls alone, end with the robot '
             'standing where it sees the same: the same walls at the same distance and heading, and no goal object',
    'walls_alone': 'the same numbers, of the episodes whose image shows no goal object',
    'share': '(success - reactive) / (oracle - reactive)'}


def table(episodes: Mapping[tuple[str, str], Sequence[Episode]]) -> dict[str, dict[str, dict]]:
    """Return the numbers by task and controller, of episodes by (task, controller)."""
    found: dict[str, dict[str, dict]] = {}
    for (task, controller), driven in episodes.items():
        if driven:
            found.setdefault(task, {})[controller] = _row(task, driven)
    for task, rows in found.items():
        _add_shares(rows)
        if 'oracle' in rows and not TASKS[task].goals_follow:
            reached = {episode.seed for episode in episodes[task, 'oracle'] if episode.success}
            for controller, row in rows.items():
                also = [episode.success for episode in episodes[task, controller] if episode.seed in reached]
                row['of_expert'] = round(sum(also) / len(also), 4) if also else None
    return found


def p_values(episodes: Mapping[tuple[str, str], Sequence[Episode]]) -> dict[str, dict[str, float]]:
    """Return by task the McNemar p-value of each pair of controllers, as ``a / b``."""
    found: dict[str, dict[str, float]] = {}
    for task in dict.fromkeys(task for task, _ in episodes):
        if TASKS[task].goals_follow:
            continue
        rows = {controller: {e.seed: e.success for e in driven} for (t, controller), driven in episodes.items() if t == task}
        for a, b in itertools.combinations(rows, 2):
            shared = rows[a].keys() & rows[b].keys()
            if shared:
                only_a = sum(rows[a][seed] and not rows[b][seed] for seed in shared)
                only_b = sum(rows[b][seed] and not rows[a][seed] for seed in shared)
                found.setdefault(task, {})[f'{a} / {b}'] = float(f'{mcnemar(only_a, only_b):.3g}')
    return found


def mcnemar(only_a: int, only_b: int) -> float:
    """Return the two-sided p-value of the exact test that each pair in which only one succeeded is equally likely to be
    either's (McNemar, Psychometrika 12, 1947; exact by the binomial distribution)."""
    n, fewer = only_a + only_b, min(only_a, only_b)
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(fewer + 1)) / 2 ** n)  # of integers, which may exceed any float


def _row(task: str, driven: Sequence[Episode]) -> dict:
    follow = TASKS[task].goals_follow
    times = [e.seconds for e in driven if e.success]
    minutes = sum(e.seconds for e in driven) / 60.0
    return {'success': None if follow else round(sum(e.success for e in driven) / len(driven), 4),
            **_alike(driven),
            'contacts': round(sum(e.contacts > 0 for e in driven) / len(driven), 4),
            'seconds': round(sum(times) / len(times), 2) if times and not follow else None,
            'goals_per_minute': round(sum(e.arrivals for e in driven) / minutes, 2) if follow else None,
            'n': len(driven)}


def _alike(driven: Sequence[Episode]) -> dict:
    """Return the additional numbers of tasks by an image."""
    def share(some: Sequence[Episode], name: str) -> float:
        return round(sum(getattr(episode, name) for episode in some) / len(some), 4)
    told = [episode for episode in driven if episode.alike is not None]
    bare = [episode for episode in told if episode.walls_alone]
    found = {'alike': share(told, 'alike')} if told else {}
    if bare:
        found['walls_alone'] = {'success': share(bare, 'success'), 'alike': share(bare, 'alike'), 'n': len(bare)}
    return found


def _add_shares(rows: dict[str, dict]) -> None:
    """Add the ``share`` of what perfect prediction adds to the reactive policy, where both were driven and differ."""
    ends = [rows[name]['success'] for name in ('reactive', 'oracle') if name in rows]
    if len(ends) < 2 or None in ends or ends[1] <= ends[0]:
        return
    for row in rows.values():
        row['share'] = round((row['success'] - ends[0]) / (ends[1] - ends[0]), 3)
