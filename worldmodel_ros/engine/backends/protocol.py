"""The interface of a back end to its users: sessions, the engine, the scheduler's service, benchmarks."""
from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

from worldmodel_ros.cache.layout import TileLayout
from worldmodel_ros.cache.pool import Storage
from worldmodel_ros.model.presets import Preset


class Mark(Protocol):
    """A point in the device's time, like ``torch.cuda.Event``."""

    def elapsed_time(self, later: Any) -> float:
        """Return the time to a later mark, ms; the device must have passed both."""


class Fetched(Protocol):
    """An output on its way to the host."""

    def result(self) -> np.ndarray:
        """Wait for the output, but for nothing queued after it."""


class Backend(Protocol):
    """
    Runs the networks of one model; everything that its users call is here.

    The defaults suit a synchronous back end in this process. Arrays that one network makes for another may be the back end's
    own; ``host`` converts them to numpy. ``TorchBackend.run`` documents each network's inputs and outputs.
    """

    name: str
    preset: Preset
    sizes: tuple[int, ...] = (1,)  # useful batch sizes; one between two of them costs as much as the larger
    asynchronous: bool = False     # whether ``run`` and ``launch`` may return before the device is done
    overlaps: bool = False         # whether it supports ``in_background``
    busy: bool = False             # whether the last work ``in_background`` is still in progress
    degraded_reason: str = ''      # why it cannot look ahead at present
    epoch: int = 0                 # how often the processes that hold the pages have been replaced
    older: Callable[[TileLayout, int], Storage] | None = None  # as ``storage``, for complete slabs, in fewer bits
    distant: Callable[[TileLayout, int], Storage] | None = None  # for distant slabs, in fewer bits still

    @abstractmethod
    def storage(self, layout: TileLayout, pages: int) -> Storage:
        """Return storage for ``pages`` pages that the passes read and write. Raises ModelError if it does not fit into
        memory."""

    @abstractmethod
    def run(self, network: str, batch: Sequence[tuple]) -> list:
        """Return a network's outputs for each element of ``batch``, the inputs of calls whose arrays have equal shapes; plans,
        outcomes and images as numpy."""

    def launch(self, network: str, batch: Sequence[tuple]) -> list:
        """As ``run``, but an asynchronous device only queues the work, and all outputs are the back end's own."""
        return self.run(network, batch)

    @abstractmethod
    def host(self, array: Any) -> np.ndarray:
        """Return an output as numpy."""

    def fetch(self, array: Any) -> Fetched:
        """Start copying an output to the host without waiting for it."""
        return OnHost(array)

    @abstractmethod
    def stack(self, arrays: Sequence[Any]) -> Any:
        """Stack outputs of equal shapes along a new first axis."""

    def settle(self) -> None:
        """Wait until all work started by ``run`` and ``launch`` is done."""

    def mark(self) -> Mark:
        """Return the device's current point in time, which it has passed when ``settle`` returns."""
        return HostMark()

    def urgent(self) -> AbstractContextManager[None]:
        """Return a context in which this thread's work has priority over work launched ``in_background``."""
        return nullcontext()

    def in_background(self) -> AbstractContextManager[Any]:
        """Return a context in which launched work runs concurrently with other work, at lower priority; one piece of work at a
        time. Only where it ``overlaps``."""
        raise NotImplementedError(f'{self.name} has no background work')

    def settle_background(self) -> None:
        """Wait until the work launched ``in_background`` is done."""

    def before_writing(self) -> None:
        """Must be called before pages are claimed and written."""

    def starting_up(self) -> AbstractContextManager[None]:
        """Return a context in which no call has a tick's deadline, for compilation and graph capture."""
        return nullcontext()

    def require_complete(self) -> None:
        """Raise RankFailure while processes of the model are missing."""

    def close(self) -> None:
        """End the processes that the back end has started; others end with this one."""


class OnHost:
    """A ``Fetched`` output that was on the host already."""

    def __init__(self, array: np.ndarray):
        self._array = array

    def result(self) -> np.ndarray:
        return self._array


class HostMark:
    """A ``Mark`` of a synchronous device."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, later: HostMark) -> float:
        return (later.seconds - self.seconds) * 1e3
