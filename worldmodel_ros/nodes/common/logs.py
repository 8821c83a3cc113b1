"""How often a node logs the same."""

from typing import Any

from rclpy.clock import Clock, ClockType

_STEADY = Clock(clock_type=ClockType.STEADY_TIME)


def at_most_every(seconds: float) -> dict[str, Any]:
    """
    Return arguments for a logger, by which this place of the code logs once in so many seconds.

    By the steady clock: by the wall clock, rclpy's default, it would be silent for as long as that is set back.
    """
    return {'throttle_duration_sec': seconds, 'throttle_time_source_type': _STEADY}
