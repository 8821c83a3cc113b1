"""A process of a model other than rank 0: carries out rank 0's orders, and ends when rank 0 is gone.

The first order makes the follower: ``Build``, or an order with a ``follow`` method. Rank 0 starts it (see ``processes``):
``python -m worldmodel_ros.engine.distributed.worker PIPE LIFELINE``, file descriptors.
"""
from __future__ import annotations

import fcntl
import gc
import logging
import os
import select
import signal
import sys
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from worldmodel_ros import realtime
from worldmodel_ros.engine.backends.cuda_graphs import Column, Eager, Graphs
from worldmodel_ros.engine.backends.pinned_inputs import Inputs
from worldmodel_ros.model.parallel.link import Link
from worldmodel_ros.model.parallel.pages import HeadsOfPages
from .backend import DividedBackend, use_device
from .orders import READY, Build, ChangePages, OpenStorage, Pass, StorageNumber

_log = logging.getLogger(__name__)


class Received(Inputs):
    """Inputs that rank 0's message fills at the start of every pass."""

    def fill(self, columns: Sequence[Column]) -> None:
        pass


class ReceivingGraphs(Graphs):
    """CUDA graphs of passes that rank 0 has started."""

    inputs_type = Received


class Follower:
    """Repeats on its share of the model what rank 0 does on its own."""

    def __init__(self, order: Build, pipe: Connection):
        device = use_device(order.rank)
        self._backend = DividedBackend(order.source, order.kind, order.rank, order.count)
        self._storages: dict[int, HeadsOfPages] = {}
        self._launch = ReceivingGraphs(device) if device.type == 'cuda' else Eager(device)
        self._stand_ins: dict[Pass, list[Column]] = {}  # inputs of the right shapes and types
        pipe.send(READY)
        self._backend.join(Link.join(device, order.rank, order.count, Link.connect(order.port, order.count)))

    @torch.inference_mode()
    def do(self, order: Any) -> None:
        """Carry out an order."""
        if isinstance(order, Pass):
            if order not in self._stand_ins:
                self._stand_ins[order] = [[torch.zeros(shape, dtype=dtype, device=self._backend.device)]
                                          for shape, dtype in order.tensors]
                _schedule_as_rank_0()
            storages = tuple(self._storages[number] for number in order.storages)
            self._launch((order.network, storages), partial(self._backend.passes.run, order.network, storages),
                         self._stand_ins[order])
        elif isinstance(order, ChangePages):
            arguments = [self._storages[each.number] if isinstance(each, StorageNumber) else each
                         for each in order.arguments]
            getattr(self._storages[order.number], order.method)(*arguments)
        elif isinstance(order, OpenStorage):
            self._storages[order.number] = self._backend._storage(order.layout, order.pages, order.precision)
        else:
            raise TypeError(f'unknown order: {order!r}')


def main(pipe: Connection, lifeline: int) -> None:
    """Follow until rank 0 is gone."""
    _end_with(lifeline)
    gc.freeze()  # else garbage collection walks all that was imported and delays this rank, for which all others wait
    try:
        order = pipe.recv()
        follower = Follower(order, pipe) if isinstance(order, Build) else order.follow(pipe)
        while True:
            follower.do(pipe.recv())
    except EOFError:
        return
    except Exception as error:
        pipe.send(f'{type(error).__name__}: {error}')
        raise


def _schedule_as_rank_0() -> None:
    # All wait for the slowest rank: a real-time rank 0 is no faster than the others.
    priority = realtime.priority_of(os.getppid())
    if priority != realtime.priority_of(0):
        realtime.apply(_log, priority)


def _end_with(lifeline: int) -> None:
    # By the kernel, as this process may hang in a collective without its peer, or be stopped.
    own = os.open(f'/proc/self/fd/{lifeline}', os.O_RDONLY)  # reopened: the owner to signal is per open file; ranks share one
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, os.O_ASYNC)
    if select.select([own], [], [], 0.0)[0]:
        os._exit(0)  # rank 0 was gone already


if __name__ == '__main__':
    main(Connection(int(sys.argv[1])), int(sys.argv[2]))
