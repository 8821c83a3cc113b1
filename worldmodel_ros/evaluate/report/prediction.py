"""Section: how well the model predicts what follows."""
from __future__ import annotations

import numpy as np

from worldmodel_ros.evaluate.drive.metrics import SUBSETS
from .film import strip
from .html import Run, bounds, number, section, signed, table
from .plot import Plot, legend, padded

STRIPS, APART_S = 3, 3.0
MEASURES = (('psnr_db', 'copy_psnr_db', 'PSNR [dB]', 1), ('ssim', 'copy_ssim', 'SSIM', 3))


def prediction(runs: list[Run]) -> str:
    """Quality by horizon compared with copying the last image, and film strips."""
    if not any(run.evaluation.numbers['prediction']['all']['pictures'] for run in runs):
        return section('prediction', 'Prediction', '<p>No prediction could be compared with a camera image.</p>')
    subset = _subset(runs)
    plots = ''.join(_by_horizon(runs, subset, *measure) for measure in MEASURES)
    words = 'while the robot moved' if subset == 'moving' else 'of the whole recording, as the robot never moved enough'
    keys = [(run.kind, run.name) for run in runs] + [('copy', 'last frame repeated')]
    return section(
        'prediction', 'Prediction', f'<div class="pair">{plots}</div>', legend(*keys), _table(runs), _strips(runs),
        lead=f'Images {words}, each predicted from the frames up to then and the actions that were executed afterwards. '
             'Repeating the last frame is the baseline of a model that knows nothing. Bands: 95 % intervals.')


def _subset(runs: list[Run]) -> str:
    return 'moving' if all(r.evaluation.numbers['prediction']['moving']['pictures'] for r in runs) else 'all'


def _by_horizon(runs: list[Run], subset: str, name: str, copy: str, label: str, digits: int) -> str:
    rows = {run.kind: run.evaluation.numbers['prediction'][subset]['by_horizon'] for run in runs}
    values = [r[key][part] for rs in rows.values() for r in rs for key in (name, copy)
              for part in ('mean', 'low', 'high') if r[key][part] is not None]
    longest = max(r['horizon_s'] for rs in rows.values() for r in rs)
    period = runs[0].evaluation.spec.step_period
    plot = Plot((0.5 * period, longest + 0.5 * period), padded(np.array(values), 0.08, 0.02), x_label='horizon [s]',
                y_label=label, x_ticks=4)
    for run in runs:
        horizon = [r['horizon_s'] for r in rows[run.kind]]
        for key, kind in ((copy, 'copy'), (name, run.kind)):
            means = [r[key]['mean'] if r[key]['mean'] is not None else np.nan for r in rows[run.kind]]
            plot.band(horizon, [r[key]['low'] for r in rows[run.kind]], [r[key]['high'] for r in rows[run.kind]], kind)
            plot.line(horizon, means, kind)
            there = [i for i, mean in enumerate(means) if np.isfinite(mean)]
            plot.dots([horizon[i] for i in there], [means[i] for i in there], kind,
                      [f'{horizon[i]:.1f} s: {means[i]:.{digits}f}' for i in there])
    return plot.svg(f'{label} of predicted images by horizon, compared with repeating the last image')


def _table(runs: list[Run]) -> str:
    names = (('psnr_db', 'PSNR', 1, 'dB'), ('copy_psnr_db', 'PSNR of the last frame repeated', 1, 'dB'),
             ('gain_db', 'gain in PSNR', 1, 'dB'), ('ssim', 'SSIM', 3, ''),
             ('copy_ssim', 'SSIM of the last frame repeated', 3, ''), ('gain_ssim', 'gain in SSIM', 3, ''))
    columns = [(run, subset) for run in runs for subset in SUBSETS]
    scores = [run.evaluation.numbers['prediction'][subset] for run, subset in columns]
    rows = [['pictures', *(str(score['pictures']) for score in scores)]]
    for name, text, digits, unit in names:
        gain = name.startswith('gain')
        rows.append([text, *((signed if gain else number)(score[name]['mean'], digits, unit)
                             + bounds(score[name], digits, gain) for score in scores)])
    rows.append(['PSNR of the autoencoder alone <small>the upper bound of every prediction</small>', *(
        _known(run) if subset == 'all' else '' for run, subset in columns)])
    head = [f'{run.letter} {words}' for run in runs for words in ('moving', 'whole recording')]
    return table(['Mean over all horizons', *head], rows)


def _known(run: Run) -> str:
    known = run.evaluation.numbers['reconstruction_db']
    return number(known['mean'], 1, 'dB') + bounds(known)


def _strips(runs: list[Run]) -> str:
    """Strips of the strongest changes; two models on one bag are shown at the same moments."""
    parts = []
    same = len(runs) == 2 and runs[0].evaluation.subject.path == runs[1].evaluation.subject.path
    groups = [runs] if same or len(runs) == 1 else [[run] for run in runs]
    for group in groups:
        scenes = group[0].evaluation.highlights.changes.best(STRIPS, APART_S)
        for scene in scenes:
            shown = [(group[0], scene)]
            for other in group[1:]:
                found = next((s for s in other.evaluation.highlights.changes
                              if s.window.stamp_ns == scene.window.stamp_ns), None)
                shown += [(other, found)] if found else []
            where = f' of {group[0].name}' if len(groups) > 1 else ''
            parts.append(f'<figure><figcaption><b>{scene.window.time_s:.1f} s</b>{where}: '
                         f'{_actions(group[0], scene)}</figcaption>{strip(shown)}</figure>')
    if not parts:
        return ''
    return ('<h3>Where the image changed most</h3><p class="lead">Selected by the camera images alone, not by the '
            'quality of the prediction.</p>' + ''.join(parts))


def _actions(run: Run, scene) -> str:
    mean = np.mean(scene.window.actions, 0)
    return ', '.join(f'{name} {number(value, 2)}' for name, value in zip(run.evaluation.spec.action_names, mean))
