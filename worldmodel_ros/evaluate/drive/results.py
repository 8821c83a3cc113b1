"""The results of an evaluation: report.html, summary.json and the windows, in one folder."""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from worldmodel_ros.evaluate.report import render
from .compare import compare
from .evaluation import Evaluation
from .forecast import in_words as forecast_in_words
from .verdict import Verdict, judge


def write_results(out: Path, evaluations: Sequence[Evaluation], provenance: Mapping[str, Any]) -> dict:
    """Write report.html and summary.json of one evaluation, or of two compared; return the summary."""
    verdicts = [judge(evaluation) for evaluation in evaluations]
    comparison = compare(*evaluations) if len(evaluations) == 2 else None
    summary = {'comparison': comparison and comparison.to_dict(),
               'evaluations': [_numbers(e, v) for e, v in zip(evaluations, verdicts)], 'provenance': dict(provenance)}
    (out / 'summary.json').write_text(json.dumps(summary, indent=1, allow_nan=False) + '\n')
    (out / 'report.html').write_text(render(evaluations, verdicts, comparison, provenance), encoding='utf-8')
    return summary


def in_words(evaluations: Sequence[Evaluation], summary: dict) -> str:
    """Return the result as text for a terminal."""
    lines = [summary['comparison']['sentence']] if summary['comparison'] else []
    for evaluation, numbers in zip(evaluations, summary['evaluations']):
        subject, verdict = evaluation.subject, numbers['verdict']
        lines += [f'{subject.bag}, {subject.model} on {subject.backend}: {verdict["sentence"]}', *(
            f'  {remark}' for remark in verdict['remarks'])]
        lines += [f'  {forecast_in_words(evaluation.forecast)}'] if evaluation.forecast else []
        lines += [f'  {finding.severity}: {finding.text}' for finding in evaluation.findings]
    return '\n'.join(lines)


def _numbers(evaluation: Evaluation, verdict: Verdict) -> dict:
    subject = evaluation.subject
    return {'bag': subject.bag, 'model': subject.model, 'backend': subject.backend, 'topics': list(subject.mapping),
            'verdict': verdict.to_dict(), **evaluation.numbers, 'windows_sha256': evaluation.digest,
            'health': evaluation.health, 'findings': [
                asdict(finding) for finding in evaluation.findings],
            'deadline': evaluation.deadline and evaluation.deadline.to_dict(), 'forecast': evaluation.forecast,
            'goals': [goal.to_dict() for goal in evaluation.goals]}
