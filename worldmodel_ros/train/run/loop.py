"""The training loop of every stage: draw, loss, update, until the schedule is done; saved and resumed exactly."""
from __future__ import annotations

import copy
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from worldmodel_ros.train.objectives.objective import Objective
from . import portable, progress
from .config import Schedule
from .log import Log
from .muon import BatchedMuon
from .progress import Randomness
from .ranks import Ranks
from .reading import ConfigError

UNTIMED_STEPS = 2  # not counted in a schedule by the clock: they include compilation
REWARM_STEPS = 100  # until the full rate when an optimiser starts without its moments


class Interrupted(Exception):
    """The run was told to end; the text says what was saved and how to resume."""


def optimise(module: nn.Module, make: Callable[[nn.Module], Objective], schedule: Schedule, *, stage: str,
             ranks: Ranks, out: Path, seed: int = 0, compile_networks: bool = False,
             checkpoint_minutes: float = 10.0, log_every: float = 5.0, carried: Path | None = None,
             carried_bits: int = 16) -> dict[str, float]:
    """
    Train ``module`` in place by the objective that ``make`` returns for its averaged copy; it ends with the averaged weights.

    Logs to ``out``/``stage``.jsonl. ``out``/``stage``/progress holds what is needed to resume after an interruption: on the
    CPU, with the same number of processes, the result is bit for bit that of an uninterrupted run.

    carried: folder of ``portable`` weights (``carried_bits`` of a layer's), for a ``module`` that is a world model; they are
    written whenever progress is saved and at the end. If there is no progress, the stage resumes from them: at their step,
    with new moments and a warm-up.

    :return: ``steps`` done and ``seconds`` taken, over all attempts.
    :raises Interrupted: at SIGINT and SIGTERM, when the progress is saved.
    :raises ConfigError: if the loss is not finite when progress would be saved or the schedule is over.
    """
    ranks.share_weights(module.state_dict().values())
    random = Randomness(seed, stage, ranks)
    averaged = averaged_copy(module)
    objective = make(averaged)
    optimiser = Optimiser(module, averaged, objective.parameters(), schedule, ranks)
    ranks.share_weights(optimiser.parameters)
    saved = _Saved(out / stage / 'progress', optimiser, objective, random, ranks, 60.0 * checkpoint_minutes, carried,
                   carried_bits)
    step, seconds = saved.restore(schedule)
    if compile_networks:
        _compile(objective)
    clock = _Clock(seconds)
    log = Log(out, stage, schedule.steps, step, seconds, log_every) if ranks.main else None
    pace, loss = _Pace(ranks.device), torch.zeros(())
    with signals() as told:
        while True:
            # Processes agree through the host: a step of the GPU takes longer, and continues meanwhile.
            elapsed, stop, due = ranks.agree([clock.seconds, bool(told), saved.due])
            done = schedule.done(step, elapsed)
            # Reading the loss makes the host wait for the device, hence not at every step.
            if (stop or due or done >= 1.0) and ranks.agree([not math.isfinite(float(loss.detach()))])[0]:
                if log:
                    log.close(step)
                raise ConfigError(f'{stage}: at step {step} the loss is not finite any more, and nothing of it is saved: lower '
                                  f'{stage}.rate, and see when it began in {out / stage}.jsonl')
            if stop or due:
                saved.save(step, clock.seconds)
            if stop or done >= 1.0:
                break
            pace.begin()
            loss, values = optimiser.learn(objective, random.numpy, random.generator, step, done)
            times = pace.end()
            if log:
                log.add(step, {'loss': loss, **values, **times})
            step += 1
            clock.count()
    if log:
        log.close(step)
    if stop:
        raise Interrupted(f'{stage}: saved at step {step} of {schedule.steps} in {saved.folder}; the same command goes on '
                          'from there')
    saved.carry(step, clock.seconds)
    module.load_state_dict(averaged.state_dict())
    objective.finish()
    return {'steps': step, 'seconds': round(clock.seconds, 1)}


class Optimiser:
    """Trains ``parameters`` (those of ``module``, and auxiliary ones) and updates the moving average ``averaged``: AdamW, and
    optionally Muon for the layers' matrices (Jordan et al. 2024), with warm-up, cosine schedule and clipped gradients."""

    def __init__(self, module: nn.Module, averaged: nn.Module, parameters: list[nn.Parameter], schedule: Schedule,
                 ranks: Ranks):
        self.module, self.averaged, self.parameters = module, averaged, parameters
        self.schedule, self.ranks, self._rewarmed = schedule, ranks, REWARM_STEPS
        matrices = layer_matrices(module, parameters) if schedule.matrix_rate else []
        chosen = {id(parameter) for parameter in matrices}
        others = [parameter for parameter in parameters if id(parameter) not in chosen]
        self.optimisers = {'adam': torch.optim.AdamW(others, lr=schedule.rate, weight_decay=schedule.decay, betas=(0.9, 0.99),
                                                     fused=parameters[0].is_cuda)}
        self.rates = {'adam': schedule.rate}
        if matrices:
            self.optimisers['muon'] = BatchedMuon(matrices, lr=schedule.matrix_rate, weight_decay=schedule.decay,
                                                       adjust_lr_fn='match_rms_adamw')
            self.rates['muon'] = schedule.matrix_rate

    def set_rate(self, done: float) -> None:
        """Set the learning rate for the share of the schedule that is done."""
        # A floor at both ends: the first step has an effect, and the last ones still average.
        cosine = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        warm_up = min(1.0, done / self.schedule.warm_up) if self.schedule.warm_up else 1.0
        again = min(1.0, self._rewarmed / REWARM_STEPS)
        for name, optimiser in self.optimisers.items():
            for group in optimiser.param_groups:
                group['lr'] = self.rates[name] * max(0.02, warm_up * cosine) * again

    def learn(self, objective: Objective, rng: np.random.Generator, generator: torch.Generator, step: int, done: float
              ) -> tuple[Tensor, dict[str, Tensor]]:
        """Make step number ``step`` (from 0) of a schedule, of which the share ``done`` is over; return the loss and its
        parts."""
        self._rewarmed += 1
        self.set_rate(done)
        objective.done = done
        device = self.ranks.device.type
        with objective.reading():
            batch = objective.draw(rng, generator)
            with torch.autocast(device, torch.bfloat16, enabled=device == 'cuda'):
                loss, values = objective.loss(batch)
        self.update(loss, step)
        with torch.no_grad():
            objective.after_update(step)
        return loss, values

    def update(self, loss: Tensor, step: int) -> None:
        """Take a step down the loss, with gradients averaged over all processes."""
        for parameter in self.parameters:
            parameter.grad = None
        loss.backward()
        self.ranks.average_gradients(self.parameters)
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimiser in self.optimisers.values():
            optimiser.step()
        # Early weights are worth nothing: let the average follow quickly at first.
        keep = min(self.schedule.average, 1.0 - 1.0 / (step + 2))
        with torch.no_grad():
            pairs = list(zip(self.averaged.parameters(), self.module.parameters()))
            torch._foreach_lerp_([a for a, _ in pairs], [p for _, p in pairs], 1.0 - keep)

    def state(self) -> dict[str, Tensor]:
        """Return what a later process needs to resume exactly: weights, averaged weights, moments of all parameters, and how
        far a repeated warm-up has come."""
        tensors = {f'module.{name}': value for name, value in self.module.state_dict().items()}
        tensors |= {f'averaged.{name}': value for name, value in self.averaged.state_dict().items()}
        for kind, optimiser in self.optimisers.items():
            tensors |= {f'{kind}.{name}': value for name, value in progress.moments_of(optimiser).items()}
        return tensors | ({'rewarmed': torch.tensor(self._rewarmed)} if self._rewarmed < REWARM_STEPS else {})

    def begin_with(self, weights: dict[str, Tensor]) -> None:
        """Resume from averaged weights alone: moments begin at zero, and the rate rises over REWARM_STEPS."""
        self.module.load_state_dict(weights)
        self.averaged.load_state_dict(weights)
        self._rewarmed = 0

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Resume from what ``state`` returned."""
        def part(prefix: str) -> dict[str, Tensor]:
            return {name[len(prefix):]: value for name, value in tensors.items() if name.startswith(prefix)}

        self.module.load_state_dict(part('module.'))
        self.averaged.load_state_dict(part('averaged.'))
        self._rewarmed = int(tensors.get('rewarmed', REWARM_STEPS))
        for kind, optimiser in self.optimisers.items():
            progress.restore_moments(optimiser, part(f'{kind}.'))


def layer_matrices(module: nn.Module, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return those of the parameters that are matrices of the DiT's layers."""
    inside = {id(parameter) for name, parameter in module.named_parameters()
              if '.blocks.' in f'.{name}' and parameter.ndim == 2}
    return [parameter for parameter in parameters if id(parameter) in inside]


def averaged_copy(module: nn.Module) -> nn.Module:
    """Return a frozen copy, for the averaged weights."""
    return copy.deepcopy(module).eval().requires_grad_(False)


class _Saved:
    """Saves what a stage needs to resume exactly, in its folder every ``interval`` s; and in ``carried``, if given, its
    portable weights."""

    def __init__(self, folder: Path, optimiser: Optimiser, objective: Objective, random: Randomness, ranks: Ranks,
                 interval: float, carried: Path | None, bits: int):
        self._carried, self._bits = carried, bits
        self.folder, self._optimiser, self._objective, self._random = folder, optimiser, objective, random
        self._ranks, self._interval, self._last = ranks, interval, time.monotonic()

    @property
    def due(self) -> bool:
        return time.monotonic() - self._last > self._interval

    def restore(self, schedule: Schedule) -> tuple[int, float]:
        """Restore what an earlier attempt saved; return its steps and seconds, zeros if there is none."""
        begun = progress.load(self.folder, self._ranks)
        if begun is None:
            return self._restore_carried(schedule)
        device, prefix = self._ranks.device, 'objective.'
        self._optimiser.restore({name: value.to(device) for name, value in begun.shared.items()})
        self._random.restore(begun.own)
        self._objective.restore({name[len(prefix):]: value.to(device) for name, value in begun.own.items()
                                 if name.startswith(prefix)})
        if self._ranks.main:
            print(f'[{self.folder.parent.name}] goes on at step {begun.step} of {schedule.steps}', flush=True)
        return begun.step, begun.seconds

    def _restore_carried(self, schedule: Schedule) -> tuple[int, float]:
        stage = self.folder.parent.name
        begun = self._carried and portable.load(self._carried, stage, self._optimiser.module)
        if not begun:
            return 0, 0.0
        self._optimiser.begin_with(begun.weights)
        self._random.begin_at(begun.step)
        if self._ranks.main:
            print(f'[{stage}] goes on at step {begun.step} of {schedule.steps} from the weights in {self._carried}', flush=True)
        return begun.step, begun.seconds

    def carry(self, step: int, seconds: float) -> None:
        """Write the portable weights, if requested."""
        if self._carried and self._ranks.main:
            portable.write(self._carried, self._optimiser.averaged, self.folder.parent.name, step, seconds,
                           self._bits)

    def save(self, step: int, seconds: float) -> None:
        self.carry(step, seconds)
        own = {**self._random.state(),
               **{f'objective.{name}': value for name, value in self._objective.state().items()}}
        progress.save(self.folder, progress.Progress(step, seconds, self._optimiser.state(), own), self._ranks)
        self._last = time.monotonic()


def _compile(objective: Objective) -> None:
    # One graph for each shape of each network; the default limit is meant for code with unplanned shapes.
    torch._dynamo.config.cache_size_limit = 64
    for network in objective.networks():
        network.compile(dynamic=False)


class _Pace:
    """Where the time of a step goes: ``host_ms``, until the host has launched all of it, and on a GPU ``starved``, 1 if it was
    idle when the host began the step. Near 1 the host is the bottleneck, near 0 the GPU."""

    def __init__(self, device: torch.device):
        self._cuda, self._last, self._starved = device.type == 'cuda', None, 0.0

    def begin(self) -> None:
        self._start = time.monotonic()
        self._starved = float(self._last is not None and self._last.query())

    def end(self) -> dict[str, float]:
        times = {'host_ms': 1e3 * (time.monotonic() - self._start)}
        if self._cuda:
            self._last = torch.cuda.Event()
            self._last.record()
            times['starved'] = self._starved
        return times


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
def signals() -> Iterator[list[float]]:
    """A list that fills when the process is told to end; another SIGINT, a second later, ends it at once."""
    told: list[float] = []

    def handle(number: int, _frame) -> None:
        # torchrun forwards what the terminal has already sent: the same SIGINT comes twice.
        if told and number == signal.SIGINT and time.monotonic() - told[0] > 1.0:
            raise KeyboardInterrupt
        told.append(time.monotonic())

    try:
        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread, which alone gets signals
        before = {}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
