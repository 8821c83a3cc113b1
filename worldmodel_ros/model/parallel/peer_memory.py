"""Messages that the GPUs of one machine write into each other's memory by their copy engines, without NCCL.

Each process has a block of its GPU's memory that all others map (CUDA IPC): flags, and room for one part of a message from each
process. A part goes in four steps, all queued on streams, so that CUDA graphs can hold them:

1. The receiver marks its room as free, by a flag in the sender's memory, when all before in its stream is through.
2. The sender waits for that flag, on a stream for messages to this receiver, and copies. A copy engine does this while the
   multiprocessors work.
3. The sender marks the part as sent, by a flag in the receiver's memory.
4. The receiver waits for that flag.

NCCL is as fast by itself (benchmarks/results/exchange_h200x2_peers.json), but its kernels take multiprocessors from the
products behind which messages should hide. A kernel of one warp waits for a flag, and also reads a word in the host's memory:
``abandon`` sets it, and everything that waits for a dead process goes on.
"""
from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

ROOM = 192 << 20  # bytes for the parts of a message; what does not fit is left to NCCL
LEAST = 2 << 20  # bytes of a part; NCCL has sooner sent what is smaller
FLAGS = 4096  # bytes before the room
ALIGNMENT = 16  # bytes; parts begin at multiples, so that they can be viewed as numbers of any type
FREE, SENT = 0, 1  # kinds of flags; a process has one of each kind for each process
SWITCH = 'WORLDMODEL_PEER_MEMORY'  # environment variable; 0: leave all messages to NCCL
OPENING = timedelta(seconds=25)  # for all to do a step of ``open_peer_memory``, which they begin together

_log = logging.getLogger(__name__)


class Memory(Protocol):
    """Memory that processes map into each other. ``own`` uint8 (n,) is this process's."""

    own: Tensor

    def mark(self, kind: int, peer: int | None = None) -> None:
        """Queue: set this process's flag of this kind in the memory of another, or of all others, when all that was queued
        before is through."""

    def await_flag(self, kind: int, peer: int | None = None) -> None:
        """Queue: wait until another process, or all others, have set their flags in own memory, and clear them; go on in any
        case once abandoned."""

    def write(self, peer: int, offset: int, data: Tensor, pitch: int) -> None:
        """Queue: copy uint8 (rows, n) into another process's memory, a row to every ``pitch`` bytes."""

    def fork(self, peer: int) -> None:
        """Queue what follows on a stream for messages to one process, behind what the caller's stream holds now."""

    def back(self) -> None:
        """Queue what follows on the caller's stream again, which does not wait for the other."""

    def join(self) -> None:
        """Queue: wait for the streams of messages to all processes."""

    def abandon(self) -> None:
        """Let everything that waits go on, now and later; from any thread."""

    def close(self) -> None:
        """Give the memory back; nothing that is queued may use it any more."""


class PeerMemory:
    """Exchanges between ``count`` processes, of which this is number ``rank``: all begin the same exchanges in the same order.
    What was received is valid until the next one begins."""

    def __init__(self, memory: Memory, rank: int, count: int):
        self._memory, self._rank, self._count = memory, rank, count
        self.abandon, self._closed, self._lock = memory.abandon, False, threading.Lock()

    def close(self) -> None:
        """Give the memory back; from any thread, once what is queued no longer waits. Who exchanges later gets RuntimeError."""
        with self._lock:
            self._closed = True
            self._memory.close()

    @contextmanager
    def using(self) -> Iterator[Memory]:
        """Have the memory for as long as something is queued. Raises RuntimeError once it is given back."""
        with self._lock:
            if self._closed:
                raise RuntimeError('the GPUs exchange nothing any more: a process of the model was lost')
            yield self._memory

    def exchange(self, size: int, joined: int = 1) -> PeerExchange | None:
        """Begin an exchange of parts of ``size`` bytes; None for a size that is left to NCCL, in all processes alike.
        ``joined``: the number of rows of each part, which come to lie next to those of the other processes."""
        if size < LEAST or size % (ALIGNMENT * joined) or size * self._count > len(self._memory.own) - FLAGS:
            return None
        with self.using() as memory:
            memory.mark(FREE)
            whole = memory.own[FLAGS:FLAGS + self._count * size].view(joined, self._count, -1)
        return PeerExchange(self, self._rank, whole)


class PeerExchange:
    """See ``link.Exchange``."""

    def __init__(self, owner: PeerMemory, rank: int, whole: Tensor):
        self._owner, self._at, self.whole = owner, FLAGS + rank * whole.shape[2], whole

    def swap(self, sent: Tensor, to: int, source: int) -> None:
        with self._owner.using() as memory:
            memory.fork(to)
            try:
                memory.await_flag(FREE, to)
                memory.write(to, self._at, sent.view(len(self.whole), -1), self.whole.shape[1] * self.whole.shape[2])
                memory.mark(SENT, to)
            finally:
                memory.back()

    def wait(self) -> None:
        with self._owner.using() as memory:
            memory.join()  # first: where streams do not run at the same time, all would wait for parts that none sends
            memory.await_flag(SENT)


def open_peer_memory(device: torch.device, rank: int, count: int, store: dist.Store) -> PeerMemory | None:
    """Return this process's part in the memory of all processes that meet in a store, which all call this; None in all of
    them if one GPU cannot reach another's memory, cuda-bindings is not installed, or $WORLDMODEL_PEER_MEMORY is 0. Raises
    RuntimeError if one does not answer."""
    memory, handle, reason = None, b'', f'${SWITCH} is 0' if os.environ.get(SWITCH) == '0' else ''
    try:
        try:
            if not reason:
                from .cuda_memory import CudaMemory
                memory = CudaMemory(device, FLAGS + ROOM, rank, count)
                handle = memory.handle
        except (ImportError, RuntimeError) as error:
            reason = f'{type(error).__name__}: {error}'
        handles = _of_all(store, 'handle', handle, rank, count)
        if all(handles):
            try:
                memory.map(handles)
            except RuntimeError as error:
                reason = str(error)
        if all(_of_all(store, 'mapped', b'' if reason or not all(handles) else b'yes', rank, count)):
            found, memory = PeerMemory(memory, rank, count), None
            return found
        _log.info('the GPUs exchange messages by NCCL, not by their copy engines: %s', reason or 'another process cannot')
        return None
    finally:
        if memory is not None:
            memory.close()


def _of_all(store: dist.Store, name: str, value: bytes, rank: int, count: int) -> list[bytes]:
    """Return the values of all processes. Not a message of NCCL's: a process would wait without end for one that has died."""
    keys = [f'peer memory: {name} {each}' for each in range(count)]
    store.set(keys[rank], value)
    store.wait(keys, OPENING)
    return [store.get(key) for key in keys]
