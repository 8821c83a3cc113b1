"""A camera that fails: stops, freezes, sends what is no image, or stamps it with another time."""

import time
from itertools import pairwise

from scenarios.checks import (
    comes_to_rest,
    drives_on,
    stays_stopped,
    stopped_after_last_command,
    stopped_within,
)
from scenarios.rig import MODEL, ROBOT, Rig, has_verdict, nanoseconds
from worldmodel_ros.msg import DeadlineStatus

RECOVERY = 5.0  # s
STEP = 0.1  # s, of the model
TOLERANCE = 0.05  # s, that a tick may be early, after an image that was lost


def camera_stops(rig: Rig) -> None:
    rig.drive()
    start = time.monotonic()
    rig.set(ROBOT, camera_stop=True)
    stop = stopped_after_last_command(rig, start)
    rig.wait_for(
        'deadline_status',
        has_verdict(DeadlineStatus.STALE_INPUT, 'no image'),
        'the missing camera to be named',
        1.0,
        since=start,
    )
    comes_to_rest(rig)
    stays_stopped(rig, stop)
    rig.set(ROBOT, camera_stop=False)
    drives_on(rig, RECOVERY)


def camera_freezes(rig: Rig) -> None:
    rig.drive()
    before = rig.refused(MODEL)
    start = time.monotonic()
    rig.set(ROBOT, camera_freeze=True)
    # frozen_camera_timeout_s (0.5 s), on top of the time that it takes to see the first repetition.
    stop = stopped_within(rig, start, 1.0)
    rig.wait_for(
        'deadline_status',
        has_verdict(DeadlineStatus.STALE_INPUT, 'frozen'),
        'the frozen camera to be named',
        since=start,
    )
    rig.wait_for_refusal(MODEL, 'image: frozen camera', before)
    stays_stopped(rig, stop)
    rig.set(ROBOT, camera_freeze=False)
    drives_on(rig, RECOVERY)


def images_are_broken(rig: Rig) -> None:
    for fault, reason in (
        ({'camera_encoding': 'rgb7'}, 'wrong encoding'),
        ({'camera_break': 'empty'}, 'empty'),
        ({'camera_break': 'short'}, 'wrong size'),
        ({'camera_break': 'wrong_size'}, 'wrong size'),
    ):
        rig.drive()
        before = rig.refused(MODEL)
        start = time.monotonic()
        rig.set(ROBOT, **fault)
        stop = stopped_after_last_command(rig, start)
        rig.wait_for_refusal(MODEL, f'image: {reason}', before)
        stays_stopped(rig, stop)
        rig.restore()
        drives_on(rig, RECOVERY)


def stamps_are_of_another_time(rig: Rig) -> None:
    for offset in (-5.0, 5.0):
        rig.drive()
        before = rig.refused(MODEL)
        start = time.monotonic()
        rig.set(ROBOT, clock_offset_s=offset)
        stop = stopped_after_last_command(rig, start)
        if offset < 0.0:
            rig.wait_for(
                'deadline_status',
                has_verdict(DeadlineStatus.STALE_INPUT, 'old on receipt'),
                'old images to be named',
                since=start,
            )
        else:
            rig.wait_for_refusal(MODEL, 'image: stamp in the future', before)
        stays_stopped(rig, stop)
        rig.set(ROBOT, clock_offset_s=0.0)
        drives_on(rig, RECOVERY)


def camera_is_faster_than_the_model(rig: Rig) -> None:
    rig.drive()
    rig.set(ROBOT, camera_rate_hz=30.0)
    start = rig.watch(2.0)
    images = len(rig.observer.since('camera/image_raw', start))
    assert images >= 40, f'{images} images in 2 s'
    ticks = [r.message for r in rig.observer.since('deadline_status', start)]
    stamps = sorted({nanoseconds(tick.header.stamp) for tick in ticks})
    nearest = min(b - a for a, b in pairwise(stamps)) / 1e9
    assert nearest >= STEP - TOLERANCE, f'two ticks are only {nearest * 1e3:.0f} ms apart'
    assert len(ticks) == len(stamps) >= 14, f'{len(ticks)} answers to {len(stamps)} images'
    drives_on(rig, RECOVERY)
