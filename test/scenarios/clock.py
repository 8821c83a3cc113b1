"""ROS time from a simulator: /clock stands still, and jumps back."""

import time

from scenarios.checks import drives_on, stays_stopped, stopped_within
from scenarios.rig import GATE, MODEL, ROBOT, Rig, answers, has_verdict
from worldmodel_ros.msg import DeadlineStatus

RECOVERY = 5.0  # s
# The images go on, and after 5 ms the gate takes them for ones of the future: from then on no command passes.
STOP_AFTER_CLOCK = 0.1 + 0.150  # s, one tick and what a silent model takes


def clock_stops(rig: Rig) -> None:
    rig.drive()
    before = rig.refused(MODEL)
    start = time.monotonic()
    rig.set(ROBOT, clock_stop=True)
    stop = stopped_within(rig, start, STOP_AFTER_CLOCK)
    rig.wait_for_refusal(MODEL, 'image: stamp in the future', before)
    assert rig.next_report(GATE), 'the diagnostics have stopped with the clock'
    stays_stopped(rig, stop)
    rig.set(ROBOT, clock_stop=False)
    drives_on(rig, RECOVERY)


def time_jumps_back(rig: Rig) -> None:
    _jumps(rig, -30.0)


def time_jumps_ahead(rig: Rig) -> None:
    _jumps(rig, 30.0)


def _jumps(rig: Rig, offset: float) -> None:
    rig.drive()
    episode = rig.observer.newest('action_chunk').message.episode_id
    stamp = rig.observer.newest('cmd_vel').message.header.stamp.sec
    rig.set(ROBOT, clock_offset_s=offset)
    again = rig.wait_for(
        'cmd_vel',
        lambda m: answers(m) and (m.header.stamp.sec - stamp) * offset > 0.5 * offset**2,
        'commands that answer images of the new time',
        RECOVERY,
    )
    # It was sent before the command, but may be heard after it.
    rig.wait_for(
        'action_chunk',
        lambda m: m.header.stamp == again.message.header.stamp and m.episode_id > episode,
        'a new episode with the jump',
        1.0,
        since=again.at - 1.0,
    )
    rig.watch(1.0)
    ticks = [r.message for r in rig.observer.since('deadline_status', again.at)]
    stale = [tick.reason for tick in ticks if has_verdict(DeadlineStatus.STALE_INPUT)(tick)]
    assert ticks and not stale, stale
    drives_on(rig, RECOVERY)
