"""Section: what a scene forecast says along the recording, and how well it agrees with what it sees later."""
from __future__ import annotations

from worldmodel_ros.evaluate.drive.forecast import in_words
from .html import Run, escape, number, section, table


def forecast(runs: list[Run]) -> str:
    """Errors of places that were forecast, by what moves and how far ahead; nothing without a forecast."""
    shown = [run for run in runs if run.evaluation.forecast]
    if not shown:
        return ''
    return section('forecast', 'Forecast', *(_one(run, len(runs) > 1) for run in shown),
                   lead='Forecast positions, compared with where the same forecast sees the objects at that time.')


def _one(run: Run, named: bool) -> str:
    found = run.evaluation.forecast
    rows = [[f'{kind}, {ahead}', number(row['error_m'], 2), number(row['standing_still_m'], 2), str(row['n'])]
            for kind, ahead_rows in found['places'].items() for ahead, row in ahead_rows.items()]
    title = f'<h3>{run.name}</h3>' if named else ''
    return title + f'<p>{escape(in_words(found))}.</p>' + table(
        ['objects, time ahead', 'median error <small>[m]</small>', 'if nothing moved <small>[m]</small>', 'cases'], rows)
