"""Seeds that may be judged on: those that no training has ever drawn from."""
from __future__ import annotations

from ...sim.rollout import TRAINING_SEEDS


class QualityError(ValueError):
    """A question that cannot be answered; the text says what is wrong, and what to do."""


def parse_seeds(text: str) -> range:
    """Return the seeds A to B - 1 of ``A:B``. Raises QualityError, also for seeds that training may use."""
    first, _, end = text.partition(':')
    try:
        seeds = range(int(first), int(end))
    except ValueError:
        raise QualityError(f'seeds {text!r}: write them as FIRST:END, such as 2000000:2000020') from None
    require_unseen(seeds)
    return seeds


def require_unseen(seeds: range) -> None:
    """Raise QualityError for no seeds at all, and for seeds that training may use."""
    if not len(seeds):
        raise QualityError(f'seeds {seeds.start}:{seeds.stop} are none: the end must be above the first')
    if seeds.start < TRAINING_SEEDS.stop:
        raise QualityError(
            f'seeds {seeds.start}:{seeds.stop} overlap those of training ({TRAINING_SEEDS.start} to '
            f'{TRAINING_SEEDS.stop - 1}), which a model may have been trained on: use seeds from {TRAINING_SEEDS.stop} up')
