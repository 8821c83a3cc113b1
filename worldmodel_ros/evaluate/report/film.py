"""Film strips: what was seen, what was predicted, and how they differ."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from worldmodel_ros.evaluate.drive.windows import Scene
from .html import Run, difference, number, picture

_GAP = '<figure class="empty"></figure>'  # below the image of now


def cell(pixels: np.ndarray, below: str, alternative: str, kind: str = '') -> str:
    return f'<figure class="{kind}">{picture(pixels, alternative)}{below}</figure>'


def row(title: str, note: str = '') -> str:
    return f'<div class="row">{title} <small>{note}</small></div>'


def strip(shown: list[tuple[Run, Scene]]) -> str:
    """Return one moment: the true images, what each run predicted, where that was wrong, and where copying is.

    All scenes are of the same moment.
    """
    first = shown[0][1]
    period = shown[0][0].evaluation.spec.step_period
    ahead = [f'+{(k + 1) * period:.1f} s' for k in range(len(first.seen))]
    parts = [row('The camera saw'), cell(first.observed, 'now', 'camera image now', 'truth')]
    parts += [cell(p, text, f'camera image {text}', 'truth') for p, text in zip(first.seen, ahead)]
    for run, scene in shown:
        title = 'The model predicted' if len(shown) == 1 else f'{run.name} predicted'
        parts += [row(title, 'from earlier frames and the executed actions'), _GAP]
        parts += [cell(p, number(db, 1, 'dB'), f'predicted image {text}') for p, db, text in
                  zip(scene.predicted, scene.window.psnr_db, ahead)]
        parts += _differences('Difference', 'black: none', scene.predicted, scene.seen, ahead, None)
    parts += _differences('Difference when the last frame is repeated', 'as if nothing moved', [first.observed] * len(ahead),
                          first.seen, ahead, first.window.copy_psnr_db)
    return f'<div class="film" style="--columns:{len(first.seen) + 1}">{"".join(parts)}</div>'


def _differences(title: str, note: str, pictures: Sequence[np.ndarray], seen: Sequence[np.ndarray],
                 ahead: Sequence[str], psnr_db: Sequence[float] | None) -> list[str]:
    below = [''] * len(ahead) if psnr_db is None else [number(db, 1, 'dB') for db in psnr_db]
    return [row(title, note), _GAP, *(cell(difference(a, b), text, f'difference {when}') for a, b, text, when in
                                      zip(pictures, seen, below, ahead))]
