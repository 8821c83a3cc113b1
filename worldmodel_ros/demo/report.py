"""The HTML report of a run: the verdict, the images, and the numbers behind them."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from worldmodel_ros.demo.verdict import Check
from worldmodel_ros.evaluate.report.html import escape, section, table
from worldmodel_ros.evaluate.report.style import CSS

_OWN = 'img{max-width:100%;height:auto}ul.checks{list-style:none;padding:0}ul.checks li{margin:.3em 0}'
_IMAGES = {  # by section: file and what it shows
    'Futures': (('futures.gif', 'camera, and the futures predicted before the command was chosen'),
                ('futures.png', 'predicted futures at three moments, and why each was chosen or not')),
    'Path': (('path.png', 'the path driven, seen from above'),),
    'Images': (('film_strip.png', 'predicted frames above those of the camera'),
               ('prediction.gif', 'predicted frames over time'),
               ('what_if.png', 'predicted outcomes of action sequences, above those of the simulator')),
    'Time': (('latency.png', 'time from camera to command'),),
}


def write_report(directory: Path, summary: dict, checks: Sequence[Check], conclusion: str, drawn: Sequence[Path]) -> Path:
    """Write report.html next to the images that were ``drawn``; return its path."""
    path, names = directory / 'report.html', {image.name for image in drawn}
    tables = {'Futures': _decisions(summary['decisions']), 'Path': _rooms(summary['rooms']), 'Time': _time(summary)}
    body = []
    for title, images in _IMAGES.items():
        shown = [f'<figure><img src="{name}" alt="{escape(text)}"></figure>' for name, text in images if name in names]
        if shown or tables.get(title):
            body.append(section(title.lower(), title, *shown, tables.get(title, '')))
    machine = summary['machine']
    told = ''.join(f'<li>{escape(str(check))}</li>' for check in checks)
    path.write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f'<title>{escape(conclusion)}</title><style>{CSS}{_OWN}</style></head><body>'
        f'<header><h1>{escape(conclusion)}</h1><ul class="checks">{told}</ul></header><main>{"".join(body)}</main>'
        f'<footer><p>{escape(machine["cpu"])}, {machine["cores"]} cores. All numbers are in <code>summary.json</code>, next to '
        'this page.</p></footer></body></html>\n')
    return path


def _counts(caption: str, head: str, counts: Mapping[str, int]) -> str:
    return table((head, 'count'), [(escape(name), str(count)) for name, count in counts.items()], caption) if counts else ''


def _decisions(decisions: dict) -> str:
    if not decisions:
        return ''
    off = decisions['movers_off_by_m']
    return (_counts('Chosen candidates', 'candidate', decisions['chosen'])
            + _counts('Why the others were rejected: the term that costs each one most', 'term', decisions['rejected_for'])
            + table(('forecast of moving objects', *(f'{ahead} s' for ahead in off)),
                    [('median error [m]', *(_number(error) for error in off.values()))]))


def _rooms(rooms: Sequence[dict]) -> str:
    rows = [(str(room['seed']), escape(room['target']), escape(room['fate']), str(room['contacts'])) for room in rooms]
    return table(('room', 'target', 'outcome', 'contacts'), rows) if rows else ''


def _time(summary: dict) -> str:
    parts = [('camera to command', summary['camera_to_command_ms']),
             *((f'of which {name}', times) for name, times in summary['part_times_ms'].items() if times['commands'])]
    return (table(('time [ms]', 'p50', 'p99', 'max'), [
        (name, *(_number(times[key]) for key in ('p50', 'p99', 'max'))) for name, times in parts])
        + _counts('Ticks by tier', 'tier', {tier: count for tier, count in summary['tiers'].items() if count})
        + _counts('Why nothing was predicted in time', 'reason', summary['not_imagined_because']))


def _number(value: float | None) -> str:
    return 'unknown' if value is None else f'{value:g}'
