"""Clones the oracle's planner into a policy on the features of a scene forecast's network, the baseline B2.

    python -m worldmodel_ros.train.scene.cloning --forecast tiny --out out/cloned --seconds 600

Episodes of the tasks that policies may be trained for are driven in pieces by the oracle, at random and reactively, in the
second round also by a policy of the first one (DAgger, Ross et al. 2011); at each tick the oracle's command is the label. No
run-time task is among them. All training seeds use the same episodes.
"""
from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import save_file

from worldmodel_ros.engine.forecast.loading import Forecasts, load_forecast
from worldmodel_ros.evaluate.control.cloned import Cloned
from worldmodel_ros.evaluate.control.controllers import CONTROLLERS
from worldmodel_ros.evaluate.control.episode import drive, rung_seconds
from worldmodel_ros.evaluate.control.tasks import TASKS, Task
from worldmodel_ros.model.cloned_policy import ClonedPolicy
from worldmodel_ros.sim.odometry import WheelOdometry
from worldmodel_ros.sim.task_scenes import Variant
from worldmodel_ros.sim.world import LIMITS, World

if TYPE_CHECKING:
    from worldmodel_ros.control.terms import Term

SEEDS = range(800_000, 900_000)  # of the rooms; the forecast was trained on others
MIX: Mapping[str, float] = {'intercept': 0.66, 'street': 0.28, 'recall': 0.06}  # shares of the episodes: recall's are long
DRIVERS: tuple[Mapping[str, float], ...] = ({'oracle': 0.55, 'random': 0.2, 'reactive': 0.25},
                                            {'cloned': 0.6, 'oracle': 0.2, 'random': 0.2})  # of a piece, by round
PIECES = (4, 16)  # ticks
EPOCHS, BATCH, RATE, HELD_BACK = 24, 512, 1e-3, 0.05
_RECALL_S = 20.0  # of a minute
_STOPS = 0.25  # share of the streets whose shuttles stop at random, as in the forecast's training
_NAMES = ('features', 'facts', 'commands')
_STREAM = 43  # keeps the drivers' random numbers apart from those of the scene of the same seed
_LOW, _HIGH = np.array([LIMITS.v_min, -LIMITS.w_max]), np.array([LIMITS.v_max, LIMITS.w_max])
Ticks = tuple[np.ndarray, np.ndarray, np.ndarray]  # features (T, QUERIES, D), facts (T, FACTS) and commands (T, 2)
_loaded: list[tuple[Forecasts, ClonedPolicy | None, World]] = []  # in a simulating process


@dataclass
class Labelled:
    """Ticks of an episode, with the oracle's commands."""

    features: list[np.ndarray] = field(default_factory=list)
    facts: list[np.ndarray] = field(default_factory=list)
    commands: list[np.ndarray] = field(default_factory=list)

    def arrays(self) -> Ticks:
        """Return all ticks as arrays, features in half precision."""
        return np.array(self.features, np.float16), np.array(self.facts, np.float32), np.array(self.commands, np.float32)


class Teacher:
    """Drives in pieces, and records what the oracle would do at each tick."""

    def __init__(self, rng: np.random.Generator, drivers: Mapping[str, float], forecast: Forecasts, policy: ClonedPolicy | None
                 ) -> None:
        self._rng, self._names, self._shares = rng, list(drivers), list(drivers.values())
        self._policy, self._left, self._driver, self._random = policy, 0, '', np.zeros(2)
        self._cloned = Cloned(policy, forecast.open(), forecast.image_size)
        self._oracle, self._reactive = CONTROLLERS['oracle'](), CONTROLLERS['reactive']()
        self.kept = Labelled()

    def decide(self, world: World, odometry: WheelOdometry, terms: Sequence[Term],
               sent: list[tuple[float, np.ndarray]], executed: np.ndarray) -> np.ndarray:
        rng = self._rng
        if self._left == 0:
            self._left, self._driver = int(rng.integers(*PIECES)), str(rng.choice(self._names, p=self._shares))
            self._random = rng.uniform(_LOW, _HIGH) * (1.0, 0.6)
        self._left -= 1
        told = world, odometry, terms, sent, executed
        label, reaction = self._oracle.decide(*told), self._reactive.decide(*told)
        inputs = self._cloned.observe(world, odometry, terms, sent[-1][1], executed)
        if inputs is not None:
            for values, value in zip((self.kept.features, self.kept.facts, self.kept.commands), (*inputs, label), strict=True):
                values.append(np.array(value))
        match self._driver:
            case 'random':
                return self._random
            case 'reactive':
                return reaction
            case 'cloned' if inputs is not None:
                return self._policy.command(*inputs)
        return label


def episode(seed: int, forecast: Forecasts, drivers: Mapping[str, float], policy: ClonedPolicy | None, world: World) -> Ticks:
    """Return the labelled ticks of a seed; moves ``world``."""
    rng = np.random.default_rng([seed, _STREAM])
    task: Task = TASKS[str(rng.choice(list(MIX), p=list(MIX.values())))]
    if task.goals_follow:
        task = replace(task, seconds=_RECALL_S)
    teacher = Teacher(rng, drivers, forecast, policy)
    drive(task.setup(seed, Variant(stops=bool(rng.random() < _STOPS))), teacher, rung_seconds()['head'], world)
    return teacher.kept.arrays()


def train(data: Sequence[Ticks], seed: int, epochs: int = EPOCHS) -> tuple[ClonedPolicy, dict[str, float]]:
    """Return a policy cloned from episodes, and its losses on those and on the held-back ones, which are the first."""
    held = max(1, round(HELD_BACK * len(data)))
    judged, seen = (tuple(torch.from_numpy(np.concatenate(part)) for part in zip(*some, strict=True))
                    for some in (data[:held], data[held:]))
    torch.manual_seed(seed)
    policy = ClonedPolicy(seen[0].shape[-1])
    optimiser = torch.optim.AdamW(policy.parameters(), lr=RATE, weight_decay=0.02)
    steps = max(1, len(seen[0]) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, epochs * steps, pct_start=0.05)
    for _ in range(epochs):
        for rows in torch.randperm(len(seen[0]))[:steps * BATCH].chunk(steps):
            loss = policy.loss(seen[0][rows].float(), *(part[rows] for part in seen[1:]))
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimiser.step()
            schedule.step()
    policy.eval()
    with torch.no_grad():
        found = {name: round(policy.loss(part[0][:20_000].float(), *(each[:20_000] for each in part[1:])).item(), 4)
                 for name, part in (('trained', seen), ('held back', judged))}
    return policy, found


def _begin(forecast: str, state: dict[str, np.ndarray] | None) -> None:
    torch.set_num_threads(1)
    policy = None
    if state:
        policy = ClonedPolicy(len(state['norm.weight'])).eval()
        policy.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})
    _loaded.append((load_forecast(forecast), policy, World()))


def _simulated(drivers: Mapping[str, float], seed: int) -> tuple[int, Ticks]:
    forecast, policy, world = _loaded[0]
    return seed, episode(seed, forecast, drivers, policy, world)


def collect(forecast: str, drivers: Mapping[str, float], policy: ClonedPolicy | None, seeds: range, seconds: float,
            workers: int) -> list[Ticks]:
    """Return the labelled episodes driven within ``seconds``, in the order of their seeds."""
    state = {name: value.numpy() for name, value in policy.state_dict().items()} if policy else None
    end, found = time.monotonic() + seconds, []
    with multiprocessing.get_context('spawn').Pool(workers, _begin, (forecast, state)) as pool:
        for seed, ticks in pool.imap_unordered(partial(_simulated, drivers), seeds):
            if len(ticks[0]):
                found.append((seed, ticks))
            if time.monotonic() > end:
                break
    return [ticks for _, ticks in sorted(found, key=lambda each: each[0])]


def _kept(file: Path | None) -> list[Ticks]:
    if file is None or not file.is_file():
        return []
    with np.load(file) as arrays:
        ends = np.cumsum(arrays['lengths'])[:-1]
        return list(zip(*(np.split(arrays[name], ends) for name in _NAMES), strict=True))


def _keep(file: Path, data: Sequence[Ticks]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.concatenate(part) for name, part in zip(_NAMES, zip(*data, strict=True), strict=True)}
    np.savez(file, lengths=[len(ticks[0]) for ticks in data], **arrays)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m worldmodel_ros.train.scene.cloning', description=__doc__.splitlines()[0])
    parser.add_argument('--forecast', default='tiny', help='shipped forecast, or folder of one')
    parser.add_argument('--out', type=Path, required=True, help='folder for the weights, one file for each seed')
    parser.add_argument('--seconds', type=float, default=600.0, help='for which each of the two rounds drives')
    parser.add_argument('--trainings', type=int, default=3, help='seeds of the training, from 0 on')
    parser.add_argument('--first-seed', type=int, default=SEEDS.start, help='of the rooms')
    parser.add_argument('--epochs', type=int, default=EPOCHS)
    parser.add_argument('--data', type=Path, metavar='FOLDER', help='keeps the rounds; none is driven twice')
    parser.add_argument('--workers', type=int, default=os.cpu_count())
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.workers)
    data: list[Ticks] = []
    result: dict = {'forecast': options.forecast, 'first_seed': options.first_seed, 'epochs': options.epochs}
    policy, rounds, share = None, [], (SEEDS.stop - options.first_seed) // len(DRIVERS)
    for number, drivers in enumerate(DRIVERS):
        file = options.data / f'round-{number}.npz' if options.data else None
        driven = _kept(file)
        if not driven:
            if data:
                policy, _ = train(data, 0, max(1, options.epochs // 2))
            first = options.first_seed + number * share
            driven = collect(options.forecast, drivers, policy, range(first, first + share), options.seconds, options.workers)
            if file:
                _keep(file, driven)
        data += driven
        rounds.append({'episodes': len(driven), 'ticks': sum(len(ticks[0]) for ticks in driven), 'drivers': dict(drivers)})
        print(json.dumps(rounds[-1]), file=sys.stderr, flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    result |= {'rounds': rounds, 'losses': []}
    for seed in range(options.trainings):
        policy, losses = train(data, seed, options.epochs)
        result['losses'].append(losses)
        print(json.dumps(losses), file=sys.stderr, flush=True)
        save_file({name: value.half() for name, value in policy.state_dict().items()}, options.out / f'seed-{seed}.safetensors',
                  {'trained': json.dumps(result | {'seed': seed})})
    print(json.dumps(result))
    return 0


if __name__ == '__main__':
    sys.exit(main())
