"""Keeps the processes of a model complete: watches them, and replaces all of them when one fails."""
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

LOOK_S = 0.02  # how often work on a device is looked at
RETRY_S = (1.0, 2.0, 5.0, 10.0)  # from one attempt to start them to the next
AWAITED_S = 30.0  # in which others take an order, or give what they hold; large pages are among both
DISSOLVING_S = 30.0  # the end of the processes, which takes most of it if it takes long, among it
ASSEMBLING_S = 300.0  # more than what the parts of it that have a limit can take together


STANDARD_ERROR = 2  # by its number: a node's host may have replaced sys.stderr by what is no file


class Event(Protocol):
    """A completion event, as torch.cuda.Event."""

    def query(self) -> bool:
        """Whether it has come."""


class _Over:
    def query(self) -> bool:
        return True


OVER = _Over()


class Started:
    """The completion of something that is watched before it is known what will tell of it: ``event``."""

    event: Event | None = None

    def query(self) -> bool:
        return self.event is not None and self.event.query()


class _Work(NamedTuple):
    epoch: int
    event: Event
    since: float  # steady time, s
    patience: float  # s


class Supervisor:
    """Looks at the processes from a thread of its own, at least every LOOK_S.

    One has failed when it ends, when it says so, when a message to it fails, or when work that all of them share is
    not over in time. Then all are ended: a message without its partner would hang for ever, on a GPU, too. They are
    started again until that succeeds; ``epoch`` counts how often. ``degraded_reason`` is empty while they are complete, and
    else says what is wrong. This process is ended, too, if a collective with dead peers does not let go of its device: its
    own supervisor can start it again with a device that is free.
    """

    def __init__(self, processes: Processes, assemble: Callable[[], Processes], dissolve: Callable[[], None]):
        """``dissolve``, called when the processes have been killed, gives up what the device still waits for from them,
        and raises what has become of the device; ``assemble`` starts others and gets them to work."""
        self._processes: Processes | None = processes
        self._assemble, self._dissolve = assemble, dissolve
        self.epoch, self.degraded_reason = 0, ''
        self._failed = threading.Event()
        self._work: deque[_Work] = deque()  # on the device, in its order
        self._turned = 0.0  # when the first of it had its turn
        self._wake, self._woken = Pipe()
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name='ranks', daemon=True)
        self._thread.start()

    @property
    def processes(self) -> Processes:
        """Those of this epoch; raises RankFailure while they are not complete."""
        self.require()
        return self._processes

    def tell(self, order: Any) -> None:
        """Give all processes an order. Raises RankFailure while they are not complete."""
        self.require()
        with self.awaited():  # one that takes nothing in any more lets who tells it wait
            self._processes.tell(order)

    def require(self) -> None:
        """Raise RankFailure while the processes are not complete; also what the device has given then is no
        result."""
        if self.degraded_reason:
            raise RankFailure(self.degraded_reason)

    def expect(self, epoch: int, event: Event, patience: float) -> None:
        """Has ``event`` watched, which is to come within so many seconds of now, or of the one before it."""
        self._work.append(_Work(epoch, event, time.monotonic(), patience))

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """What this thread does in this context waits for all processes: they have failed if it fails, which raises
        RankFailure, or is not over within AWAITED_S."""
        epoch, done = self.epoch, Started()
        self.expect(epoch, done, AWAITED_S)
        try:
            yield
        except Exception as error:
            raise self.failed(epoch, error) from error
        finally:
            done.event = OVER

    def failed(self, epoch: int, error: Exception) -> RankFailure:
        """Report that work of an epoch failed; return what is to be raised."""
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
        """Why the processes have to be replaced, if they have to; takes up to LOOK_S."""
        try:
            self._processes.check(LOOK_S, self._woken)
        except RankFailure as failure:
            return str(failure)
        if self._woken.poll():
            return self._woken.recv()
        now = time.monotonic()
        try:
            while self._work and (self._work[0].epoch != self.epoch or self._work[0].event.query()):
                self._work.popleft()
                self._turned = now
        except Exception as error:
            return f"rank 0's device failed: {error}"
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
            except Exception as error:  # whatever it is, the robot stands still until it is mended
                self.degraded_reason = f'{reason}; starting them again failed: {error}'
                _log.error('%s', self.degraded_reason)
                if self._pause(RETRY_S[min(attempt, len(RETRY_S) - 1)]):
                    return
        while self._woken.poll():  # of the epoch that is over
            self._woken.recv()
        self._failed.clear()
        self.epoch += 1
        self.degraded_reason = ''
        _log.warning('the processes of the model are complete again after %.1f s', time.monotonic() - start)

    def _pause(self, seconds: float) -> bool:
        """Wait; return whether there is nothing to wait for any more."""
        deadline = time.monotonic() + seconds
        while not self._closed and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._closed

    def _end(self) -> None:
        self._work.clear()
        if self._processes is None:
            return
        with exit_after(DISSOLVING_S):
            self._processes.kill()  # before: what they hold of a message is to be let go
            self._dissolve()
            self._processes.stop()
        self._processes = None


@contextmanager
def exit_after(seconds: float) -> Iterator[None]:
    """End this process, with exit code 1 and all threads' stacks on its standard error, if what is done in this context
    takes longer.

    A collective with a dead peer can hang while holding the GIL, so the time is kept by a thread that needs no Python. It is
    ``faulthandler.dump_traceback_later``, of which a process has one: another use of it meanwhile is lost.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=STANDARD_ERROR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
