"""The loop of every stage that learns: draw, loss, update, until the schedule is done; saved and gone on with exactly."""
from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from . import progress
from .config import Schedule
from .log import Log
from .optim import Optimiser, averaged_copy
from .ranks import Ranks

UNTIMED_STEPS = 2  # of a schedule by the clock: these pay for compilation


class Interrupted(Exception):
    """The run was told to end; the text says what was saved and how to go on."""


class Objective(Protocol):
    """What a stage minimises. `after_update(step)`, `state()` and `restore(state)` are optional."""

    def parameters(self) -> list[nn.Parameter]:
        """What is trained, the same in each call."""

    def networks(self) -> list[nn.Module]:
        """What may be compiled."""

    def draw(self, rng: np.random.Generator, generator: torch.Generator) -> Any:
        """Return a batch."""

    def loss(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a batch, and by name what is worth watching."""


def optimise(module: nn.Module, make: Callable[[nn.Module], Objective], schedule: Schedule, *, stage: str,
             ranks: Ranks, out: Path, seed: int = 0, compile_networks: bool = False,
             checkpoint_minutes: float = 10.0, log_every: float = 5.0) -> dict[str, float]:
    """
    Train `module` in place by the objective that `make` gives for the averaged copy of it; it ends with the averaged
    weights.

    Logs to `out`/`stage`.jsonl. In `out`/`stage`/progress lies what is needed to go on after an interruption: with as
    many processes on the CPU, the result is bit for bit that of a run without one.

    :return: `steps` done and `seconds` taken, over all attempts.
    :raises Interrupted: at SIGINT and SIGTERM, when the progress is saved.
    """
    folder = out / stage / 'progress'
    ranks.share_weights(module.state_dict().values())
    random = progress.Randomness(seed, stage, ranks)
    averaged = averaged_copy(module)
    objective = make(averaged)
    optimiser = Optimiser(module, averaged, objective.parameters(), schedule, ranks)
    ranks.share_weights(optimiser.parameters)
    begun = progress.load(folder, ranks)
    if begun is not None:
        optimiser.restore({name: value.to(ranks.device) for name, value in begun.shared.items()})
        random.restore(begun.own)
        if hasattr(objective, 'restore'):
            objective.restore({name[len('objective.'):]: value.to(ranks.device) for name, value in begun.own.items()
                               if name.startswith('objective.')})
        if ranks.main:
            print(f'[{stage}] goes on at step {begun.step} of {schedule.steps}', flush=True)
    if compile_networks:
        # One graph for each shape of each network; the default limit is for code that meets shapes it did not plan for.
        torch._dynamo.config.cache_size_limit = 64
        for network in objective.networks():
            network.compile(dynamic=False)
    step = begun.step if begun else 0
    clock = _Clock(begun.seconds if begun else 0.0)
    log = Log(out, stage, schedule.steps, step, clock.seconds, log_every) if ranks.main else None
    saved, interval = time.monotonic(), 60.0 * checkpoint_minutes

    def save() -> None:
        own = {**random.state(), **{f'objective.{name}': value for name, value in
                                    (objective.state() if hasattr(objective, 'state') else {}).items()}}
        progress.save(folder, progress.Progress(step, clock.seconds, optimiser.state(), own), ranks)

    with _signals() as told:
        while True:
            # Processes agree through the host: a step of the GPU takes longer, and goes on meanwhile.
            elapsed, stop, due = ranks.agree([clock.seconds, bool(told), time.monotonic() - saved > interval])
            if stop or due:
                save()
                saved = time.monotonic()
            if stop:
                if log:
                    log.close(step)
                raise Interrupted(f'{stage}: saved at step {step} of {schedule.steps} in {folder}; the same command '
                                  'goes on from there')
            done = step / schedule.steps
            if schedule.max_minutes is not None:
                done = max(done, elapsed / (60.0 * schedule.max_minutes))
            if done >= 1.0:
                break
            optimiser.set_rate(done)
            batch = objective.draw(random.numpy, random.generator)
            with torch.autocast(ranks.device.type, torch.bfloat16, enabled=ranks.device.type == 'cuda'):
                loss, values = objective.loss(batch)
            optimiser.update(loss, step)
            if hasattr(objective, 'after_update'):
                with torch.no_grad():
                    objective.after_update(step)
            if log:
                log.add(step, {'loss': loss, **values})
            step += 1
            clock.count()
    if log:
        log.close(step)
    module.load_state_dict(averaged.state_dict())
    return {'steps': step, 'seconds': round(clock.seconds, 1)}


class _Clock:
    """Seconds of training over all attempts; the first steps of each, which compile, are not counted."""

    def __init__(self, before: float):
        self.before, self.steps, self.start = before, 0, time.monotonic()

    def count(self) -> None:
        self.steps += 1
        if self.steps == UNTIMED_STEPS:
            self.start = time.monotonic()

    @property
    def seconds(self) -> float:
        return self.before + (time.monotonic() - self.start if self.steps >= UNTIMED_STEPS else 0.0)


@contextmanager
def _signals():
    """A list that fills when the process is told to end; another SIGINT, a second later, ends it at once."""
    told: list[float] = []

    def handle(number: int, _frame) -> None:
        # torchrun hands on what the terminal has sent already: the same SIGINT comes twice.
        if told and number == signal.SIGINT and time.monotonic() - told[0] > 1.0:
            raise KeyboardInterrupt
        told.append(time.monotonic())

    try:
        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: whoever started it ends it
        before = {}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
