"""Background work on a low-priority CUDA stream, whose kernels run where those of a tick leave room."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .cuda_graphs import Graphs

TICKS = -1  # a stream's priority; what is lower goes first


class BackgroundStream:
    """``launch``: graphs of its own, since a graph's memory is for one call at a time.

    Host bookkeeping knows nothing of streams: a page that a branch has given up may be given to a session while a pass
    of the branch is still in progress. What that pass then reads is of no use to anyone; but what it writes must come
    before what the session writes.
    """

    def __init__(self, device: torch.device):
        self.launch = Graphs(device)
        self._stream = torch.cuda.Stream(device)  # 0, the default, is the lowest priority
        self._done = torch.cuda.Event()
        self._writes = False

    @contextmanager
    def queueing(self) -> Iterator[None]:
        """What is queued in this context comes after all that was queued before it, and waits for nothing else."""
        self._writes = False
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._done.record(self._stream)

    @property
    def busy(self) -> bool:
        """Whether the last work is still in progress."""
        return not self._done.query()

    def wait(self) -> None:
        """Wait for the last work."""
        self._done.synchronize()

    def will_write(self) -> None:
        """The work that is being queued, or is about to be, writes pages."""
        self._writes = True

    def before_writing(self) -> None:
        """What is queued now on the current stream comes after what the last work writes."""
        if self._writes:
            torch.cuda.current_stream().wait_event(self._done)
