"""
The network calls of sessions: what asks for them, who runs them, and how long they take.

What a session does is a generator that yields a ``Call`` where it needs a network, and is sent the outputs; where other
work may come between, it yields a ``Boundary``, which names the unit that follows. Nothing is prepared ahead of a
boundary: what the work reads may have changed when it goes on. One session's calls are run as they come, blocking, queued or in
the background; those of many sessions in batches.
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
# What is promised must hold nearly always, so a prediction ends with a high quantile of what was measured.
QUANTILE = 0.95
HISTORY = 100
BEFORE_DENOISING = ('encode', 'commit', 'policy')
SESSION = 'session'  # what saving or loading one takes of the engine's thread at a time; no network call


@dataclass(frozen=True)
class Boundary:
    """The unit that follows: observe, policy, denoise (with its step), commit or decode."""

    unit: str
    step: int = 0


@dataclass(frozen=True)
class Call:
    """One network's inputs for one session; see the back ends for what they are."""

    network: str
    inputs: tuple


Calls = Generator['Boundary | Call', Any, Result]


def run(calls: Calls[Result], backend: Backend) -> Result:
    """Run the calls of one session to their end."""
    outputs = None
    try:
        while True:
            item, outputs = calls.send(outputs), None
            if isinstance(item, Call):
                outputs, = backend.run(item.network, [item.inputs])
                if backend.asynchronous:
                    backend.settle()  # its time is taken
    except StopIteration as end:
        return end.value
    finally:
        calls.close()  # what it holds is let go now, and not when the exception's traceback is forgotten


def run_ahead(calls: Calls[Result], backend: Backend) -> Result:
    """As ``run``, but only queues the work of the device; outputs are the back end's own."""
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
    """Calls that are run unit by unit: they stand at ``boundary``, or have ended, and then ``result`` is there."""

    def __init__(self, calls: Calls[Result]):
        """Run ``calls`` to their first boundary, and raise what they raise."""
        self._calls = calls
        self.boundary: Boundary | None = None
        self.result: Result | None = None
        if self.resume(None) is not None:
            raise ValueError('work must begin with a boundary')

    def resume(self, outputs: Any) -> Call | None:
        """Go on, with the outputs of the last call; return the next one, None at a boundary and at the end."""
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
        """Give it up; what it holds is let go."""
        self.boundary = None
        self._calls.close()


def run_unit(works: Sequence[Work], backend: Backend, queued: bool = False) -> list[Exception | None]:
    """Run the next unit of each of ``works``, calls of one network together; return what each of them raised.

    ``queued``: by ``Backend.launch``. Work that raised is closed. A network that raises fails all whose call it ran.
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
        # All members of a unit come to the same networks, but for the last step's, which has outcomes to read.
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
    """``times`` takes how long the parts of the work took."""

    def __init__(self, backend: Backend, times: PartTimes):
        self._backend, self._times = backend, times

    def queue(self, calls: Calls[Result]) -> Result:
        """Has the device do a call's work when its turn comes; the results are the back end's own. For an asynchronous
        back end."""
        with self._times.queued(self._backend.mark):
            return run_ahead(calls, self._backend)

    def units(self, calls: Calls[Result]) -> Generator[None, None, Result]:
        """Every ``next`` but the first, which prepares, is one unit; a tick can go first between any two. Where the
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
        """Run the next unit: in the background of ticks, if the device can; else it is waited for, so that there is one at
        most that a tick has to wait for."""
        backend = self._backend
        if backend.overlaps:
            with self._times.ignored(), backend.in_background():  # its time next to a tick says nothing of a tick
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
    """Return the parts of a world model's tick with so many denoising steps, and how often each comes."""
    return {**dict.fromkeys(BEFORE_DENOISING, 1), 'denoise': steps}


class Recent:
    """The last HISTORY values, in order too: a tick asks for quantiles between image and command, each of which takes numpy
    forty microseconds."""

    def __init__(self) -> None:
        self._values: deque[float] = deque()
        self._ordered: list[float] = []

    def append(self, value: float) -> None:
        if len(self._values) == HISTORY:
            del self._ordered[bisect_left(self._ordered, self._values.popleft())]
        self._values.append(value)
        insort(self._ordered, value)

    def quantile(self, level: float) -> float:
        """As numpy's, between two values in proportion; 0.0 without any."""
        ordered = self._ordered
        if not ordered:
            return 0.0
        at = level * (len(ordered) - 1)
        low = int(at)
        return ordered[low] + (at - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


class StepTimes:
    """Last durations (s) of each part (encode, commit, policy, denoise for one step, decode) and of whole ticks.

    The predicted tick is the sum of its parts' medians and one tail: the high quantile of how much real ticks exceeded
    that sum. Adding the parts' own high quantiles instead would count an interruption, which strikes a tick once, in
    every part.
    """

    def __init__(self, parts: Callable[[Any], Mapping[str, int]] = of_world_model):
        """``parts``: gives the parts of a tick with such ``steps``, and how often each comes. What tells ticks apart need not
        be a number."""
        self._parts = parts
        self._times: dict[str, Recent] = {}
        self._excess = Recent()

    def record(self, part: str, seconds: float) -> None:
        self._times.setdefault(part, Recent()).append(float(seconds))

    def record_tick(self, seconds: float, steps: Any) -> None:
        """Take the whole time of a tick with such ``steps``."""
        self._excess.append(float(seconds) - self.typical_tick(steps))

    def quantile(self, part: str) -> float:
        """High quantile (s) of a part; 0.0 when it was never measured."""
        return self._quantile(part, QUANTILE)

    def predict(self, steps: Any) -> float:
        """Time (s) from a frame at hand to its plan, in such ``steps``."""
        return self.typical_tick(steps) + max(0.0, self._excess.quantile(QUANTILE))

    def prediction_rate(self, step_period: float) -> float:
        """Highest rate (Hz) of one-step futures, imagined and decoded, where a frame comes every ``step_period`` s."""
        work = self.typical_tick(1) + self.typical('decode')
        return 1.0 / max(step_period, work)

    def unit(self) -> float:
        """Time (s) of the longest single network call: the quantum that cannot be interrupted."""
        return max((self.quantile(part) for part in self._times if part != SESSION), default=0.0)

    def typical_unit(self) -> float:
        """Median (s) of that call."""
        return max((self.typical(part) for part in self._times if part != SESSION), default=0.0)

    def typical(self, part: str) -> float:
        """Median (s) of a part; 0.0 when it was never measured."""
        return self._quantile(part, 0.5)

    def typical_tick(self, steps: Any) -> float:
        """Return the sum (s) of the medians of a tick's parts."""
        return sum(count * self.typical(part) for part, count in self._parts(steps).items())

    def _quantile(self, part: str, level: float) -> float:
        return self._times[part].quantile(level) if part in self._times else 0.0


class PartTimes:
    """Measures the parts of one session's work, also where the device works asynchronously.

    Takes times into ``last`` (s by part) and into an engine's step times; those of failed work are not taken.

    Queued work is timed by marks that the device passes: their times are known when it has, and ``read`` takes them.
    """

    def __init__(self, step_times: StepTimes):
        self.last: dict[str, float] = {}
        self._step_times = step_times
        self._mark: Callable[[], Mark] | None = None
        self._unread: list[tuple[str, Mark, Mark]] = []
        self._ignore = False

    @contextmanager
    def queued(self, mark: Callable[[], Mark]) -> Iterator[None]:
        """Work in this context is queued; ``mark`` gives a point in the device's time (``Backend.mark``)."""
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
        """Work in this context is not timed."""
        self._ignore = True
        try:
            yield
        finally:
            self._ignore = False

    def forget(self) -> None:
        """Give up the marks of queued work that was not waited for."""
        self._unread.clear()

    def read(self) -> None:
        """Take the times of queued work, which must be over."""
        for part, start, end in self._unread:
            self._take(part, start.elapsed_time(end) / 1e3)
        self._unread.clear()

    def _take(self, part: str, seconds: float) -> None:
        self.last[part] = seconds
        self._step_times.record(part, seconds)
