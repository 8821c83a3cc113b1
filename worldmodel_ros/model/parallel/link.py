"""Communication between processes: over torch.distributed, by NCCL between GPUs and gloo between CPUs. Large messages GPUs
write into each other's memory, where they can (``peer_memory``)."""
from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
# Before there is a group: defaults of its functions would keep the group, and with it threads that abort an ending process.
import torch.distributed.nn
from torch import Tensor

from .peer_memory import PeerMemory, open_peer_memory

# Renamed in PyTorch 2.13.
_all_gather = getattr(dist, 'all_gather_single', None) or dist.all_gather_into_tensor

START_UP = timedelta(seconds=120)  # for all to reach the same message, including loading and compiling
BACKGROUND_BLOCKS = 4  # of an NCCL kernel for background messages, each of which occupies a multiprocessor while it waits

_peers: PeerMemory | None = None  # of the default group


class Exchange(Protocol):
    """Messages from each process to each other one. ``whole`` uint8 (joined, R, n / joined): [:, r] came from process r, except
    the own part, which is the caller's to fill. It is valid from ``wait`` until the link's next ``exchange`` or ``all_to_all``.
    """

    whole: Tensor

    def swap(self, sent: Tensor, to: int, source: int) -> None:
        """Begin to send uint8 (n,) to one process and to receive from another. Leave ``sent`` alone until ``wait``."""

    def wait(self) -> None:
        """Wait for all swaps; on a GPU, the current stream does."""


@dataclass(frozen=True)
class Link:
    """This process, number ``rank`` of ``count``, and the messages between all of them.

    All processes must call every method, in the same order and with the same shapes. Between GPUs it only queues the work, and
    can be captured in a CUDA graph; a dead peer is then waited for without end. Between CPUs it raises RuntimeError if a peer
    has died.
    """

    device: torch.device
    rank: int
    count: int
    _messages: dist.ProcessGroup | None = None  # None: the default group, of ``join``
    _peers: PeerMemory | None = None

    @staticmethod
    def listen(count: int) -> dist.TCPStore:
        """Return the store where ``count`` processes of this machine meet, in rank 0; its ``port`` is a free one."""
        return dist.TCPStore('127.0.0.1', 0, count, True, START_UP, wait_for_workers=False)

    @staticmethod
    def connect(port: int, count: int) -> dist.TCPStore:
        """Return the same store in the other processes."""
        return dist.TCPStore('127.0.0.1', port, count, False, START_UP)

    @classmethod
    def join(cls, device: torch.device, rank: int, count: int, store: dist.TCPStore) -> Link:
        """Wait until all have joined."""
        global _peers
        if device.type == 'cuda':
            # Failures are handled here: PyTorch would end the process, and rank 0 drives the robot.
            os.environ['TORCH_NCCL_ASYNC_ERROR_HANDLING'] = '0'
            os.environ['TORCH_NCCL_ENABLE_MONITORING'] = '0'
            dist.init_process_group('nccl', store=store, rank=rank, world_size=count, timeout=START_UP, device_id=device,
                                    pg_options=_options(high_priority=True))
            _peers = open_peer_memory(device, rank, count, store)
        else:
            dist.init_process_group('gloo', store=store, rank=rank, world_size=count, timeout=START_UP)
        return cls(device, rank, count, _peers=_peers)

    def background(self) -> Link:
        """Return a link of the same processes whose messages are not ordered with this one's: for a low-priority CUDA
        stream, while this link's stream goes on. All processes must call this, and queue messages of both links in the same
        order."""
        options = None
        if self.device.type == 'cuda':
            options = _options(high_priority=False)
            options.config.max_ctas = BACKGROUND_BLOCKS
        return replace(self, _messages=dist.new_group(timeout=START_UP, pg_options=options), _peers=None)

    @staticmethod
    def leave() -> Future[None]:
        """Abort communication, so that a device waiting for a message goes on; the future completes when all has been left.

        The other processes must have ended, or be leaving, too, and graphs that hold messages must be gone
        (NCCL, commDestroySync and ncclProxyService).
        """
        global _peers
        left: Future[None] = Future()
        peers, _peers = _peers, None
        if peers is not None:
            peers.abandon()

        def leave() -> None:
            try:
                if dist.is_initialized():
                    dist.distributed_c10d._abort_process_group()  # an orderly shutdown would wait for the others' messages
                if peers is not None:
                    peers.close()
                left.set_result(None)
            except Exception as error:
                left.set_exception(error)
        threading.Thread(target=leave, name='leaving', daemon=True).start()
        return left

    def exchange(self, size: int, joined: int = 1) -> Exchange:
        """Begin an exchange of ``size`` bytes from each process to each other one, in ``joined`` rows."""
        exchange = self._peers and self._peers.exchange(size, joined)
        return exchange or _Messages(self, torch.empty(self.count, size, dtype=torch.uint8, device=self.device), joined)

    def all_to_all(self, rows: Tensor, joined: int = 1) -> Tensor:
        """Send row r of uint8 (R, n) to process r. Return what came from all, (joined, R, n / joined): from process r, the
        ``joined`` parts of its row. The result is valid until the next call, or the next ``exchange``."""
        exchange = self._peers and self._peers.exchange(rows.shape[1], joined=joined)
        if not exchange:
            received = torch.empty_like(rows)
            dist.all_to_all_single(received, rows, group=self._messages)
            return received.view(self.count, joined, -1).transpose(0, 1)
        for to, source in self.turns():
            exchange.swap(rows[to], to, source)
        exchange.whole[:, self.rank] = rows[self.rank].view(joined, -1)
        exchange.wait()
        return exchange.whole

    def turns(self) -> list[tuple[int, int]]:
        """Return to which process to send, and from which one to receive, in an order in which all processes are busy."""
        return [((self.rank + step) % self.count, (self.rank - step) % self.count) for step in range(1, self.count)]

    def all_gather(self, x: Tensor) -> Tensor:
        """Return x (...) of every process, (R, ...)."""
        x = x.contiguous()
        whole = x.new_empty(self.count, *x.shape)
        # As bytes, since gloo knows few types.
        _all_gather(whole.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8), group=self._messages)
        return whole

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x over all processes, bit-identical in each of them. It overwrites x if that is contiguous."""
        x = x.contiguous()
        dist.all_reduce(x, group=self._messages)
        return x

    def sum_later(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin ``sum``; return what waits for it, on a GPU the current stream, and returns it."""
        x = x.contiguous()
        work = dist.all_reduce(x, group=self._messages, async_op=True)

        def result() -> Tensor:
            work.wait()
            return x
        return result

    def broadcast(self, row: Tensor) -> None:
        """Overwrite ``row`` with that of rank 0."""
        dist.broadcast(row, 0, group=self._messages)


class _Messages:
    """An ``Exchange`` over torch.distributed."""

    def __init__(self, link: Link, rows: Tensor, joined: int):
        self._link, self._rows, self._waits = link, rows, []
        self.whole = rows.view(link.count, joined, -1).transpose(0, 1)

    def swap(self, sent: Tensor, to: int, source: int) -> None:
        sizes = torch.zeros(2, self._link.count, dtype=torch.int64)
        sizes[0, source] = sizes[1, to] = len(sent)
        work = dist.all_to_all_single(self._rows[source], sent, *sizes.tolist(), group=self._link._messages, async_op=True)
        self._waits.append((work, sent))

    def wait(self) -> None:
        for work, _ in self._waits:
            work.wait()


def _options(high_priority: bool) -> dist.ProcessGroupNCCL.Options:
    """``high_priority``: messages precede the GPU's background work."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high_priority)
    options._timeout = START_UP  # else PyTorch warns that it takes the group's
    return options
