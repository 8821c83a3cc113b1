"""
Keeps a process from being blocked by the reader of its output.

A log line is written by the thread that logs, under Python's lock: where the reader of a pipe has stopped (a launcher that
hangs, a terminal on hold) and the pipe is full, the whole process blocks. A node whose work is to stop the robot in time must
not. Here standard output and error go into non-blocking pipes of the process's own, and a thread hands on what comes out; what
does not fit is dropped.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import threading

_CAPACITY = 1 << 20  # bytes, of each pipe: some thousands of lines, where the kernel allows it
_FAREWELL = 0.5      # s, for the last lines to be handed on when the process ends
_STREAMS = (1, 2)


def unblock_output() -> None:
    """Have nothing that is written to standard output or error wait for its reader. To be called once, before any logging."""
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
        pass  # more than /proc/sys/fs/pipe-max-size: 64 kB it is
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
            return  # no process reads any more; the pipe fills up and stays so
