"""A camera that fails while the rest of the driver goes on."""

import time
from functools import partial

from faults.matrix import DEGRADED, RECOVERED, Seen, case
from faults.seen import PAUSE, afterwards, drives_through, right_after_a_command
from faults.systems import MODEL, ONE_ROBOT, ROBOT, Running
from scenarios.checks import stays_stopped, stopped_within
from scenarios.rig import answers

CAMERA_TIMEOUT = 0.25        # s, camera_timeout_s of the model node
STOP_AFTER_IMAGE = 0.250     # s, one period of the camera and STOP_LATENCY
FROZEN = 1.0                 # s, frozen_camera_timeout_s (0.5 s), and the time to see the first repetition


def _stops_for(faults: dict, refusal: str, bound: float, running: Running) -> Seen:
    rig = running.rig
    right_after_a_command(rig)
    before = rig.refused(MODEL)
    start = time.monotonic()
    rig.set(ROBOT, **faults)
    at = stopped_within(rig, start, bound)
    if refusal:
        rig.wait_for_refusal(MODEL, f'image: {refusal}', before)
    stays_stopped(rig, at)
    rig.restore()
    return Seen(afterwards(rig), at - start)


for _name, _faults, _refusal, _bound, _what in (
    ('camera_stops', {'camera_stop': True}, '', STOP_AFTER_IMAGE, 'The camera sends nothing more'),
    ('camera_freezes', {'camera_freeze': True}, 'frozen camera', FROZEN, 'The camera sends the same image again and again'),
    ('camera_empty', {'camera_break': 'empty'}, 'empty', STOP_AFTER_IMAGE, 'Images without data'),
    ('camera_cut_short', {'camera_break': 'short'}, 'wrong size', STOP_AFTER_IMAGE, 'Images with half of their data'),
    ('camera_encoding', {'camera_encoding': 'rgb7'}, 'wrong encoding', STOP_AFTER_IMAGE,
     'Images with an encoding that there is not'),
    ('camera_ahead', {'clock_offset_s': 5.0}, 'stamp in the future', STOP_AFTER_IMAGE, "The camera's clock is 5 s ahead"),
    ('camera_behind', {'clock_offset_s': -5.0}, '', STOP_AFTER_IMAGE, "The camera's clock is 5 s behind"),
):
    case(ONE_ROBOT, RECOVERED, 'to the stop', _bound, name=_name, what=_what)(
        partial(_stops_for, _faults, _refusal, _bound))


@case(ONE_ROBOT, f'{DEGRADED}the rate of the model', 'longest pause', PAUSE)
def camera_too_fast(running: Running) -> Seen:
    """The camera sends 50 images a second"""
    rig = running.rig
    rig.drive()
    rig.set(ROBOT, camera_rate_hz=50.0)
    start = rig.watch(3.0)
    pause = drives_through(rig, start)
    commands = len([r for r in rig.observer.since('cmd_vel', start) if answers(r.message)])
    images = len(rig.observer.since('camera/image_raw', start))
    assert images >= 100, f'{images} images in 3 s'
    rate = commands / 3.0
    return Seen(f'{DEGRADED}the rate of the model' if 7.0 <= rate <= 11.0 else f'{rate:.1f} commands a second', pause)
