"""Asynchronous copies between host and GPU: the inputs of a captured graph, and its outputs."""
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 256  # bytes, the granularity of device memory
STAGES = 2  # the two denoising steps of a tick are the same graph: the second is staged while the first is queued


class Inputs:
    """``tensors``, each (rows, ...), in one block of device memory.

    A call has a dozen small arrays (noise levels, rotations, page numbers). They are written to a block of pinned host
    memory in the same order, from which adjacent ones are transferred in one copy. STAGES such blocks are used in turn, so
    that the host need not wait for the previous call's copy.
    """

    def __init__(self, device: torch.device, rows: int, columns: Sequence[Sequence[np.ndarray | Tensor]]):
        """Allocate for batches of up to ``rows`` whose arguments have the shapes and types of ``columns``, one for each."""
        firsts = [column[0] if isinstance(column[0], Tensor) else torch.from_numpy(np.array(column[0]))
                  for column in columns]
        self._device = device
        self._specs = [((rows, *first.shape), first.dtype) for first in firsts]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in self._specs]
        self._begins = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]).tolist()
        self._ends = [begin + size for begin, size in zip(self._begins, sizes)]
        self._block = torch.zeros(self._begins[-1], dtype=torch.uint8, device=device)
        self.tensors = [self._view(self._block, index) for index in range(len(columns))]
        self._stages = [_Stage(self._begins[-1], device.type == 'cuda') for _ in range(STAGES)]
        self._turn = 0

    def fill(self, columns: Sequence[Sequence[np.ndarray | Tensor]]) -> None:
        """Queue the copies of a batch of arguments to the inputs; missing rows repeat the first one."""
        if not columns:
            return
        size = len(columns[0])
        stage = self._stages[self._turn]
        self._turn = (self._turn + 1) % STAGES
        stage.wait()
        runs: list[list[int]] = []  # begin and end of each contiguous range, in bytes
        for index, (column, static) in enumerate(zip(columns, self.tensors, strict=True)):
            if not any(isinstance(part, Tensor) for part in column):
                staged = stage.arrays.get(index)
                if staged is None:
                    staged = stage.arrays[index] = self._view(stage.block, index).numpy()
                if size == 1:  # a robot's own session, for which stacking takes longer than copying
                    staged[:] = column[0]
                else:
                    np.stack(column, out=staged[:size])
                    staged[size:] = staged[:1]
                if runs and runs[-1][1] == self._begins[index]:
                    runs[-1][1] = self._begins[index + 1]
                else:
                    runs.append([self._begins[index], self._begins[index + 1]])
                continue
            if size == 1:
                static[0].copy_(column[0])
            else:
                torch.stack([torch.as_tensor(part, device=self._device) for part in column], out=static[:size])
            if size < len(static):
                static[size:] = static[:1]
        for begin, end in runs:
            self._block[begin:end].copy_(stage.block[begin:end], non_blocking=True)
        stage.copying()

    def _view(self, block: Tensor, index: int) -> Tensor:
        shape, dtype = self._specs[index]
        return block[self._begins[index]:self._ends[index]].view(dtype).view(shape)


class _Stage:
    """A block of host memory from which a GPU copies asynchronously."""

    def __init__(self, nbytes: int, on_gpu: bool):
        self.block = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=on_gpu)
        self.arrays: dict[int, np.ndarray] = {}  # its parts, by argument index
        self._copied = torch.cuda.Event() if on_gpu else None

    def wait(self) -> None:
        """Wait until it may be written to."""
        if self._copied:
            self._copied.synchronize()

    def copying(self) -> None:
        """Note that copies from it have been queued."""
        if self._copied:
            self._copied.record()


class Fetched:
    """An output that is copied to the host once the device has computed it."""

    def __init__(self, output: Tensor):
        on_gpu = output.is_cuda
        self._host = torch.empty(output.shape, dtype=output.dtype, pin_memory=True) if on_gpu else output
        self._arrived = torch.cuda.Event() if on_gpu else None
        if on_gpu:
            self._host.copy_(output, non_blocking=True)
            self._arrived.record()

    def result(self) -> np.ndarray:
        """Wait for the output, but for nothing queued after it."""
        if self._arrived:
            self._arrived.synchronize()
        return self._host.numpy()
