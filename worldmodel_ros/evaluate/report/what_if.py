"""Section: does the model know that another action leads elsewhere?"""
from __future__ import annotations

from worldmodel_ros.motion import MANEUVERS
from .film import cell, row
from .html import Run, bounds, number, section, table


def what_if(runs: list[Run]) -> str:
    """How often the branch nearest to the executed action predicted best, and examples."""
    parts = [_table(runs), *(_examples(run, len(runs) > 1) for run in runs)]
    return section(
        'what-if', 'What if', *parts,
        lead=f'At some ticks the model predicted {len(MANEUVERS)} maneuvers: {", ".join(MANEUVERS)}. If its predictions follow '
             'the actions, the branch nearest to the executed action has the images nearest to those of the camera.')


def _table(runs: list[Run]) -> str:
    found = [run.evaluation.numbers['what_if'] for run in runs]
    if not any(numbers['decisive'] for numbers in found):
        return '<p>The recording has no window in which the executed action was clearly nearest to one maneuver.</p>'

    def cells(show) -> list[str]:
        return [show(numbers) if numbers['decisive'] else '&ndash;' for numbers in found]
    rows = [
        ['the branch nearest to the executed action was the best', *cells(
            lambda n: number(n['nearest_is_best']['mean'] * 100, 0, '%') + _share_bounds(n['nearest_is_best']))],
        ['a model that ignores the action', *cells(lambda n: number(n['chance'] * 100, 0, '%'))],
        ['always naming the most frequent maneuver', *cells(lambda n: number(n['always'] * 100, 0, '%'))],
        [f'mean rank of that branch, of {len(MANEUVERS)}', *cells(
            lambda n: number(n['mean_rank']['mean'], 2) + bounds(n['mean_rank'], 2))],
        ['windows evaluated, and those with a clear action', *cells(lambda n: f'{n["asked"]}, {n["decisive"]}')]]
    return table(['', *(run.name for run in runs)], rows)


def _share_bounds(interval: dict) -> str:
    return bounds({key: interval[key] and 100 * interval[key] for key in ('low', 'high')}, 0)


def _examples(run: Run, named: bool) -> str:
    parts = []
    for name in MANEUVERS:
        scene = run.evaluation.highlights.what_ifs.get(name)
        if scene is None:
            continue
        window = scene.window
        branches = window.branches
        ahead = len(scene.seen) * run.evaluation.spec.step_period
        cells = [cell(scene.branches[''], 'camera', f'camera image {ahead:.1f} s ahead', 'truth')]
        for branch in MANEUVERS:
            below = f'{branch}<br>{number(branches.psnr_db[branch], 1, "dB")}'
            kind = 'best' if branch == branches.best else ''
            cells.append(cell(scene.branches[branch], below, f'predicted: {branch}', kind))
        note = f'at {window.time_s:.1f} s, {ahead:.1f} s ahead; nearest: {name}; blue frame: the best branch'
        parts.append(f'<figure><div class="film" style="--columns:{len(MANEUVERS) + 1}">{row("Executed: " + name, note)}'
                     f'{"".join(cells)}</div></figure>')
    if not parts:
        return ''
    title = f'Where the executed action was nearest to one maneuver{": " + run.name if named else ""}'
    return f'<h3>{title}</h3>' + ''.join(parts)
