"""What ends this process when nothing else can."""
from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager

STANDARD_ERROR = 2  # by its number: who runs a node may have replaced sys.stderr by what is no file


@contextmanager
def or_end(seconds: float) -> Iterator[None]:
    """Ends this process, with exit code 1 and all threads' stacks on its standard error, if what is done in this
    context takes longer.

    A device that waits for the dead may let nobody go, not even who holds Python's lock: so the time is kept by a
    thread that needs no Python. It is `faulthandler.dump_traceback_later`, of which a process has one: another use of
    it meanwhile is lost.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=STANDARD_ERROR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
