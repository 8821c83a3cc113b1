"""The head of the page: the verdict in one sentence, what was evaluated, and the numbers to see first."""
from __future__ import annotations

from worldmodel_ros.control.ladder import Tier
from worldmodel_ros.evaluate.drive.compare import MEASURES, Comparison
from worldmodel_ros.evaluate.drive.verdict import Verdict
from .html import Run, bounds, escape, number, section, signed, table

LEVELS = {'good': 'Good', 'fair': 'Take care', 'bad': 'Not here'}


def header(runs: list[Run], verdicts: list[Verdict], comparison: Comparison | None) -> str:
    """Title, verdicts and facts."""
    title = comparison.sentence if comparison else verdicts[0].sentence
    parts = [f'<p class="eyebrow">worldmodel_ros, evaluation of {_what(runs)}</p>',
             '' if comparison else _badge(verdicts[0]), f'<h1>{_code(title)}</h1>']
    for run, verdict in zip(runs, verdicts):
        if comparison:
            parts.append(f'<h3>{run.name}</h3>{_badge(verdict)}{_code(verdict.sentence)}')
        parts += [f'<p>{_code(remark)}</p>' for remark in verdict.remarks]
    return f'<header>{"".join(parts)}{"".join(_facts(run, len(runs) > 1) for run in runs)}</header>'


def tiles(runs: list[Run]) -> str:
    """The numbers to see first, each a link to its section."""
    return ''.join(f'<div class="tiles">{"".join(_tiles(run, len(runs) > 1))}</div>' for run in runs)


def differences(comparison: Comparison) -> str:
    """The table of the comparison."""
    rows = []
    for name, words, unit, digits, more_is_better in MEASURES:
        interval = comparison.differences[name]
        good = interval.above_zero if more_is_better else interval.below_zero
        bad = interval.below_zero if more_is_better else interval.above_zero
        word = '<b class="b">B better</b>' if good else '<b class="a">A better</b>' if bad else 'not significant'
        between = bounds(interval.to_dict(), digits, sign=True) or '&ndash;'
        rows.append([words, signed(interval.mean, digits, unit), between, '&ndash;' if interval.mean is None else word])
    how = (f'Paired, over the same {comparison.windows} windows.' if comparison.paired else
           'Two different recordings: part of the difference may be that one is easier to predict.')
    return section('compare', 'Comparison', table(['B minus A', 'mean', '95 % interval', 'result'], rows), lead=how)


def _what(runs: list[Run]) -> str:
    bags = dict.fromkeys(run.evaluation.subject.bag for run in runs)
    return ' and '.join(f'<code>{escape(bag)}</code>' for bag in bags)


def _badge(verdict: Verdict) -> str:
    return f'<span class="badge {verdict.level}">{LEVELS[verdict.level]}</span>'


def _facts(run: Run, named: bool) -> str:
    subject, pace = run.evaluation.subject, run.evaluation.numbers['pace']
    episodes = f', in {pace["episodes"]} episodes' if pace['episodes'] != 1 else ''
    facts = [('Recording', f'{escape(subject.bag)}, {pace["seconds"]:.1f} s, {pace["ticks"]} model ticks{episodes}'),
             ('Model', f'{escape(subject.model)}, on {escape(subject.backend)}'),
             ('Topics', '<br>'.join(escape(line) for line in subject.mapping))]
    title = f'<dt></dt><dd><b>{run.name}</b></dd>' if named else ''
    return (f'<dl class="facts">{title}' + ''.join(f'<dt>{name}</dt><dd>{value}</dd>' for name, value in facts if value)
            + '</dl>')


def _tiles(run: Run, named: bool) -> list[str]:
    numbers, evaluation = run.evaluation.numbers, run.evaluation
    gain, known = numbers['prediction']['moving']['gain_db'], numbers['reconstruction_db']
    deadline, what_if = evaluation.deadline, numbers['what_if']
    serious = sum(finding.severity != 'info' for finding in evaluation.findings)
    found = [
        ('prediction', signed(gain['mean'], 1, 'dB'), 'prediction compared with repeating the last frame',
         _between(gain, 1)),
        ('prediction', number(known['mean'], 1, 'dB'), 'autoencoder alone', 'familiar place: 28 dB or more'),
        ('what-if', number(what_if['nearest_is_best']['mean'] * 100, 0, '%') if what_if['decisive'] else '&ndash;',
         'what-if: the executed action\'s branch is best', f'{what_if["decisive"]} windows; chance level 20 %'),
        ('deadline', number(deadline.share(Tier.TWO_STEP) * 100, 1, '%') if deadline and deadline.ticks else '&ndash;',
         'of the ticks in time by the two-step model', _latency(deadline)),
        ('surprise', str(sum(moment.outlier for moment in evaluation.moments)), 'moments of surprise',
         'the worst are shown with images'),
        ('health', str(serious), 'problems in the recording', 'with remedies' if serious else '')]
    mark = f'<small>{run.name}</small>' if named else ''
    return [f'<a class="tile" href="#{anchor}">{mark}<b>{value}</b><span>{words}</span><small>{note}</small></a>'
            for anchor, value, words, note in found]


def _between(interval: dict, digits: int) -> str:
    if interval['low'] is None:
        return ''
    return f'95 %: {signed(interval["low"], digits)} to {signed(interval["high"], digits)}'


def _latency(deadline) -> str:
    latency = deadline.latency_ms() if deadline else None
    return f'p99 {number(latency["p99"], 1, "ms")} of {deadline.budget.deadline * 1e3:.0f}' if latency else ''


def _code(text: str) -> str:
    """Text whose ``quoted`` parts are code."""
    parts = escape(text).split('`')
    return ''.join(f'<code>{part}</code>' if i % 2 else part for i, part in enumerate(parts))
