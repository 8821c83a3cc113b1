"""Background work on a low-priority CUDA stream, whose kernels run where a tick's leave room."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .cuda_graphs import Graphs

TICKS = -1  # stream priority of ticks; lower numbers go first


class BackgroundStream:
    """``launch`` has its own graphs, since a graph's memory serves one call at a time.

    Host bookkeeping ignores streams: a page that a branch has released may be given to a session while a pass of the branch
    is still in flight. What that pass then reads does not matter, but its writes must come before the session's.
    """

    def __init__(self, device: torch.device):
        self.launch = Graphs(device)
        self._stream = torch.cuda.Stream(device)  # 0, the default, is the lowest priority
        self._done = torch.cuda.Event()
        self._writes = False

    @contextmanager
    def queueing(self) -> Iterator[None]:
        """Queue the work in this context on the background stream, ordered only after what was queued before."""
        self._writes = False
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._done.record(self._stream)

    @property
    def busy(self) -> bool:
        """Whether the last work is still in flight."""
        return not self._done.query()

    def wait(self) -> None:
        """Wait for the last work."""
        self._done.synchronize()

    def will_write(self) -> None:
        """Note that the work being queued, or about to be, writes pages."""
        self._writes = True

    def before_writing(self) -> None:
        """Make the current stream wait for the last work if that writes pages."""
        if self._writes:
            torch.cuda.current_stream().wait_event(self._done)
