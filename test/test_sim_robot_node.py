"""The simulated robot as a process on real ROS 2: what it publishes, obeys, measures and refuses."""
import logging
import math
import os
import re
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
from builtin_interfaces.msg import Duration, Time
from dds import raise_receiving_threads, received_at
from geometry_msgs.msg import Twist
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import Image
from sim_robot_rig import nanoseconds, picture, robot
from std_srvs.srv import Trigger

from worldmodel_ros import realtime
from worldmodel_ros.motion import MANEUVERS
from worldmodel_ros.msg import ActionChunk
from worldmodel_ros.nodes.common import qos
from worldmodel_ros.nodes.sim_robot import futures
from worldmodel_ros.nodes.sim_robot.futures import ACTION_NAMES
from worldmodel_ros.nodes.sim_robot.node import CLOCK_START, SLICE
from worldmodel_ros.sim.world import World
from worldmodel_ros.srv import WhatIf

pytestmark = [pytest.mark.ros, pytest.mark.untimed]


def roomy_seed(start=1_000_000):
    """A room in which the robot can drive 1 m straight on from its start."""
    for seed in range(start, start + 100):
        if not World(seed).play(np.tile((0.5, 0.0), (20, 1))).collided.any():
            return seed
    raise AssertionError('no room')


@pytest.fixture(scope='module')
def driven(tmp_path_factory):
    """One robot for the tests that leave it as they found it."""
    with robot(tmp_path_factory.mktemp('robot'), seed=roomy_seed()) as (process, onlooker):
        onlooker.process = process
        yield onlooker


@pytest.fixture
def onlooker(driven):
    yield driven
    driven.set_parameters(camera_stop=False, camera_freeze=False, camera_encoding='rgb8', camera_break='none',
                          clock_offset_s=0.0, camera_rate_hz=10.0, camera_width=64, camera_height=64,
                          publish_compressed=False)


def fresh(onlooker, topic='camera/image_raw'):
    """The first message of a topic that was surely made after now."""
    return onlooker.next(topic, 2)[1]


def pose(message):
    position, orientation = message.pose.pose.position, message.pose.pose.orientation
    return position.x, position.y, 2 * math.atan2(orientation.z, orientation.w)


def chunk(*rows, names=ACTION_NAMES, step_period=0.1):
    return ActionChunk(names=names, step_period=step_period, values=[value for row in rows for value in row])


def test_images_come_at_their_rate_stamped_at_capture(onlooker):
    images = onlooker.next('camera/image_raw', 25)
    stamps = np.array([nanoseconds(image.header.stamp) for image in images]) / 1e9
    assert np.mean(np.diff(stamps)) == pytest.approx(0.1, rel=0.01)
    now = onlooker.get_clock().now().nanoseconds / 1e9
    assert 0.0 < now - stamps[-1] < 0.5
    image = images[-1]
    assert (image.height, image.width, image.step, image.encoding) == (64, 64, 192, 'rgb8')
    assert image.header.frame_id == 'camera_optical_frame'
    assert len(image.data) == 64 * 192
    assert picture(image).std() > 5.0


@pytest.mark.parametrize('width, height', [(64, 64), (160, 120), (640, 480)])
def test_the_camera_model_fits_the_pictures(onlooker, width, height):
    assert onlooker.set_parameters(camera_width=width, camera_height=height).successful
    image = fresh(onlooker)
    infos = onlooker.received['camera/camera_info']
    onlooker.wait(lambda: infos and infos[-1].header.stamp == image.header.stamp)
    info = infos[-1]
    assert (image.width, image.height, len(image.data)) == (width, height, width * height * 3)
    assert (info.width, info.height, info.header) == (width, height, image.header)
    # 90 degrees from the upper to the lower edge, square pixels, the axis in the middle.
    f, cx, cy = height / 2, (width - 1) / 2, (height - 1) / 2
    assert info.k.tolist() == pytest.approx([f, 0.0, cx, 0.0, f, cy, 0.0, 0.0, 1.0])


def test_compressed_images_show_the_same_picture(onlooker):
    assert onlooker.set_parameters(publish_compressed=True).successful
    compressed = fresh(onlooker, 'camera/image_raw/compressed')
    raw, = (image for image in onlooker.received['camera/image_raw'] if image.header == compressed.header)
    decoded = cv2.imdecode(np.frombuffer(compressed.data, np.uint8), cv2.IMREAD_COLOR)[:, :, ::-1]
    assert compressed.format == 'jpeg'
    assert np.abs(decoded.astype(float) - picture(raw)).mean() < 6.0


def test_the_robot_moves_as_commanded_and_brakes_when_commands_cease(onlooker):
    start = pose(fresh(onlooker, 'odom'))
    truth = onlooker.drive(0.4, 0.0, 1.0)
    silence = time.monotonic()
    moved = pose(onlooker.received['odom'][-1])[0] - start[0]
    assert moved == pytest.approx(0.4, abs=0.1)
    assert truth[-1].twist.twist.linear.x == pytest.approx(0.4, abs=0.05)
    onlooker.wait(lambda: abs(onlooker.received['sim/ground_truth'][-1].twist.twist.linear.x) < 0.02)
    # The timeout of 0.5 s, the motors' time to follow, and the period of the messages.
    assert 0.4 < time.monotonic() - silence < 0.9
    assert int(onlooker.report('commands')['brakings']) >= 1


def test_odometry_is_what_slipping_encoders_tell_from_the_start_on_and_not_the_truth(onlooker):
    origin = World(roomy_seed()).pose
    odom = fresh(onlooker, 'odom')
    onlooker.wait(lambda: onlooker.received['sim/ground_truth'][-1].header.stamp == odom.header.stamp)
    truth = onlooker.received['sim/ground_truth'][-1]
    assert (odom.header.frame_id, odom.child_frame_id) == ('odom', 'base_link')
    assert truth.header.frame_id == 'world'
    x, y, yaw = pose(odom)
    cos, sin = math.cos(origin[2]), math.sin(origin[2])
    expected = (origin[0] + cos * x - sin * y, origin[1] + sin * x + cos * y)
    # The robot has driven for some seconds in the tests before this one.
    assert pose(truth)[:2] == pytest.approx(expected, abs=0.3) and pose(truth)[:2] != pytest.approx(expected, abs=1e-6)
    assert math.remainder(pose(truth)[2] - yaw - origin[2], math.tau) == pytest.approx(0.0, abs=0.3)
    for _ in range(3):
        onlooker.drive(0.3, 0.0, 0.3)
    assert onlooker.received['odom'][-1].twist.twist.linear.x == pytest.approx(0.3, abs=0.06)


def test_commands_beyond_the_motors_are_clamped_and_non_finite_ones_refused(onlooker):
    onlooker.drive(0.0, 40.0, 0.6)
    assert 1.0 < onlooker.received['sim/ground_truth'][-1].twist.twist.angular.z < 1.7
    before = int(onlooker.report('commands').get('refused: cmd_vel: not finite', 0))
    onlooker.command(math.nan, 0.0)
    onlooker.wait(lambda: onlooker.next('/diagnostics'))
    assert int(onlooker.report('commands')['refused: cmd_vel: not finite']) == before + 1


def test_each_command_is_judged_by_the_age_of_its_observation(onlooker):
    for _ in range(5):  # on a busy machine the first command, too, may be late, and the robot counts it
        before = onlooker.report('commands')
        image = fresh(onlooker)
        onlooker.command(0.0, 0.0, image.header.stamp)                   # at once
        onlooker.pass_time(0.15)
        onlooker.command(0.0, 0.0, image.header.stamp)                   # late
        onlooker.pass_time(0.1)
        onlooker.command(0.0, 0.0)                                       # answers nothing
        onlooker.pass_time(0.1)
        onlooker.command(0.0, 0.0, Time(sec=5))                          # answers what was no picture
        after = onlooker.report('commands')
        counted = {key: int(after[key]) - int(before[key])
                   for key in ('received', 'late', 'without_observation', 'unknown_observation')}
        *_, first, second = [float(text) for report in onlooker.received['/diagnostics'][-3:] for status in report.status
                             for value in status.values if value.key == 'latencies_ms' for text in value.value.split()]
        assert counted == {'received': 4, 'late': 2 + (first > 50.0), 'without_observation': 1, 'unknown_observation': 1}
        if first < 50.0:
            break
    assert first < 50.0 < 150.0 < second < 300.0


def test_objects_and_walls_are_told_with_place_and_colour(onlooker):
    message, world = fresh(onlooker, 'sim/objects'), World(roomy_seed())
    objects = {marker.text: marker for marker in message.markers if marker.ns == 'objects'}
    assert set(objects) == set(world.colours)
    red = objects['red']
    assert (red.pose.position.x, red.pose.position.y) == pytest.approx(world.position('red'), abs=0.02)
    assert red.color.r > 2 * max(red.color.g, red.color.b)
    assert sum(marker.ns == 'walls' for marker in message.markers) == 4
    assert {marker.header.frame_id for marker in message.markers} == {'world'}


def test_the_frozen_camera_repeats_one_picture_with_new_stamps(onlooker):
    assert onlooker.set_parameters(camera_freeze=True).successful
    frozen = fresh(onlooker)
    images = onlooker.next('camera/image_raw', 5)
    assert all(image.data == frozen.data for image in images)
    assert np.all(np.diff([nanoseconds(image.header.stamp) for image in images]) > 0)


def test_a_stopped_camera_publishes_nothing_until_it_goes_on(onlooker):
    assert onlooker.set_parameters(camera_stop=True).successful
    onlooker.next('odom', 3)
    have = len(onlooker.received['camera/image_raw'])
    onlooker.next('odom', 12)
    assert len(onlooker.received['camera/image_raw']) == have
    assert onlooker.set_parameters(camera_stop=False).successful
    fresh(onlooker)


@pytest.mark.parametrize('kind, length, height', [
    ('empty', 0, 64), ('short', 64 * 96, 64), ('wrong_size', 64 * 192, 128)])
def test_broken_images_are_broken_as_told(onlooker, kind, length, height):
    assert onlooker.set_parameters(camera_break=kind, camera_encoding='bayer_rggb8').successful
    image = fresh(onlooker)
    assert (len(image.data), image.height, image.encoding) == (length, height, 'bayer_rggb8')


def test_a_jump_of_the_clock_shows_in_stamps_but_not_in_the_judgement(onlooker):
    before = onlooker.report('commands')
    stamp = nanoseconds(fresh(onlooker).header.stamp)
    assert onlooker.set_parameters(clock_offset_s=-30.0).successful
    image = fresh(onlooker)
    assert nanoseconds(image.header.stamp) - stamp == pytest.approx(-30e9, abs=1e9)
    onlooker.command(0.0, 0.0, image.header.stamp)
    assert int(onlooker.report('commands')['late']) == int(before['late'])


def test_unknown_faults_and_rates_are_refused_with_what_is_allowed(onlooker):
    result = onlooker.set_parameters(camera_break='melted')
    assert not result.successful and 'none, empty, short, wrong_size' in result.reason
    assert not onlooker.set_parameters(camera_rate_hz=1000.0).successful


@pytest.mark.waiting  # the camera's schedule is a bound of real time
def test_what_if_tells_each_branch_apart_without_disturbing_the_camera(onlooker):
    observation = fresh(onlooker)
    # When DDS had them, and all of them: of the queue of one image, what this process is late for is lost.
    arrivals = []
    images = onlooker.create_subscription(Image, 'camera/image_raw', lambda _, info: arrivals.append(received_at(info)),
                                          QoSProfile(depth=1000, reliability=ReliabilityPolicy.BEST_EFFORT))
    raise_receiving_threads()
    onlooker.wait(lambda: arrivals)
    request = WhatIf.Request(
        names=list(MANEUVERS), goal='red', observation_stamp=observation.header.stamp, horizon=1.0)
    answers = [onlooker.call(onlooker.what_if, request) for _ in range(5)]
    answer = answers[0]
    assert answer.success and not answer.deadline_exceeded and answer.message == ''
    assert answer.header == observation.header
    branches = {branch.name: branch for branch in answer.branches}
    assert list(branches) == list(MANEUVERS)
    assert all(len(branch.frames) == len(branch.x) == len(branch.collision_risk) == 10
               for branch in answer.branches)
    assert branches['forward'].x[-1] > 0.3 > branches['stop'].x[-1] > branches['backward'].x[-1]
    assert branches['left'].yaw[-1] > 0.5 and branches['right'].yaw[-1] < -0.5
    assert [branch.x for branch in answers[4].branches] == [branch.x for branch in answer.branches]
    stamps = [nanoseconds(frame.header.stamp) for frame in branches['left'].frames]
    assert stamps == [nanoseconds(answer.header.stamp) + 100_000_000 * k for k in range(1, 11)]
    # The camera has kept its schedule meanwhile.
    have = len(arrivals)
    onlooker.wait(lambda: len(arrivals) > have)
    onlooker.destroy_subscription(images)
    assert max(np.diff(arrivals)) < 0.3


@pytest.mark.parametrize('change, complaint', [
    ({'names': ['sideways']}, "name 'sideways' is unknown: use one of forward"),
    ({'names': []}, 'no branch: give names'),
    ({'names': ['policy']}, "policy is the model's"),
    ({'goal': 'pink'}, "goal 'pink' is unknown: use one of red"),
    ({'horizon': math.nan}, 'horizon is nan'),
    ({'horizon': 1000.0}, 'horizon is 1000'),
    ({'actions': [chunk((0.1, 0.0), names=['joint_1', 'joint_2'])]}, r'actions\[0\]: names are'),
    ({'actions': [chunk((0.1, 0.0), step_period=0.05)]}, r'actions\[0\]: step_period is 0.05 s: .* 0.1 s'),
    ({'actions': [chunk((0.1,))]}, r'actions\[0\]: 1 values'),
    ({'actions': [chunk((math.inf, 0.0))]}, r'actions\[0\]: values must be finite'),
    ({'deadline': Duration(sec=-1)}, 'deadline is -1.0 s: give a time from now on'),
    ({'names': ['stop'] * 100, 'horizon': 10.0}, 'more than 640 steps'),
])
def test_a_what_if_that_cannot_be_played_is_refused_with_the_remedy(onlooker, change, complaint):
    request = WhatIf.Request(**{'names': ['stop'], **change})
    answer = onlooker.call(onlooker.what_if, request)
    assert not answer.success and not answer.branches
    assert re.search(complaint, answer.message), answer.message


def test_an_observation_that_is_not_kept_is_refused_with_those_that_are(onlooker):
    stamp = fresh(onlooker).header.stamp
    stamp.sec -= 60
    answer = onlooker.call(onlooker.what_if, WhatIf.Request(names=['stop'], observation_stamp=stamp))
    assert not answer.success and 'is none of the newest' in answer.message


def test_branches_not_finished_by_the_deadline_are_left_out(onlooker):
    request = WhatIf.Request(names=['stop'] * 60, horizon=1.0)
    request.deadline.nanosec = 60_000_000
    answer = onlooker.call(onlooker.what_if, request)
    assert answer.deadline_exceeded and len(answer.branches) < 60
    assert 0.06 <= answer.elapsed < 0.3
    assert answer.success == bool(answer.branches)


def test_explicit_actions_are_told_as_far_as_the_robot_can_follow_them(onlooker):
    branch, = onlooker.call(onlooker.what_if, WhatIf.Request(actions=[chunk((9.0, -9.0))])).branches
    assert list(branch.actions.values) == pytest.approx([0.6, -1.5])


def test_what_really_happens_is_what_was_told(onlooker):
    def turned(message):
        return math.remainder(pose(message)[2] - pose(start)[2], math.tau)

    def unbroken(truth):
        """What it is 0.7 s after it begins to turn, if it has not braked; by its own time, since a busy machine is late."""
        begun = next((i for i, message in enumerate(truth) if turned(message) > 0.02), len(truth))
        ended = next((i for i, message in enumerate(truth[begun:], begun)
                      if nanoseconds(message.header.stamp) >= nanoseconds(truth[begun].header.stamp) + 700_000_000), None)
        turns = [message.twist.twist.angular.z > 0.6 for message in truth[begun:ended]]
        return truth[ended] if ended and all(turns) else None

    def stands():
        return abs(onlooker.received['sim/ground_truth'][-1].twist.twist.angular.z) < 0.01

    # A machine that has no time for commands for half a second has the robot brake: then it is driven again.
    for _ in range(5):
        onlooker.wait(stands)
        answer = onlooker.call(onlooker.what_if, WhatIf.Request(actions=[chunk(*[(0.2, 1.2)] * 8)]))
        start = fresh(onlooker, 'sim/ground_truth')
        after = unbroken(onlooker.drive(0.2, 1.2, 1.6))
        if after is not None:
            break
    assert after is not None, 'the robot braked in each of five drives'
    assert turned(after) == pytest.approx(answer.branches[0].yaw[-1], abs=0.25)


def test_what_plays_futures_waits_for_most_of_the_time():
    world = World(roomy_seed())
    observation = futures.Observation(1, world.snapshot(), world)
    futures._play(observation, 'left', np.float32([(0.3, 0.5)] * 2), '', math.inf)  # makes this thread's context
    begun, worked = time.monotonic(), time.thread_time()
    branch = futures._play(observation, 'left', np.float32([(0.3, 0.5)] * 40), '', math.inf)
    share = (time.thread_time() - worked) / (time.monotonic() - begun)
    assert len(branch.frames) == 40 and share < 0.3


@pytest.mark.parametrize('own, wanted', [(25, 24), (1, 0), (0, 0)])
def test_what_plays_futures_comes_right_after_the_receipt_of_commands(monkeypatch, own, wanted):
    given = []
    monkeypatch.setattr(realtime, 'priority_of', lambda process: own)
    monkeypatch.setattr(os, 'sched_setscheduler', lambda thread, scheduling, priority: given.append(priority.sched_priority))
    futures._prepare(logging.getLogger('test'))
    assert given == [wanted] * (wanted > 0)


def test_true_futures_equal_a_replay_in_the_library(tmp_path):
    seed = roomy_seed()
    with robot(tmp_path, seed=seed, publish_clock=True) as (process, onlooker):
        image = onlooker.received['camera/image_raw'][0]
        rows = np.float32([(0.5, 0.3)] * 6 + [(0.1, -1.2)] * 6)
        request = WhatIf.Request(actions=[chunk(*rows.tolist())], goal='blue', names=['policy'])
        request.observation_stamp = image.header.stamp
        answer = onlooker.call(onlooker.what_if, request)
        assert answer.message == "policy left out: the plan is the model's"
        branch, = answer.branches
        assert branch.name == 'explicit_0'
        assert np.array_equal(branch.actions.values, rows.ravel())

        world = World(seed)
        for _ in range(round((nanoseconds(image.header.stamp) - CLOCK_START) / 1e9 / SLICE)):
            world.step((0.0, 0.0), SLICE)
        assert np.array_equal(world.render(), picture(image))
        x, y, yaw = world.pose
        distance = world.goal_distance('blue')
        playback = world.play(rows)
        dx, dy = playback.poses[:, 0] - x, playback.poses[:, 1] - y
        np.testing.assert_allclose(branch.x, math.cos(yaw) * dx + math.sin(yaw) * dy, atol=1e-6)
        np.testing.assert_allclose(branch.y, math.cos(yaw) * dy - math.sin(yaw) * dx, atol=1e-6)
        assert np.array_equal(np.array(branch.collision_risk) > 0.5, playback.collided)
        assert branch.progress == pytest.approx(distance - world.goal_distance('blue'), abs=1e-6)
        for frame, expected in zip(branch.frames, playback.frames, strict=True):
            decoded = cv2.imdecode(np.frombuffer(frame.data, np.uint8), cv2.IMREAD_COLOR)[:, :, ::-1]
            assert np.abs(decoded.astype(float) - expected).mean() < 6.0

        # Time is the simulation's.
        heard = []
        ticking = onlooker.create_subscription(
            Clock, '/clock', lambda message, info: heard.append((received_at(info), nanoseconds(message.clock))), qos.CAMERA)
        for _ in range(10):  # on busy cores it falls behind now and then
            del heard[:]
            onlooker.wait(lambda: len(heard) >= 50)
            arrivals, clocks = zip(*heard)
            if arrivals[-1] - arrivals[0] == pytest.approx(1e-9 * (clocks[-1] - clocks[0]), abs=0.1):
                break
        else:
            raise AssertionError(f'{arrivals[-1] - arrivals[0]} s passed, and {clocks[-1] - clocks[0]} ns for the simulation')
        onlooker.destroy_subscription(ticking)
        onlooker.listen('/clock', Clock, qos.CAMERA)
        assert min(b - a for a, b in zip(clocks, clocks[1:])) == 10_000_000  # where none is lost: best effort
        assert clocks[-1] - clocks[0] >= 490_000_000
        assert onlooker.set_parameters(clock_stop=True).successful
        onlooker.next('odom', 3)
        have = len(onlooker.received['/clock'])
        onlooker.next('odom', 5)
        assert len(onlooker.received['/clock']) == have


def test_a_reset_begins_the_next_seed(tmp_path):
    seed = roomy_seed()
    with robot(tmp_path, seed=seed) as (process, onlooker):
        onlooker.drive(0.4, 0.0, 0.6)
        old = onlooker.received['camera/image_raw'][-1].header.stamp
        answer = onlooker.call(onlooker.reset, Trigger.Request())
        assert (answer.success, answer.message) == (True, f'seed {seed + 1}')
        # On a busy machine, messages of before may still be in flight.
        begun, zero = World(seed + 1).pose, (0.0, 0.0, 0.0)
        onlooker.wait(lambda: pose(onlooker.received['odom'][-1]) == pytest.approx(zero, abs=0.01))
        onlooker.wait(lambda: pose(onlooker.received['sim/ground_truth'][-1]) == pytest.approx(begun, abs=0.01))
        objects = {marker.text: marker for marker in onlooker.received['sim/objects'][-1].markers}
        position = objects['red'].pose.position
        assert (position.x, position.y) == pytest.approx(World(seed + 1).position('red'), abs=0.02)
        answer = onlooker.call(onlooker.what_if, WhatIf.Request(names=['stop'], observation_stamp=old))
        assert not answer.success


def test_it_takes_plain_twists_and_names_its_frames_as_it_is_told_and_ends_with_code_0(tmp_path):
    with robot(tmp_path, {'cmd_vel': 'cmd_vel_plain'}, seed=roomy_seed(), enable_stamped_cmd_vel=False,
               base_frame='left/base_footprint') as (process, onlooker):
        twist = Twist()
        twist.linear.x = 0.3
        for _ in range(6):
            onlooker.plain.publish(twist)
            fresh(onlooker, 'odom')
        odom = onlooker.received['odom'][-1]
        assert odom.twist.twist.linear.x > 0.2
        assert (odom.header.frame_id, odom.child_frame_id) == ('left/odom', 'left/base_footprint')
        assert onlooker.received['camera/image_raw'][-1].header.frame_id == 'left/camera_optical_frame'
    assert process.exit_codes == [0]


def test_a_parameter_out_of_range_keeps_it_from_starting_and_says_why(tmp_path):
    with pytest.raises(AssertionError, match='(?s)cannot start: .*camera_width'):
        with robot(tmp_path, camera_width=4):
            pass


def test_threads_of_dds_have_no_heaps_of_their_own(onlooker):
    """In heaps of threads, of which the C library reserves 64 MiB each, holes would grow over hours."""
    fresh(onlooker)
    maps = [line.split(maxsplit=5) for line in Path(f'/proc/{onlooker.process.pid}/maps').read_text().splitlines()]
    spans = [[int(address, 16) for address in line[0].split('-')] for line in maps]
    heaps = [hex(start) for (start, middle), (again, end), line, rest in zip(spans, spans[1:], maps, maps[1:])
             if start % 2**26 == 0 and middle == again and end == start + 2**26 and line[1] == 'rw-p' and rest[1] == '---p']
    assert len(heaps) <= os.cpu_count()  # of threads that NumPy's library has started when it was imported
