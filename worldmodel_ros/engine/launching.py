"""Runs a function of tensors on a batch that is gathered from many sessions: eagerly, or as a CUDA graph.

A tick is hundreds of small kernels, and starting them one by one takes the host longer than a GPU needs to run them. A
graph starts them all at once; it was captured for one batch size, so a batch is padded to the next of BUCKETS.
"""
from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

BUCKETS = (1, 2, 4, 8, 16, 32)

Column = Sequence[np.ndarray | Tensor]  # one of the function's arguments, for each session: on the host or the device
Function = Callable[..., 'tuple[Tensor, ...]']


class Eager:
    """Stacks and calls."""

    def __init__(self, device: torch.device):
        self._device = device

    def __call__(self, key: Hashable, function: Function, columns: Sequence[Column]) -> tuple[Tensor, ...]:
        """Outputs of ``function``; ``key`` tells it from others, and what it closes over."""
        return function(*(self._stacked(column) for column in columns))

    def _stacked(self, column: Column) -> Tensor:
        if _on_host(column):
            return torch.from_numpy(np.stack(column)).to(self._device)
        return torch.stack(_on(self._device, column))


class Graphs:
    """As Eager, from graphs that are captured when a function first meets a bucket and shapes.

    Rows that pad a batch repeat its first one, so that they do nothing that it does not do. A function may be called
    more than once while it is captured; it must not depend on how often.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._graphs: dict[Hashable, _Graph] = {}
        self._memory = torch.cuda.graph_pool_handle()  # one for all: no two run at once, and results are copied out

    def __call__(self, key: Hashable, function: Function, columns: Sequence[Column]) -> tuple[Tensor, ...]:
        size = len(columns[0])
        bucket = next((bucket for bucket in BUCKETS if bucket >= size), size)
        shapes = tuple(tuple(column[0].shape) for column in columns)
        graph = self._graphs.get((key, bucket, shapes))
        if graph is None:
            graph = _Graph(self._device, bucket, columns)
            graph.fill(columns)
            graph.capture(function, self._memory)
            self._graphs[key, bucket, shapes] = graph
        else:
            graph.fill(columns)
        return graph.replay(size)


class _Graph:
    """One captured function, and the memory that it reads from and writes to."""

    def __init__(self, device: torch.device, bucket: int, columns: Sequence[Column]):
        self._device = device
        firsts = [column[0] if isinstance(column[0], Tensor) else torch.from_numpy(np.array(column[0]))
                  for column in columns]
        self._inputs = [torch.zeros((bucket, *first.shape), dtype=first.dtype, device=device) for first in firsts]
        self._staging: list[Tensor | None] = [None] * len(columns)  # in host memory from which a GPU copies by itself
        self._copied = torch.cuda.Event()

    def fill(self, columns: Sequence[Column]) -> None:
        size = len(columns[0])
        self._copied.synchronize()  # the staging memory may still be read from
        for index, (column, static) in enumerate(zip(columns, self._inputs)):
            if _on_host(column):
                if self._staging[index] is None:
                    self._staging[index] = torch.zeros(static.shape, dtype=static.dtype, pin_memory=True)
                np.stack(column, out=self._staging[index].numpy()[:size])
                static[:size].copy_(self._staging[index][:size], non_blocking=True)
            else:
                torch.stack(_on(self._device, column), out=static[:size])
            if size < len(static):
                static[size:] = static[:1]
        self._copied.record()

    def capture(self, function: Function, memory: tuple) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # libraries choose and allocate at first calls
                function(*self._inputs)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=memory):
            self._outputs = function(*self._inputs)

    def replay(self, size: int) -> tuple[Tensor, ...]:
        self._graph.replay()
        return tuple(output[:size].clone() for output in self._outputs)


def _on_host(column: Column) -> bool:
    return not any(isinstance(part, Tensor) for part in column)


def _on(device: torch.device, column: Column) -> list[Tensor]:
    return [torch.as_tensor(part, device=device) for part in column]
