"""Measures how long a model's units take at each batch size, on this machine."""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from worldmodel_ros.cache.pool import OutOfPages
from worldmodel_ros.engine.network_calls import Boundary, Calls, Work, run_unit
from worldmodel_ros.engine.session import Session
from worldmodel_ros.serving.scheduler import StepTable
from .networks import Networks

RUNS = 20  # enough for a high quantile that does not depend on a single interruption
FEWEST, PATIENCE = 5, 1.0  # as few are enough once they have taken this long [s]
YOUNG = 2  # runs of a branch from a window that is not full
PAUSE = 0.005  # s between runs: a real-time thread that never waits would starve other processes


def calibrate(networks: Networks, table: StepTable, clock: Callable[[], float] = time.monotonic) -> None:
    """Record the times of each unit of a model at the batch sizes of its back end.

    A size for which the engine has no memory is skipped, and so never used.
    """
    for size in networks.engine.backend.sizes:
        try:
            _Calibration(networks, table, clock, size).run()
        except OutOfPages:
            if size == 1:
                raise
            return


class _Calibration:
    """Measures one batch size, on noise."""

    def __init__(self, networks: Networks, table: StepTable, clock: Callable[[], float], size: int):
        self._networks, self._table, self._clock, self._size = networks, table, clock, size
        spec = networks.engine.spec
        rng = np.random.default_rng(size)
        self._frame = rng.integers(0, 256, (*spec.image_size, 3), dtype=np.uint8)
        self._actions = np.zeros((spec.chunk_frames + 1, spec.actions), np.float32)

    def run(self) -> None:
        """Measure branches first: there may be memory for a batch of them but not for as many sessions.

        Partly filled windows, whose attention is masked, come before full ones. So full ones determine the typical time,
        while the high quantile includes both. The first run of each case is a warm-up and is not recorded.
        """
        open_session, window = self._networks.engine.open_session, self._networks.engine.spec.context_frames
        session = open_session()
        branches = [session] * self._size
        self._run([session], self._observe)
        self._repeat(YOUNG, branches, self._branch)
        for _ in range(window):
            self._run([session], self._observe)
        self._repeat(RUNS, branches, self._branch)
        self._repeat(RUNS, branches, self._plan)
        if self._size == 1:
            self._snapshot(session)
        sessions = [session, *(open_session() for _ in range(self._size - 1))]
        for run in range(window if self._size > 1 else 0):  # the first one's window is full already
            self._run(sessions, self._observe, recorded=run > 0)
        self._repeat(RUNS, sessions, self._observe)

    def _repeat(self, runs: int, sessions: Sequence[Session], calls: Callable[[Session, int], Calls]) -> None:
        """Record ``runs`` runs, fewer where they take long, alternating between one and two denoising steps."""
        self._run(sessions, calls)
        start = self._clock()
        for run in range(runs):
            self._run(sessions, calls, steps=1 + run % 2, recorded=True)
            if run + 1 >= FEWEST and self._clock() - start > PATIENCE:
                return

    def _snapshot(self, session: Session) -> None:
        """Record how long saving or loading occupies the service's thread."""
        for run in range(FEWEST + 1):
            time.sleep(PAUSE)
            start = self._clock()
            session.capture()
            self._networks.engine.backend.settle()
            if run:
                self._table.record(self._networks.unit('snapshot').network, 1, self._clock() - start, self._clock(),
                                   calibrating=True)

    def _branch(self, session: Session, steps: int) -> Calls:
        return session.branching(self._actions, steps)

    def _plan(self, session: Session, steps: int) -> Calls:
        yield Boundary('policy')
        yield from session.planning(session.spec.goals[0])

    def _observe(self, session: Session, steps: int) -> Calls[None]:
        yield Boundary('observe')
        yield from session.observing(self._frame, self._actions[0])
        yield from session.planning(session.spec.goals[0])

    def _run(self, sessions: Sequence[Session], calls: Callable[[Session, int], Calls], steps: int = 1,
             recorded: bool = False) -> None:
        """Run the calls of all sessions to their end. As in service, their first unit includes their setup."""
        backend = self._networks.engine.backend
        time.sleep(PAUSE)
        start = self._clock()
        works = [Work(calls(session, steps)) for session in sessions]
        while works[0].boundary:
            part = works[0].boundary.unit
            for error in run_unit(works, backend):
                if error:
                    raise error
            backend.settle()
            now = self._clock()
            if recorded:
                self._table.record(self._networks.unit(part).network, self._size, now - start, now, calibrating=True)
            start = now
