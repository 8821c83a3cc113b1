"""Ends processes as a crash would."""

import os
import signal
import time

from worldmodel_ros.bringup.shared_memory import owned_segments, remove_segments

_END = 5.0  # s


def kill(pid: int) -> None:
    """Send SIGKILL to a process, not a child of this one, wait for its end, and remove what it leaves."""
    segments = owned_segments(pid)
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + _END
    while segments and remove_segments(segments[:1]) == 0 and time.monotonic() < end:
        time.sleep(0.002)
    remove_segments(segments[1:])
