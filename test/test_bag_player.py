"""The bag player: recorded messages on real topics at their time, and a clock that says so."""
import contextlib
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import rclpy
from ament_index_python import get_package_prefix
from bag_messages import ACTIONS, task
from bags import NS, START as RECORDED, shift_time, simulated_drive, truncate, write_bag
from geometry_msgs.msg import Twist, TwistStamped
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.experimental.events_executor import EventsExecutor
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile
from rosgraph_msgs.msg import Clock
from scenarios.speed import USUAL_TICK, measured
from sensor_msgs.msg import CompressedImage
from std_msgs.msg import String
from std_srvs.srv import Trigger
from world_model_rig import Spinning, wait_for

from worldmodel_ros.bags import playback
from worldmodel_ros.bags.drive import read_drive
from worldmodel_ros.bags.guess import find_mapping
from worldmodel_ros.bags.mapping import Mapping
from worldmodel_ros.bags.source import open_bag
from worldmodel_ros.bringup.description import DescriptionError
from worldmodel_ros.bringup.replay import prepare
from worldmodel_ros.cli import main as cli
from worldmodel_ros.model.presets import TINY
from worldmodel_ros.nodes.bag_player.node import BagPlayer
from worldmodel_ros.nodes.bag_player.time import PlaybackTime
from worldmodel_ros.nodes.common.parameters import ParameterError
from worldmodel_ros.nodes.common.qos import COMMAND, LATCHED

START = 1_000 * NS


@pytest.fixture(scope='module')
def bag(tmp_path_factory):
    return write_bag(tmp_path_factory.mktemp('player') / 'drive', simulated_drive(seconds=2.0, rate=20.0))


def ms(*values):
    return [START + value * NS // 1000 for value in values]


class Playing:
    """A thread that lets messages through, as the player's does."""

    def __init__(self, playback, times, period=0.01):
        self.playback, self.let_through, self.ticks = playback, [], []
        self.thread = threading.Thread(target=self._run, args=(times, period), daemon=True)
        self.thread.start()

    def _run(self, times, period):
        self.playback.begin(times[0])
        for at in times:
            if not self.playback.wait_for(at, period, lambda now, at=at: self.ticks.append((now, at))):
                return
            self.let_through.append((time.monotonic(), at))
            self.playback.passed()
        self.playback.finish()


def test_messages_are_due_at_the_rate_and_the_clock_never_passes_one_nor_goes_back():
    playing = Playing(PlaybackTime(2.0, False), ms(0, 100, 300))
    playing.thread.join(60.0)
    at = [moment for moment, _ in playing.let_through]
    assert at[1] - at[0] >= 0.049 and at[2] - at[0] >= 0.149
    ticks = [now for now, _ in playing.ticks]
    assert ticks == sorted(ticks) and all(now <= following for now, following in playing.ticks)


def test_the_clock_leaves_a_period_after_each_message():
    playing = Playing(PlaybackTime(1.0, False), ms(0, 20, 40, 60), period=0.03)
    playing.thread.join(60.0)
    assert playing.ticks == []


def test_where_time_was_set_back_the_rest_is_played_at_its_rate_too():
    playing = Playing(PlaybackTime(1.0, False), [*ms(0, 50), *ms(-9_000, -8_900, -8_850)])
    playing.thread.join(60.0)
    at = [moment for moment, _ in playing.let_through]
    assert at[3] - at[2] >= 0.099 and at[4] - at[2] >= 0.149
    assert all(now <= following for now, following in playing.ticks)


def test_where_time_was_set_forward_the_gap_is_skipped_and_reported():
    skipped = []
    playing = Playing(PlaybackTime(1.0, False, skipping=skipped.append), ms(0, 50, 3_600_050, 3_600_100, 3_600_200))
    playing.thread.join(60.0)
    at = [moment for moment, _ in playing.let_through]
    assert at[3] - at[2] >= 0.049 and at[4] - at[2] >= 0.149
    assert skipped == [pytest.approx(3_600.0, abs=10.0)]
    ticks = [now for now, _ in playing.ticks]
    assert ticks == sorted(ticks) and all(now <= following for now, following in playing.ticks)


def test_a_gap_is_not_skipped_while_paused():
    playback = PlaybackTime(1.0, True)
    playing = Playing(playback, ms(0, 3_600_000, 3_600_050))
    wait_for(lambda: playback.step(1.0), 'a step')
    ticks = len(playing.ticks)
    wait_for(lambda: len(playing.ticks) > ticks + 3, 'the clock while paused')
    assert playback.now() == START and len(playing.let_through) == 1
    playback.pause(False)
    playing.thread.join(60.0)
    assert len(playing.let_through) == 3


def test_a_pause_holds_the_time_and_ends_where_it_began():
    playback = PlaybackTime(1.0, True)
    playing = Playing(playback, ms(0, 50))
    wait_for(lambda: len(playing.ticks) > 3, 'the clock while paused')
    assert not playing.let_through and {now for now, _ in playing.ticks} == {START}
    resumed = time.monotonic()
    playback.pause(False)
    playing.thread.join(60.0)
    assert playing.let_through[1][0] - resumed >= 0.049


def test_a_step_plays_one_message_and_the_time_stands_there():
    playback = PlaybackTime(1.0, True)
    playing = Playing(playback, ms(0, 5_000, 10_000))
    for number, at in enumerate(ms(0, 5_000), start=1):
        wait_for(lambda: playback.step(1.0), 'a step')
        assert [t for _, t in playing.let_through] == ms(0, 5_000, 10_000)[:number]
        assert playback.now() == at
    playback.stop()
    playing.thread.join(60.0)
    assert not playing.thread.is_alive() and len(playing.let_through) == 2


def test_there_is_no_step_before_the_first_message_after_the_last_or_while_playing():
    playback = PlaybackTime(1.0, True)
    assert not playback.step(0.1)
    playing = Playing(playback, ms(0))
    wait_for(lambda: playback.step(1.0), 'a step')
    playing.thread.join(60.0)
    assert not playback.step(0.1)
    assert not PlaybackTime(1.0, False).step(0.1)


def test_another_rate_goes_on_from_the_present_time():
    playback = PlaybackTime(0.01, False)
    playing = Playing(playback, ms(0, 1_000))
    wait_for(lambda: playing.ticks, 'the clock')
    assert playback.now() < START + NS // 10
    playback.set_rate(50.0)
    playing.thread.join(60.0)
    assert len(playing.let_through) == 2
    assert playing.let_through[1][0] - playing.let_through[0][0] < 50.0  # of the 100 at the first rate


@pytest.mark.parametrize('flag, order', [(1, '<'), (0, '>')])
def test_an_image_can_be_stamped_with_its_receipt_in_either_byte_order(flag, order):
    raw = bytes([0, flag, 0, 0]) + struct.pack(f'{order}iI', 7, 9) + b'rest'
    topic = SimpleNamespace(type='sensor_msgs/msg/Image')
    part, = playback.parts(
        SimpleNamespace(topics={'/image': topic}),
        Mapping('/image', None, (), image_stamps='log'))
    stamped = part.convert(SimpleNamespace(raw=raw, log_ns=5 * NS + 3))
    assert stamped == bytes([0, flag, 0, 0]) + struct.pack(f'{order}iI', 5, 3) + b'rest'


class Listener:
    """Hears what is played, as bytes, in the order of its arrival."""

    def __init__(self, context, namespace):
        self.node = Node('listener', context=context, namespace=namespace)
        self.received, self.clocks = [], []

    def listen(self):
        for kind, topic, qos in ((CompressedImage, 'camera/image_raw/compressed', QoSProfile(depth=1000)),
                                 (TwistStamped, 'cmd_vel', COMMAND)):
            self.node.create_subscription(
                kind, topic, lambda data, topic=topic: self.received.append((topic, bytes(data))), qos, raw=True)
        self.node.create_subscription(Clock, '/clock', lambda m: self.clocks.append(m.clock.sec * NS + m.clock.nanosec),
                                      QoSProfile(depth=1000))


@contextlib.contextmanager
def played(path, namespace='replay', deaf_for=0.0, **parameters):
    """Run a player and a listener in one process; the latter begins to listen after ``deaf_for`` seconds."""
    context = Context()
    rclpy.init(context=context)
    listener, ended = Listener(context, namespace), threading.Event()
    values = {'bag': str(path), 'wait_s': 20.0, **parameters}
    spinning = [Spinning(listener.node, SingleThreadedExecutor(context=context))]
    player = None
    try:
        player = BagPlayer(ended.set, context=context, namespace=namespace,
                           parameter_overrides=[Parameter(name, value=value) for name, value in values.items()])
        spinning.append(Spinning(player, EventsExecutor(context=context)))
        time.sleep(deaf_for)
        listener.listen()
        yield SimpleNamespace(player=player, listener=listener, ended=ended, received=listener.received,
                              node=listener.node)
    finally:
        if player:
            player.on_shutdown()
        for each in spinning:
            each.close()
        rclpy.shutdown(context=context)


def recorded(path, *names):
    with open_bag(path) as bag:
        return [(record.topic.name, record.raw, record.log_ns) for record in bag.messages(names or None)]


@pytest.mark.ros
@pytest.mark.untimed
def test_what_was_recorded_goes_out_byte_for_byte_behind_a_clock_that_says_when(bag):
    with played(bag, rate=2.0) as play:
        assert play.ended.wait(20.0)
        assert not play.player.failed
        clocks = play.listener.clocks
        assert clocks == sorted(clocks)
    records = recorded(bag, '/camera/image_raw/compressed', '/cmd_vel')
    # A command may be lost to a queue of one, as on a robot; images wait in this listener's.
    assert [data for topic, data in play.received if topic.startswith('camera')] == [
        raw for topic, raw, _ in records if topic.startswith('/camera')]
    assert {data for topic, data in play.received if topic == 'cmd_vel'} <= {
        raw for topic, raw, _ in records if topic == '/cmd_vel'}
    assert sum(topic == 'cmd_vel' for topic, _ in play.received) >= 15
    assert {at for _, _, at in records} <= set(clocks)


@pytest.mark.ros
@pytest.mark.untimed
def test_a_goal_reaches_a_node_that_comes_later(bag):
    with played(bag, start_paused=True, wait_s=0.0) as play:
        client = play.node.create_client(Trigger, 'bag_player/play_next')
        assert client.wait_for_service(10.0)

        def step():
            future = client.call_async(Trigger.Request())
            wait_for(future.done, 'an answer')
            return future.result().success

        wait_for(step, 'the first message, which is the goal')
        goals = []
        play.node.create_subscription(String, 'goal', lambda message: goals.append(message.data), LATCHED)
        wait_for(lambda: goals, 'the goal')
        assert goals == [read(bag)[0].goal]


def read(path):
    with open_bag(path) as bag:
        return list(read_drive(bag, find_mapping(bag, TINY), TINY))


@pytest.mark.ros
@pytest.mark.untimed
def test_it_waits_for_a_subscriber_and_begins_anew_when_it_is_to_loop(bag):
    with played(bag, namespace='elsewhere', deaf_for=0.7, rate=20.0, loop=True, clock_hz=200.0) as play:
        first = recorded(bag, '/camera/image_raw/compressed')[0][1]
        wait_for(lambda: [data for _, data in play.received].count(first) >= 2, 'the second pass')
        # The player was there long before; a pass takes 0.1 s.
        assert next(data for topic, data in play.received if topic.startswith('camera')) == first
        assert not play.ended.is_set()


@pytest.mark.ros
@pytest.mark.untimed
def test_it_does_not_wait_for_a_subscriber_of_another_type(bag):
    context = Context()
    rclpy.init(context=context)
    try:
        stranger = Node('stranger', context=context, namespace='replay')
        stranger.create_subscription(Twist, 'cmd_vel', lambda message: None, COMMAND)
        with played(bag, wait_s=60.0, rate=20.0) as play:
            wait_for(lambda: play.player.count_subscribers('cmd_vel') == 2, 'the stranger')
            assert play.ended.wait(20.0)
        assert sum(topic == 'cmd_vel' for topic, _ in play.received) > 0
    finally:
        rclpy.shutdown(context=context)


@pytest.mark.ros
@pytest.mark.untimed
def test_services_and_the_rate_steer_it(bag):
    with played(bag, rate=0.01) as play:
        def call(name):
            client = play.node.create_client(Trigger, f'bag_player/{name}')
            assert client.wait_for_service(10.0)
            future = client.call_async(Trigger.Request())
            wait_for(future.done, name)
            return future.result()

        wait_for(lambda: play.received, 'the first image')
        assert (call('is_paused').success, call('play_next').success) == (False, False)
        assert call('toggle_paused').message == 'paused' and call('is_paused').success
        assert call('resume').message == 'playing' and not call('is_paused').success
        assert call('pause').message == 'paused'
        assert call('play_next').success
        call('resume')
        result, = play.player.set_parameters([Parameter('rate', value=100.0)])
        assert result.successful
        assert play.ended.wait(10.0)


@pytest.mark.ros
@pytest.mark.untimed
def test_a_message_that_cannot_be_converted_is_left_out_and_playing_goes_on(tmp_path):
    config = tmp_path / 'config.yaml'
    config.write_text('action_topic: /joints\nactions:\n  linear.x: velocity[left]\n  angular.z: velocity[nobody]\n')
    bag = write_bag(tmp_path / 'bag', simulated_drive(seconds=2.0, rate=20.0), action='JointState',
                    action_topic='/joints')
    with played(bag, rate=20.0, config=str(config)) as play:
        assert play.ended.wait(20.0)
        assert not play.player.failed
        assert {topic for topic, _ in play.received} == {'camera/image_raw/compressed'}


@pytest.mark.ros
@pytest.mark.untimed
@pytest.mark.parametrize('parameters, complaint', [
    ({'bag': ''}, 'bag: name the rosbag2 folder'),
    ({'bag': '/nowhere'}, '/nowhere does not exist'),
    ({'model': '/no/model'}, "no model '/no/model'"),
    ({'config': '/no/config.yaml'}, '/no/config.yaml cannot be read'),
])
def test_what_cannot_be_played_is_refused_before_anything_starts(bag, parameters, complaint):
    with pytest.raises(ParameterError, match=complaint), played(bag, **parameters):
        pass


@pytest.mark.ros
@pytest.mark.untimed
@pytest.mark.parametrize('given, code, said', [
    ([], 0, 'played 61 messages'), (['-p', 'bag:=/nowhere'], 2, 'cannot start')])
def test_the_process_ends_with_the_bag(bag, given, code, said):
    executable = Path(get_package_prefix('worldmodel_ros')) / 'lib' / 'worldmodel_ros' / 'bag_player'
    done = subprocess.run(
        [sys.executable, executable, '--ros-args', '-p', f'bag:={bag}', '-p', 'wait_s:=0.0', '-p', 'rate:=10.0',
         *given], capture_output=True, text=True, timeout=30.0)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr


@pytest.mark.ros
@pytest.mark.untimed
def test_a_player_that_hangs_at_its_end_is_ended_with_where_it_stood(bag):
    program = ('import time\nfrom worldmodel_ros.nodes.bag_player import node\nnode._ENDING = 2.0\n'
               'node.BagPlayer.on_shutdown = lambda self: time.sleep(1e6)\nnode.main()')
    done = subprocess.run([sys.executable, '-c', program, '--ros-args', '-p', f"bag:='{bag}'", '-p', 'wait_s:=0.1',
                           '-p', 'rate:=10.0'], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and '_say_goodbye' in done.stderr, done.stderr


@pytest.mark.ros
def test_a_bag_is_replayed_into_the_whole_system_by_one_command_and_recorded(bag, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Deadlines are of the bag's time: played slower, it leaves the model longer.
    rate = min(1.0, USUAL_TICK / measured().tick_s)
    assert cli(['replay', str(bag), '--rate', f'{rate:.3f}', '--record', 'out', '--logs', 'log']) == 0, capfd.readouterr().err
    with open_bag(tmp_path / 'out') as result:
        assert result.problems == []
        counts = {name: topic.count for name, topic in result.topics.items()}
        futures = [result.deserialize(r.topic, r.raw) for r in result.messages(['/replay/predicted_future'])]
    # A busy machine may cost a tick or two, and then its prediction.
    ticks = read(bag)
    assert len(ticks) - 4 <= counts['/replay/predicted_future'] <= len(ticks)
    assert counts['/replay/camera/image_raw/compressed'] >= 36
    stamps = {future.header.stamp.sec * NS + future.header.stamp.nanosec for future in futures}
    assert stamps <= {tick.stamp_ns for tick in ticks}
    assert {future.goal for future in futures} == {ticks[0].goal}
    # Nothing that a robot listens to.
    assert all(name.startswith('/replay/') or name == '/diagnostics' for name in counts)


@pytest.mark.ros
@pytest.mark.waiting(seconds=13)
def test_a_bag_without_odometry_is_replayed_into_a_node_that_decides_on_a_forecast(tmp_path, capfd, monkeypatch):
    drive = simulated_drive(seconds=3.0)
    told = task('a task', drive.goals[0][1])  # which is in view
    bag = write_bag(tmp_path / 'bag', drive, goal_topic=None, extra=[('/task', 'worldmodel_ros/msg/Task', RECORDED, told)])
    monkeypatch.chdir(tmp_path)
    # Slower than real time: what is shown is that all is there, not that it is in time.
    assert cli(['replay', str(bag), '--rate', '0.5', '--record', 'out', '--logs', 'log', '--set', 'forecast:=tiny']) == 0, \
        capfd.readouterr().err
    with open_bag(tmp_path / 'out') as result:
        def heard(name):
            return [result.deserialize(r.topic, r.raw) for r in result.messages([f'/replay/{name}'])]
        decisions, futures = heard('decision'), heard('predicted_future')
    assert len(decisions) >= 10 and {decision.task for decision in decisions} == {'a task'}
    compared = [decision for decision in decisions if decision.candidates]
    assert compared and all(len(c.terms) == 1 for decision in compared for c in decision.candidates)
    chosen = {decision.sequence: decision.chosen for decision in decisions}
    with_images = [future for future in futures if future.decision.chosen]
    assert with_images
    assert all(chosen.get(future.sequence, future.decision.chosen) == future.decision.chosen for future in with_images)


def test_wheels_and_task_are_played_but_wheels_that_stand_in_for_commands_as_those_alone(tmp_path):
    def names(path):
        with open_bag(path) as bag:
            return [part.name for part in playback.parts(bag, find_mapping(bag, TINY))]
    wheels = ACTIONS['Odometry']
    extra = [('/odom', wheels.type, RECORDED, wheels.make((0.1, 0.0), RECORDED)),
             ('/task', 'worldmodel_ros/msg/Task', RECORDED, task('a task', 'red'))]
    drive = simulated_drive(seconds=1.0)
    assert names(write_bag(tmp_path / 'all', drive, extra=extra)) == [
        'camera/image_raw/compressed', 'cmd_vel', 'goal', 'odom', 'task']
    assert names(write_bag(tmp_path / 'wheels', drive, action='Odometry', action_topic='/odom')) == [
        'camera/image_raw/compressed', 'cmd_vel', 'goal']


def test_any_player_will_do_for_what_needs_no_conversion(bag, tmp_path):
    replay = prepare({'bag': str(bag), 'rate': '2', 'loop': 'true', 'start_paused': False, 'model': ''})
    assert replay.plain
    assert replay.arguments == {'bag': str(bag), 'rate': 2.0, 'loop': 'true', 'start_paused': False,
                                'use_sim_time': True, 'image_transport': 'compressed'}
    command = replay.ros2_bag_play('robot1')
    assert command[:4] == ['ros2', 'bag', 'play', str(bag)]
    options = ' '.join(command[4:])
    assert '--clock-topics-all' in options and '--rate 2.0' in options
    assert '--topics /camera/image_raw/compressed /cmd_vel /goal' in options
    assert '/cmd_vel:=/robot1/cmd_vel' in options and '/goal:=/robot1/goal' in options
    assert options.endswith('--loop')
    assert '/cmd_vel:=/cmd_vel' in replay.ros2_bag_play('')
    raw = write_bag(tmp_path / 'raw', simulated_drive(seconds=1.0), encoding='mono8', action='Twist')
    replay = prepare({'bag': str(raw)})
    assert (replay.plain, replay.arguments['image_transport']) == (False, 'raw')


def test_only_our_own_player_will_do_for_a_bag_of_a_recorder_that_crashed_or_whose_clock_was_set_back(tmp_path):
    drive = simulated_drive(seconds=2.0)
    crashed = truncate(write_bag(tmp_path / 'crashed', drive))
    back = write_bag(tmp_path / 'back', shift_time(drive, 1.0, -3.0))
    assert [prepare({'bag': str(bag)}).plain for bag in (crashed, back)] == [False, False]


@pytest.mark.parametrize('given, complaint', [
    ({}, 'bag: name the rosbag2 folder'), ({'bag': '/nowhere'}, 'nowhere does not exist'),
    ({'bag': '/nowhere', 'rate': 'fast'}, "rate: 'fast' is no number"), ({'model': '/no/model'}, 'no model')])
def test_a_replay_that_cannot_be_is_refused_by_the_bring_up(bag, given, complaint):
    with pytest.raises(DescriptionError, match=complaint):
        prepare({'bag': str(bag), **given} if 'model' in given else given)


def test_a_bag_that_cannot_be_replayed_is_refused_before_anything_starts(capsys, tmp_path):
    assert cli(['replay', str(tmp_path / 'nowhere')]) == 1
    assert 'does not exist' in capsys.readouterr().err
