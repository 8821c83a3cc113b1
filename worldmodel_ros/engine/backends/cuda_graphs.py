"""Runs a function of tensors on a batch gathered from many sessions: eagerly, or as a CUDA graph.

A tick is hundreds of small kernels, and launching them one by one takes the host longer than a GPU needs to run them. A
graph launches them all at once; it is captured for one batch size, so a batch is padded to the next of BUCKETS.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from worldmodel_ros.kernels.graph_capture import capturing
from .pinned_inputs import Inputs

BUCKETS = (1, 2, 4, 8, 16, 32)

Column = Sequence[np.ndarray | Tensor]  # one of the function's arguments for each session, on the host or the device
Function = Callable[..., 'tuple[Tensor, ...]']


class Eager:
    """Stacks the batch and calls the function."""

    side_stream: torch.cuda.Stream | None = None

    def __init__(self, device: torch.device):
        self._device = device

    def __call__(self, key: Hashable, function: Function, columns: Sequence[Column]) -> tuple[Tensor, ...]:
        """Return the outputs of ``function``; ``key`` identifies it and what it closes over."""
        return function(*(self._stacked(column) for column in columns))

    def reset(self) -> None:
        """There is nothing to free."""

    def _stacked(self, column: Column) -> Tensor:
        if any(isinstance(part, Tensor) for part in column):
            return torch.stack([torch.as_tensor(part, device=self._device) for part in column])
        return torch.from_numpy(np.stack(column)).to(self._device)


class Graphs:
    """As Eager, with graphs that are captured on a function's first call with a bucket and shapes.

    Padding rows repeat the first row of a batch, so that they have no effects of their own. A function may be called
    several times while it is captured, and must not depend on how often. A call returns as soon as the work is queued.
    ``captures`` and ``capture_seconds`` tell how many graphs were captured, and in what time, compilation included.
    """

    inputs_type = Inputs

    def __init__(self, device: torch.device, priority: int = 0):
        """``priority``: of the kernels relative to those of other graphs; lower numbers go first."""
        self._device = device
        self._graphs: dict[Hashable, _Graph] = {}
        self._memory = torch.cuda.graph_pool_handle()  # one for all: no two run at once, and results are copied out
        # Freed memory is reused only by the stream that had it: with its own streams, each graph would take more.
        self._streams = torch.cuda.Stream(), torch.cuda.Stream(priority=priority)
        self.side_stream = torch.cuda.Stream(priority=priority)  # for what a function does next to its other work
        self.capture_seconds = 0.0

    @property
    def captures(self) -> int:
        return len(self._graphs)

    def __call__(self, key: Hashable, function: Function, columns: Sequence[Column]) -> tuple[Tensor, ...]:
        size = _rows(columns)
        bucket = next((bucket for bucket in BUCKETS if bucket >= size), size)
        shapes = tuple(tuple(column[0].shape) for column in columns)
        graph = self._graphs.get((key, bucket, shapes))
        if graph is None:
            start = time.perf_counter()
            graph = self._graphs[key, bucket, shapes] = _Graph(
                self.inputs_type(self._device, bucket, columns), function, columns, self._memory, *self._streams)
            self.capture_seconds += time.perf_counter() - start
        return graph(columns)

    def reset(self) -> None:
        """Free all graphs, none of which may be running; remaining references hold no memory."""
        for graph in list(self._graphs.values()):
            graph.reset()
        self._graphs.clear()


class _Graph:
    """One captured function, and the memory that it reads from and writes to."""

    def __init__(self, inputs: Inputs, function: Function, columns: Sequence[Column], memory: tuple,
                 side: torch.cuda.Stream, stream: torch.cuda.Stream):
        """Capture ``function`` for ``inputs``, with the values of ``columns``, since zeros may be invalid. ``side``: the
        stream of the warm-up calls; kernels have the priority of ``stream``."""
        self._inputs = inputs
        inputs.fill(columns)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # libraries select algorithms and allocate on first calls
                function(*inputs.tensors)
        torch.cuda.current_stream().wait_stream(side)
        with capturing(stream, memory) as self._graph:
            self._outputs = function(*inputs.tensors)

    def __call__(self, columns: Sequence[Column]) -> tuple[Tensor, ...]:
        self._inputs.fill(columns)
        self._graph.replay()
        return tuple(output[:_rows(columns)].clone() for output in self._outputs)

    def reset(self) -> None:
        self._graph.reset()


def _rows(columns: Sequence[Column]) -> int:
    """Return the size of a batch; a function without arguments has one result."""
    return len(columns[0]) if columns else 1
