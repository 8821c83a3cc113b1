"""Communication between processes over torch.distributed: NCCL between GPUs, gloo between CPUs."""
from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
# Before there is a group: defaults of its functions would keep the group, and with it threads that abort an ending process.
import torch.distributed.nn
from torch import Tensor

# Renamed in PyTorch 2.13.
_all_gather = getattr(dist, 'all_gather_single', None) or dist.all_gather_into_tensor

START_UP = timedelta(seconds=120)  # for all to reach the same message, including loading and compiling
BACKGROUND_BLOCKS = 4  # of an NCCL kernel for background messages, each of which occupies a multiprocessor while it waits


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
        if device.type == 'cuda':
            # Failures are handled here: PyTorch would end the process, and rank 0 drives the robot.
            os.environ['TORCH_NCCL_ASYNC_ERROR_HANDLING'] = '0'
            os.environ['TORCH_NCCL_ENABLE_MONITORING'] = '0'
            dist.init_process_group('nccl', store=store, rank=rank, world_size=count, timeout=START_UP, device_id=device,
                                    pg_options=_options(high_priority=True))
        else:
            dist.init_process_group('gloo', store=store, rank=rank, world_size=count, timeout=START_UP)
        return cls(device, rank, count)

    def background(self) -> Link:
        """Return a link of the same processes whose messages are not ordered with this one's: for a low-priority CUDA
        stream, while this link's stream goes on. All processes must call this, and queue messages of both links in the same
        order."""
        options = None
        if self.device.type == 'cuda':
            options = _options(high_priority=False)
            options.config.max_ctas = BACKGROUND_BLOCKS
        return replace(self, _messages=dist.new_group(timeout=START_UP, pg_options=options))

    @staticmethod
    def leave() -> Future[None]:
        """Abort communication, so that a device waiting for a message goes on; the future completes when all has been left.

        The other processes must have ended, or be leaving, too, and graphs that hold messages must be gone
        (NCCL, commDestroySync and ncclProxyService).
        """
        left: Future[None] = Future()

        def leave() -> None:
            try:
                if dist.is_initialized():
                    dist.distributed_c10d._abort_process_group()  # an orderly shutdown would wait for the others' messages
                left.set_result(None)
            except Exception as error:
                left.set_exception(error)
        threading.Thread(target=leave, name='leaving', daemon=True).start()
        return left

    def all_to_all(self, rows: Tensor) -> Tensor:
        """Send row r of (R, n) to process r; row r of the result came from process r."""
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=self._messages)
        return received

    def swap(self, sent: Tensor, to: int, received: Tensor, source: int) -> Callable[[], object]:
        """Begin to send to one process and to receive from another, both uint8 (n,). Leave the tensors alone until the
        returned function has been called, which on a GPU makes the current stream wait."""
        sizes = torch.zeros(2, self.count, dtype=torch.int64)
        sizes[0, source], sizes[1, to] = len(received), len(sent)
        return dist.all_to_all_single(received, sent, *sizes.tolist(), group=self._messages, async_op=True).wait

    def all_gather(self, x: Tensor) -> Tensor:
        """Return x (...) of every process, (R, ...)."""
        x = x.contiguous()
        whole = x.new_empty(self.count, *x.shape)
        # As bytes, since gloo knows few types.
        _all_gather(whole.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8), group=self._messages)
        return whole

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x over all processes, bit-identical in each of them."""
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=self._messages)
        return x

    def broadcast(self, row: Tensor) -> None:
        """Overwrite ``row`` with that of rank 0."""
        dist.broadcast(row, 0, group=self._messages)


def _options(high_priority: bool) -> dist.ProcessGroupNCCL.Options:
    """``high_priority``: messages precede the GPU's background work."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high_priority)
    options._timeout = START_UP  # else PyTorch warns that it takes the group's
    return options
