"""Exit codes with which a process of this package tells its parent how it ended."""
import os
import signal
from types import FrameType

# The configuration is refused: a restart with the same one would end the same way. Also argparse's code for a bad option.
BAD_CONFIGURATION = 2

# The robot was safe, but the model too slow on this machine: its predictions came too late, or not at all.
TOO_SLOW = 3

# The process has lost the GPU (engine/device_failure.py) and must be restarted, which the supervisor and the launch files do,
# as after any exit except BAD_CONFIGURATION.
DEVICE_LOST = 4


def exit_when_interrupted(code: int) -> None:
    """
    Make SIGINT end this process at once with that exit code, without a traceback, until it installs its own handler.

    Call it from the main thread before the imports, which take a second or more and have nothing to clean up. SIGINT is
    unblocked: the parent process may have blocked it until here (bringup/process.py), so that it cannot arrive before
    Python has started.
    """
    def end(number: int, frame: FrameType | None) -> None:
        os._exit(code)

    signal.signal(signal.SIGINT, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
