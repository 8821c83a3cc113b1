"""Logs of a stage: a line or a bar on the terminal, JSON lines in a file, TensorBoard events if installed; curves."""
from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor


_DRAWN = ('vae', 'teacher', 'student', 'self_forcing', 'decoder')  # stages
_NOT_DRAWN = ('step', 'seconds', 'steps_per_s', 'loss', 'host_ms', 'starved')


class Log:
    """
    Averages the values added between two lines; a line is written every ``every`` seconds.

    ``steps`` is the number of the stage's steps, for the bar. ``first`` is the step resumed from: later lines of an earlier
    attempt are dropped.
    """

    def __init__(self, folder: Path, stage: str, steps: int | None = None, first: int = 0, seconds: float = 0.0,
                 every: float = 5.0):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f'{stage}.jsonl'
        kept = [line for line in (path.read_text().splitlines() if first and path.is_file() else []) if _step(line) < first]
        new = path.with_suffix('.new')  # an attempt that ends before its first line leaves those of the others
        new.write_text(''.join(line + '\n' for line in kept))
        new.replace(path)
        self.file = path.open('a')
        self.stage, self.every = stage, every
        self.last = time.monotonic()
        self.start = self.last - seconds
        self.sums: dict[str, tuple[Tensor | float, int]] = {}  # and of how many steps: not all log the same
        self.count = 0
        self.bar = _bar(stage, steps, first)
        self.events = _events(folder / 'tensorboard' / stage)

    def add(self, step: int, values: Mapping[str, Tensor | float]) -> None:
        """Add the losses of one step, and its times: name to scalar; tensors are read only when a line is due."""
        for name, value in values.items():
            total, count = self.sums.get(name, (0.0, 0))
            self.sums[name] = total + (value.detach() if isinstance(value, Tensor) else value), count + 1
        self.count += 1
        if self.bar is not None:
            self.bar.update()
        if time.monotonic() - self.last >= self.every:
            self.write(step)

    def write(self, step: int) -> None:
        """Write a line now."""
        now = time.monotonic()
        means = {name: round(float(total) / count, 5) for name, (total, count) in self.sums.items()}
        row = {'step': step, 'seconds': round(now - self.start, 1),
               'steps_per_s': round(self.count / max(now - self.last, 1e-9), 2), **means}
        self.file.write(json.dumps(row) + '\n')
        self.file.flush()
        if self.bar is not None:
            self.bar.set_postfix({name: f'{value:.4g}' for name, value in means.items()})
        else:
            print(f'[{self.stage}] ' + ' '.join(f'{name} {value}' for name, value in row.items()), flush=True)
        if self.events is not None:
            for name, value in means.items():
                self.events.add_scalar(f'{self.stage}/{name}', value, step)
        self.sums, self.count, self.last = {}, 0, now

    def close(self, step: int) -> None:
        """Write what is left, and close."""
        if self.count:
            self.write(step)
        self.file.close()
        if self.bar is not None:
            self.bar.close()
        if self.events is not None:
            self.events.close()


def _step(line: str) -> float:
    """Return the step of a line; infinite for one that was cut off, as its process ended."""
    try:
        return json.loads(line)['step']
    except ValueError:
        return math.inf


def _bar(stage: str, steps: int | None, first: int):
    """A progress bar on a terminal, else None: lines are better in a file."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(desc=stage, total=steps, initial=first, dynamic_ncols=True)


def _events(folder: Path):
    try:
        from tensorboard.summary import Writer
    except ImportError:
        print(f'[{folder.name}] no TensorBoard here ("pip install tensorboard"): the curves are in '
              f'{folder.name}.jsonl alone', flush=True)
        return None
    return Writer(str(folder))


def draw_curves(folder: Path, file: Path) -> None:
    """Read ``<stage>.jsonl`` in ``folder`` and write one image, a panel per stage and quantity; none without logs."""
    stages = {stage: [json.loads(line) for line in (folder / f'{stage}.jsonl').read_text().splitlines()]
              for stage in _DRAWN if (folder / f'{stage}.jsonl').is_file()}
    stages = {stage: lines for stage, lines in stages.items() if lines}
    if not stages:
        return
    try:
        import matplotlib
    except ImportError:
        print(f'no matplotlib here ("pip install matplotlib"): no {file}', flush=True)
        return
    matplotlib.use('Agg')
    from matplotlib import pyplot as plt

    panels = {stage: [name for name in lines[-1] if name not in _NOT_DRAWN] for stage, lines in stages.items()}
    columns = max(map(len, panels.values()))
    width, height = 3.0 * columns, 2.2 * len(stages)
    figure, axes = plt.subplots(len(stages), columns, figsize=(width, height), squeeze=False)
    for row, (stage, lines) in zip(axes, stages.items()):
        for axis, name in zip(row, panels[stage]):
            points = [(line['step'], line[name]) for line in lines if name in line]
            axis.plot(*zip(*points), linewidth=1)
            axis.set_title(f'{stage}: {name}', fontsize=9)
            axis.set_xlabel('step', fontsize=8)
            axis.set_yscale('log' if min(value for _, value in points) > 0 and name != 'psnr_db' else 'linear')
            axis.tick_params(which='both', labelsize=7)
        for axis in row[len(panels[stage]):]:
            axis.axis('off')
    # Margins [inch] that hold these labels; ``tight_layout`` would draw them all once more to find out.
    figure.subplots_adjust(0.55 / width, 0.45 / height, 1.0 - 0.15 / width, 1.0 - 0.25 / height, wspace=0.35, hspace=0.5)
    figure.savefig(file, dpi=110)
    plt.close(figure)
