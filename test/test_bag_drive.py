"""A bag as ticks: what the live node would have been given, and what was wrong with the data."""
import json
import math
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bag_messages import camera_info_message
from bags import (
    NS, at_rate, frozen, gap, late, mixed_sizes, real_drive, shift_stamps, shift_time, simulated_drive, truncate,
    without_commands, write_bag, zero_stamps)
from camera_infos import camera_info
from pixel_encodings import ALIKE, EXACT

from worldmodel_ros.bags.drive import read_drive
from worldmodel_ros.bags.guess import find_mapping
from worldmodel_ros.bags.quantiles import Quantiles
from worldmodel_ros.bags.source import open_bag
from worldmodel_ros.inputs import images
from worldmodel_ros.inputs.camera import Lens, View
from worldmodel_ros.inputs.ticks import FrameSettings
from worldmodel_ros.model.presets import TINY

CONFIGS = Path(__file__).resolve().parents[1] / 'config' / 'evaluate'


def ticks_of(path, config=None, settings=FrameSettings()):
    """All ticks of a bag, and the health of its data."""
    with open_bag(path) as bag:
        drive = read_drive(bag, find_mapping(bag, TINY, config), TINY, settings)
        return list(drive), drive.health


def kinds(health):
    return {finding.kind for finding in health.findings()}


def same(ticks, others):
    """Whether two lists of ticks are the same, bit for bit."""
    return len(ticks) == len(others) and all(
        all(np.array_equal(value, theirs[name]) for name, value in vars(tick).items())
        for tick, theirs in zip(ticks, map(vars, others)))


@pytest.fixture(scope='module')
def drive():
    return simulated_drive(seconds=4.0)


@pytest.fixture(scope='module')
def bag(drive, tmp_path_factory):
    return write_bag(tmp_path_factory.mktemp('drive') / 'bag', drive, encoding='png')


def test_a_sound_drive_gives_its_pictures_as_ticks_and_nothing_to_complain_of(bag, drive):
    ticks, health = ticks_of(bag)
    assert all(np.array_equal(tick.image, frame) for tick, frame in zip(ticks, drive.frames, strict=True))
    assert [tick.stamp_ns for tick in ticks] == list(drive.stamps)
    assert [tick.log_ns for tick in ticks] == list(drive.received)
    assert [tick.index for tick in ticks] == list(range(len(ticks)))
    assert {tick.episode for tick in ticks} == {0}
    assert [tick.goal for tick in ticks] == [drive.goals[0][1]] * len(ticks)
    assert all(tick.image.flags.writeable and tick.image.flags.c_contiguous for tick in ticks)
    assert health.findings() == []


def test_executed_is_the_time_weighted_mean_since_the_tick_before(bag, drive):
    ticks, _ = ticks_of(bag)
    commands = [(0.0, 0.0), *(command for _, command in drive.commands)]
    # Each command is received 30 ms after its frame, so that for 30 of 100 ms the one before it is in force.
    for k in range(1, len(ticks)):
        before = commands[k - 1] if k > 1 else (0.0, 0.0)
        expected = 0.3 * np.array(before) + 0.7 * np.array(commands[k])
        assert ticks[k].executed.dtype == np.float32
        assert np.allclose(ticks[k].executed, expected, atol=1e-6)
    assert not ticks[0].executed.any()


def test_recorded_is_the_command_that_answered_the_frame(bag, drive):
    ticks, _ = ticks_of(bag)
    assert np.array_equal([tick.recorded for tick in ticks], np.float32([command for _, command in drive.commands]))


@pytest.mark.parametrize(('timeout', 'in_force'), [(None, 5), (0.3, 3), (0, 20)])
def test_before_the_first_command_nothing_was_recorded_and_the_last_is_in_force_until_its_time_is_over(
        drive, tmp_path, timeout, in_force):
    few, config = replace(drive, commands=drive.commands[5:20]), None
    if timeout is not None:
        config = tmp_path / 'bag.yaml'
        config.write_text(f'executed_timeout_s: {timeout}\n')
    ticks, health = ticks_of(write_bag(tmp_path / 'bag', few), config)
    assert [tick.recorded is None for tick in ticks[:7]] == [True] * 5 + [False] * 2
    assert not ticks[5].executed.any() and ticks[6].executed.any()
    last = np.float32(few.commands[-1][1])
    assert all(np.array_equal(tick.recorded, last) for tick in ticks[20:20 + in_force])
    assert all(np.array_equal(tick.executed, last) for tick in ticks[21:20 + in_force])
    assert not any(tick.recorded.any() for tick in ticks[20 + in_force:])
    assert not any(tick.executed.any() for tick in ticks[21 + in_force:])
    assert health.findings() == []


def test_a_driver_that_tells_changes_only_is_told_of_and_can_be_named(drive, tmp_path):
    """The command that holds for a second is said once; a base with a time-out would have braked."""
    changes = replace(drive, commands=drive.commands[1:12] + drive.commands[21:])
    bag = write_bag(tmp_path / 'bag', changes)
    (finding,) = ticks_of(bag)[1].findings()
    assert (finding.kind, finding.count, finding.severity) == ('action ran out', 1, 'warning')
    assert '0.5 s' in finding.text and 'executed_timeout_s: 0' in finding.text
    (tmp_path / 'bag.yaml').write_text('executed_timeout_s: 0\n')
    ticks, health = ticks_of(bag, tmp_path / 'bag.yaml')
    assert np.array_equal(ticks[20].executed, np.float32(drive.commands[11][1])) and not health.findings()


@pytest.mark.parametrize('encoding', [*EXACT, *ALIKE, 'mono8', 'jpeg'])
def test_every_encoding_that_robots_use_is_read(bag, drive, tmp_path, encoding):
    short = replace(drive, frames=drive.frames[:5], stamps=drive.stamps[:5], received=drive.received[:5])
    ticks, health = ticks_of(write_bag(tmp_path / 'bag', short, encoding=encoding))
    assert len(ticks) == 5 and not health.findings()
    for tick, frame in zip(ticks, drive.frames):
        expected = np.repeat(tick.image[..., :1], 3, 2) if encoding == 'mono8' else frame
        error = np.abs(tick.image.astype(int) - expected).mean()
        assert error == 0.0 if encoding in EXACT or encoding == 'mono8' else error < 12.0


@pytest.mark.parametrize('storage', ['mcap', 'sqlite3'])
def test_the_same_drive_gives_the_same_ticks_bit_for_bit(bag, drive, tmp_path, storage):
    again = write_bag(tmp_path / 'bag', drive, encoding='png', storage=storage, compression='message')
    assert same(ticks_of(again)[0], ticks_of(bag)[0])


def test_a_second_pass_gives_the_same_and_counts_anew(bag):
    with open_bag(bag) as opened:
        drive = read_drive(opened, find_mapping(opened, TINY), TINY)
        assert same(list(drive), list(drive))
        assert (drive.health.images, drive.images) == (40, 40)


def test_of_a_fast_camera_only_the_ticks_are_decoded(tmp_path, monkeypatch):
    fast = simulated_drive(seconds=2.0, rate=40.0)
    decoded = []
    read = images.read
    monkeypatch.setattr(images, 'read', lambda *given: decoded.append(1) or read(*given))
    ticks, health = ticks_of(write_bag(tmp_path / 'bag', fast))
    assert (len(ticks), len(decoded), health.images, health.ticks) == (20, 20, 80, 20)
    assert {b.stamp_ns - a.stamp_ns for a, b in zip(ticks, ticks[1:])} == {NS // 10}


def test_pictures_are_cut_and_scaled_as_by_the_node(tmp_path):
    wide = simulated_drive(seconds=1.0, size=(120, 160))
    ticks, health = ticks_of(write_bag(tmp_path / 'bag', wide, encoding='rgb8'))
    assert all(np.array_equal(t.image, images.fit(f, TINY.image_size)) for t, f in zip(ticks, wide.frames, strict=True))
    assert health.sizes == {(160, 120): 10}


@pytest.mark.parametrize(('fault', 'kind', 'ticks', 'episodes'), [
    (lambda d: gap(d, 2.0, 0.5), 'gap', 35, 1),
    (lambda d: gap(d, 1.0, 1.5), 'gap', 25, 2),
    (lambda d: frozen(d, 1.5, 1.5), 'frozen camera', 28, 2),
    (lambda d: shift_time(d, 2.0, -1.5), 'time set back', 40, 2),
    (lambda d: shift_time(d, 2.0, -100.0), 'time set back', 40, 2),
    (lambda d: shift_time(d, 2.0, 100.0), 'gap', 40, 2),
    (lambda d: shift_stamps(d, 2.0, -0.45), 'stamp out of order', 36, 1),
    (lambda d: shift_stamps(d, 2.0, -0.4), 'duplicate stamp', 36, 1),
    (lambda d: shift_stamps(d, 2.0, -5.0), 'clock jump', 40, 2),
    (lambda d: shift_stamps(d, 2.0, 5.0), 'stamp in the future', 40, 2),
    (lambda d: shift_stamps(d, 0.0, -5.0), 'other clock', 40, 1),
    (lambda d: late(d, 0.1), 'stale on receipt', 40, 1),
    (lambda d: mixed_sizes(d, 2.0), 'mixed sizes', 40, 1),
    (without_commands, 'no actions', 40, 1),
    (zero_stamps, 'zero stamp', 0, 0),
    (zero_stamps, 'no ticks', 0, 0),
    (lambda d: replace(d, stamps=d.stamps[:20] * 2), 'time set back', 40, 2),
    (lambda d: replace(d, goals=((d.stamps[0], 'the moon'),)), 'unknown goal', 40, 1),
    (lambda d: replace(d, commands=((d.stamps[3], (9.0, 0.0)),)), 'action out of range', 40, 1),
    (lambda d: replace(d, commands=((d.stamps[3], (math.nan, 0.0)),)), 'action not finite', 40, 1),
    (lambda d: replace(d, commands=((d.stamps[3], (0.0, 1e20)),)), 'action not finite', 40, 1)])  # its square is not
def test_a_fault_of_the_data_is_found_told_and_worked_around(drive, tmp_path, fault, kind, ticks, episodes):
    found, health = ticks_of(write_bag(tmp_path / 'bag', fault(drive)))
    assert kind in kinds(health)
    assert (len(found), len({tick.episode for tick in found})) == (ticks, episodes)
    assert all(np.isfinite(tick.executed).all() for tick in found)
    (finding,) = [f for f in health.findings() if f.kind == kind]
    assert finding.severity in ('error', 'warning') and len(finding.text) > 40
    assert len(finding.first_stamps) <= 5


def test_a_slow_camera_is_told_of(tmp_path):
    found, health = ticks_of(write_bag(tmp_path / 'bag', simulated_drive(seconds=4.0, rate=4.0)))
    assert len(found) == 16
    assert kinds(health) == {'slow camera'}


@pytest.mark.parametrize(('rate', 'mean', 'said'), [
    (8.0, 125.0, 'faster'), (12.5, 80.0, 'slower'), (20.0, 100.0, ''), (25.0, 100.0, ''), (50.0, 100.0, ''),
    (15.0, 100.0, 'gate stops the robot'), (24.0, 100.0, 'up to 125 ms'), (60.0, 100.0, '')])
def test_a_rate_that_does_not_go_with_the_model_is_told_of(drive, tmp_path, rate, mean, said):
    found, health = ticks_of(write_bag(tmp_path / 'bag', at_rate(drive, rate)))
    assert (found[-1].stamp_ns - found[0].stamp_ns) / (len(found) - 1) == pytest.approx(mean * 1e6, rel=0.02)
    assert kinds(health) - {'frozen camera'} == ({'unfit rate'} if said else set())
    assert said in ''.join(f.text for f in health.findings() if f.kind == 'unfit rate')


def test_uneven_images_are_told_of(drive, tmp_path):
    uneven = tuple(s + 45_000_000 * (k % 2) for k, s in enumerate(drive.stamps))
    _, health = ticks_of(write_bag(tmp_path / 'bag', replace(drive, stamps=uneven, received=uneven)))
    assert 'jitter' in kinds(health)
    spacing = health.to_dict()['spacing_s']
    assert spacing['p99'] == pytest.approx(0.145, rel=0.01)


def test_the_time_of_receipt_stands_in_for_useless_stamps(drive, tmp_path):
    (tmp_path / 'bag.yaml').write_text('image_stamps: log\n')
    found, health = ticks_of(write_bag(tmp_path / 'bag', zero_stamps(drive)), tmp_path / 'bag.yaml')
    assert [tick.stamp_ns for tick in found] == list(drive.received)
    assert not health.findings()


def test_images_that_cannot_be_used_are_counted_by_reason_and_the_others_used(drive, tmp_path):
    bag = write_bag(tmp_path / 'bag', drive, encoding='rgb8')
    with open_bag(bag) as opened:
        mapping, deserialize = find_mapping(opened, TINY), opened.deserialize

        def spoilt(topic, raw):
            message = deserialize(topic, raw)
            if topic.name == mapping.image_topic and message.header.stamp.nanosec == 500_000_000:
                message.encoding = '16UC1'
            return message
        opened.deserialize = spoilt
        reading = read_drive(opened, mapping, TINY)
        assert len(list(reading)) == 36
        (finding,) = [f for f in reading.health.findings() if f.kind == 'depth image']
    assert finding.count == 4 and 'colour camera' in finding.text


def test_messages_that_cannot_be_read_are_counted_and_the_others_used(drive, tmp_path):
    bag = write_bag(tmp_path / 'bag', drive, action='Float64MultiArray')
    (tmp_path / 'bag.yaml').write_text('action_topic: /cmd_vel\nactions: {linear.x: "data[0]", angular.z: "data[2]"}\n')
    found, health = ticks_of(bag, tmp_path / 'bag.yaml')
    (finding,) = [f for f in health.findings() if f.kind == 'unreadable message']
    assert (len(found), finding.count) == (40, 40)
    assert 'data[2]' in finding.text


def test_goals_change_when_they_were_given(drive, tmp_path):
    second = 'red' if drive.goals[0][1] != 'red' else 'blue'
    changed = replace(drive, goals=(*drive.goals, (drive.stamps[20] - 1, second), (drive.stamps[30] - 1, '')))
    found, _ = ticks_of(write_bag(tmp_path / 'bag', changed))
    assert [tick.goal for tick in found] == [drive.goals[0][1]] * 20 + [second] * 10 + [''] * 10


def test_what_is_left_of_a_bag_that_was_cut_off_is_evaluated(drive, tmp_path):
    found, health = ticks_of(truncate(write_bag(tmp_path / 'bag', drive, encoding='rgb8'), 0.6))
    assert 20 < len(found) < 30
    assert not health.findings()


@pytest.mark.parametrize('seconds', [0.0, 1.0, 100.0])
def test_the_first_part_of_a_drive_is_the_same_as_in_the_whole_and_so_is_its_health(bag, drive, seconds):
    whole, _ = ticks_of(bag)
    with open_bag(bag) as opened:
        part = read_drive(opened, find_mapping(opened, TINY), TINY, seconds=seconds)
        ticks = list(part)
    assert len(ticks) == part.health.images == min(40, 1 + round(10 * seconds))
    assert same(ticks, whole[:len(ticks)])


def test_whoever_stops_early_leaves_no_thread_behind(tmp_path):
    path = write_bag(tmp_path / 'bag', simulated_drive(seconds=10.0))
    before = set(threading.enumerate())
    with open_bag(path) as bag:
        ticks = iter(read_drive(bag, find_mapping(bag, TINY), TINY))
        next(ticks)
        ticks.close()
        assert set(threading.enumerate()) <= before


def test_what_goes_wrong_while_reading_ahead_is_raised_where_ticks_are_asked_for(bag, monkeypatch):
    with open_bag(bag) as opened:
        drive = read_drive(opened, find_mapping(opened, TINY), TINY)
        monkeypatch.setattr(opened, 'deserialize', lambda topic, raw: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(drive)


@pytest.mark.parametrize('fault', [lambda d: d, zero_stamps, without_commands])
def test_health_can_be_written_as_json(drive, tmp_path, fault):
    _, health = ticks_of(write_bag(tmp_path / 'bag', fault(drive)))
    written = json.loads(json.dumps(health.to_dict(), allow_nan=False))
    assert written['images'] == 40
    assert [f['kind'] for f in written['findings']] == [f.kind for f in health.findings()]


def test_quantiles_are_right_to_one_per_cent():
    values = np.random.default_rng(0).normal(0.0, 1.0, 5000)
    quantiles = Quantiles()
    for value in values:
        quantiles.add(value)
    for share in (0.01, 0.3, 0.9, 0.99):
        assert quantiles.quantile(share) == pytest.approx(np.quantile(values, share), rel=0.02)
    assert len(quantiles) == 5000 and math.isnan(Quantiles().quantile(0.5))


def test_the_real_drive_is_read_whole():
    found, health = ticks_of(real_drive(), CONFIGS / 'donkeycar.yaml')
    assert (health.images, len(found), health.episodes) == (750, 375, 1)
    assert {round((b.stamp_ns - a.stamp_ns) / NS, 3) for a, b in zip(found, found[1:])} == {0.1}
    assert all(tick.image.std() > 5.0 for tick in found)
    assert all(tick.recorded is not None for tick in found)
    assert not health.findings()


def test_images_are_warped_by_the_camera_info_next_to_them_and_left_where_there_is_none(drive, tmp_path):
    short = replace(drive, frames=drive.frames[:5], stamps=drive.stamps[:5], received=drive.received[:5])
    told = camera_info((64, 64), 110.0)
    before = ('/camera/camera_info', 'sensor_msgs/msg/CameraInfo', drive.received[0] - 1, camera_info_message(told))
    bag = write_bag(tmp_path / 'bag', short, encoding='rgb8', extra=(before,))
    view = View(Lens.of(told), 90.0, (64, 64))
    ticks, health = ticks_of(bag)
    assert len(ticks) == 5 and not health.findings()
    assert all(np.array_equal(tick.image, view(frame, (64, 64))) for tick, frame in zip(ticks, drive.frames))
    config = tmp_path / 'bag.yaml'
    config.write_text('camera_info_topic: none\n')
    assert all(np.array_equal(tick.image, frame) for tick, frame in zip(ticks_of(bag, config)[0], drive.frames))


def test_images_of_a_bag_are_corrected_by_rectification_and_pitch_as_by_the_node(drive, tmp_path):
    short = replace(drive, frames=drive.frames[:5], stamps=drive.stamps[:5], received=drive.received[:5])
    told = camera_info((64, 64), 110.0, (-0.2, 0.05, 0.0, 0.0))
    told.p[0] = told.p[5] = 20.0
    before = ('/camera/camera_info', 'sensor_msgs/msg/CameraInfo', drive.received[0] - 1, camera_info_message(told))
    bag, config = write_bag(tmp_path / 'bag', short, encoding='rgb8', extra=(before,)), tmp_path / 'bag.yaml'
    for text, rectified, pitch in (('image_rectified: true', True, 0.0), ('image_rectified: false', False, 0.0),
                                   (f'{{image_rectified: true, camera_pitch_deg: {TINY.camera.pitch + 5.0}}}', True, 5.0)):
        config.write_text(text)
        view = View(Lens.of(told, rectified), 90.0, (64, 64), pitch)
        assert all(np.array_equal(tick.image, view(frame, (64, 64)))
                   for tick, frame in zip(ticks_of(bag, config)[0], drive.frames))


def test_a_bag_of_a_camera_that_does_not_see_enough_says_so(drive, tmp_path):
    narrow = ('/camera/camera_info', 'sensor_msgs/msg/CameraInfo', drive.received[0] - 1,
              camera_info_message(camera_info((64, 64), 60.0)))
    ticks, health = ticks_of(write_bag(tmp_path / 'bag', drive, encoding='rgb8', extra=(narrow,)))
    text = ''.join(finding.text for finding in health.findings())
    assert not ticks and 'take a wider lens' in text and 'camera_info_topic: none in the file of --config' in text
