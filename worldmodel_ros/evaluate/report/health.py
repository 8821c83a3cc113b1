"""Section: what is wrong with the recording itself."""
from __future__ import annotations

from datetime import datetime, timezone

from worldmodel_ros.bags.findings import Finding
from worldmodel_ros.evaluate.drive.evaluation import Evaluation
from ...inputs.ticks import NS
from .html import Run, escape, number, section, table

SEVERITY = {'error': 'Error', 'warning': 'Warning', 'info': 'Note'}


def health(runs: list[Run]) -> str:
    """Findings with their remedies, and the counts behind them."""
    return section('health', 'Data health', *(_one(run, len(runs) > 1) for run in runs),
                   lead='Findings from reading the bag: time stamps, gaps, frozen and refused images.')


def _one(run: Run, named: bool) -> str:
    evaluation = run.evaluation
    title = f'<h3>{run.name}</h3>' if named else ''
    items = ''.join(f'<li><b class="sev-{finding.severity}">{SEVERITY[finding.severity]}</b>{escape(finding.text)}'
                    f'{_where(evaluation, finding)}</li>' for finding in evaluation.findings)
    found = f'<ul class="findings">{items}</ul>' if items else '<p>No problems were found in this recording.</p>'
    return title + found + _table(evaluation.health)


def _where(evaluation: Evaluation, finding: Finding) -> str:
    """When it happened, if that is within the recording's own time."""
    if not len(evaluation.columns):
        return ''
    times = [(stamp - int(evaluation.columns['stamp_ns'][0])) / NS for stamp in finding.first_stamps]
    end = evaluation.numbers['pace']['seconds'] + 1.0
    places = [f'{time:.1f} s' for time in times if -1.0 <= time <= end]
    if not places:
        return ''
    return f' <small>At {", ".join(places)}{" ..." if finding.count > len(places) else ""}.</small>'


def _table(numbers: dict) -> str:
    began = numbers['first_stamp']
    when = datetime.fromtimestamp(began / NS, timezone.utc).strftime('%Y-%m-%d %H:%M:%S UTC') if began else '&ndash;'
    rows = [['images, and model ticks among them', f'{numbers["images"]}, {numbers["ticks"]}'], ['first stamp', when],
            ['time between images', _spread(numbers['spacing_s'])],
            ['age of an image when recorded', _spread(numbers['age_on_receipt_s'])],
            ['sizes', escape(', '.join(f'{size} ({count})' for size, count in numbers['sizes'].items())) or '&ndash;'],
            ['actions', str(numbers['actions'])]]
    rows += [[f'range of {escape(name)}', f'{number(low, 2)} to {number(high, 2)}']
             for name, (low, high) in (numbers['action_range'] or {}).items()]
    return table(['', ''], rows)


def _spread(seconds: dict | None) -> str:
    """Quantiles in words."""
    if seconds is None:
        return '&ndash;'
    return (f'{number(seconds["p50"] * 1e3, 1, "ms")} <small>1 to 99 %: {number(seconds["p1"] * 1e3, 1)} to '
            f'{number(seconds["p99"] * 1e3, 1)}</small>')
