"""Measures how long the parts of a tick take on this machine, or reads the times that were measured on the robot.

    python -m worldmodel_ros.evaluate.drive.step_times --out step_times.json      # on the robot
    worldmodel evaluate bag BAG --step-times step_times.json                # anywhere
"""
from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from worldmodel_ros.engine.engine import Engine

PARTS = ('encode', 'commit', 'policy', 'denoise', 'decode')
TICKS = 100  # enough for a p95, which is what the ladder predicts with


class StepTimesError(ValueError):
    """A file that holds no step times; the text says what to do."""


@dataclass(frozen=True)
class MeasuredTimes:
    """``ticks``: seconds of each of PARTS, one row per measured tick; ``denoise`` is one step of it."""

    ticks: list[dict[str, float]]
    model: str
    backend: str
    machine: dict

    def save(self, path: Path) -> None:
        rows = [{part: round(tick[part], 6) for part in PARTS} for tick in self.ticks]
        path.write_text(json.dumps({'model': self.model, 'backend': self.backend, 'machine': self.machine,
                                    'seconds': rows}, indent=1) + '\n')

    @classmethod
    def load(cls, path: Path) -> MeasuredTimes:
        """Read what ``save`` wrote; raises StepTimesError."""
        try:
            content = json.loads(path.read_text())
            rows = [{part: float(row[part]) for part in PARTS} for row in content['seconds']]
            good = bool(rows) and all(0.0 <= value < float('inf') for row in rows for value in row.values())
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StepTimesError(f'{path} contains no step times ({type(error).__name__}: {error}); create it with '
                                 '`python -m worldmodel_ros.evaluate.drive.step_times --out FILE`') from error
        if not good:
            raise StepTimesError(f'{path}: every row of "seconds" needs a time from 0 s for {", ".join(PARTS)}, and '
                                 'there must be at least one row')
        return cls(rows, str(content.get('model', '')), str(content.get('backend', '')), content.get('machine', {}))


def measure(engine: Engine, model: str, ticks: int = TICKS, progress: Callable[[float], None] | None = None
            ) -> MeasuredTimes:
    """Time ticks of two steps on noise, paced at the model's rate: a processor that idles in between is slower. With tiles,
    passes take longer the more frames there are, so the session has seen as many as it keeps before."""
    from worldmodel_ros.machine import machine
    spec, session, rng = engine.spec, engine.open_session(), np.random.default_rng(0)
    engine.warm_up()

    def observe() -> None:
        frame = rng.integers(0, 256, (*spec.image_size, 3), dtype=np.uint8)
        session.observe(frame, np.zeros(spec.actions, np.float32))
    for _ in range(spec.context_frames if spec.tile else 0):
        observe()
    rows, due = [], time.perf_counter()
    for tick in range(ticks):
        observe()
        plan = session.plan(spec.goals[0])
        start = time.perf_counter()
        future = session.imagine(plan, steps=2)
        denoise = (time.perf_counter() - start) / 2
        session.decode(future)
        rows.append({**{part: session.timings[part] for part in ('encode', 'commit', 'policy', 'decode')},
                     'denoise': denoise})
        if progress:
            progress((tick + 1) / ticks)
        due += spec.step_period
        time.sleep(max(0.0, due - time.perf_counter()))
    return MeasuredTimes(rows, model, engine.backend.name, machine())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m worldmodel_ros.evaluate.drive.step_times',
                                     description=__doc__.splitlines()[0])
    parser.add_argument('--model', default='tiny', help='shipped model or folder (default: tiny)')
    parser.add_argument('--backend', default='auto', help='auto, torch, onnx or onnx-int8')
    parser.add_argument('--ticks', type=int, default=TICKS)
    parser.add_argument('--out', type=Path, required=True, help='JSON file to write')
    options = parser.parse_args(arguments)

    from worldmodel_ros.engine import load
    measured = measure(load(options.model, options.backend), options.model, options.ticks)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    measured.save(options.out)
    median = {part: round(float(np.median([row[part] for row in measured.ticks])) * 1e3, 2) for part in PARTS}
    print(f'{options.out}: median ms {json.dumps(median)}', file=sys.stderr)
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
