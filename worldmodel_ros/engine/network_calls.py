"""Runs a session's network calls: blocking, queued or in the background."""
from __future__ import annotations

from collections.abc import Generator
from contextlib import nullcontext

from .backends.protocol import Backend
from .calls import Calls, Result, Work, run_ahead, run_unit
from .step_times import PartTimes


class NetworkCalls:
    """``times`` takes how long the parts of the work took."""

    def __init__(self, backend: Backend, times: PartTimes):
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
        if self._backend.busy:
            self._backend.settle_background()
        return work.result

    def _run_unit(self, work: Work) -> None:
        """Runs the next unit: in the background of ticks, if the device can; else it is waited for, so that there is one at
        most that a tick has to wait for."""
        backend = self._backend
        if backend.overlaps:
            with self._times.ignored(), backend.in_background():  # its time next to a tick says nothing of a tick
                error, = run_unit([work], backend, queued=True)
        else:
            with self._times.queued(backend.mark) if backend.asynchronous else nullcontext():
                error, = run_unit([work], backend)
            backend.settle()
            self._times.read()
        if error:
            raise error
