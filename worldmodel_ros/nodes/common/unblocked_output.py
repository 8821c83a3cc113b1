"""
Keeps a process from being blocked by the reader of its output.

A log line is written by the thread that logs, under the GIL: if the reader of a pipe has stopped (a hanging launcher, a
paused terminal) and the pipe is full, the whole process blocks. A node that must stop the robot in time cannot allow that.
Here standard output and error go into the process's own non-blocking pipes, and a thread forwards their content; what does not
fit is dropped.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import threading

_CAPACITY = 1 << 20  # bytes, of each pipe: some thousands of lines, if the kernel allows it
_FAREWELL = 0.5      # s, for the last lines to be forwarded when the process ends
_STREAMS = (1, 2)


def unblock_output() -> None:
    """Make writes to standard output and error independent of their reader. Call it once, before any logging."""
    threads = [_redirect(stream) for stream in _STREAMS]

    def hand_on_the_rest() -> None:
        for stream in _STREAMS:
            os.close(stream)  # the end of the pipe, for the thread
        for thread in threads:
            thread.join(_FAREWELL)
    atexit.register(hand_on_the_rest)


def _redirect(stream: int) -> threading.Thread:
    reader = os.dup(stream)
    outlet, inlet = os.pipe()
    try:
        fcntl.fcntl(inlet, fcntl.F_SETPIPE_SZ, _CAPACITY)
    except OSError:
        pass  # above /proc/sys/fs/pipe-max-size: keep the default of 64 kB
    os.set_blocking(inlet, False)
    os.dup2(inlet, stream)
    os.close(inlet)
    thread = threading.Thread(target=_hand_on, args=(outlet, reader), name=f'output {stream}', daemon=True)
    thread.start()
    return thread


def _hand_on(outlet: int, reader: int) -> None:
    while data := os.read(outlet, 65536):
        try:
            while data:
                data = data[os.write(reader, data):]
        except OSError:
            return  # the reader is gone; the pipe fills up and further output is dropped
