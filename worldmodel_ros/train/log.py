"""Progress of a training run: one line on the terminal, one JSON object per line in a file."""
from __future__ import annotations

import json
import time
from pathlib import Path


class Log:
    """Averages what is added between two lines; a line is written every ``every`` seconds."""

    def __init__(self, folder: Path, stage: str, every: float = 5.0):
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / f'{stage}.jsonl').open('w')
        self.stage, self.every = stage, every
        self.start = self.last = time.monotonic()
        self.sums: dict[str, object] = {}
        self.count = 0

    def add(self, step: int, values: dict) -> None:
        """Adds the losses of one step: name to scalar tensor; tensors are read only when a line is due."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value.detach()
        self.count += 1
        if time.monotonic() - self.last >= self.every:
            self.write(step)

    def write(self, step: int) -> None:
        now = time.monotonic()
        row = {'step': step, 'seconds': round(now - self.start, 1),
               'steps_per_s': round(self.count / (now - self.last), 2)}
        row.update({name: round(float(total) / self.count, 5) for name, total in self.sums.items()})
        self.file.write(json.dumps(row) + '\n')
        self.file.flush()
        print(f'[{self.stage}] ' + ' '.join(f'{name} {value}' for name, value in row.items()), flush=True)
        self.sums, self.count, self.last = {}, 0, now
