"""Section: where the model was wrong, as a timeline to jump from."""
from __future__ import annotations

import numpy as np

from worldmodel_ros.evaluate.drive.surprise import THRESHOLD, Moment, limit
from .film import strip
from .html import Run, number, section
from .plot import Plot, over_time


def moments(runs: list[Run]) -> str:
    """The surprise over the recording, and the moments with their images."""
    parts = []
    for run in runs:
        title = f'<h3>{run.name}</h3>' if len(runs) > 1 else ''
        parts.append(title + _timeline(run) + _cards(run))
    return section(
        'surprise', 'Surprise', *parts,
        lead='How much worse each image was predicted, one step before, than the autoencoder alone reconstructs it. '
             f'The numbers link to the images; red: beyond {THRESHOLD} robust standard deviations of this recording.')


def _anchor(run: Run, moment: Moment) -> str:
    return f'moment-{run.kind}-{moment.peak}'


def _timeline(run: Run) -> str:
    columns = run.evaluation.columns
    values, times = columns['surprise_db'], columns['time_s']
    there = values[np.isfinite(values)]
    if not len(there):
        return '<p>No image of this recording was predicted.</p>'
    top = max(float(there.max()), 1.0)
    plot = Plot((0.0, max(float(times[-1]), 1e-3)), (min(0.0, float(there.min())), top * 1.28), width=960, height=230,
                x_label='recording time [s]', y_label='surprise [dB]', x_ticks=10)
    if limit(values) < top * 1.2:
        plot.horizontal(limit(values), '', f'{THRESHOLD} deviations')
    plot.episodes(times, columns['episode'])
    plot.line(*over_time(times, values, columns['episode'], np.max), f'thin {run.kind}')
    for index, moment in enumerate(run.evaluation.moments, start=1):
        plot.link(moment.time_s, moment.surprise_db, _anchor(run, moment), str(index),
                  f'{moment.time_s:.1f} s: {moment.surprise_db:.1f} dB', 'outlier' if moment.outlier else '')
    return f'<div id="timeline-{run.kind}">{plot.svg("surprise over time", wide=True)}</div>'


def _cards(run: Run) -> str:
    evaluation, cards = run.evaluation, []
    if evaluation.moments and not any(moment.outlier for moment in evaluation.moments):
        cards.append('<p>No moment stands out: nowhere is the model much worse than usual on this recording. '
                     'The worst windows are:</p>')
    for index, moment in enumerate(evaluation.moments, start=1):
        scene = evaluation.highlights.surprise(moment.peak - 1)
        lasted = f', from {moment.start_s:.1f} to {moment.end_s:.1f} s' if moment.end_s > moment.start_s else ''
        shown = strip([(run, scene)]) if scene else '<p>Its images were not kept.</p>'
        cards.append(
            f'<div class="moment" id="{_anchor(run, moment)}"><a class="back" href="#timeline-{run.kind}">timeline</a>'
            f'<h3>{index}. {moment.time_s:.1f} s</h3><p><small>{number(moment.surprise_db, 1, "dB")} worse than known, '
            f'{number(moment.score, 1)} deviations{lasted}. The surprise is in the first image after now.'
            f'</small></p>{shown}</div>')
    return ''.join(cards)
