"""Writes one table of several runs, from the JSON that their evaluations left.

    python -m worldmodel_ros.train.run.table out/ablations
"""
from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SAMPLERS = ('teacher', 'two_step', 'one_step')
HORIZONS = ('1.0', '5.0')


def columns(quality: dict[str, Any], metrics: dict[str, Any]) -> dict[str, float | None]:
    """Return the values to compare by column heading; None where a part was not judged."""
    def at(content: Any, *keys: str) -> float | None:
        for key in keys:
            content = content.get(key) if isinstance(content, dict) else None
        return content if isinstance(content, (int, float)) else None

    found: dict[str, float | None] = {
        f'PSNR 0.4 s {name}': at(metrics, 'psnr_db', name, 'mean') for name in ('two_step', 'one_step')}
    for horizon in HORIZONS:
        for sampler in SAMPLERS:
            found[f'PSNR {horizon} s {sampler}'] = at(quality, 'horizons', horizon, sampler, 'psnr_db')
    found['bearing 5 s two_step'] = at(quality, 'horizons', '5.0', 'two_step', 'bearing_deg')
    found['what-if 1 s'] = at(quality, 'what_if_ranking', '1.0')
    for driver in ('two_step', 'planner'):
        found[f'success {driver}'] = at(quality, 'closed_loop', driver, 'success')
    for key in ('sharpness_ratio', 'colour_ratio', 'action_response_ratio'):
        found[key.replace('_', ' ')] = at(quality, 'drift', key)
    return found


def write_table(out: Path, names: Sequence[str]) -> str:
    """Write table.json and table.md in ``out`` for the runs in its folders; return the Markdown."""
    rows = {}
    for name in names:
        folder = out / name / 'evaluation'
        parts = [json.loads(file.read_text()) if file.is_file() else {}
                 for file in (folder / 'quality.json', folder / 'metrics.json')]
        rows[name] = columns(*parts) if any(parts) else {}
    headings = [h for h in columns({}, {}) if any(row.get(h) is not None for row in rows.values())]
    lines = ['| run | ' + ' | '.join(headings) + ' |', '|---' * (len(headings) + 1) + '|']
    for name, row in rows.items():
        values = ['' if row.get(h) is None else f'{row[h]:.2f}' for h in headings] if row else ['not evaluated']
        lines.append(f'| {name} | ' + ' | '.join(values) + ' |')
    text = '\n'.join(lines) + '\n'
    (out / 'table.md').write_text(text)
    (out / 'table.json').write_text(json.dumps(rows, indent=1) + '\n')
    return text


def main() -> int:
    parser = argparse.ArgumentParser(prog='python -m worldmodel_ros.train.run.table', description=__doc__.splitlines()[0])
    parser.add_argument('out', type=Path, help='folder whose folders are the runs')
    out: Path = parser.parse_args().out
    print(write_table(out, sorted(path.parent.name for path in out.glob('*/evaluation') if path.is_dir())))
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
