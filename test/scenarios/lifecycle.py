"""The lifecycle of the world model while its robot, which was driving, waits for it."""

import time

from scenarios.checks import drives_on, stays_stopped, stopped_within
from scenarios.rig import Rig

RECOVERY = 10.0  # s


def lifecycle_cycles(rig: Rig) -> None:
    """What many cycles leave behind is seen without a robot (test_model_process.py)."""
    rig.drive()
    start = time.monotonic()
    rig.bring_model_to('inactive')
    stop = stopped_within(rig, start, 1.0)
    for _ in range(2):
        rig.bring_model_to('unconfigured', 'inactive', 'active', 'inactive')
    stays_stopped(rig, stop + 0.05)
    rig.bring_model_to('active')
    drives_on(rig, RECOVERY)
