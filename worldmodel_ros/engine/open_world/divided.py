"""An open world model on several GPUs: rank 0 has the sessions, and the other processes mirror them.

The inputs of a session are small (an image, poses), and all that follows is deterministic, noise included. So each process has
the whole session, but only its share of the network and of the pages, and decodes only its rows of the images.
"""
from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ...cache.pool import OutOfPages
from ...exit_codes import DEVICE_LOST
from ...model.checkpoint_description import ModelError
from ...model.parallel.group import SequenceParallel, TensorParallel
from ...model.parallel.link import Link
from ..backends import PARALLEL_KINDS
from ..device_failure import RankFailure
from ..distributed.backend import use_device
from ..distributed.orders import READY
from ..distributed.processes import Processes
from ..session_folder import SessionFileError
from .description import WorldDescription
from .session import WorldSession
from .world import OpenWorld, Share

_log = logging.getLogger(__name__)
_LOADING_S = 900.0  # timeout for all to read their share of the weights
_LOOK_S = 0.5
_REFUSALS = ValueError, OutOfPages, SessionFileError  # which are those of all processes


@dataclass(frozen=True)
class BuildWorld:
    """The first order for a process of a divided world."""

    description: WorldDescription
    backend: str
    threads: int
    sessions: int
    kind: str
    rank: int
    count: int
    port: int

    def follow(self, pipe: Connection) -> WorldFollower:
        """Load this process's share of the world, and report READY."""
        follower = WorldFollower(self)
        pipe.send(READY)
        return follower

    def share(self, link: Link) -> Share:
        """Return this process's share of the network."""
        return Share(TensorParallel(link) if self.kind == 'tensor' else SequenceParallel(link, self.kind == 'sequence-fp8'),
                     self.kind)


class WorldFollower:
    """Repeats in its own sessions what rank 0 does in its sessions."""

    def __init__(self, order: BuildWorld):
        link = Link.join(use_device(order.rank), order.rank, order.count, Link.connect(order.port, order.count))
        # Only rank 0 has the smaller model.
        description = replace(order.description, smaller=None)
        self._world = OpenWorld(description, order.backend, order.threads, order.sessions, share=order.share(link))
        self._sessions: dict[int, WorldSession] = {}

    def do(self, order: tuple[str, int, Sequence[Any]]) -> None:
        """Carry out an order of ``LeadingWorld.tell``. An order that fails here has failed on rank 0, too."""
        name, number, arguments = order
        try:
            if name == 'open':
                self._sessions[number] = WorldSession(self._world, *arguments)
            elif name == 'load':
                self._sessions[number] = WorldSession.load(self._world, *arguments)
            elif name == 'fork':
                self._sessions[arguments[0]] = self._sessions[number].fork()
            elif name == 'close':
                if session := self._sessions.pop(number, None):  # else it could not be opened
                    session.close()
            else:
                getattr(self._sessions[number], name)(*arguments)
        except _REFUSALS as error:
            _log.info('refused: %s', error)


class LeadingWorld(OpenWorld):
    """Rank 0's world. When another process fails, or this one alone, it ends with DEVICE_LOST, to be restarted: the other's
    pages are lost, and a device may wait for its messages forever."""

    def __init__(self, description: WorldDescription, backend: str = 'auto', threads: int = 1, sessions: int = 1,
                 gpus: int = 2, kind: str = PARALLEL_KINDS[0]):
        """Start the other processes and load the world. ``kind``: how the network is divided, one of
        ``backends.PARALLEL_KINDS``. Raises ModelError."""
        if kind not in PARALLEL_KINDS:
            raise ModelError(f'a model is not divided by {kind!r}; known: {", ".join(PARALLEL_KINDS)}')
        check(description, gpus, kind)
        if dist.is_initialized():
            raise ModelError('this process works with others already, and can for one model only: close that first')
        if torch.cuda.is_available() and torch.cuda.device_count() < gpus:
            raise ModelError(f'gpus is {gpus}, and this machine has {torch.cuda.device_count()}: choose fewer')
        store, device = Link.listen(gpus), use_device(0)
        orders = [BuildWorld(description, backend, threads, sessions, kind, rank, gpus, store.port) for rank in range(gpus)]
        self._processes, self._closed = Processes(orders[1:]), False
        try:
            link = Link.join(device, 0, gpus, store)
            super().__init__(description, backend, threads, sessions, share=orders[0].share(link))
            self._processes.expect(READY, _LOADING_S)
        except BaseException as error:
            self._processes.stop()
            Link.leave().result()
            if isinstance(error, RankFailure):
                raise ModelError(str(error)) from error
            raise
        threading.Thread(target=self._watch, name='ranks', daemon=True).start()
        atexit.register(self.close)

    def tell(self, name: str, number: int, *arguments: Any) -> None:
        """Order the other processes to do what this one is about to do with a session. Raises RankFailure."""
        if self._closed:
            raise RankFailure('the processes of the model have been ended')
        try:
            self._processes.tell((name, number, arguments))
        except OSError as error:  # ``_watch`` ends this process
            raise RankFailure(f'a process of the model is gone: {error}') from error

    @contextmanager
    def jointly(self) -> Iterator[None]:
        """End this process where it fails alone, as when it is out of memory: the others would wait in that chunk for its
        messages, and take those of the next chunk for them."""
        try:
            yield
        except (*_REFUSALS, RankFailure):
            raise
        except Exception as error:
            if self._closed:
                raise
            self._end(f'rank 0 of the model failed: {type(error).__name__}: {error}', error)

    def close(self) -> None:
        """End the other processes."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self.close)
            self._samplers.clear()  # graphs hold collectives, which must be freed before their communicator
            self._processes.stop()
            Link.leave().result()

    @property
    def pids(self) -> list[int]:
        """Process ids of the other processes."""
        return self._processes.pids

    def _watch(self) -> None:
        while not self._closed:
            try:
                self._processes.check(_LOOK_S)
            except (RankFailure, OSError) as error:
                if not self._closed:
                    self._end(str(error))

    @staticmethod
    def _end(reason: str, error: Exception | None = None) -> NoReturn:
        _log.critical('%s: this process ends, too, with exit code %d, to be started again', reason, DEVICE_LOST, exc_info=error)
        logging.shutdown()
        os._exit(DEVICE_LOST)


def check(description: WorldDescription, count: int, kind: str) -> None:
    """Raise ModelError for a world that cannot be divided among ``count`` processes."""
    config = description.network()
    if description.two_networks:
        raise ModelError(f'{description.name} has two networks, which are placed by devices in world.json: set gpus to 1')
    if count < 2 or config.heads % count or (kind == 'tensor' and config.ffn % count):
        raise ModelError(f'{description.name}: {config.heads} heads and {config.ffn} hidden units cannot be divided among '
                         f'{count} processes')
