"""Where a camera stands is read off tf, and told where it differs from the training."""
import math

import pytest
from geometry_msgs.msg import TransformStamped

from worldmodel_ros.inputs.mount import Frames, Mount


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
