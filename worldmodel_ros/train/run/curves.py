"""Draws the curves of a training run from its logs."""
from __future__ import annotations

import json
from pathlib import Path

STAGES = ('vae', 'teacher', 'student', 'self_forcing')
_NOT_DRAWN = ('step', 'seconds', 'steps_per_s', 'loss')


def draw(folder: Path, file: Path) -> None:
    """Reads ``<stage>.jsonl`` in ``folder`` and writes one picture, a panel per stage and quantity; none without logs."""
    stages = {stage: [json.loads(line) for line in (folder / f'{stage}.jsonl').read_text().splitlines()]
              for stage in STAGES if (folder / f'{stage}.jsonl').is_file()}
    stages = {stage: lines for stage, lines in stages.items() if lines}
    if not stages:
        return
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot as plt

    panels = {stage: [name for name in lines[-1] if name not in _NOT_DRAWN] for stage, lines in stages.items()}
    columns = max(map(len, panels.values()))
    figure, axes = plt.subplots(len(stages), columns, figsize=(3.0 * columns, 2.2 * len(stages)), squeeze=False)
    for row, (stage, lines) in zip(axes, stages.items()):
        for axis, name in zip(row, panels[stage]):
            points = [(line['step'], line[name]) for line in lines if name in line]
            axis.plot(*zip(*points), linewidth=1)
            axis.set_title(f'{stage}: {name}', fontsize=9)
            axis.set_xlabel('step', fontsize=8)
            axis.set_yscale('log' if min(value for _, value in points) > 0 and name != 'psnr_db' else 'linear')
            axis.tick_params(labelsize=7)
        for axis in row[len(panels[stage]):]:
            axis.axis('off')
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)
