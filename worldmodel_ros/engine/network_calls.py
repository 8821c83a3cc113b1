"""
The network calls of sessions: requesting, running and timing them.

A session's work is a generator that yields a ``Call`` where it needs a network, and is sent the outputs; where other work
may run first, it yields a ``Boundary``, which names the unit that follows. Nothing is prepared ahead of a boundary, since
what the work reads may have changed when it resumes. One session's calls run as they come, blocking, queued or in the
background; those of many sessions run in batches.
"""
from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .backends.protocol import Backend, Mark

Result = TypeVar('Result')
# Predicted times must nearly always hold, hence a high quantile of the measured ones.
QUANTILE = 0.95
HISTORY = 100
BEFORE_DENOISING = ('encode', 'commit', 'policy')
SESSION = 'session'  # time on the engine's thread for one step of saving or loading; not a network call


@dataclass(frozen=True)
class Boundary:
    """Start of a unit: observe, policy, denoise (with its step), commit or decode."""

    unit: str
    step: int = 0


@dataclass(frozen=True)
class Call:
    """One network's inputs for one session, as its back end documents them."""

    network: str
    inputs: tuple


Calls = Generator['Boundary | Call', Any, Result]


def run(calls: Calls[Result], backend: Backend) -> Result:
    """Run one session's calls to the end and return their result."""
    outputs = None
    try:
        while True:
            item, outputs = calls.send(outputs), None
            if isinstance(item, Call):
                outputs, = backend.run(item.network, [item.inputs])
                if backend.asynchronous:
                    backend.settle()  # for the timing
    except StopIteration as end:
        return end.value
    finally:
        calls.close()  # release its resources now, not when the exception's traceback is freed


def run_ahead(calls: Calls[Result], backend: Backend) -> Result:
    """As ``run``, but only queue the device's work; outputs are the back end's own."""
    outputs = None
    try:
        while True:
            item, outputs = calls.send(outputs), None
            if isinstance(item, Call):
                outputs, = backend.launch(item.network, [item.inputs])
    except StopIteration as end:
        return end.value
    finally:
        calls.close()


class Work(Generic[Result]):
    """Calls that are run unit by unit: paused at ``boundary``, or finished, with their ``result``."""

    def __init__(self, calls: Calls[Result]):
        """Run ``calls`` to their first boundary; raise what they raise."""
        self._calls = calls
        self.boundary: Boundary | None = None
        self.result: Result | None = None
        if self.resume(None) is not None:
            raise ValueError('work must begin with a boundary')

    def resume(self, outputs: Any) -> Call | None:
        """Resume with the outputs of the last call; return the next call, None at a boundary and at the end."""
        try:
            item = self._calls.send(outputs)
        except StopIteration as end:
            self.boundary, self.result = None, end.value
            return None
        if isinstance(item, Call):
            return item
        self.boundary = item
        return None

    def close(self) -> None:
        """Cancel the work and release what it holds."""
        self.boundary = None
        self._calls.close()


def run_unit(works: Sequence[Work], backend: Backend, queued: bool = False) -> list[Exception | None]:
    """Run the next unit of each of ``works``, batching calls of one network; return what each of them raised.

    ``queued``: use ``Backend.launch``. Work that raised is closed. A network that raises fails all works in its batch.
    """
    run_batch = backend.launch if queued else backend.run
    errors: list[Exception | None] = [None] * len(works)
    pending: dict[int, Call] = {}

    def resume(index: int, outputs: Any) -> None:
        try:
            call = works[index].resume(outputs)
            if call is not None:
                pending[index] = call
        except Exception as error:
            fail(index, error)

    def fail(index: int, error: Exception) -> None:
        errors[index] = error
        works[index].close()

    for index in range(len(works)):
        resume(index, None)
    while pending:
        # All works in a unit call the same networks, except that the last denoising step also reads outcomes.
        network = next(iter(pending.values())).network
        group = [index for index, call in pending.items() if call.network == network]
        batch = [pending.pop(index).inputs for index in group]
        try:
            outputs = run_batch(network, batch)
        except Exception as error:
            for index in group:
                fail(index, error)
        else:
            for index, output in zip(group, outputs, strict=True):
                resume(index, output)
    return errors


class NetworkCalls:
    """Runs a session's network calls; ``times`` records how long the parts of the work took."""

    def __init__(self, backend: Backend, times: PartTimes):
        self._backend, self._times = backend, times

    def queue(self, calls: Calls[Result]) -> Result:
        """Queue calls on the device of an asynchronous back end; the result is the back end's own."""
        with self._times.queued(self._backend.mark):
            return run_ahead(calls, self._backend)

    def units(self, calls: Calls[Result]) -> Generator[None, None, Result]:
        """Run one unit per ``next`` after the first, which prepares, so that a tick can go first between any two. Where the
        device ``overlaps``, a unit is only queued, and the result is the back end's own."""
        work = Work(calls)
        yield
        while work.boundary:
            self._run_unit(work)
            yield
        if self._backend.busy:
            self._backend.settle_background()
        return work.result

    def _run_unit(self, work: Work) -> None:
        """Run the next unit: in the background of ticks if the device can; else wait for it, so that a tick waits for one
        unit at most."""
        backend = self._backend
        if backend.overlaps:
            with self._times.ignored(), backend.in_background():  # its time next to a tick says nothing about a tick's
                error, = run_unit([work], backend, queued=True)
        else:
            with self._times.queued(backend.mark) if backend.asynchronous else nullcontext():
                error, = run_unit([work], backend)
            if backend.asynchronous:
                backend.settle()
                self._times.read()
        if error:
            raise error


def of_world_model(steps: int) -> Mapping[str, int]:
    """Return the parts of a world model's tick with ``steps`` denoising steps, and how often each occurs."""
    return {**dict.fromkeys(BEFORE_DENOISING, 1), 'denoise': steps}


class Recent:
    """The last HISTORY values, also kept sorted: a tick needs quantiles between image and command, and numpy takes 40 us for
    each."""

    def __init__(self) -> None:
        self._values: deque[float] = deque()
        self._ordered: list[float] = []

    def append(self, value: float) -> None:
        if len(self._values) == HISTORY:
            del self._ordered[bisect_left(self._ordered, self._values.popleft())]
        self._values.append(value)
        insort(self._ordered, value)

    def quantile(self, level: float) -> float:
        """Return a quantile with linear interpolation, as numpy's; 0.0 without values."""
        ordered = self._ordered
        if not ordered:
            return 0.0
        at = level * (len(ordered) - 1)
        low = int(at)
        return ordered[low] + (at - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


class StepTimes:
    """Recent durations (s) of each part (encode, commit, policy, denoise for one step, decode) and of whole ticks.

    The predicted tick is the sum of its parts' medians plus one tail: the high quantile of how much measured ticks exceeded
    that sum. Adding the parts' own high quantiles would count an interruption, which hits a tick once, in every part.
    """

    def __init__(self, parts: Callable[[Any], Mapping[str, int]] = of_world_model):
        """``parts`` returns the parts of a tick with given ``steps``, and how often each occurs; ``steps``, which tells ticks
        apart, need not be a number."""
        self._parts = parts
        self._times: dict[str, Recent] = {}
        self._excess = Recent()

    def record(self, part: str, seconds: float) -> None:
        self._times.setdefault(part, Recent()).append(float(seconds))

    def record_tick(self, seconds: float, steps: Any) -> None:
        """Record the whole time of a tick with ``steps``."""
        self._excess.append(float(seconds) - self.typical_tick(steps))

    def quantile(self, part: str) -> float:
        """Return the high quantile (s) of a part; 0.0 when it was never measured."""
        return self._quantile(part, QUANTILE)

    def predict(self, steps: Any) -> float:
        """Return the predicted time (s) from a received frame to its plan, with ``steps``."""
        return self.typical_tick(steps) + max(0.0, self._excess.quantile(QUANTILE))

    def prediction_rate(self, step_period: float) -> float:
        """Return the highest rate (Hz) of one-step futures, imagined and decoded, with a frame every ``step_period`` s."""
        work = self.typical_tick(1) + self.typical('decode')
        return 1.0 / max(step_period, work)

    def unit(self) -> float:
        """Return the high quantile (s) of the longest single network call, which cannot be interrupted."""
        return max((self.quantile(part) for part in self._times if part != SESSION), default=0.0)

    def typical_unit(self) -> float:
        """Return the median (s) of that call."""
        return max((self.typical(part) for part in self._times if part != SESSION), default=0.0)

    def typical(self, part: str) -> float:
        """Return the median (s) of a part; 0.0 when it was never measured."""
        return self._quantile(part, 0.5)

    def typical_tick(self, steps: Any) -> float:
        """Return the sum (s) of the medians of a tick's parts."""
        return sum(count * self.typical(part) for part, count in self._parts(steps).items())

    def _quantile(self, part: str, level: float) -> float:
        return self._times[part].quantile(level) if part in self._times else 0.0


class PartTimes:
    """Measures the parts of one session's work, also on an asynchronous device.

    Records times in ``last`` (s by part) and in an engine's step times; times of failed work are not recorded.

    Queued work is timed by marks on the device; ``read`` records their times once the device has passed them.
    """

    def __init__(self, step_times: StepTimes):
        self.last: dict[str, float] = {}
        self._step_times = step_times
        self._mark: Callable[[], Mark] | None = None
        self._unread: list[tuple[str, Mark, Mark]] = []
        self._ignore = False

    @contextmanager
    def queued(self, mark: Callable[[], Mark]) -> Iterator[None]:
        """Time work in this context, which is queued, by ``mark`` (``Backend.mark``)."""
        self._mark = mark
        try:
            yield
        finally:
            self._mark = None

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Time a block of work."""
        if self._ignore:
            yield
            return
        mark = self._mark
        start = mark() if mark else time.perf_counter()
        yield
        if mark:
            self._unread.append((part, start, mark()))
        else:
            self._take(part, time.perf_counter() - start)

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Do not time work in this context."""
        self._ignore = True
        try:
            yield
        finally:
            self._ignore = False

    def forget(self) -> None:
        """Discard the marks of queued work that was not waited for."""
        self._unread.clear()

    def read(self) -> None:
        """Record the times of queued work, which must have finished."""
        for part, start, end in self._unread:
            self._take(part, start.elapsed_time(end) / 1e3)
        self._unread.clear()

    def _take(self, part: str, seconds: float) -> None:
        self.last[part] = seconds
        self._step_times.record(part, seconds)
