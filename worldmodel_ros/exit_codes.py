"""Exit codes by which a process of this package tells who started it what became of it."""
import os
import signal
from types import FrameType

# What it was started with is refused: started again in the same way, it would end in the same way. Also the code with
# which argparse refuses an option.
BAD_CONFIGURATION = 2

# The robot was safe, and the model too slow on this machine: its predictions came too late, or not at all.
TOO_SLOW = 3

# The GPU is lost to this process (engine/device_failure.py): to be started again, which the supervisor and the launch files
# do, as after any end but BAD_CONFIGURATION.
DEVICE_LOST = 4


def exit_when_interrupted(code: int) -> None:
    """
    End this process with that exit code at SIGINT, at once and without a traceback, until it has a handler of its own.

    To be called from the main thread before the imports, which take a second or more and have nothing to clean up. SIGINT
    is unblocked: who starts the process may hold it back until here (bringup/process.py), so that it cannot come before
    Python has started.
    """
    def end(number: int, frame: FrameType | None) -> None:
        os._exit(code)

    signal.signal(signal.SIGINT, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
