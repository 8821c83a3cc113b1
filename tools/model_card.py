"""Fills docs/model_card.md from benchmarks/results/quality_*.json, the models' own files and docs/images/quality/.

    worldmodel evaluate quality --seeds A:B --model tiny --json benchmarks/results/quality_tiny.json \
        --pictures docs/images/quality/tiny
    .venv/bin/python tools/model_card.py

The text between ``<!-- NAME -->`` and ``<!-- end -->`` is written by this program, so that no number is typed by
hand; the text around it is not touched. A test checks that they agree.
"""
from __future__ import annotations

import json
import re
from pathlib import Path
from textwrap import fill

ROOT = Path(__file__).resolve().parents[1]
CARD = ROOT / 'docs' / 'model_card.md'
RESULTS = ROOT / 'benchmarks' / 'results'
PICTURES = ROOT / 'docs' / 'images' / 'quality'

WAYS = {'copy_last': 'copy the last picture', 'teacher': 'teacher, 32 steps', 'two_step': '**two steps**',
        'one_step': '**one step**', 'deployed_two_step': 'two steps, int8 on the robot',
        'deployed_one_step': 'one step, int8 on the robot', 'truncated': 'flow cut to two steps',
        'truncated_one_step': 'flow cut to one step', 'vae': 'autoencoder alone (bound)',
        'simulator': 'the simulator, latencies unknown (bound)',
        'simulator_nominal_gains': 'the same, wheel gains unknown too',
        'truth': 'the true picture (bound of the detector)'}
CAPTIONS = {'first': 'Not chosen: the first start in a room. Last picture seen, then 0.4, 1, 2 and 5 s ahead. '
                     'Rows: what came, two steps, one step, teacher.',
            'worst': 'The worst start of the room, of the rooms with the worst ones. Rows as above.',
            'dream': 'A rollout of ten minutes: what came (above) and what was imagined at 0, 1, 2, 5 and 10 minutes.'}


def table(head: list[str], rows: list[list]) -> str:
    lines = ['| ' + ' | '.join(map(shown, row)) + ' |' for row in (head, *rows)]
    return '\n'.join([lines[0], '|' + '---|' * len(head), *lines[1:]])


def shown(value) -> str:
    if value is None:
        return 'none'
    return f'{value:.3g}' if isinstance(value, float) else str(value)


def percent(share: float | None) -> str:
    return 'none' if share is None else f'{100 * share:.0f} %'


def by_horizon(report: dict, cell, ways: dict[str, str] = WAYS) -> str:
    horizons = report['horizons']
    rows = [[name, *(cell(at[way]) if way in at else '' for at in horizons.values())] for way, name in ways.items()
            if any(way in at for at in horizons.values())]
    return table(['', *(f'{horizon} s' for horizon in horizons)], rows)


def targets(report: dict) -> str:
    """Return each target, the measured value and whether it is reached, by the mean."""
    rows = []

    def add(what: str, target: str, values: dict, reached) -> None:
        measured = ', '.join(f'{shown(value)}{f" ({at})" if at else ""}' for at, value in values.items())
        met = all(value is not None and reached(value) for value in values.values())
        rows.append([what, target, measured, 'yes' if met else '**no**'])

    gains = {horizon: at['gains_db'] for horizon, at in report['horizons'].items()}
    for name, words, least in (('two_step_over_teacher', 'two steps over the teacher', -0.5),
                               ('one_step_over_teacher', 'one step over the teacher', -1.0)):
        add(f'{words} [dB]', f'{least} or more', {f'{h} s': g[name]['mean'] for h, g in gains.items()},
            lambda value, least=least: value >= least)
    add('two steps over copying, at 1 s [dB]', '5 or more', {'': gains['1.0']['two_step_over_copy_last']['mean']},
        lambda value: value >= 5.0)
    share = {way: report['horizons']['5.0'][way]['bearing_within_5_deg'] for way in ('two_step', 'simulator')}
    add(f'bearing of the goal within 5 degrees, at 5 s (the simulator itself: {shown(share["simulator"])})',
        '0.8 or more', {'': share['two_step']}, lambda value: value >= 0.8)
    add('what-if: the imagined branch nearest to the truth is the real one, at 1 s', '0.95 or more',
        {'': report['what_if_ranking']['1.0']}, lambda value: value >= 0.95)
    drift = report['drift']
    add('ten minutes: end over beginning', '0.85 to 1.15',
        {name: drift[f'{name.replace(" ", "_")}_ratio'] for name in ('sharpness', 'colour', 'action response')},
        lambda value: 0.85 <= value <= 1.15)
    loop = report['closed_loop']
    expert = loop['expert']['success'] or 1.0
    add('success in the closed loop over the expert\'s', '0.9 or more',
        {name.replace('_', ' '): loop[name]['success'] / expert for name in ('two_step', 'one_step', 'planner')},
        lambda value: value >= 0.9)
    return table(['target', '', 'measured', 'reached'], rows)


def prediction(report: dict) -> str:
    def cell(way: dict) -> str:
        low, high = way['psnr_interval']
        interval = '' if low is None else f' [{low:.1f}, {high:.1f}]'
        return f'{way["psnr_db"]:.1f}{interval}; {way["ssim"]:.2f}; {100 * way["sharpness_of_true"]:.0f} %'
    counts = ', '.join(str(at['two_step']['moments']) for at in report['horizons'].values())
    return (f'PSNR in dB with its 95 % interval over rooms; SSIM; sharpness over that of the true picture. Moments '
            f'while moving: {counts}.\n\n' + by_horizon(report, cell, {w: n for w, n in WAYS.items() if w != 'truth'}))


def bearings(report: dict) -> str:
    def cell(way: dict) -> str:
        return f'{percent(way["bearing_within_5_deg"])}; {shown(way["bearing_deg"])}°'

    def cell_all(way: dict) -> str:
        return cell(way['all_objects'])
    first = next(iter(report['horizons'].values()))
    lines = []
    for words, select, getter in (
            ('The expert\'s own goal, the same all the way', cell, lambda at: at['two_step']['cases']),
            ('Every object, in the drives of all drivers', cell_all,
             lambda at: at['two_step']['all_objects']['cases'])):
        cases = ', '.join(str(getter(at)) for at in report['horizons'].values())
        lines += [f'{words}, where it is visible in the true picture: within 5 degrees, and the median error. '
                  f'Cases: {cases}.', '', by_horizon(report, select), '']
    posed = {way: name for way, name in WAYS.items() if 'position_error_m' in first.get(way, {})}
    def place(way: dict) -> str:
        return f'{way["position_error_m"]:.2f} m; {way["yaw_error_deg"]:.1f}°'
    lines += ['Where the imagined picture was taken, by the true view that is most like it: median error of place and '
              'yaw.', '', by_horizon(report, place, posed)]
    return '\n'.join(lines)


def what_if(report: dict) -> str:
    rows = [[way.replace('_', ' '), percent(of['share']), _interval(of['interval']), of['branches'],
             of['action_sensitivity'], '; '.join(f'{text} {n}x' for text, n in of['mistakes'].items()) or 'none']
            for way, of in report['what_if'].items()]
    return table(['', 'right', '95 % interval', 'branches', 'sensitivity', 'mistakes'], rows)


def _interval(bounds: list) -> str:
    return 'too few rooms' if None in bounds else f'{percent(bounds[0])} to {percent(bounds[1])}'


def drift(report: dict) -> str:
    of = report['drift']
    rows = [[name.replace('_', ' '), of[name], of['true'][name]] for name in
            ('sharpness_ratio', 'colour_ratio', 'action_response_ratio', 'fork_difference_ratio', 'histogram_distance')]
    rows += [[f'{name} over that of the true drive, {end} fifth', of[f'{name}_of_true'][end], 1] for name in
             ('sharpness', 'response', 'fork') for end in ('first', 'last')]
    return (f'{of["dreams"]} rollouts of {of["seconds"]:.0f} s.\n\n'
            + table(['last fifth over first fifth', 'imagined', 'true drives'], rows))


def closed_loop(report: dict) -> str:
    rows = [[name.replace('_', ' '), f'{percent(of["success"])} of {of["episodes"]}', of['seconds'], of['collisions'],
             of['episodes_with_collision'], of.get('jump_m_s', ''), of.get('jump_rad_s', '')]
            for name, of in report['closed_loop'].items()]
    return table(['', 'reached', 'median s', 'contacts an episode', 'episodes with one', 'jump m/s', 'jump rad/s'],
                 rows)


def made_by(report: dict) -> str:
    machine = report['machine']
    return (f'Rooms {report["seeds"]} ({report["episodes"]}), teacher: {report["teacher"]}, on the robot: '
            f'{report["backend"]}. {machine["cpu"]}, {machine["cores"]} cores; {report["wall_s"]:.0f} s.\n\n'
            f'    {report["command"]}' + (f'\n\n{fill(report["note"], 132)}' if 'note' in report else ''))


def training(name: str) -> str:
    """Return the provenance in the model's own file."""
    description = json.loads((ROOT / 'worldmodel_ros' / 'weights' / name / 'model.json').read_text())
    rows = list(_flat('', description['provenance']))
    return table(['of model.json', ''], rows)


def _flat(path: str, value):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f'{path} {key}'.strip().replace('_', ' '), inner)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value, start=1):
            yield from _flat(f'{path} {index}', item)
    else:
        yield [path, ', '.join(map(str, value)) if isinstance(value, list) else value]


def pictures(name: str) -> str:
    lines = []
    for kind, caption in CAPTIONS.items():
        files = sorted((PICTURES / name).glob(f'{kind}_*.png'))
        lines += [f'![{kind}, room {file.stem.split("_")[1]}]({file.relative_to(CARD.parent)})' for file in files]
        lines += ['', f'*{caption}*', ''] if files else []
    return '\n'.join(lines).strip()


def block(name: str) -> str:
    """Return the block of ``PART MODEL``, such as ``targets tiny``."""
    part, model = name.split()
    if part in ('training', 'pictures'):
        return {'training': training, 'pictures': pictures}[part](model)
    report = json.loads((RESULTS / f'quality_{model}.json').read_text())
    return {'targets': targets, 'prediction': prediction, 'bearings': bearings, 'what_if': what_if, 'drift': drift,
            'closed_loop': closed_loop, 'made_by': made_by}[part](report)


def filled(text: str) -> str:
    """Return the card with every block rewritten."""
    return re.sub(r'(<!-- ([a-z_]+ [a-z0-9_]+) -->\n).*?(<!-- end -->)',
                  lambda found: f'{found[1]}{block(found[2])}\n{found[3]}', text, flags=re.DOTALL)


if __name__ == '__main__':
    CARD.write_text(filled(CARD.read_text()))
