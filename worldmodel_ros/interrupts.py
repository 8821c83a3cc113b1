"""SIGINT and SIGTERM as an exception in the main thread."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_REPEATED_AFTER = 0.01  # s


class Interrupted(BaseException):
    """A signal came. Not an Exception, so that no handler on the way swallows it."""


def raise_interrupted() -> None:
    """Make the next SIGINT or SIGTERM raise Interrupted, and later ones be ignored. Call it from the main thread."""
    def handle(number: int, frame: FrameType | None) -> None:
        ignore()  # Ctrl-C in a terminal under ``ros2 launch`` arrives twice
        raise Interrupted

    def install() -> None:
        for number in SIGNALS:
            signal.signal(number, handle)
    install()
    repeat_if_dropped(install)


def ignore() -> None:
    """Ignore both signals from now on."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def repeat_if_dropped(prepare: Callable[[], object]) -> None:
    """
    Where Python has dropped an Interrupted, call ``prepare()`` and send the signal again.

    Python drops an exception that a signal's handler raises in ``__del__`` or in a callback of a weak reference (the import
    system has some): it reports the exception as ignored, and the program would go on without an end.
    """
    before = sys.unraisablehook

    def hook(unraisable: 'sys.UnraisableHookArgs') -> None:
        if isinstance(unraisable.exc_value, Interrupted):
            prepare()
            threading.Timer(_REPEATED_AFTER, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            before(unraisable)
    sys.unraisablehook = hook
