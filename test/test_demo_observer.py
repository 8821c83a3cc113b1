"""The demo's onlooker on real topics: what is published is recorded, and only while the robot drives."""
import array
import json
import threading
import time

import numpy as np
import pytest
import rclpy
from builtin_interfaces.msg import Time
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from geometry_msgs.msg import TwistStamped
from nav_msgs.msg import Odometry
from rclpy.executors import SingleThreadedExecutor
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import String
from visualization_msgs.msg import Marker, MarkerArray

from demo_recordings import encode, panorama
from worldmodel_ros.demo.recording import NS, Recording
from worldmodel_ros.msg import (
    ActionChunk, Candidate, DeadlineStatus, Decision, ForecastThing, PredictedFuture, Task, Term, WhatIfBranch)
from worldmodel_ros.nodes.common.qos import CAMERA, COMMAND, JUDGEMENTS, LATCHED, STATUS
from worldmodel_ros.nodes.demo.observer import observing
from worldmodel_ros.srv import WhatIf

pytestmark = [pytest.mark.ros, pytest.mark.untimed]


class System:
    """The other side: one node in the place of robot, model and gate."""

    def __init__(self):
        self.node = rclpy.create_node('system', namespace='demo_test')
        self.goals = []
        topics = {'cmd_vel': (TwistStamped, COMMAND), 'camera/image_raw': (Image, CAMERA),
                  'predicted_future': (PredictedFuture, STATUS), 'decision': (Decision, STATUS),
                  'deadline_status': (DeadlineStatus, STATUS),
                  'sim/ground_truth': (Odometry, STATUS), 'sim/objects': (MarkerArray, LATCHED), 'task': (Task, LATCHED),
                  'sim/judgement': (String, JUDGEMENTS),
                  '/diagnostics': (DiagnosticArray, STATUS)}
        self.topics = {name: self.node.create_publisher(kind, name, qos)
                       for name, (kind, qos) in topics.items()}
        self.node.create_subscription(String, 'goal', lambda m: self.goals.append(m.data), LATCHED)
        self.node.create_service(WhatIf, 'world_model_node/what_if', self.imagine)
        self.node.create_service(WhatIf, 'sim_robot/what_if', self.play)
        self.executor = SingleThreadedExecutor()
        self.executor.add_node(self.node)
        self.questions = []

    def imagine(self, request, response):
        response.header.stamp = Time(sec=7)
        response.success, response.step_period, response.elapsed = True, 0.1, 0.02
        response.branches = [self.branch(name, 0.9) for name in request.names]
        response.terms = ['reach red (weight 1)']
        for branch in response.branches:
            branch.terms = [-0.5]
        return response

    def play(self, request, response):
        self.questions.append(request)
        response.success = True
        response.branches = [self.branch(f'explicit_{k}', 1.0) for k in range(len(request.actions))]
        return response

    @staticmethod
    def branch(name, x):
        frames = [CompressedImage(format='png', data=array.array('B', encode(panorama(0))))]
        return WhatIfBranch(name=name, frames=frames, actions=ActionChunk(step_period=0.1),
                            collision_risk=[0.5], progress=x, x=[x], y=[0.0], yaw=[0.0])

    def publish(self, name, message):
        self.topics[name].publish(message)

    def until(self, condition, timeout=10.0):
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, 'it did not happen in time'
            self.executor.spin_once(timeout_sec=0.02)


@pytest.fixture
def observed():
    recording = Recording()
    with observing(recording, 'demo_test', {}) as observer:
        system = System()
        try:
            system.until(lambda: all(p.get_subscription_count() for p in system.topics.values()))
            yield system, observer, recording
        finally:
            system.executor.shutdown()
            system.node.destroy_node()


def test_the_observer_follows_the_names_of_the_robot_and_not_the_words_of_the_command_line(monkeypatch):
    monkeypatch.setattr('sys.argv', ['worldmodel', 'demo', '--set', 'task:=street', 'image:=/front/image_raw'])
    with observing(Recording(), 'demo_test', {'camera/image_raw': '/front/image_raw'}) as observer:
        names = {name: observer.resolve_topic_name(name) for name in ('camera/image_raw', 'task', 'cmd_vel')}
    assert names == {'camera/image_raw': '/front/image_raw', 'task': '/demo_test/task', 'cmd_vel': '/demo_test/cmd_vel'}


def command(stamp, v=0.3):
    message = TwistStamped()
    message.header.stamp = stamp
    message.twist.linear.x = v
    return message


def image(offset, stamp):
    data = array.array('B', panorama(offset).tobytes())
    message = Image(height=64, width=64, step=192, encoding='rgb8', data=data)
    message.header.stamp = stamp
    return message


def test_a_drive_is_recorded_from_its_first_command_to_its_end(observed):
    system, observer, recording = observed
    system.publish('cmd_vel', command(Time(sec=1)))     # of somebody else: no goal has been given
    assert not observer.wait_for_command(0.3)
    observer.begin()
    observer.set_goal('red')
    system.until(lambda: system.goals == ['red'])
    system.publish('cmd_vel', command(Time()))          # a stop answers no observation
    system.publish('camera/image_raw', image(0, Time(sec=4)))
    assert not observer.wait_for_command(0.3)

    now = observer.now()
    stamp = Time(sec=now // NS, nanosec=now % NS)
    system.publish('cmd_vel', command(stamp))
    assert observer.wait_for_command(10.0)
    assert [c.stamp for c in recording.commands] == [now] and 0.0 < recording.commands[0].latency < 1.0
    assert recording.image_stamps == [] and observer.waited > 0.3

    future = PredictedFuture(step_period=0.1, tier=1, frames=[CompressedImage(data=array.array('B', b'abc'))])
    future.header.stamp = stamp
    pose = Odometry()
    pose.pose.pose.position.x, pose.pose.pose.orientation.z, pose.pose.pose.orientation.w = 1.5, 1.0, 0.0
    status = DeadlineStatus(tier=2, verdict=DeadlineStatus.LATE, latency=0.06)
    box = Marker(ns='objects', id=3, type=Marker.CYLINDER, text='red')
    box.pose.orientation.w, box.scale.x = 1.0, 0.3
    decision = Decision(
        chosen='policy', passes=2, terms=['reach red'], times=[0.0, 0.1], walls=[1.0, 0.0, 2.0], forecast_time=0.5,
        candidates=[Candidate(name='policy', score=1.0, terms=[1.0], x=[0.0, 0.5], y=[0.0, 0.25]),
                    Candidate(name='stop 0.4 s', score=0.5, terms=[0.5], vetoed=True, contact='wall')],
        things=[ForecastThing(name='red', colour='red', radius=0.25, x=[2.0], y=[1.0])])
    decision.header.stamp = stamp
    for name, message in (('camera/image_raw', image(3, Time(sec=5))), ('decision', decision), ('predicted_future', future),
                          ('sim/ground_truth', pose), ('deadline_status', status),
                          ('sim/objects', MarkerArray(markers=[box])), ('cmd_vel', command(Time(), v=0.0))):
        system.publish(name, message)
    system.until(lambda: all((recording.choices, recording.images, recording.futures, recording.poses, recording.ticks,
                              recording.things, len(recording.commands) == 2)))
    assert (recording.images[0] == panorama(3)).all() and recording.image_stamps == [5 * NS]
    assert recording.futures[0].frames == (b'abc',) and recording.futures[0].stamp == now
    choice, = recording.choices
    assert (choice.stamp, choice.chosen, choice.passes) == (now, 'policy', 2)
    assert (choice.terms, choice.forecast_time) == (('reach red',), 0.5)
    assert [(option.name, option.score, option.terms, option.contact) for option in choice.options] == [
        ('policy', 1.0, (1.0,), ''), ('stop 0.4 s', 0.5, (0.5,), 'wall')]
    assert choice.options[0].path.tolist() == [[0.0, 0.0], [0.5, 0.25]] and choice.walls.tolist() == [[1.0, 0.0, 2.0]]
    assert [(thing.name, thing.path.tolist()) for thing in choice.things] == [('red', [[2.0, 1.0]])]
    assert recording.poses[0].x == 1.5 and abs(recording.poses[0].yaw) == pytest.approx(np.pi)
    assert (recording.ticks[0].tier, recording.ticks[0].late, recording.ticks[0].latency) == (2, True, 0.06)
    thing = recording.things['objects/3']
    assert thing.name == 'red' and thing.round and thing.length == pytest.approx(0.3)
    assert recording.commands[1].stamp == 0

    assert observer.finish(timeout=0.2) is None     # the robot says nothing
    system.until(lambda: system.goals[-1] == '')
    system.publish('cmd_vel', command(stamp))
    system.until(lambda: True)
    assert len(recording.commands) == 2


def test_rooms_of_a_task_are_told_by_their_judge(observed):
    system, observer, recording = observed

    def judge(seed, succeeded, **more):
        told = {'task': 'street', 'seed': seed, 'target': 'red', 'succeeded': succeeded, 'reason': 'done' * bool(succeeded),
                'seconds': 0.0, 'contacts': 0, 'arrivals': 0}
        system.publish('sim/judgement', String(data=json.dumps({**told, **more})))
    objects = MarkerArray(markers=[Marker(ns='objects', id=0, text='red'), Marker(ns='movers', id=0, text='shuttle 1')])
    system.publish('task', Task(terms=[Term(kind=Term.CLEARANCE), Term(kind=Term.REACH, target='blue')]))
    judge(5, None)
    system.until(lambda: recording.rooms and recording.target == 'blue')
    system.publish('sim/objects', objects)
    system.until(lambda: recording.rooms[0].things)
    assert recording.sightings == []  # the drive has not begun
    judge(5, True, seconds=7.5, arrivals=1)
    judge(6, None)
    system.until(lambda: len(recording.rooms) == 2)
    first, second = recording.rooms
    assert (first.seed, first.target, first.succeeded, first.fate) == (5, 'red', True, 'done, 7.5 s, 1 arrivals')
    assert set(first.things) == {'objects/0', 'movers/0'} and second.succeeded is None and not second.things
    observer.begin()
    now = observer.now()
    system.publish('cmd_vel', command(Time(sec=now // NS, nanosec=now % NS)))
    assert observer.wait_for_command(10.0)
    objects.markers[0].header.stamp = Time(sec=9)
    system.publish('sim/objects', objects)
    system.until(lambda: recording.sightings)
    assert recording.sightings[0].stamp == 9 * NS and set(recording.sightings[0].movers) == {'shuttle 1'}


def test_the_robots_own_count_of_late_commands_is_taken(observed):
    system, observer, recording = observed

    def report(node, **values):
        pairs = [KeyValue(key=k, value=v) for k, v in values.items()]
        status = DiagnosticStatus(name=f'{node}: commands', hardware_id=node, values=pairs)
        return DiagnosticArray(status=[status])
    system.publish('/diagnostics', report('demo_test/sim_robot', late='3', latencies_ms='20.5 31.0'))
    system.publish('/diagnostics', report('other/sim_robot', late='99', latencies_ms='1.0'))
    system.until(lambda: recording.robot.get('late') == '3')
    assert recording.robot_latencies == [0.0205, 0.031] and 'latencies_ms' not in recording.robot
    observer.begin()
    assert recording.robot_latencies == []  # of commands before
    system.publish('/diagnostics', report('demo_test/sim_robot', latencies_ms='22.0'))
    system.until(lambda: recording.robot_latencies == [0.022])
    assert observer.finish(timeout=0.1) is None     # an old report does not count
    news = report('demo_test/sim_robot', late='4')
    publisher = system.node.create_timer(0.05, lambda: system.publish('/diagnostics', news))
    late = []
    waiting = threading.Thread(target=lambda: late.append(observer.finish(timeout=5.0)))
    waiting.start()
    system.until(lambda: late)
    waiting.join()
    publisher.cancel()
    assert late == [4]


def test_a_question_goes_to_the_model_and_its_sequences_to_the_simulator(observed):
    system, observer, recording = observed
    system.until(lambda: observer._what_if.reachable)
    observer.ask_what_if(('left', 'policy'), 'blue', 0.8)
    observer.ask_what_if(('right',), 'blue', 0.8)       # one at a time
    system.until(lambda: recording.what_ifs)
    answer = recording.what_ifs[0]
    assert (answer.stamp, answer.goal, answer.step, answer.elapsed) == (7 * NS, 'blue', 0.1, 0.02)
    assert [b.name for b in answer.branches] == [b.name for b in answer.truth] == ['left', 'policy']
    assert answer.branches[0].path.shape == (1, 3) and answer.truth[0].progress == 1.0
    assert answer.terms == ('reach red (weight 1)',) and [b.terms for b in answer.branches] == [(-0.5,), (-0.5,)]
    assert len(system.questions) == 1
    assert system.questions[0].observation_stamp.sec == 7 and len(system.questions[0].actions) == 2
