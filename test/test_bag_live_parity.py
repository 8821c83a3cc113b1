"""The same bag gives the same, bit for bit, through topics into the live node and through the reader."""
import contextlib
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from bags import NS, shift_time, simulated_drive, write_bag
from rclpy.experimental.events_executor import EventsExecutor
from rclpy.parameter import Parameter
from small_model import small_checkpoint
from std_srvs.srv import Trigger
from world_model_rig import Spinning, rig, stamp_of, wait_for

from worldmodel_ros.bags.drive import read_drive
from worldmodel_ros.bags.guess import find_mapping
from worldmodel_ros.bags.source import open_bag
from worldmodel_ros.engine import load
from worldmodel_ros.nodes.bag_player.node import BagPlayer
from worldmodel_ros.nodes.common.messages import to_jpeg

pytestmark = [pytest.mark.ros, pytest.mark.waiting(seconds=4)]

CAR = """
action_topic: /drive
actions:
  linear.x: {field: drive.speed, scale: 0.9, offset: 0.01}
  angular.z: {speed: drive.speed, steering: drive.steering_angle, wheelbase: 0.26}
"""
# Of these the pictures, the executed actions, or both go different ways through the node.
BAGS = {
    'jpeg, twist stamped': dict(),
    'bayer, twist, at a rate that is no multiple of the model\'s': dict(
        encoding='bayer_rggb8', action='Twist', storage='sqlite3', rate=25.0),
    'bgr8, steered car by a config, whose driver falls silent on the way': dict(
        encoding='bgr8', action='AckermannDriveStamped', action_topic='/drive', config=CAR, silent=(0.4, 1.3)),
    'stamps that are not to be used': dict(config='image_stamps: log\n'),
}


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
    return small_checkpoint(tmp_path_factory.mktemp('model'))


class Watched:
    """An engine that keeps what its sessions are given and what they imagine."""

    def __init__(self, engine):
        self._engine, self.seen, self.imagined = engine, [], []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def __setattr__(self, name, value):
        target = self if name in ('_engine', 'seen', 'imagined') else self._engine
        object.__setattr__(target, name, value)

    def open_session(self):
        session = self._engine.open_session()
        observe, imagine = session.observe, session.imagine

        def watched_observe(frame, executed):
            observe(frame, executed)
            self.seen.append((frame.copy(), executed.copy()))

        def watched_imagine(actions, steps=2):
            future = imagine(actions, steps)
            self.imagined.append((future, steps))
            return future

        session.observe, session.imagine = watched_observe, watched_imagine
        return session


def from_the_reader(bag_path, config, checkpoint):
    """Return the ticks of a bag, and what is imagined from each."""
    engine, episode, results = load(str(checkpoint), 'torch'), None, []
    with open_bag(bag_path) as bag:
        for tick in read_drive(bag, find_mapping(bag, engine.spec, config), engine.spec):
            if tick.episode != episode:
                session, episode = engine.open_session(), tick.episode
            session.observe(tick.image, tick.executed)
            future = session.imagine(session.plan(tick.goal), steps=2)
            session.decode(future)
            results.append(SimpleNamespace(tick=tick, future=future))
    return results


@contextlib.contextmanager
def playing(node, bag, config, checkpoint):
    """Run a paused player beside a world model node."""
    values = {'bag': str(bag), 'config': str(config or ''), 'model': str(checkpoint), 'start_paused': True,
              'wait_for': 'world_model_node', 'wait_s': 20.0}
    player = BagPlayer(lambda: None, context=node.context,
                       parameter_overrides=[Parameter(name, value=value) for name, value in values.items()])
    spinning = Spinning(player, EventsExecutor(context=node.context))
    client = node.tester.create_client(Trigger, 'bag_player/play_next')
    assert client.wait_for_service(20.0)

    def step():
        future = client.call_async(Trigger.Request())
        wait_for(future.done, 'an answer of play_next')
        return future.result().success

    try:
        yield step
    finally:
        player.on_shutdown()
        spinning.close()


def through_topics(bag_path, config, checkpoint, ticks):
    """
    Play a bag into a live node, each message once the node has dealt with the one before: how fast the machine is
    makes no difference. Return the watched engine and the predictions that the node published.
    """
    engine = Watched(load(str(checkpoint), 'torch'))
    with open_bag(bag_path) as bag:
        mapping = find_mapping(bag, engine.spec, config)
        records = list(bag.messages(mapping.topics))
        compressed = bag.topics[mapping.image_topic].type.endswith('CompressedImage')
    ticks_at = {tick.log_ns for tick in ticks}
    # The node's deadline is not what is tested here: every tick gets its two steps.
    with rig('configure', 'activate', load_engine=lambda **_: engine, use_sim_time=True, deadline_s=10.0, reserve_s=0.1,
             camera_timeout_s=60.0, image_transport='compressed' if compressed else 'raw') as node, \
            playing(node, bag_path, config, checkpoint) as step:
        goal = ''
        wait_for(step, 'the first message')  # which waits for the node to be found
        for number, record in enumerate(records):
            if number:
                assert step()
            if record.topic.name == mapping.goal_topic:
                goal = record.raw[8:].rstrip(b'\0').decode()
                wait_for(lambda: node.subject._goal == goal, 'the goal')
            elif record.topic.name == mapping.action_topic:
                wait_for(lambda: node.subject._executed.actions._kept
                         and node.subject._executed.actions._kept[-1].stamp == record.log_ns, 'the executed action')
            elif record.log_ns in ticks_at:
                done = sum(at <= record.log_ns for at in ticks_at)
                wait_for(lambda: len(node.messages('predicted_future')) >= done, f'tick {done}')
            else:
                time.sleep(0.01)  # of an image between two ticks the node shows nothing
        assert not step()
        assert node.refused() == {}
        return engine, node.messages('predicted_future')


def assert_same(results, engine, published):
    assert len(engine.seen) == len(engine.imagined) == len(published) == len(results) > 8
    for result, (image, executed), (future, steps), message in zip(results, engine.seen, engine.imagined, published):
        tick = result.tick
        assert steps == 2
        assert np.array_equal(image, tick.image)
        assert executed.dtype == tick.executed.dtype and np.array_equal(executed, tick.executed)
        assert np.array_equal(future.actions, result.future.actions)
        assert np.array_equal(future.latents, result.future.latents)
        assert np.array_equal(future.collision_risk, result.future.collision_risk)
        assert np.array_equal(future.frames, result.future.frames)
        assert stamp_of(message) == tick.stamp_ns
        assert [frame.data.tobytes() for frame in message.frames] == [
            to_jpeg(frame, message.header.stamp, '').data.tobytes() for frame in result.future.frames]


@pytest.mark.parametrize('name', BAGS)
def test_the_live_node_predicts_from_topics_what_the_reader_predicts_from_the_bag(name, tmp_path, checkpoint):
    options = dict(BAGS[name])
    config = None
    if text := options.pop('config', None):
        config = tmp_path / 'config.yaml'
        config.write_text(text)
    drive, (begin, end) = simulated_drive(2.0, rate=options.pop('rate', 20.0)), options.pop('silent', (0.0, 0.0))
    drive = replace(drive, commands=tuple(
        (at, command) for at, command in drive.commands if not begin * NS <= at - drive.stamps[0] < end * NS))
    bag = write_bag(tmp_path / 'bag', drive, **options)
    results = from_the_reader(bag, config, checkpoint)
    assert [result.tick.executed.any() for result in results].count(False) == (1 if end == 0.0 else 5)
    assert_same(results, *through_topics(bag, config, checkpoint, [result.tick for result in results]))


def test_a_jump_of_time_begins_the_same_new_episode_in_both(tmp_path, checkpoint):
    bag = write_bag(tmp_path / 'bag', shift_time(simulated_drive(seconds=2.0, rate=20.0), 1.0, 30.0))
    results = from_the_reader(bag, None, checkpoint)
    assert {result.tick.episode for result in results} == {0, 1}
    engine, published = through_topics(bag, None, checkpoint, [result.tick for result in results])
    assert_same(results, engine, published)
    assert len({message.episode_id for message in published}) == 2
