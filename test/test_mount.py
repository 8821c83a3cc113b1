"""Where a camera stands is read off tf, and told where it differs from the training."""
import json
import math
from pathlib import Path

import pytest
from geometry_msgs.msg import TransformStamped

from worldmodel_ros.inputs import mount
from worldmodel_ros.inputs.mount import Frames, Mount

RESULTS = Path(__file__).parents[1] / 'benchmarks' / 'results'


def transform(parent, child, place=(0.0, 0.0, 0.0), rpy=(0.0, 0.0, 0.0)):
    message = TransformStamped()
    message.header.frame_id, message.child_frame_id = parent, child
    t, q = message.transform.translation, message.transform.rotation
    t.x, t.y, t.z = place
    (sr, cr), (sp, cp), (sy, cy) = ((math.sin(angle / 2), math.cos(angle / 2)) for angle in rpy)
    q.w, q.x = cr * cp * cy + sr * sp * sy, sr * cp * cy - cr * sp * sy
    q.y, q.z = cr * sp * cy + sr * cp * sy, cr * cp * sy - sr * sp * cy
    return message


OPTICAL = (-math.pi / 2, 0.0, -math.pi / 2)  # REP 103: of an optical frame in the camera's own


def robot(*more):
    """Return the frames of a robot whose camera looks 15 degrees down from 0.32 m above its base, turned to the left."""
    frames = Frames()
    for each in (transform('base_link', 'mast', (0.1, 0.05, 0.30)),
                 transform('mast', 'camera', (0.0, 0.0, 0.02), (0.0, math.radians(15.0), 0.4)),
                 transform('camera', 'camera_optical_frame', rpy=OPTICAL), *more):
        frames.add(each)
    return frames


def test_height_and_pitch_follow_from_the_chain_of_transforms():
    found = robot().mount('base_link', 'camera_optical_frame')
    assert (found.height, found.pitch) == pytest.approx((0.32, 15.0))


def test_the_floor_is_where_base_footprint_is():
    frames = robot(transform('base_footprint', 'base_link', (0.0, 0.0, 0.08)))
    assert frames.mount('base_link', 'camera_optical_frame').height == pytest.approx(0.40)


@pytest.mark.parametrize('camera', ['nowhere', 'camera_left'])
def test_a_camera_that_is_not_connected_with_the_base_stands_nowhere(camera):
    assert robot(transform('other', 'camera_left')).mount('base_link', camera) is None


def test_a_circle_and_broken_numbers_do_no_harm():
    frames = robot(transform('b', 'a'), transform('a', 'b'), transform('base_link', 'mast', (0.0, 0.0, math.nan)))
    assert frames.mount('base_link', 'a') is None
    assert frames.mount('base_link', 'camera_optical_frame').height == pytest.approx(0.32)


def test_differences_are_told_beyond_the_tolerance_only():
    assert Mount(0.26, 9.0).differences(0.25, 8.0) == []
    assert Mount(0.35, 3.0).differences(0.25, 8.0) == [
        '0.10 m higher than in training (0.25 m)', '5.0 degrees further up than in training (8 degrees down)']


def test_what_a_difference_costs_is_told_by_the_nearest_one_that_was_measured():
    assert Mount(0.26, 9.0).cost(0.25, 8.0) == ''
    higher = Mount(0.36, 8.0).cost(0.25, 8.0)
    assert higher.startswith('0.1 m higher: 18% of goal objects and 100% of poses')
    assert higher.endswith('(100%, 100% and 5% as in training)')
    assert 'degrees' not in higher and Mount(0.60, 8.0).cost(0.25, 8.0) == higher  # no more was measured
    both = Mount(0.19, -1.0).cost(0.25, 8.0)
    assert both.startswith('0.05 m lower: ') and '; 10 degrees further up: 38% of goal objects' in both


def test_costs_are_those_of_the_committed_results():
    colour, pose = (json.loads((RESULTS / name).read_text()) for name in ('control_mounts.json', 'control_mounts_places.json'))
    measured = {}
    for name in (None, *colour['variants']):
        rooms, places = (told['variants'][name] if name else told['tasks'] for told in (colour, pose))
        row = {'colour': rooms['rooms']['one_step']['success'], 'pose': places['places']['one_step']['success'],
               'contacts': places['places']['one_step']['contacts']}
        for kind, what in (('height', 'height_m'), ('pitch', 'pitch_deg')):
            if name is None or name.startswith(f'camera_{kind}_'):
                measured.setdefault(what, {})[name.rpartition('_')[2] if name else '0'] = row
    assert mount._costs() == measured
    assert all(list(table) == sorted(table, key=float) for table in mount._costs().values())
