"""Images to ticks, as the live node and the reading of bags do it: paced, read, and watched for a frozen camera."""
from types import SimpleNamespace

import numpy as np
import pytest
from bag_messages import TYPES, image_message
from pixel_encodings import ALIKE, EXACT
from rclpy.serialization import deserialize_message
from sensor_msgs.msg import CompressedImage, Image

from worldmodel_ros.inputs import images
from worldmodel_ros.inputs.ticks import NS, FrameSettings, Frames, Pace
from worldmodel_ros.inputs.images import ImageError

START = 1_000 * NS
SIZE = (16, 16)


def picture(seed=0, size=(24, 32)):
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)


def raw(seed=0):
    pixels = picture(seed)
    return SimpleNamespace(height=24, width=32, encoding='rgb8', step=96, data=pixels.ravel())


def play(frames, messages, moving=True, period=0.1, settings=FrameSettings()):
    """Give a camera's images one after another; return what became of each."""
    return [frames.take(message, START + round(k * period * NS), moving, k * period, settings)
            for k, message in enumerate(messages)]


def test_only_ticks_are_decoded():
    broken = SimpleNamespace(encoding='rgb8', height=24, width=32, step=96, data=np.zeros(5, np.uint8))
    result = play(Frames(0.1, SIZE), [raw(), broken, broken, raw(1)], period=1 / 30)
    assert [frame.pace for frame in result] == [Pace.NEW_EPISODE, Pace.BETWEEN, Pace.BETWEEN, Pace.TICK]
    assert [frame.image is not None for frame in result] == [True, False, False, True]
    assert result[0].image.shape == (*SIZE, 3)


def test_after_an_image_that_cannot_be_read_the_next_one_is_the_tick():
    frames = Frames(0.1, SIZE)
    play(frames, [raw()])
    with pytest.raises(ImageError):
        frames.take(SimpleNamespace(encoding='16UC1', height=1, width=1, step=2, data=b'ab'), START + NS // 10, True,
                    0.1, FrameSettings())
    assert frames.take(raw(1), START + NS * 13 // 100, True, 0.13, FrameSettings()).pace is Pace.TICK


def test_a_camera_that_froze_gives_no_ticks_until_it_has_recovered_and_then_a_new_episode():
    messages = [raw(0)] * 9 + [raw(k) for k in range(1, 8)]
    result = [frame.pace for frame in play(Frames(0.1, SIZE), messages)]
    assert result[:7] == [Pace.NEW_EPISODE] + [Pace.TICK] * 5 + [Pace.FROZEN]
    assert result[7:12] == [Pace.FROZEN] * 5  # the first three that change are waited for
    assert result[12] is Pace.NEW_EPISODE and result[13:] == [Pace.TICK] * 3


def test_forgetting_begins_an_episode_and_trusts_the_camera_again():
    frames = Frames(0.1, SIZE)
    play(frames, [raw()] * 9)
    assert frames.frozen
    frames.forget()
    assert not frames.frozen
    assert frames.take(raw(), START + NS, True, 1.0, FrameSettings()).pace is Pace.NEW_EPISODE


@pytest.mark.parametrize('encoding', [*EXACT, *ALIKE, 'mono8', 'jpeg', 'png'])
def test_a_message_of_rclpy_and_one_out_of_a_bag_give_the_same_picture(encoding):
    message = image_message(picture(size=(48, 64)), START, encoding)
    kind, name = ((CompressedImage, 'CompressedImage') if encoding in ('jpeg', 'png') else (Image, 'Image'))
    cdr = bytes(TYPES.serialize_cdr(message, f'sensor_msgs/msg/{name}'))
    ours = images.read(TYPES.deserialize_cdr(cdr, f'sensor_msgs/msg/{name}'), SIZE)
    assert np.array_equal(ours, images.read(deserialize_message(cdr, kind), SIZE))


def test_whoever_sorts_the_images_later_gets_every_one():
    frames = Frames(0.1, SIZE)
    result = play(frames, [raw(k) for k in range(9)], period=1 / 60, settings=FrameSettings(every_image=True))
    assert [frame.pace for frame in result] == [Pace.NEW_EPISODE, *[Pace.BETWEEN] * 5, Pace.TICK, *[Pace.BETWEEN] * 2]
    assert all(frame.image is not None for frame in result)
