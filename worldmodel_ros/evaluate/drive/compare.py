"""Two evaluations compared: what is better by how much, and whether that is more than chance."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .bootstrap import Interval, block_labels, difference_interval, mean_interval
from .evaluation import Evaluation
from .metrics import chosen_plans, window_means

# Name, words, unit, digits, whether more is better.
MEASURES = (('gain_db', 'gain over repeating the last frame', 'dB', 1, True),
            ('psnr_db', 'PSNR of predicted images', 'dB', 1, True),
            ('ssim', 'SSIM of predicted images', '', 3, True),
            ('reconstruction_db', 'autoencoder alone', 'dB', 1, True),
            ('surprise_db', 'surprise', 'dB', 2, False),
            ('command_error', 'difference between plan and recorded command', '% of the range', 1, False))


@dataclass(frozen=True)
class Comparison:
    """``differences``: second minus first, by measure. ``paired``: on the same windows of one bag, ``windows`` of them."""

    paired: bool
    windows: int
    differences: dict[str, Interval]
    sentence: str

    def to_dict(self) -> dict:
        return {'paired': self.paired, 'windows': self.windows, 'sentence': self.sentence,
                'differences': {name: interval.to_dict() for name, interval in self.differences.items()}}


def compare(first: Evaluation, second: Evaluation) -> Comparison:
    """Compare two models on one bag window by window, or two recordings by their means."""
    # Errors of images of different sizes cannot be compared.
    paired = first.subject.path == second.subject.path and first.spec.image_size == second.spec.image_size \
        and first.spec.step_period == second.spec.step_period
    values_a, values_b = _values(first), _values(second)
    blocks_a, blocks_b = (block_labels(e.columns['episode'], e.columns['time_s']) for e in (first, second))
    if paired:
        _, rows_a, rows_b = np.intersect1d(first.columns['stamp_ns'], second.columns['stamp_ns'], return_indices=True)
        differences = {name: mean_interval(values_b[name][rows_b] - values_a[name][rows_a], blocks_a[rows_a])
                       for name, *_ in MEASURES}
        windows = len(rows_a)
    else:
        differences = {name: difference_interval(values_a[name], blocks_a, values_b[name], blocks_b)
                       for name, *_ in MEASURES}
        windows = len(first.columns) + len(second.columns)
    # On the same windows copying is the same too, so both differences are equal.
    decisive = differences['psnr_db' if paired else 'gain_db']
    return Comparison(paired, windows, differences, _sentence(paired, decisive, *names((first, second))))


def names(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return what distinguishes two evaluations: their models, their bags, or else their back ends."""
    subjects = [evaluation.subject for evaluation in evaluations]
    for what in ('model', 'bag', 'path'):
        found = [getattr(subject, what) for subject in subjects]
        for told in ([Path(text).name for text in found], found):
            if len(set(told)) > 1:
                return told
    return [subject.backend for subject in subjects]


def _values(evaluation: Evaluation) -> dict[str, np.ndarray]:
    """Each measure at each window (N,), NaN where there is none."""
    c = evaluation.columns
    subset = 'moving' if evaluation.numbers['prediction']['moving']['pictures'] else 'all'
    policy = evaluation.numbers['policy']
    plans = chosen_plans(c, policy) if policy['windows'] else np.full_like(c['after'], np.nan)
    span = np.subtract(c.spec.action_high, c.spec.action_low)
    error = np.abs((plans - c['after']) / span).mean(1)
    return {'gain_db': window_means(c, c['psnr_db'] - c['copy_psnr_db'], subset),
            'psnr_db': window_means(c, c['psnr_db'], subset), 'ssim': window_means(c, c['ssim'], subset),
            'reconstruction_db': c['reconstruction_db'], 'surprise_db': c['surprise_db'],
            'command_error': 100.0 * error}


def _sentence(paired: bool, difference: Interval, first: str, second: str) -> str:
    if difference.mean is None:
        return f'A ({first}) and B ({second}) have no predictions to compare.'
    a, b = f'A ({first})', f'B ({second})'
    measure = 'PSNR' if paired else 'gain over repeating the last frame'
    if difference.low is None:
        return (f'{b} has {difference.mean:+.1f} dB of {measure} compared with {a}, but the recordings are too short to tell '
                'this from chance.')
    bounds = f'{difference.mean:+.1f} dB of {measure} [{difference.low:+.1f}, {difference.high:+.1f}]'
    bounds = bounds.replace('-', '\u2212')
    if difference.above_zero or difference.below_zero:
        what = 'predicts' if paired else 'is predicted'
        return f'{b} {what} {"better" if difference.above_zero else "worse"} than {a}: {bounds}.'
    return f'There is no difference between {a} and {b} beyond chance: {bounds}.'
