"""The thread of the service: does one piece of work after another, and sleeps while there is none."""
from __future__ import annotations

import gc
import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future as Promise

from worldmodel_ros.engine.device_failure import end_if_lost
from worldmodel_ros.realtime import Urgency, apply

LOG = logging.getLogger(__name__)
SWITCH_INTERVAL = 5e-4  # s that a thread of the process may run Python while another wants to


class ServiceThread:
    """``wake``: held where something is handed in. ``priority``: under SCHED_FIFO; 0 for none."""

    def __init__(self, wake: threading.Condition, priority: int):
        self._wake, self._priority = wake, priority
        self._news = False  # something was handed in since the last look
        self._thread: threading.Thread | None = None
        self._urgency: Urgency | None = None
        self.running = False

    def start(self, prepare: Callable[[], None], step: Callable[[], float | None]) -> None:
        """Returns when ``prepare`` has, in the thread, and raises what it raises.

        Then ``step`` is called again and again; it returns how long there is nothing to do [s], None for until more
        comes.
        """
        ready = Promise()
        self.running = True
        self._thread = threading.Thread(target=self._run, args=(prepare, step, ready), name='service', daemon=True)
        self._thread.start()
        ready.result()

    def stop(self) -> None:
        """Ends after the step in progress."""
        with self._wake:
            self.running = False
            self.stir()
        if self._thread:
            self._thread.join()
        self._thread = None

    def stir(self) -> None:
        """Something was handed in. To be called with ``wake`` held."""
        self._news = True
        self._wake.notify()

    def is_urgent(self, urgent: bool) -> None:
        """What the thread does next is urgent, or can wait; to be called in it."""
        if self._urgency:
            self._urgency.urgent = urgent

    def _run(self, prepare: Callable[[], None], step: Callable[[], float | None], ready: Promise) -> None:
        apply(LOG, self._priority)  # it changes what `prepare` measures
        # Another thread that runs Python, to take a tick or to read a socket, would keep this one waiting for as long.
        sys.setswitchinterval(SWITCH_INTERVAL)
        try:
            prepare()
        except Exception as error:
            ready.set_exception(error)
            return
        # A collection of what start-up has left behind takes longer than a step.
        gc.collect()
        gc.freeze()
        self._urgency = Urgency()
        ready.set_result(None)
        while self.running:
            self._news = False  # before the look: what comes during it calls for another
            try:
                patience = step()
            except Exception as error:  # of the service itself, not of a session: others must go on
                end_if_lost(error)
                LOG.exception('the service goes on after an error of its own')
                continue
            with self._wake:
                if self.running and not self._news and patience != 0.0:
                    self._wake.wait(patience)
