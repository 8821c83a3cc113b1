"""The thread that runs an engine: does one piece of work after another, and sleeps while there is none."""
from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future as Promise
from contextlib import AbstractContextManager, ExitStack, nullcontext

from worldmodel_ros import realtime

_NICENESS = -10


class WorkThread:
    """
    Does one step after another, most urgent first. `wake` is to be held where something is handed in.

    It holds none of what it runs: who stops it can be forgotten at once, with the memory that it has on a device.
    """

    def __init__(self, name: str) -> None:
        self.wake = threading.Condition()
        self.running = False
        self._name = name
        self._news = False  # something was handed in since the last look
        self._thread: threading.Thread | None = None
        self._urgency: Urgency | None = None

    def start(self, step: Callable[[], float | None], failed: Callable[[Exception], None],
              surroundings: Callable[[], AbstractContextManager] = nullcontext) -> None:
        """
        Start the thread, which enters `surroundings`, and then calls `step` until it is stopped.

        A step returns how long there is nothing to do [s], None for until more comes. What it raises is told to
        `failed`, and the thread goes on. Returns when `surroundings` is entered, and raises what that raises.
        """
        entered: Promise = Promise()
        self.running = True
        self._thread = threading.Thread(
            target=self._run, args=(step, failed, surroundings, entered), name=self._name, daemon=True)
        self._thread.start()
        entered.result()

    def stop(self) -> None:
        """End the thread after the step in progress."""
        with self.wake:
            self.running = False
            self.stir()
        if self._thread:
            self._thread.join()
        self._thread = None

    def stir(self) -> None:
        """Something was handed in. To be called with `wake` held."""
        self._news = True
        self.wake.notify()

    def urgent(self, urgent: bool) -> None:
        """
        What comes next in this step is urgent, or can wait: under SCHED_FIFO, where the thread is, or not.

        To be called in the thread. The next step begins urgent again.
        """
        if self._urgency:
            self._urgency.urgent = urgent

    def _run(self, step: Callable[[], float | None], failed: Callable[[Exception], None],
             surroundings: Callable[[], AbstractContextManager], entered: Promise) -> None:
        with ExitStack() as stack:
            try:
                stack.enter_context(surroundings())
            except Exception as error:
                entered.set_exception(error)
                return
            self._urgency = Urgency()
            entered.set_result(None)
            while self.running:
                self._news = False  # before the look: what comes during it calls for another
                try:
                    patience = step()
                except Exception as error:  # whatever it is, the robots need their next answers
                    failed(error)
                    patience = 0.0
                self.urgent(True)  # to be woken at once
                with self.wake:
                    if self.running and not self._news and patience != 0.0:
                        self.wake.wait(patience)


class Urgency:
    """
    Has the calling thread run under SCHED_FIFO, if it did so when this was made, only while its work is `urgent`.

    Linux gives real-time threads 95 % of a processor (sched(7), `sched_rt_runtime_us`) and then stops all of them there
    for up to 50 ms, however urgent: a thread that fills a processor with work that can wait would have the watchdogs
    throttled with it. Such work runs in the ordinary class, with a niceness that other programs do not have.
    """

    def __init__(self) -> None:
        self._priority, self._urgent = realtime.priority_of(0), True
        if self._priority:
            try:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # counts in the ordinary class only
            except PermissionError:
                pass

    @property
    def urgent(self) -> bool:
        """Whether the thread runs under SCHED_FIFO, where that is permitted."""
        return self._urgent

    @urgent.setter
    def urgent(self, urgent: bool) -> None:
        if self._priority and urgent is not self._urgent:
            policy, priority = (os.SCHED_FIFO, self._priority) if urgent else (os.SCHED_OTHER, 0)
            os.sched_setscheduler(0, policy, os.sched_param(priority))
        self._urgent = urgent


def uncancellable_future() -> Promise:
    """Return a future whose work has begun, as it were: who does not want its result may forget it."""
    promise: Promise = Promise()
    promise.set_running_or_notify_cancel()
    return promise
