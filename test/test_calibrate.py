"""Latency, gains, slip and pitch are fitted within their bounds of the simulator's truth, or refused with words."""
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import rclpy
import yaml
from bag_messages import TYPES, camera_info_message, image_message, odometry, twist
from camera_infos import camera_info
from dds import raise_threads, received_at
from geometry_msgs.msg import TwistStamped
from nav_msgs.msg import Odometry
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from real_drive import real_drive
from rosbags.rosbag2 import StoragePlugin, Writer
from sensor_msgs.msg import Joy
from std_msgs.msg import Bool

from worldmodel_ros import cli
from worldmodel_ros.bags.problems import BagError
from worldmodel_ros.bringup.process import signal_prefix
from worldmodel_ros.calibrate import pattern, recording
from worldmodel_ros.calibrate.recording import Signals, calibrate, read, with_time_out
from worldmodel_ros.calibrate.response import CannotTell, fit
from worldmodel_ros.clocks import wall_minus_steady
from worldmodel_ros.inputs.camera import Lens
from worldmodel_ros.motion import increments
from worldmodel_ros.nodes.calibrator import node as calibrator
from worldmodel_ros.nodes.calibrator.node import HELD, Calibrator, Run, drive
from worldmodel_ros.nodes.common.messages import time_message
from worldmodel_ros.nodes.common.qos import COMMAND, ODOMETRY
from worldmodel_ros.sim.cameras import WIDE
from worldmodel_ros.sim.odometry import WheelOdometry
from worldmodel_ros.sim.scene import CAMERA_PITCH
from worldmodel_ros.sim.world import World

NS = 1_000_000_000
LENS = Lens(WIDE.size, (WIDE.focal, WIDE.focal), WIDE.centre, 'plumb_bob', WIDE.distortion)
STEP = 0.005  # s
HINDSIGHT = 0.4  # s


def simulated(seed, delay, with_images=False):
    """Return a world after the pattern was driven in it, with commands that take effect ``delay`` s late, and the signals."""
    world = World(seed)
    wheels = WheelOdometry(world)
    commands = [(k * pattern.PERIOD, command) for k, command in enumerate(pattern.commands())]
    times, poses, image_times, images = [0.0], [wheels.pose], [], []
    waiting, executed = list(commands), (0.0, 0.0)
    for step in range(1, round((commands[-1][0] + 0.5) / STEP) + 1):
        while waiting and waiting[0][0] + delay <= (step - 1) * STEP + 1e-9:
            executed = waiting.pop(0)[1]
        world.step(executed, STEP)
        if step % 10 == 0:
            wheels.update(world)
            times.append(step * STEP)
            poses.append(wheels.pose)
        if with_images and step % 40 == 0:
            image_times.append(step * STEP)
            images.append(cv2.cvtColor(WIDE.render(world), cv2.COLOR_RGB2GRAY))
    return world, Signals(np.array([at for at, _ in commands]), np.array([command for _, command in commands]),
                          np.array(times), np.array(poses), np.array(image_times), images, LENS)


@pytest.mark.parametrize(('seed', 'delay'), [(1_000_003, 0.0), (1_000_004, 0.08), (1_000_005, 0.12), (1_000_006, 0.2),
                                             (1_000_008, 0.15), (1_000_009, 0.05)])
def test_latency_and_gains_are_those_of_the_simulator(seed, delay):
    world, signals = simulated(seed, delay)
    found, gain = calibrate(signals), np.mean(world.scene.wheel_gain)
    for name in ('speed', 'turn'):
        told = found.responses[name]
        assert told.latency.value == pytest.approx(delay, abs=0.020)
        assert told.latency.low <= told.latency.value <= told.latency.high < told.latency.low + 0.1
        assert told.gain.value == pytest.approx(gain, rel=0.05)
        assert told.gain.low <= told.gain.value <= told.gain.high
    assert found.parameters['command_delay_s'] == pytest.approx(max(0.0, delay - 0.03), abs=0.020)
    assert found.refused['turn_seen'] == 'no images were recorded' == found.refused['camera_pitch_deg']


@pytest.mark.parametrize('gap', [1, 25])
def test_a_recording_tells_the_rest_where_the_robot_was_put_elsewhere(gap):
    _, signals = simulated(1_000_004, 0.08)
    middle = len(signals.pose_times) // 2
    elsewhere = np.concatenate([signals.poses[:middle], signals.poses[middle:] + (2.0, -1.0, 0.0)])
    lost = slice(middle, middle + gap)
    found = calibrate(Signals(signals.command_times, signals.commands, np.delete(signals.pose_times, lost),
                              np.delete(elsewhere, lost, 0)))
    assert found.responses['speed'].latency.value == pytest.approx(0.08, abs=0.020)
    assert found.responses['turn'].latency.value == pytest.approx(0.08, abs=0.020)


@pytest.mark.slow
def test_images_tell_slip_and_pitch_of_the_simulator():
    world, signals = simulated(1_000_009, 0.05, with_images=True)
    found, true = calibrate(signals), math.degrees(CAMERA_PITCH + world.scene.camera_rotation[1])
    told = found.estimates['camera_pitch_deg']
    assert told.value == pytest.approx(true, abs=1.5) and told.low <= true <= told.high
    assert found.estimates['turn_slip'].value == pytest.approx(0.0, abs=0.05)
    assert found.responses['turn_seen'].latency.value == pytest.approx(0.05, abs=0.03)
    assert found.parameters['camera_pitch_deg'] == round(told.value, 2)
    assert yaml.safe_load(yaml.safe_dump(found.to_dict()))['told']['camera_pitch_deg']['value'] == round(told.value, 4)


def steps(count=24, seconds=0.8, seed=0):
    """Return times and values of a command that is held for a while, again and again."""
    values = np.random.default_rng(seed).choice([-0.2, 0.0, 0.2], count)
    return np.arange(count) * seconds, np.where(np.diff(values, prepend=0.0) == 0.0, 0.1, values)


def base(times, commands, latency, lag, gain, noise, at):
    """Return what a base with these has moved between the times ``at``."""
    grid = np.arange(0.0, at[-1] + 0.001, 0.001)
    held = commands[np.clip(np.searchsorted(times, grid - latency, 'right') - 1, 0, None)] * (grid >= latency)
    speed, speeds = 0.0, []
    for command in held:
        speed += (command - speed) * 0.001 / lag
        speeds.append(speed)
    way = np.cumsum(speeds) * 0.001 * gain
    return np.diff(np.interp(at, grid, way)) + noise * np.random.default_rng(1).standard_normal(len(at) - 1)


@pytest.mark.parametrize(('latency', 'lag', 'gain'), [(0.05, 0.02, 1.0), (0.1, 0.1, 0.85), (0.25, 0.2, 1.2)])
def test_a_slow_base_is_told_by_the_time_that_it_is_late_on_average(latency, lag, gain):
    (times, commands), at = steps(), np.arange(0.0, 19.0, 0.05)
    found = fit(times, commands, at, base(times, commands, latency, lag, gain, 0.0005, at))
    assert found.latency.value == pytest.approx(latency + lag, abs=0.02) and found.gain.value == pytest.approx(gain, rel=0.03)
    assert found.latency.low <= latency + lag <= found.latency.high and found.explained > 0.95


def test_the_interval_grows_with_the_noise():
    (times, commands), at = steps(), np.arange(0.0, 19.0, 0.05)
    narrow, wide = (fit(times, commands, at, base(times, commands, 0.1, 0.03, 1.0, noise, at)).gain
                    for noise in (0.0002, 0.002))
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)


def test_what_cannot_be_told_is_refused_with_words():
    (times, commands), at = steps(), np.arange(0.0, 19.0, 0.05)
    moved = base(times, commands, 0.1, 0.03, 1.0, 0.0005, at)
    for changed, complaint in (
            ({'commands': np.zeros(24)}, 'no command but 0'), ({'commands': np.full(24, 0.2)}, 'changes 0 times'),
            ({'increments': np.random.default_rng(0).standard_normal(len(moved))}, 'does not follow'),
            ({'increments': -moved}, 'the other way'), ({'times': at + 100.0}, 'hardly overlap')):
        with pytest.raises(CannotTell, match=complaint):
            fit(**{'command_times': times, 'commands': commands, 'times': at, 'increments': moved, **changed})
    noisy = base(times[:8], commands[:8], 0.1, 0.03, 1.0, 0.004, at[:130])
    with pytest.raises(CannotTell):
        fit(times[:8], commands[:8], at[:130], noisy)


def test_blank_images_and_a_lens_that_is_not_known_tell_nothing():
    _, signals = simulated(1_000_003, 0.0)
    blank = [np.full((480, 640), 90, np.uint8)] * 60
    driven = signals.command_times, signals.commands, signals.pose_times, signals.poses, np.arange(60) * 0.1, blank
    refused = calibrate(Signals(*driven, LENS)).refused
    assert 'nothing can be followed' in refused['turn_seen'] and 'things with corners' in refused['camera_pitch_deg']
    assert 'turn on the spot' in refused['turn_slip']
    assert 'camera_info' in calibrate(Signals(*driven)).refused['camera_pitch_deg']


def test_a_camera_info_of_another_size_than_the_images_is_refused_with_both_sizes():
    _, signals = simulated(1_000_003, 0.0)
    small = [np.full((240, 320), 90, np.uint8)] * 60
    refused = calibrate(replace(signals, image_times=np.arange(60) * 0.1, images=small)).refused
    for name in ('turn_slip', 'camera_pitch_deg'):
        assert 'camera_info is of 640 x 480 pixels, and the images have 320 x 240' in refused[name]


def test_increments_are_along_the_way():
    ahead, turned = increments(np.array([[0.0, 0.0, 3.1], [-0.1, 0.0, -3.1], [0.0, 0.0, -3.1]]))
    assert ahead == pytest.approx([0.1, -0.1], abs=2e-3) and turned == pytest.approx([2 * math.pi - 6.2, 0.0])


def test_a_base_has_braked_when_its_time_out_is_over():
    rows = np.array([[0.0, 0.2, 0.0], [0.1, 0.2, 0.0], [2.0, -0.2, 0.1]])
    assert with_time_out(rows, 0.5).tolist() == [[0.0, 0.2, 0.0], [0.1, 0.2, 0.0], [0.6, 0.0, 0.0], [2.0, -0.2, 0.1]]
    assert with_time_out(rows, 0.0) is rows


def write_recording(path, signals, with_camera=True, with_odometry=True, jump=(math.inf, 0.0)):
    """Write signals as a bag, the images plain ones of one colour. After ``jump[0]`` s, all clocks are set by ``jump[1]`` s."""
    began = 1_700_000_000
    def nanoseconds(at):
        return round((began + at + jump[1] * (at >= jump[0])) * NS)
    rows = [('/cmd_vel', 'geometry_msgs/msg/Twist', at, twist(tuple(map(float, command))))
            for at, command in zip(signals.command_times, signals.commands)]
    if with_odometry:
        rows += [('/odom', 'nav_msgs/msg/Odometry', at + 0.003, odometry((0.0, 0.0), nanoseconds(at), tuple(pose)))
                 for at, pose in zip(signals.pose_times, signals.poses.tolist())]
    if with_camera:
        plain = np.full((48, 64, 3), 90, np.uint8)
        rows += [('/camera/image_raw', 'sensor_msgs/msg/Image', at, image_message(plain, nanoseconds(at), 'rgb8'))
                 for at in np.arange(0.0, 2.0, 0.1)]
        rows.append(('/camera/camera_info', 'sensor_msgs/msg/CameraInfo', 0.0,
                     camera_info_message(camera_info((48, 64), 90.0))))
    with Writer(path, version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        connections = {}
        for topic, kind, at, message in sorted(rows, key=lambda row: row[2]):
            if topic not in connections:
                connections[topic] = writer.add_connection(topic, kind, typestore=TYPES)
            writer.write(connections[topic], nanoseconds(at), TYPES.serialize_cdr(message, kind))
    return path


@pytest.mark.parametrize('seconds', [-30.0, 30.0, 10_000_000.0])
def test_of_a_recording_during_which_the_clock_was_set_the_longest_part_is_used(tmp_path, capsys, seconds):
    _, signals = simulated(1_000_004, 0.08)
    bag = write_recording(tmp_path / 'bag', signals, jump=(3.0, seconds))
    part = read(bag)
    assert part.command_times[-1] == pytest.approx(signals.command_times[-1] - 3.0, abs=0.1)
    assert part.pose_times.min() > -0.1 and part.pose_times[-1] == pytest.approx(signals.pose_times[-1] - 3.0, abs=0.1)
    assert part.lens and not part.images
    assert cli.main(['calibrate', str(bag)]) == 0
    told, error = capsys.readouterr()
    assert yaml.safe_load(told)['told']['speed']['latency_s']['value'] == pytest.approx(0.08, abs=0.02)
    assert 'note:' in error and 'has 2 parts' in error and ('the clock was set back' in error) == (seconds < 0.0)


def test_a_bag_is_calibrated_on_the_command_line(tmp_path, capsys):
    world, signals = simulated(1_000_004, 0.08)
    bag = write_recording(tmp_path / 'bag', signals)
    out, parameters = tmp_path / 'found.yaml', tmp_path / 'node.yaml'
    assert cli.main(['calibrate', str(bag), '--out', str(out), '--parameters', str(parameters)]) == 0
    found = yaml.safe_load(out.read_text())
    assert found == yaml.safe_load(capsys.readouterr().out)
    assert found['told']['speed']['latency_s']['value'] == pytest.approx(0.08, abs=0.02)
    assert found['told']['turn']['gain']['value'] == pytest.approx(np.mean(world.scene.wheel_gain), rel=0.05)
    assert set(found['refused']) == {'turn_seen', 'turn_slip', 'camera_pitch_deg'}
    node, = yaml.safe_load(parameters.read_text()).values()
    assert node['ros__parameters'] == found['parameters']['world_model_node']


def test_the_lens_of_rectified_images_is_the_one_in_p(tmp_path, monkeypatch):
    _, signals = simulated(1_000_004, 0.08)
    told = camera_info((48, 64), 90.0, (-0.2, 0.05, 0.0, 0.0))
    monkeypatch.setitem(globals(), 'camera_info', lambda *given: told)
    bag, config = write_recording(tmp_path / 'bag', signals), tmp_path / 'bag.yaml'
    config.write_text('image_rectified: true\n')
    assert read(bag).lens == Lens.of(told) != Lens.of(told, rectified=True) == read(bag, config).lens


def once(build, number, change):
    """Return ``build`` with the arguments of its call ``number`` changed."""
    calls = iter(range(10_000))
    return lambda *given: build(*(change(*given) if next(calls) == number else given))


@pytest.mark.parametrize(('name', 'number', 'change'), [
    ('odometry', 0, lambda command, at, place: (command, 0, place)),          # a driver that has no time yet
    ('odometry', 300, lambda command, at, place: (command, at + 10**15, place)),
    ('odometry', 100, lambda command, at, place: (command, at, (math.nan, 0.0, math.nan))),
    ('twist', 20, lambda command: ((math.nan, math.inf),)),
    ('image_message', 0, lambda frame, at, encoding: (frame, 0, encoding)),
    ('image_message', 9, lambda frame, at, encoding: (np.repeat(frame, 2, 1), at, encoding))])
def test_a_single_wrong_message_is_left_out(tmp_path, monkeypatch, name, number, change):
    _, signals = simulated(1_000_004, 0.08)
    monkeypatch.setitem(globals(), name, once(globals()[name], number, change))
    taken = read(write_recording(tmp_path / 'bag', signals))
    kinds = {'odometry': taken.pose_times, 'twist': taken.command_times, 'image_message': taken.image_times}
    assert {kind: len(times) for kind, times in kinds.items()} == {
        kind: have - (kind == name) for kind, have in (
            ('odometry', len(signals.poses)), ('twist', len(signals.commands)), ('image_message', 20))}
    assert len({image.shape for image in taken.images}) == 1 and len(taken.images) == len(taken.image_times)
    assert all(np.isfinite(each).all() for each in (*kinds.values(), taken.commands, taken.poses))
    found = calibrate(taken)
    for axis in ('speed', 'turn'):
        assert found.responses[axis].latency.value == pytest.approx(0.08, abs=0.02)


def test_a_bag_that_tells_nothing_says_what_is_missing(tmp_path, capsys):
    _, signals = simulated(1_000_004, 0.08)
    bag = write_recording(tmp_path / 'bag', signals, with_odometry=False)
    assert cli.main(['calibrate', str(bag)]) == 1
    assert 'no odometry was recorded' in capsys.readouterr().out
    with pytest.raises(BagError, match='no odometry on /wheels'):
        read(bag, odometry='/wheels')
    assert cli.main(['calibrate']) == 2 and cli.main(['calibrate', '--drive']) == 2


def test_the_real_lap_tells_how_late_its_steering_is_seen_and_no_more():
    config = Path(__file__).resolve().parents[1] / 'config' / 'evaluate' / 'donkeycar.yaml'
    found = calibrate(read(real_drive(), config))
    told = found.responses['turn_seen']
    assert 0.15 < told.latency.value < 0.30 and told.explained > 0.8 and set(found.responses) == {'turn_seen'}
    assert not found.estimates and not found.parameters
    assert 'no odometry' in found.refused['speed'] and 'camera_info' in found.refused['camera_pitch_deg']


class Base:
    """
    A base over real topics: it obeys commands ``latency`` s late, and publishes its odometry; and a person's thumb.

    It moves by when DDS had a command, and its odometry is of ``HINDSIGHT`` ago: where this process waits for a core, no
    command acts later or not at all.
    """

    def __init__(self, latency=0.15, gain=0.9, deadman=Bool):
        self.context = Context()
        rclpy.init(context=self.context)
        self.node = Node('base', context=self.context)
        self.heard, self.latency, self.gain = [], latency, gain
        self.pose = [0.0, 0.0, 0.0]
        self.node.create_subscription(TwistStamped, 'cmd_vel', self._hear, 100)
        self.odometry = self.node.create_publisher(Odometry, 'odom', ODOMETRY)
        self.thumb = self.node.create_publisher(deadman, 'deadman', COMMAND)
        self.held, self.moved_until = True, time.monotonic() - HINDSIGHT
        self.running = True
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _hear(self, message, info):
        self.heard.append((received_at(info), (message.twist.linear.x, message.twist.angular.z)))

    def _move(self, end):
        """Move until ``end`` [s, steady]."""
        changes = [(at + self.latency, command) for at, command in self.heard]
        times = [self.moved_until, *(at for at, _ in changes if self.moved_until < at < end), end]
        for begun, until in pairwise(times):
            v, w = next((command for at, command in reversed(changes) if at <= begun), (0.0, 0.0))
            moved, turned = v * self.gain * (until - begun), w * self.gain * (until - begun)
            x, y, yaw = self.pose
            self.pose = [x + moved * math.cos(yaw), y + moved * math.sin(yaw), yaw + turned]
        self.moved_until = end

    def _run(self):
        executor = SingleThreadedExecutor(context=self.context)
        executor.add_node(self.node)
        due = told = time.monotonic()
        while self.running:
            due += 0.005
            while (left := due - time.monotonic()) > 0.0:
                executor.spin_once(timeout_sec=left)
            self._move(time.monotonic() - HINDSIGHT)
            if self.moved_until - told > 0.03:
                told = self.moved_until
                message = Odometry()
                message.header.stamp = time_message(round(self.moved_until * NS) + wall_minus_steady())
                message.pose.pose.position.x, message.pose.pose.position.y = self.pose[:2]
                message.pose.pose.orientation.z, message.pose.pose.orientation.w = (
                    math.sin(self.pose[2] / 2), math.cos(self.pose[2] / 2))
                self.odometry.publish(message)
                self.thumb.publish(Bool(data=self.held) if self.thumb.msg_type is Bool else
                                   Joy(buttons=[0, int(self.held)]))
        executor.shutdown()

    def close(self):
        self.running = False
        self.thread.join()
        rclpy.shutdown(context=self.context)


@pytest.fixture
def robot():
    made, ours = [], threading.get_native_id()
    # A thumb counts for 0.3 s: neither who holds nor who hears it waits for a core as long as that.
    policy, parameters = os.sched_getscheduler(ours), os.sched_getparam(ours)

    def make(**options):
        made.append(Base(**options))
        raise_threads([ours, made[-1].thread.native_id])
        return made[-1]
    yield make
    os.sched_setscheduler(ours, policy, parameters)
    for each in made:
        each.close()


def run_of(**options):
    return Run(**{'deadman': 'deadman', 'button': None, 'cmd_vel': 'cmd_vel', 'odometry': 'odom', 'rounds': 1, **options})


@pytest.mark.ros
@pytest.mark.waiting(seconds=11)
def test_a_robot_is_driven_and_calibrated_over_ros(robot):
    base = robot(deadman=Joy)
    found = calibrate(drive(run_of(button=1)))
    assert {'speed', 'turn'} <= set(found.responses), found.refused
    for name in ('speed', 'turn'):
        assert found.responses[name].latency.value == pytest.approx(0.15, abs=0.03)
        assert found.responses[name].gain.value == pytest.approx(0.9, rel=0.05)
    speeds, turns = zip(*(command for _, command in base.heard))
    assert max(map(abs, speeds)) <= pattern.SPEED and max(map(abs, turns)) <= pattern.TURN
    assert base.heard[-1][1] == (0.0, 0.0)


@pytest.mark.ros
@pytest.mark.waiting
def test_a_deadman_that_is_let_go_stops_the_robot_and_nothing_is_told(robot):
    base = robot()
    timer = threading.Timer(3.0, lambda: setattr(base, 'held', False))
    timer.start()
    with pytest.raises(RuntimeError, match='let go'):
        drive(run_of())
    moving = [at for at, command in base.heard if any(command)]
    assert moving and base.heard[-1][1] == (0.0, 0.0) and base.heard[-1][0] > moving[-1]


@pytest.mark.ros
@pytest.mark.waiting
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGHUP])
def test_a_calibration_that_is_ended_by_a_signal_stops_the_robot(robot, number):
    base = robot()
    process = subprocess.Popen([*signal_prefix(f'--default-signal={number.name}'), sys.executable, '-m', 'worldmodel_ros.cli',
                                'calibrate', '--drive', '--deadman', 'deadman'], stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 60.0
        while not any(any(command) for _, command in base.heard):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(number)
        said = process.communicate(timeout=30.0)[1]
    finally:
        process.kill()
    assert 'KeyboardInterrupt' in said and base.heard[-1][1] == (0.0, 0.0)


@pytest.mark.ros
@pytest.mark.untimed
def test_a_deadman_that_is_let_go_counts_where_each_command_is_late(robot, monkeypatch):
    send, base = Calibrator.send, robot()

    def late(self, *command):
        send(self, *command)
        time.sleep(1.2 * pattern.PERIOD)
        base.held = len(self.commands) < 4
    monkeypatch.setattr(Calibrator, 'send', late)
    with pytest.raises(RuntimeError, match='let go'):
        drive(run_of())
    assert len(base.heard) < 30 and base.heard[-1][1] == (0.0, 0.0)


class Silent:
    """An executor and a clock: nothing comes after the deadman was held once, and time passes only in ``spin_once``."""

    def __init__(self, **options):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def add_node(self, node):
        self.node = node
        node._hold(True)

    def spin_once(self, timeout_sec):
        self.now += timeout_sec

    def shutdown(self):
        pass


@pytest.mark.ros
@pytest.mark.untimed
@pytest.mark.parametrize('waited', [0.0, 0.05, 0.29])
def test_a_deadman_that_falls_silent_stops_the_robot_when_it_is_no_longer_valid(monkeypatch, waited):
    silent, sent = Silent(), []
    monkeypatch.setattr(calibrator, 'time', silent)
    monkeypatch.setattr(calibrator, 'SingleThreadedExecutor', lambda **options: silent)
    monkeypatch.setattr(calibrator, '_wait', lambda *given: silent.spin_once(waited))
    monkeypatch.setattr(pattern, 'commands', lambda *given: iter([(0.2, 0.0)] * 9))
    monkeypatch.setattr(Calibrator, 'send', lambda self, *command: sent.append((silent.now, command))
                        or self.commands.append((silent.now, *command)))
    with pytest.raises(RuntimeError, match='let go'):
        drive(run_of())
    stopped = next(at for at, command in sent if not any(command))
    assert stopped - 100.0 == pytest.approx(HELD, abs=1e-6)


@pytest.mark.ros
@pytest.mark.untimed
def test_nothing_drives_without_a_deadman_or_next_to_another_commander(robot, monkeypatch):
    monkeypatch.setattr('worldmodel_ros.nodes.calibrator.node._PATIENCE', 2.0)
    base = robot()
    base.held = False
    with pytest.raises(RuntimeError, match='the deadman on /deadman to be held'):
        drive(run_of())
    base.held = True
    base.node.create_publisher(TwistStamped, 'cmd_vel', COMMAND)
    with pytest.raises(RuntimeError, match='end the gate'):
        drive(run_of())
    assert not base.heard


def test_images_in_which_nothing_can_be_followed_do_not_count_as_a_robot_that_stands(monkeypatch):
    shifts, fitted = iter([0.1, np.nan, 0.2, 0.3, 0.1, 0.2]), []
    monkeypatch.setattr(recording.vision, 'shift', lambda before, after: next(shifts))
    monkeypatch.setattr(recording, 'fit', lambda *values: fitted.append(values[3]))
    images, times = tuple(np.zeros((7, 8, 8), np.uint8)), np.arange(7.0)
    recording._by_images(SimpleNamespace(images=images, image_times=times, command_times=times, commands=np.zeros((7, 2))))
    np.testing.assert_array_equal(fitted, [[0.1, np.nan, 0.2, 0.3, 0.1, 0.2]])
