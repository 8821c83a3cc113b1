"""Has a back end do what one session's calls ask for, also where the device works beside the host, or beside ticks."""
from __future__ import annotations

from collections.abc import Generator
from contextlib import nullcontext
from types import SimpleNamespace

from .backends.stage_timer import PartTimes
from .calls import Calls, Result, Work, run_ahead, run_unit


class Runner:
    """``times`` takes how long the parts of the work took."""

    def __init__(self, backend, times: PartTimes):
        self._backend, self._times = backend, times

    def queue(self, calls: Calls[Result]) -> Result:
        """Has the device do a call's work when its turn comes; the results are the back end's own. For an asynchronous
        back end."""
        with self._times.queued(self._backend.mark):
            return run_ahead(calls, self._backend)

    def units(self, calls: Calls[Result]) -> Generator[None, None, Result]:
        """Every `next` but the first, which prepares, is one unit; a tick can go first between any two. Where the
        device `overlaps`, a unit is only queued, and the result is the back end's own."""
        work = Work(calls)
        yield
        while work.boundary:
            self._run_unit(work)
            yield
        if self.busy:
            self._backend.settle_beside()
        return work.result

    @property
    def overlaps(self) -> bool:
        """Whether the device does `units` beside ticks."""
        return self._backend.asynchronous and self._backend.overlaps

    @property
    def busy(self) -> bool:
        """Whether the device still works on one of `units`; the next one waits for it."""
        return self._backend.asynchronous and self._backend.busy

    def _run_unit(self, work: Work) -> None:
        """Runs the next unit: beside what ticks do, if the device can; else it is waited for, so that there is one at
        most that a tick has to wait for."""
        backend = self._backend
        if self.overlaps:
            with self._times.ignored(), backend.beside():  # how long it takes beside a tick says nothing of a tick
                error, = run_unit([work], SimpleNamespace(run=backend.launch))
        else:
            with self._times.queued(backend.mark) if backend.asynchronous else nullcontext():
                error, = run_unit([work], backend)
            backend.settle()
            self._times.read()
        if error:
            raise error
