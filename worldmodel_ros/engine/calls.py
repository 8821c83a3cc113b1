"""Work as a sequence of network calls: one session's are run as they come, those of many sessions in batches.

What a session does is a generator that yields a `Call` where it needs a network, and is sent the outputs; where other
work may come between, it yields a `Boundary`, which names the unit that follows. Nothing is prepared ahead of a
boundary: what the work reads may have changed when it goes on.
"""
from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .backends.protocol import Backend

Result = TypeVar('Result')


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
    """Runs the calls of one session to their end."""
    outputs = None
    try:
        while True:
            item, outputs = calls.send(outputs), None
            if isinstance(item, Call):
                outputs, = backend.run(item.network, [item.inputs])
                backend.settle()  # its time is taken
    except StopIteration as end:
        return end.value
    finally:
        calls.close()  # what it holds is let go now, and not when the exception's traceback is forgotten


def run_ahead(calls: Calls[Result], backend: Backend) -> Result:
    """As `run`, but only queues the work of the device; outputs are the back end's own."""
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
        """Runs ``calls`` to their first boundary, and raises what they raise."""
        self._calls = calls
        self.boundary: Boundary | None = None
        self.result: Result | None = None
        if self.resume(None) is not None:
            raise ValueError('work must begin with a boundary')

    def resume(self, outputs: Any) -> Call | None:
        """Goes on, with the outputs of the last call; returns the next one, None at a boundary and at the end."""
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
        """Gives it up; what it holds is let go."""
        self.boundary = None
        self._calls.close()


def run_unit(works: Sequence[Work], backend: Backend, queued: bool = False) -> list[Exception | None]:
    """Runs the next unit of each of ``works``, calls of one network together; returns what each of them raised.

    ``queued``: by `Backend.launch`. Work that raised is closed. A network that raises fails all whose call it ran.
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
