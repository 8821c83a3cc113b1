"""A back end whose networks take times chosen by a test, on a clock that need not be real; sessions are real."""
from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
from fake_engine import FakeClock
from small_model import SMALL

from worldmodel_ros.cache.pool import NumpyStorage
from worldmodel_ros.engine.backends.protocol import Backend
from worldmodel_ros.engine.engine import Engine
from worldmodel_ros.serving.scheduler import StepTable
from worldmodel_ros.serving.service.messages import Tick
from worldmodel_ros.serving.service.service import Service, ServiceSettings

COSTS = {'encode': 0.002, 'commit': 0.003, 'policy': 0.001, 'denoise': 0.006, 'outcomes': 0.0, 'decode': 0.004}


class TimedBackend(Backend):
    """``costs`` [s] of a network for one session; each additional one in a batch adds ``share`` of them."""

    name = 'timed'

    def __init__(self, clock: FakeClock, costs=None, sizes=(1,), share=0.1, preset=SMALL):
        self.preset, self.sizes, self.share = preset, sizes, share
        self.costs = {**COSTS, **(costs or {})}
        self.clock = clock
        self.batches: list[tuple[str, int]] = []
        self.broken: dict[str, Exception] = {}  # by network
        self.meanwhile = None  # called once, while a network runs
        self.plan = 0.25

    def fill(self, table: StepTable) -> None:
        """Fill the table as a calibration would."""
        parts = {'observe': ('encode', 'commit', 'policy'), 'denoise': ('denoise', 'outcomes'), 'commit': ('commit',),
                 'policy': ('policy',),
                 'decode': ('decode',)}
        for size, _ in itertools.product(self.sizes, range(25)):
            for part, networks in parts.items():
                cost = sum(self.costs[network] for network in networks)
                table.record(f'{self.preset.name}/{part}', size, cost * (1 + self.share * (size - 1)))
        table.record(f'{self.preset.name}/snapshot', 1, 0.03)

    def storage(self, layout, pages):
        return NumpyStorage(layout, self.preset.depth, self.preset.heads, self.preset.head_dim, pages)

    def run(self, network, batch):
        self.batches.append((network, len(batch)))
        self.clock.sleep(self.costs[network] * (1 + self.share * (len(batch) - 1)))
        if self.meanwhile:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        if network in self.broken:
            raise self.broken[network]
        return [getattr(self, f'_{network}')(*inputs) for inputs in batch]

    def host(self, array):
        return array

    def stack(self, arrays):
        return np.stack(arrays)

    def _encode(self, frame, state):
        # The latent identifies its frame.
        latents = np.full((*self.preset.latent_size, self.preset.latent_channels), frame.mean(), np.float32)
        return latents, np.zeros(1, np.float32)

    def _commit(self, latents, actions, window, places):
        return np.zeros((len(latents), self.preset.tokens, self.preset.width), np.float32)

    def _denoise(self, z, tau, rate, row, actions, window):
        return z, np.zeros((len(z), self.preset.tokens, self.preset.width), np.float32)

    def _policy(self, features, noise, prefix, delay):
        return np.full(noise.shape, self.plan, np.float32)

    def _outcomes(self, features):
        return np.zeros(len(features), np.float32), np.zeros((len(features), len(self.preset.goals)), np.float32)

    def _decode(self, latents, before):
        return np.zeros((len(latents), *self.preset.image_size, 3), np.uint8)


class Listener:
    def __init__(self):
        self.replies, self.pictures, self.failures = [], [], []

    def replied(self, reply):
        self.replies.append(reply)

    def pictured(self, picture):
        self.pictures.append(picture)

    def failed(self, reason, error):
        self.failures.append(reason)


class Rig:
    """A service on a virtual clock, advanced by hand: work without a cost does not affect the times."""

    def __init__(self, costs=None, sizes=(1,), smaller=None, sessions=8, share=0.1, **settings):
        self.clock = FakeClock()
        self.backend = TimedBackend(self.clock, costs, sizes, share)
        engine = Engine(self.backend, Path('timed'), sessions)
        if smaller:
            preset = replace(SMALL, name='smaller-test', image_size=(16, 16))
            self.small = TimedBackend(self.clock, smaller, sizes, share, preset)
            smaller = Engine(self.small, Path('timed'), sessions)
        table = StepTable(padded=len(sizes) > 1)
        for backend in (self.backend, self.small) if smaller else (self.backend,):
            backend.fill(table)
        self.service = Service(engine, smaller, ServiceSettings(**settings), self.clock, table)

    def open(self):
        listener = Listener()
        return self.service.open(listener), listener

    def tick(self, session, sequence, budget=0.05, **values):
        values = {'goal': 'red', 'stamp': sequence, 'executed': np.array([0.1, 0.2], np.float32), **values}
        image = np.full((*SMALL.image_size, 3), sequence % 256, np.uint8)
        self.service.tick(session, Tick(image, due=self.clock.now + budget, sequence=sequence, **values))

    def run(self, seconds):
        """Let ``seconds`` pass."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            patience = self.service.step()
            if patience != 0.0:
                self.clock.now = min(until, self.clock.now + (until if patience is None else max(patience, 1e-6)))

    def settle(self):
        """Do everything that can be done now."""
        while self.service.step() == 0.0:
            pass
