"""
SIGINT and SIGTERM: as an exception in the main thread while a program starts, and then as a request to end.

An exception may come between any two instructions, also where a lock has just been taken, or where a waiting thread has been
told something and is not yet crossed off: then a thread waits for good. So a program whose threads share locks has an ``End``.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_REPEATED_AFTER = 0.01  # s


class Interrupted(BaseException):
    """A signal came. Not an Exception, so that no handler on the way swallows it."""


def raise_interrupted() -> None:
    """
    Make the next SIGINT or SIGTERM raise Interrupted, and later ones be ignored. Call it from the main thread.

    Python drops an exception that a signal's handler raises in ``__del__`` or in a callback of a weak reference (the import
    system has some): it reports the exception as ignored, and the program would go on without an end. So the signal is then
    sent again until the exception was raised elsewhere.
    """
    raised = dropping = False
    before = sys.unraisablehook

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        if dropping:  # what is raised in the hook is dropped without another call of it
            return
        raised = True
        ignore()  # Ctrl-C in a terminal under ``ros2 launch`` arrives twice
        raise Interrupted

    def install() -> None:
        for number in SIGNALS:
            signal.signal(number, handle)

    def repeat() -> None:
        while True:
            time.sleep(_REPEATED_AFTER)
            if raised:
                return
            os.kill(os.getpid(), signal.SIGINT)

    def hook(unraisable: 'sys.UnraisableHookArgs') -> None:
        nonlocal raised, dropping
        if isinstance(unraisable.exc_value, Interrupted):
            dropping, raised = True, False
            install()
            threading.Thread(target=repeat, name='interrupt', daemon=True).start()
            dropping = False
        else:
            before(unraisable)
    install()
    sys.unraisablehook = hook


class End:
    """
    What both signals ask for from its creation on, which is in the main thread. ``asked``: whether one came, or ``ask`` was
    called. A selector may wait for it: it is readable once asked.
    """

    def __init__(self) -> None:
        self.asked = False
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: self.ask())

    def fileno(self) -> int:
        """Return what a selector waits for."""
        return self._read

    def ask(self) -> None:
        """Ask for the end; from any thread."""
        self.asked = True
        with suppress(BlockingIOError):  # asked often
            os.write(self._write, b'.')


def as_ctrl_c() -> None:
    """
    Make SIGTERM, and SIGHUP of a terminal that is closed, raise KeyboardInterrupt as Ctrl-C does.

    Call it from the main thread. A signal that is ignored stays so: SIGHUP under ``nohup``.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


def ignore() -> None:
    """Ignore both signals from now on."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
