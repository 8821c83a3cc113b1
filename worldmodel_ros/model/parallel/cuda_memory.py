"""``peer_memory.Memory`` of GPUs: CUDA IPC, copy engines, and kernels of one warp that set flags and wait for them."""
from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from cuda.bindings import runtime
from torch import Tensor

from ...kernels.cuda_calls import DeviceMemory, done
from .flags_triton import await_flags, set_flags

MESSAGES = -2  # stream priority, before that of products; lower numbers go first


class CudaMemory:
    """Memory of this process's GPU; also of the others' once ``map`` was called. Raises RuntimeError for what CUDA refuses."""

    def __init__(self, device: torch.device, size: int, rank: int, count: int):
        for peer in range(count):
            if peer != rank and not torch.cuda.can_device_access_peer(device, peer):
                raise RuntimeError(f'GPU {rank} cannot reach the memory of GPU {peer}')
        self._device, self._rank, self._count = device, rank, count
        self._address, self._mapped = done(runtime.cudaMalloc(size)), [0] * count
        self.own = torch.as_tensor(DeviceMemory(self._address, size, '|u1'), device=device).zero_()
        self._words, self._stop = self.own.view(torch.int32), torch.zeros(1, dtype=torch.int32, pin_memory=True)
        # A flag's kernel is one warp, and should not wait until a product leaves a multiprocessor.
        self._streams = {peer: torch.cuda.Stream(device, priority=MESSAGES) for peer in range(count) if peer != rank}
        self._within: Any = None  # the context of one of them, while it is the current one
        torch.cuda.synchronize(device)

    @property
    def handle(self) -> bytes:
        """What other processes map this memory by."""
        return bytes(done(runtime.cudaIpcGetMemHandle(self._address)).reserved)

    def map(self, handles: Sequence[bytes]) -> None:
        """Map the memory of the other processes; ``handles`` of all, by rank."""
        for peer, data in enumerate(handles):
            if peer != self._rank:
                handle = runtime.cudaIpcMemHandle_t()
                handle.reserved = data
                self._mapped[peer] = done(runtime.cudaIpcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess))
        self._bases = torch.tensor(self._mapped, device=self._device)

    def mark(self, kind: int, peer: int | None = None) -> None:
        flag = kind * self._count + self._rank
        if peer is None:
            set_flags[(self._count,)](self._bases, flag, 0, self._rank, num_warps=1)
        else:
            set_flags[(1,)](self._bases, flag, peer, self._rank, num_warps=1)

    def await_flag(self, kind: int, peer: int | None = None) -> None:
        first = kind * self._count
        if peer is None:
            await_flags[(self._count,)](self._words, self._stop, first, first + self._rank, num_warps=1)
        else:
            await_flags[(1,)](self._words, self._stop, first + peer, -1, num_warps=1)

    def write(self, peer: int, offset: int, data: Tensor, pitch: int) -> None:
        to, kind = self._mapped[peer] + offset, runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        stream, (rows, size) = torch.cuda.current_stream(self._device).cuda_stream, data.shape
        if rows == 1:
            done(runtime.cudaMemcpyAsync(to, data.data_ptr(), size, kind, stream))
        else:
            done(runtime.cudaMemcpy2DAsync(to, pitch, data.data_ptr(), size, size, rows, kind, stream))

    def fork(self, peer: int) -> None:
        stream = self._streams[peer]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        self._within = torch.cuda.stream(stream)
        self._within.__enter__()

    def back(self) -> None:
        self._within.__exit__(None, None, None)

    def join(self) -> None:
        for stream in self._streams.values():
            torch.cuda.current_stream(self._device).wait_stream(stream)

    def abandon(self) -> None:
        self._stop.fill_(1)

    def close(self) -> None:
        # The thread that closes begins on another GPU. What was queued outside of a graph may still be reading flags.
        with torch.cuda.device(self._device), suppress(RuntimeError):
            torch.cuda.synchronize(self._device)
        for address in filter(None, self._mapped):
            runtime.cudaIpcCloseMemHandle(address)  # of a process that may be dead
        runtime.cudaFree(self._address)
