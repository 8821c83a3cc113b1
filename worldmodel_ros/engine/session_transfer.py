"""Saves and loads sessions in a thread that may block, next to the one that answers ticks."""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future as Promise, TimeoutError as TimeUp
from typing import TYPE_CHECKING, Any, TypeVar

from ..cache.pool import OutOfPages
from .session_file import Capture, Loaded
from .session_folder import SessionFileError, SessionFolder, check_name

if TYPE_CHECKING:
    from .engine import Engine
    from .session import Session

PATIENCE = 5.0  # s to wait for the engine's thread to have time between two ticks
_ATTEMPTS = 3   # to copy pages that sessions may take back

Call = Callable[[Callable[['Session'], Any]], Promise]
Result = TypeVar('Result')


class Transfer:
    """One transfer to or from a file. ``call`` schedules a function of the session on the engine's thread, between two
    ticks; ``patience``: timeout of each such call, s."""

    def __init__(self, engine: Engine, call: Call, patience: float = PATIENCE):
        self._engine, self._call, self._patience = engine, call, patience
        self._on_engine: list[float] = []  # s that each part took on the engine's thread

    def save(self, folder: SessionFolder, name: str) -> str:
        """Write the session to a file; return a report of size and time. Raises SessionFileError, and ValueError before
        the first frame."""
        check_name(name)
        start = time.perf_counter()
        capture = self._captured()
        nbytes = folder.save(name, capture.nbytes, capture.write)
        return self._report(nbytes, time.perf_counter() - start)

    def load(self, folder: SessionFolder, name: str, adopt: Call | None = None) -> str:
        """Replace the session by one from a file; return a report of size and time. Raises SessionFileError, and then
        changes nothing. ``adopt`` replaces ``call`` for the step that changes the session."""
        start = time.perf_counter()
        nbytes, loaded = folder.load(name, lambda file, size: (size, self._engine.read_session(file, size)))
        try:
            self._pieces(loaded)
            self._do(lambda session: session.restore(loaded), adopt)
        except OutOfPages as error:
            raise SessionFileError(f'there is no memory next to the questions in progress: try again ({error})'
                                   ) from error
        finally:
            loaded.close()
        return self._report(nbytes, time.perf_counter() - start)

    def _captured(self) -> Capture:
        for attempt in range(_ATTEMPTS):
            capture = self._do(lambda session: session.capture())
            try:
                self._pieces(capture)
                return capture
            except OutOfPages as error:
                lost = error
        raise SessionFileError(f'memory is so short that the session could not be copied: try again ({lost})')

    def _pieces(self, what: Capture | Loaded) -> None:
        run_pieces(what.pieces(), what.on_host, self._timed_call, self._patience)

    def _do(self, function: Callable[[Session], Result], call: Call | None = None) -> Result:
        """Call a function on the engine's thread and wait for its result."""
        return wait(self._timed_call(function, call), self._patience)

    def _timed_call(self, function: Callable[[Session], Result], call: Call | None = None) -> Promise:
        def timed(session: Session) -> Result:
            start = time.perf_counter()
            try:
                return function(session)
            finally:
                self._on_engine.append(time.perf_counter() - start)
        return (call or self._call)(timed)

    def _report(self, nbytes: int, seconds: float) -> str:
        parts = self._on_engine
        return (f'{nbytes / 1e6:.2f} MB in {seconds * 1e3:.0f} ms; of the engine\'s thread {sum(parts) * 1e3:.2f} ms'
                + (f' in {len(parts)} parts, {max(parts) * 1e3:.2f} ms at the most' if len(parts) > 1 else ''))


def run_pieces(pieces: Iterator[None], on_host: bool, call: Call, patience: float) -> None:
    """Run ``pieces``, which copies or fills pages: in this thread if these are ``on_host``, else piece by piece in the
    engine's, with a timeout of ``patience`` s for each."""
    if on_host:
        for _ in pieces:
            pass
    else:
        while wait(call(lambda session: advance(pieces)), patience):
            pass


def wait(promise: Promise, patience: float) -> Any:
    """Return the result of a call on the engine's thread. Raises SessionFileError after ``patience`` s, and
    CancelledError if the thread is stopped."""
    try:
        return promise.result(patience)
    except TimeUp:
        if promise.done():  # the call itself may have raised TimeoutError
            return promise.result()
        if promise.cancel():
            raise SessionFileError(
                f'the engine had no time between two images for {patience:g} s, and has not begun: try again with a '
                'lower load, or while the camera is off') from None
        raise SessionFileError(
            f'it has begun, and was not finished within {patience:g} s: look for a device that hangs, or a shared '
            'engine that is never idle. What was being saved or loaded is given up') from None


def advance(pieces: Iterator[None]) -> bool:
    """Run the next piece; return whether there may be another one."""
    return next(pieces, pieces) is None
