"""Computes the numbers of a report from the columns of a recording, as docs/evaluating.md defines them."""
from __future__ import annotations

from dataclasses import replace

import numpy as np

from worldmodel_ros.motion import MANEUVERS
from .bootstrap import block_labels, mean_interval
from .columns import Columns

SUBSETS = ('moving', 'all')


def subset_mask(columns: Columns, subset: str) -> np.ndarray:
    """Return which predicted images (N, K) are judged: all with a true image, or those that a moving robot led to."""
    came = np.isfinite(columns['psnr_db'])
    return came & (columns['moving'] == 1.0) if subset == 'moving' else came


def window_means(columns: Columns, values: np.ndarray, subset: str) -> np.ndarray:
    """Return the mean over the judged horizons of each window (N,), NaN where there is none."""
    mask = subset_mask(columns, subset)
    counts = mask.sum(1)
    return np.where(counts > 0, np.where(mask, values, 0.0).sum(1) / np.maximum(counts, 1), np.nan)


def prediction(columns: Columns, subset: str) -> dict:
    """Return PSNR and SSIM of the predicted images and of copying the last one, and the gain over copying."""
    blocks = block_labels(columns['episode'], columns['time_s'])
    psnr, copy, ssim, copy_ssim = columns['psnr_db'], columns['copy_psnr_db'], columns['ssim'], columns['copy_ssim']
    values = {'psnr_db': psnr, 'copy_psnr_db': copy, 'gain_db': psnr - copy,
              'ssim': ssim, 'copy_ssim': copy_ssim, 'gain_ssim': ssim - copy_ssim}
    mask = subset_mask(columns, subset)

    def row(select) -> dict:
        return {name: mean_interval(select(array), blocks).to_dict() for name, array in values.items()}

    by_horizon = [{'horizon_s': round((k + 1) * columns.spec.step_period, 3), 'pictures': int(mask[:, k].sum()),
                   **row(lambda array, k=k: np.where(mask[:, k], array[:, k], np.nan))}
                  for k in range(columns.spec.chunk_frames)]
    return {**row(lambda array: window_means(columns, array, subset)), 'pictures': int(mask.sum()),
            'windows': int(mask.any(1).sum()), 'by_horizon': by_horizon}


def reconstruction(columns: Columns) -> dict:
    """Return the PSNR of the recording's images through the autoencoder alone."""
    return mean_interval(columns['reconstruction_db'], block_labels(columns['episode'], columns['time_s'])).to_dict()


def policy(columns: Columns) -> dict:
    """Compare the first command of the plans, and baselines, with what was executed in the step after.

    ``known_goal``: for the plan for the bag's goal, if it has one, with the baselines over the same windows. ``best_goal``: the
    goal whose plans are nearest to the recording as a whole, which flatters a model that was given no goal. ``hold``: the
    action of the step before. ``mean``: the mean action of the windows.
    """
    spec, after, plans = columns.spec, columns['after'], columns['plans']
    there = np.isfinite(after).all(1)
    if not there.any():
        return {'windows': 0}
    goals = {goal: agreement(plans[there, i], after[there], spec) for i, goal in enumerate(spec.goals)}
    best = min(goals, key=lambda goal: goals[goal]['relative_rmse'])
    result = {'windows': int(there.sum()), 'goals': goals, 'best_goal': best, **_baselines(columns, there)}
    told = there & (columns['goal'] >= 0)
    if told.any():
        chosen = plans[np.flatnonzero(told), columns['goal'][told]]
        result['known_goal'] = {'windows': int(told.sum()), **agreement(chosen, after[told], spec), **_baselines(columns, told)}
    return result


def _baselines(columns: Columns, windows: np.ndarray) -> dict:
    """Return the agreement of baselines over some windows, bool (N,)."""
    after = columns['after'][windows]
    return {'hold': agreement(columns['before'][windows], after, columns.spec),
            'mean': agreement(np.broadcast_to(after.mean(0), after.shape), after, columns.spec)}


def chosen_plans(columns: Columns, policy: dict) -> np.ndarray:
    """Return the plans (N, A) to compare with the recording: for the goal that was set, or else for the nearest one."""
    plans, goals = columns['plans'], columns['goal']
    if 'known_goal' not in policy:
        return plans[:, columns.spec.goals.index(policy['best_goal'])]
    return np.where(goals[:, None] >= 0, plans[np.arange(len(columns)), goals], np.nan)


def agreement(plan: np.ndarray, done: np.ndarray, spec) -> dict:
    """Return the errors of ``plan`` (N, A) against ``done``, in SI units; ``relative_rmse``: as a share of the ranges."""
    error = plan - done
    span = np.subtract(spec.action_high, spec.action_low)
    result = {'relative_rmse': round(float(np.sqrt(np.mean(np.square(error / span)))), 4)}
    for i, name in enumerate(spec.action_names):
        result[name] = {'mae': round(float(np.abs(error[:, i]).mean()), 4),
                        'rmse': round(float(np.sqrt(np.square(error[:, i]).mean())), 4),
                        'correlation': _correlation(plan[:, i], done[:, i])}
    return result


def _correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Pearson's; None if one of them never changes."""
    if len(a) < 3 or np.ptp(a) < 1e-6 or np.ptp(b) < 1e-6:
        return None
    return round(float(np.corrcoef(a, b)[0, 1]), 3)


def what_if(columns: Columns) -> dict:
    """Return how often the branch nearest to the executed actions predicted best, where the actions tell branches apart.

    ``chance``: of a model that ignores the action. ``always``: of one that always names the most frequent branch.
    """
    rows = columns['branches']
    asked = len(rows)
    rows = rows[rows[:, 5] == 1.0]
    if not len(rows):
        return {'asked': asked, 'decisive': 0}
    window = rows[:, 0].astype(int)
    blocks = block_labels(columns['episode'], columns['time_s'])[window]
    nearest, best = rows[:, 1].astype(int), rows[:, 2].astype(int)
    counts = np.bincount(nearest, minlength=len(MANEUVERS))
    confusion = {name: {other: int(((nearest == i) & (best == j)).sum()) for j, other in enumerate(MANEUVERS)}
                 for i, name in enumerate(MANEUVERS) if counts[i]}
    return {'asked': asked, 'decisive': len(rows),
            'nearest_is_best': _share(nearest == best, blocks),
            'mean_rank': mean_interval(rows[:, 3], blocks).to_dict(),
            'chance': round(1.0 / len(MANEUVERS), 4), 'chance_rank': (1 + len(MANEUVERS)) / 2,
            'always': round(float(counts.max() / counts.sum()), 4), 'confusion': confusion}


def _share(hits: np.ndarray, blocks: np.ndarray) -> dict:
    """Share of the hits; resampling tells nothing of its uncertainty if all are the same."""
    interval = mean_interval(hits.astype(float), blocks)
    if hits.all() or not hits.any():
        interval = replace(interval, low=None, high=None)
    return interval.to_dict()


def pace(columns: Columns) -> dict:
    """Return ticks, episodes and how well the camera keeps the model's step period."""
    spacing = np.diff(columns['stamp_ns'])[np.diff(columns['episode']) == 0] / 1e9
    return {'ticks': len(columns), 'episodes': len(np.unique(columns['episode'])),
            'seconds': round(float(columns['time_s'][-1]), 3) if len(columns) else 0.0,
            'step_period_s': columns.spec.step_period,
            'tick_spacing_s': round(float(np.median(spacing)), 4) if len(spacing) else None}
