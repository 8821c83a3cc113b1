"""Draws the curves of a training run from its logs."""
from __future__ import annotations

import json
from pathlib import Path

PANELS = {'vae': ('psnr_db', 'kl'), 'teacher': ('flow', 'imitation', 'contact', 'progress'),
          'student': ('flow', 'half', 'whole', 'imitation', 'contact', 'progress')}


def draw(folder: Path, file: Path) -> None:
    """Reads ``<stage>.jsonl`` in ``folder`` and writes one picture with a panel per stage and quantity."""
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot as plt

    stages = {stage: [json.loads(line) for line in (folder / f'{stage}.jsonl').read_text().splitlines()]
              for stage in PANELS if (folder / f'{stage}.jsonl').is_file()}
    columns = max(len(PANELS[stage]) for stage in stages)
    figure, axes = plt.subplots(len(stages), columns, figsize=(3.0 * columns, 2.2 * len(stages)), squeeze=False)
    for row, (stage, lines) in zip(axes, stages.items()):
        for axis, name in zip(row, PANELS[stage]):
            points = [(line['seconds'], line[name]) for line in lines if name in line]
            axis.plot(*zip(*points), linewidth=1)
            axis.set_title(f'{stage}: {name}', fontsize=9)
            axis.set_xlabel('s', fontsize=8)
            axis.set_yscale('linear' if name == 'psnr_db' else 'log')
            axis.tick_params(labelsize=7)
        for axis in row[len(PANELS[stage]):]:
            axis.axis('off')
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)
