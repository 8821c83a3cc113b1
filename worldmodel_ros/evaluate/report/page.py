"""Assembles the page."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from worldmodel_ros.evaluate.drive.compare import Comparison
from worldmodel_ros.evaluate.drive.evaluation import Evaluation
from worldmodel_ros.evaluate.drive.verdict import Verdict
from .commands import commands
from .deadline import deadline
from .forecast import forecast
from .goals import goals
from .health import health
from .html import escape, runs
from .moments import moments
from .overview import differences, header, tiles
from .prediction import prediction
from .style import CSS
from .what_if import what_if

CONTENTS = (('compare', 'Comparison'), ('goals', 'Goals'), ('prediction', 'Prediction'), ('surprise', 'Surprise'),
            ('commands', 'Commands'), ('what-if', 'What if'), ('forecast', 'Forecast'), ('deadline', 'Deadline'),
            ('health', 'Data health'))


def render(evaluations: Sequence[Evaluation], verdicts: Sequence[Verdict], comparison: Comparison | None,
           provenance: Mapping[str, Any]) -> str:
    """Return the page of one evaluation or of two; ``provenance``: command, time, machine and versions."""
    shown, verdicts = runs(evaluations), list(verdicts)
    title = comparison.sentence if comparison else verdicts[0].sentence
    contents = ''.join(f'<li><a href="#{anchor}">{name}</a></li>' for anchor, name in CONTENTS
                       if (comparison or anchor != 'compare')
                       and (anchor not in ('forecast', 'goals') or any(getattr(e, anchor) for e in evaluations)))
    body = [tiles(shown), differences(comparison) if comparison else '', goals(shown), prediction(shown), moments(shown),
            commands(shown), what_if(shown), forecast(shown), deadline(shown), health(shown)]
    return ('<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            # The browser itself enforces that nothing else is loaded; no icon, so that none is requested.
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
            'style-src \'unsafe-inline\'">'
            '<link rel="icon" href="data:,">'
            f'<title>{escape(title.replace("`", ""))}</title><style>{CSS}</style></head><body>'
            f'{header(shown, verdicts, comparison)}<nav aria-label="Contents"><ol>{contents}</ol></nav>'
            f'<main>{"".join(body)}</main>{_footer(provenance)}</body></html>\n')


def _footer(provenance: Mapping[str, Any]) -> str:
    machine = provenance['machine']
    versions = ', '.join(f'{name} {version}' for name, version in provenance['versions'].items() if version)
    return (f'<footer><p><code>{escape(provenance["command"])}</code></p>'
            f'<p>{escape(provenance["time"])}, {escape(machine["cpu"])}, {machine["cores"]} cores, '
            f'Python {escape(machine["python"])}. {escape(versions)}.</p>'
            '<p>All numbers are in <code>summary.json</code>, values for each window in <code>windows*.jsonl</code>, '
            'next to this page. Intervals: 95 %, block bootstrap over the recording. Definitions: '
            '<code>docs/evaluating.md</code>.</p></footer>')
