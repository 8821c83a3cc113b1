"""Watches the processes of a model, and replaces all of them when one fails."""
from __future__ import annotations

import faulthandler
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from typing import Any, NamedTuple, Protocol

from worldmodel_ros.engine.device_failure import RankFailure
from .processes import Processes

_log = logging.getLogger(__name__)

LOOK_S = 0.02  # polling period of work on a device
ENDING_S = 0.2  # from a failed message to a process until its end is seen
RETRY_S = (1.0, 2.0, 5.0, 10.0)  # delays between attempts to start the processes
AWAITED_S = 30.0  # timeout for others to take an order or return their pages; both can be large
DISSOLVING_S = 30.0  # timeout of dissolving, including the end of the processes, which can take most of it
ASSEMBLING_S = 300.0  # timeout of assembling, more than the sum of its parts' own timeouts


STANDARD_ERROR = 2  # by number, as a node's host may have replaced sys.stderr by something that is not a file


class Event(Protocol):
    """A completion event, like ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Return whether it has completed."""


class _Over:
    def query(self) -> bool:
        return True


OVER = _Over()


class Started:
    """The completion of work that is watched before its ``event`` is known."""

    event: Event | None = None

    def query(self) -> bool:
        return self.event is not None and self.event.query()


class _Work(NamedTuple):
    epoch: int
    event: Event
    since: float  # steady time, s
    patience: float  # s


class Supervisor:
    """Watches the processes from its own thread, at least every LOOK_S.

    A process has failed when it ends, when it reports so, when a message to it fails, or when work that all of them share is
    late. Then all are ended, as a collective without its peer would hang forever, also on a GPU, and started again until that
    succeeds; ``epoch`` counts how often. ``degraded_reason`` is empty while they are complete, else it says what is wrong.
    This process is ended, too, if a collective with dead peers does not release its device: its own supervisor can restart it
    with a free device.
    """

    def __init__(self, processes: Processes, assemble: Callable[[], Processes], dissolve: Callable[[], None]):
        """``dissolve``, called when the processes have been killed, aborts what the device still waits for from them, and
        raises if the device has failed; ``assemble`` starts new ones and connects them."""
        self._processes: Processes | None = processes
        self._assemble, self._dissolve = assemble, dissolve
        self.epoch, self.degraded_reason = 0, ''
        self._failed = threading.Event()
        self._work: deque[_Work] = deque()  # on the device, in its order
        self._turned = 0.0  # when the first item reached the front
        self._wake, self._woken = Pipe()
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name='ranks', daemon=True)
        self._thread.start()

    @property
    def processes(self) -> Processes:
        """Processes of this epoch; raises RankFailure while they are not complete."""
        self.require()
        return self._processes

    def tell(self, order: Any) -> None:
        """Give all processes an order. Raises RankFailure while they are not complete."""
        self.require()
        with self.awaited():  # a process that has stopped reading would block the sender
            self._processes.tell(order)

    def require(self) -> None:
        """Raise RankFailure while the processes are not complete; results that the device has returned then are invalid."""
        if self.degraded_reason:
            raise RankFailure(self.degraded_reason)

    def expect(self, epoch: int, event: Event, patience: float) -> None:
        """Watch ``event``, which must complete within ``patience`` s of now or of the completion of the one before it."""
        self._work.append(_Work(epoch, event, time.monotonic(), patience))

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Run work that waits for all processes in this context: they have failed if it raises, which raises RankFailure, or
        takes longer than AWAITED_S."""
        epoch, done = self.epoch, Started()
        self.expect(epoch, done, AWAITED_S)
        try:
            yield
        except Exception as error:
            raise self.failed(epoch, error) from error
        finally:
            done.event = OVER

    def failed(self, epoch: int, error: Exception) -> RankFailure:
        """Report that work of an epoch failed; return the error to raise."""
        if epoch == self.epoch and not self.degraded_reason:
            self._wake.send(f'a pass failed: {error}')
            self._failed.wait(5.0)
        return RankFailure(self.degraded_reason or str(error))

    def close(self) -> None:
        """End the processes."""
        self._closed = True
        self._wake.send('')
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed:
            reason = self._reason()
            if reason and not self._closed:
                self._replace(reason)
        self._end()

    def _reason(self) -> str:
        """Return why the processes must be replaced, or ''; takes up to LOOK_S."""
        try:
            self._processes.check(LOOK_S, self._woken)
            if self._woken.poll() and (reported := self._woken.recv()):
                # A message to a process that is ending fails before its end is seen, which says more.
                self._processes.check(ENDING_S)
                return reported
        except RankFailure as failure:
            return str(failure)
        now = time.monotonic()
        while self._work and (self._work[0].epoch != self.epoch or self._work[0].event.query()):
            self._work.popleft()
            self._turned = now
        if self._work and now > max(self._work[0].since, self._turned) + self._work[0].patience:
            return f'the processes of the model did not do their part within {self._work[0].patience:g} s'
        return ''

    def _replace(self, reason: str) -> None:
        self.degraded_reason = reason
        self._failed.set()
        _log.error('%s; starting all of them again', reason)
        start = time.monotonic()
        try:
            self._end()
        except Exception:
            _log.critical('the device does not let go of the processes that were killed: this process ends, too', exc_info=True)
            os._exit(1)
        for attempt in itertools.count():
            try:
                with exit_after(ASSEMBLING_S):
                    self._processes = self._assemble()
                break
            except Exception as error:  # retry after any error, as the robot stands still until this succeeds
                self.degraded_reason = f'{reason}; starting them again failed: {error}'
                _log.error('%s', self.degraded_reason)
                if self._pause(RETRY_S[min(attempt, len(RETRY_S) - 1)]):
                    return
        while self._woken.poll():  # discard reports of the previous epoch
            self._woken.recv()
        self._failed.clear()
        self.epoch += 1
        self.degraded_reason = ''
        _log.warning('the processes of the model are complete again after %.1f s', time.monotonic() - start)

    def _pause(self, seconds: float) -> bool:
        """Wait; return whether the supervisor was closed."""
        deadline = time.monotonic() + seconds
        while not self._closed and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._closed

    def _end(self) -> None:
        self._work.clear()
        if self._processes is None:
            return
        with exit_after(DISSOLVING_S):
            self._processes.kill()  # first, so that they release their part of a collective
            self._dissolve()
            self._processes.stop()
        self._processes = None


@contextmanager
def exit_after(seconds: float) -> Iterator[None]:
    """End this process, with exit code 1 and all threads' stacks on its standard error, if the context takes longer.

    A collective with a dead peer can hang while holding the GIL, so the timer is a thread that needs no Python:
    ``faulthandler.dump_traceback_later``, of which a process has only one, so that another use of it meanwhile is lost.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=STANDARD_ERROR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
