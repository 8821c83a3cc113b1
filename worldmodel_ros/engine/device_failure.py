"""Failures of this process's device, after which it must be restarted, and of a model's other processes."""
from __future__ import annotations

import os
import sys
import traceback

from ..exit_codes import DEVICE_LOST

_STANDARD_ERROR = 2  # by number, as a node's host may have replaced sys.stderr by something that is not a file
# CUDA error codes of <driver_types.h> after which the process must be terminated and relaunched, or whose device is gone.
# Out of memory, invalid arguments and the like are not among them.
_CODES = frozenset((46, 214, 220, 221, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 999))
# Their messages, for errors without a code (before torch 2.8, and from libraries).
_WORDS = ('illegal memory access', 'device-side assert', 'launch timed out', 'hardware stack error', 'illegal instruction',
          'misaligned address', 'operation not supported on global/shared address space', 'invalid program counter',
          'unspecified launch failure', 'uncorrectable ecc', 'uncorrectable nvlink', 'device has been lost',
          'gpu is lost', 'device(s) is/are busy or unavailable')


class RankFailure(RuntimeError):
    """A process of a model on several devices has died, or has not answered in time. The processes are replaced; sessions
    keep the observations that come meanwhile, and look ahead again once all are back."""


def is_lost(error: BaseException | None) -> bool:
    """Return whether after an error, or one that caused it, every later call to the device fails."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        # A RankFailure is about another process's device: that process is replaced. Its cause may be this one's device.
        if isinstance(error, RuntimeError) and not isinstance(error, RankFailure):
            text = str(error).lower()
            code = getattr(error, 'error_code', None)
            if isinstance(code, int) and code in _CODES:
                return True
            if ('cuda' in text or 'device' in text) and any(words in text for words in _WORDS):
                return True
        error = error.__cause__ or error.__context__
    return False


def end_if_lost(error: BaseException) -> None:
    """
    End this process with DEVICE_LOST, and the reason on its standard error, if an error ``is_lost``; else return.

    It ends at once, without cleaning up: the resources are on the device, and the libraries that own them abort or hang
    when asked to release them. The gate stops the robot, and the supervisor of the process restarts it.
    """
    if not is_lost(error):
        return
    story = ''.join(traceback.format_exception(error))
    # Not by a logger, which may publish, or hand its lines to a thread that will never run again.
    os.write(_STANDARD_ERROR, f'{story}the device is lost to this process, in which every later call would fail: it ends '
                              f'with exit code {DEVICE_LOST}, to be started again\n'.encode(errors='replace'))
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        pass
    os._exit(DEVICE_LOST)

