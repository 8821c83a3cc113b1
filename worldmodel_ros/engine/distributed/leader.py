"""Rank 0's back end: it decides what all processes run."""
from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from worldmodel_ros.cache.layout import TileLayout
from worldmodel_ros.engine.backends.cuda_graphs import Column, Eager, Function, Graphs
from worldmodel_ros.engine.backends.networks import Source
from worldmodel_ros.engine.backends.protocol import Fetched
from worldmodel_ros.engine.device_failure import RankFailure
from worldmodel_ros.kernels.pages import Precision
from worldmodel_ros.model.parallel.link import START_UP, Link
from .backend import DividedBackend, check, use_device
from .orders import READY, Build, OpenStorage, Pass
from .passes import PASSES
from .processes import Processes
from .storage import LedPages
from .supervisor import LOOK_S, OVER, Event, Started, Supervisor

TAKING_IN = ('encode', 'commit')  # networks that run on a frame also while processes are missing
PATIENCE_OF_CPU = 10.0  # s; CPUs are for tests only
WARM_UP_S = 600.0  # timeout of a pass while the model starts up: with a cold cache each process compiles
GOING_ON_S = 1.0  # by when a device whose messages were aborted usually goes on
BEGINNING_S = 5.0  # a pass that takes longer to start is being compiled or captured, and holds no graph of another one
SLOTS = 256  # of completion numbers; more than passes are ever queued
NO_FEATURES = (None,)  # result of a commit while processes are missing


class LeadingBackend(DividedBackend):
    """A ``TorchBackend`` whose passes over tiles run on ``count`` processes, of which this is rank 0.

    From a process's failure until all have been replaced, commits return NO_FEATURES, and anything that looks ahead
    raises RankFailure. The pages of the old processes are then lost; ``epoch`` counts how often that happened.
    """

    storage_type = LedPages

    def __init__(self, source: Source, kind: str, count: int, patience: float | None = None,
                 warm_up: float = WARM_UP_S):
        """``kind``: how the model is divided, one of ``backends.PARALLEL_KINDS``; ``patience``: timeout (s) of a pass that is
        not the first of its shapes, by default a tick's period on GPUs; ``warm_up``: timeout (s) of any pass while it
        starts up. Raises ModelError, and ValueError for what cannot be divided."""
        check(source.preset, kind, count)
        if dist.is_initialized():
            raise ValueError('this process works with others already, and can for one model only: close that first')
        self._count = count
        self._patience = patience or (source.preset.step_period if torch.cuda.is_available() else PATIENCE_OF_CPU)
        self._warm_up, self._starting = warm_up, 0  # _starting: number of open ``starting_up`` contexts
        self._opened: list[OpenStorage] = []
        self._known: set[Pass] = set()  # compiled and captured ones
        self._beginning = threading.Lock()  # held while a pass is started
        self._newest: Event = OVER  # completion of the last pass
        self._source, self._kind, self._place = source, kind, use_device(0)
        store, processes = self._start()  # they read the model at the same time
        try:
            super().__init__(source, kind, 0, count)
            self._completions = Completions(self.device)
            self._alone, self._launch = self._launch, self._launched
            self._together = self._new_launcher()
            self.join(self._meet(store, processes))
        except BaseException:
            processes.stop()
            Link.leave().result()
            raise
        self._supervisor = Supervisor(processes, self._assemble, self._dissolve)
        self.name = f'{self.name}-{kind}-{count}'
        atexit.register(self.close)  # graphs must be freed before the communicator that they use

    @property
    def epoch(self) -> int:
        """How often the processes have been replaced."""
        return self._supervisor.epoch

    @property
    def processes(self) -> Processes:
        """The other processes, ranks 1 and up; raises RankFailure while they are not complete."""
        return self._supervisor.processes

    @property
    def degraded_reason(self) -> str:
        """What is wrong with the processes; empty while they are complete."""
        return self._supervisor.degraded_reason

    def require_complete(self) -> None:
        """Raise RankFailure while processes are missing."""
        self._supervisor.require()

    @contextmanager
    def starting_up(self) -> Iterator[None]:
        """Relax the timeout of passes started in this context: another process may be compiling what this one has
        compiled already, also in a pass that is not the first of its shapes."""
        self._starting += 1
        try:
            yield
        finally:
            self._starting -= 1

    def close(self) -> None:
        """End the other processes, which would also end with this one."""
        atexit.unregister(self.close)
        self._supervisor.close()

    def run(self, network: str, batch: Sequence[tuple]) -> list:
        outputs = super().run(network, batch)
        if network not in TAKING_IN:
            self.require_complete()  # else the device's result is invalid
        return outputs

    def fetch(self, array: Tensor) -> FetchedFromAll:
        return FetchedFromAll(super().fetch(array), self)

    def _commit(self, columns: list[tuple]) -> list:
        try:
            return super()._commit(columns)
        except RankFailure:
            return [NO_FEATURES] * len(columns[0])

    def _storage(self, layout: TileLayout, pages: int, precision: Precision) -> LedPages:
        order = OpenStorage(len(self._opened), layout, pages, precision)
        self._supervisor.tell(order)
        self._opened.append(order)
        storage = super()._storage(layout, pages, precision)
        storage.number, storage.supervisor = order.number, self._supervisor
        return storage

    def _launched(self, key: Hashable, function: Function, columns: Sequence[Column]) -> tuple[Tensor, ...]:
        """Stand in for a launcher: run the passes over tiles on all processes, and everything else here."""
        if not (isinstance(key, tuple) and key[0] in PASSES):
            return self._alone(key, function, columns)
        network, storages = key
        order = Pass(network, tuple(storage.number for storage in storages),
                     tuple((tuple(column[0].shape), _dtype(column[0])) for column in columns))
        with self._beginning:
            epoch, started, first = self.epoch, Started(), order not in self._known
            self._supervisor.tell(order)
            self._supervisor.expect(epoch, started, self._allowed(first))
            try:
                outputs = self._together(key, partial(self.passes.run, network, storages), columns)
                self._newest = started.event = self._completions.note() if self.device.type == 'cuda' else OVER
            except Exception as error:
                raise self._supervisor.failed(epoch, error) from error
            self._known.add(order)
        return outputs

    def _allowed(self, first: bool) -> float:
        """Return how long a pass may take [s]."""
        if self._starting:
            return self._warm_up
        return START_UP.total_seconds() if first else self._patience

    def _start(self) -> tuple[dist.TCPStore, Processes]:
        store = Link.listen(self._count)
        return store, Processes([Build(self._source, self._kind, rank, self._count, store.port)
                                 for rank in range(1, self._count)])

    def _meet(self, store: dist.TCPStore, processes: Processes) -> Link:
        processes.expect(READY, START_UP.total_seconds())
        return Link.join(self._place, 0, self._count, store)

    def _assemble(self) -> Processes:
        store, processes = self._start()
        try:
            self.group.link = self._meet(store, processes)
            for order in self._opened:
                processes.tell(order)
        except BaseException:
            processes.stop()
            Link.leave().result()
            raise
        self._together = self._new_launcher()
        return processes

    def _new_launcher(self) -> Eager | Graphs:
        return Graphs(self.device) if self.device.type == 'cuda' else Eager(self.device)

    def _dissolve(self) -> None:
        # The device may be in a graph whose collective waits for a dead peer. It continues once the collectives are aborted;
        # aborting ends only when no graph holds one any more; and a graph may be freed only when it has finished. Until then
        # nothing here may block on the device, so it is polled.
        left = Link.leave()
        alone = self._beginning.acquire(timeout=BEGINNING_S)
        begun = time.monotonic()
        while not self._newest.query():
            time.sleep(LOOK_S)
            if time.monotonic() > begun + GOING_ON_S:
                torch.cuda.current_stream(self.device).query()  # raises if the device has failed, and will never get there
        self._together.reset()
        self._known.clear()
        self.passes.forget()
        if alone:
            self._beginning.release()
        left.result()
        if self.device.type == 'cuda':
            torch.cuda.synchronize(self.device)


class Completions:
    """Completion events in pinned host memory: ``torch.cuda.Event.query`` holds the GIL, and waits for a thread that has the
    driver's lock while it waits for the GPU. A device that has failed never completes."""

    def __init__(self, device: torch.device):
        self._device, self._number = device, 0
        self._slots = torch.zeros(SLOTS, dtype=torch.int64, pin_memory=device.type == 'cuda')
        self._seen = self._slots.numpy()  # the same memory

    def note(self) -> PassEvent:
        """Queue a host write after all earlier work of this stream; return its completion event."""
        self._number += 1
        slot = self._number % SLOTS
        number = torch.full((1,), self._number, dtype=torch.int64, device=self._device)
        self._slots[slot:slot + 1].copy_(number, non_blocking=True)
        return PassEvent(self._seen, slot, self._number)


class PassEvent(NamedTuple):
    """An ``Event``: a pass has written its number, or a later one has written its own, to its slot."""

    slots: np.ndarray
    slot: int
    number: int

    def query(self) -> bool:
        return int(self.slots[self.slot]) >= self.number


class FetchedFromAll:
    """A ``Fetched`` that is valid only if no process has failed meanwhile."""

    def __init__(self, fetched: Fetched, backend: LeadingBackend):
        self._fetched, self._backend = fetched, backend

    def result(self) -> np.ndarray:
        result = self._fetched.result()
        self._backend.require_complete()
        return result


def _dtype(array: np.ndarray | Tensor) -> torch.dtype:
    return array.dtype if isinstance(array, Tensor) else _torch_type(array.dtype)


@lru_cache
def _torch_type(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
