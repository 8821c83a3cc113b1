"""Goals as ROS 2 users have them: poses, and the action drive_to with feedback, cancel and pre-emption, over real DDS."""
import contextlib
import math
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from action_msgs.msg import GoalStatus
from geometry_msgs.msg import PoseStamped
from nav_msgs.msg import Odometry
from PIL import Image as Pixels
from rclpy.action import ActionClient
from sensor_msgs.msg import Image
from std_msgs.msg import String
from test_world_model_node_deciding import SLOT, Stream, forecasts
from world_model_rig import MOTION, active, rig, wait_for

from worldmodel_ros import cli
from worldmodel_ros.action import DriveTo
from worldmodel_ros.control.pilot import SLOTS
from worldmodel_ros.control.sight import NAME as SIGHT, Sight
from worldmodel_ros.control.terms import Reach
from worldmodel_ros.nodes.world_model.drive_to import said_of
from worldmodel_ros.msg import ActionChunk, Decision, Task, Term
from worldmodel_ros.nodes.common.drive_to_client import in_words
from worldmodel_ros.nodes.common.messages import time_message
from worldmodel_ros.nodes.common.qos import ODOMETRY, STATUS

pytestmark = [pytest.mark.ros, pytest.mark.waiting]
PLACES = {}  # in base_link, by name, as Forecast sees them now
SHOWN = {}   # and as it sees them in a white image
GONE = [0.0]  # m that the robot has driven ahead, towards a wall
BROKEN = {6, 7}   # the greys of an image for which it fails


class Scene(Stream):
    """Sees PLACES, which stand still in base_link, and in a white image SHOWN."""

    def observe(self, image, executed, measured, passes):
        presence, places = np.zeros(len(SLOTS)), np.zeros((len(self.times), len(SLOTS), 2))
        shown = image.min() == 255
        if BROKEN == {image.min(), image.max()}:
            raise RuntimeError('the device is lost')
        for name, place in dict(SHOWN if shown else PLACES).items():
            presence[SLOT[name]] = 0.9
            places[:, SLOT[name]] = place
        ahead = PLACES['red'][0] - SHOWN['red'][0] if shown and SHOWN else GONE[0]
        return presence, places, np.array([1.0, 0.0, 4.0 - ahead, 4.0, 4.0 + ahead, 4.0])


class Robot:
    """A node that decides, a camera that never stops, odometry at ``pose`` (None: none), and a client of the action."""

    def __init__(self, node):
        self.node, self.pose, self.decisions, self.feedback = node, None, [], []
        tester = node.tester
        tester.create_subscription(Decision, 'decision', lambda m: self.decisions.append((time.monotonic(), m)), STATUS)
        self.odometry = tester.create_publisher(Odometry, 'odom', ODOMETRY)
        self.poses = tester.create_publisher(PoseStamped, 'goal_pose', 10)
        self.goals = tester.create_publisher(String, 'goal', 10)
        self.client = ActionClient(tester, DriveTo, 'drive_to')
        self.running = True
        self.camera = threading.Thread(target=self._film, daemon=True)
        self.camera.start()
        assert self.client.wait_for_server(20.0)

    def _film(self):
        due = time.monotonic()
        while self.running:
            if self.pose is not None:
                message = Odometry()
                message.header.frame_id, message.header.stamp = 'odom', time_message(self.node.now())
                x, y, yaw = self.pose
                message.pose.pose.position.x, message.pose.pose.position.y = x, y
                message.pose.pose.orientation.z, message.pose.pose.orientation.w = math.sin(yaw / 2), math.cos(yaw / 2)
                self.odometry.publish(message)
            self.node.images.publish(self.node.image())
            due = max(due + 0.1, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))

    def stand_at(self, *pose):
        """Be at (x, y, yaw) by odometry; return once the node has heard so. Readings of the test before are recent, too."""
        self.pose = pose
        readings = self.node.subject._deciding.odometry.readings
        wait_for(lambda: (heard := readings.at(self.node.now())) and heard[0] == pytest.approx(pose), 'odometry')

    def send(self, **goal):
        """Send a goal; return its handle."""
        future = self.client.send_goal_async(
            DriveTo.Goal(**goal), feedback_callback=lambda m: self.feedback.append((time.monotonic(), m.feedback)))
        wait_for(future.done, 'the answer to a goal')
        return future.result()

    def accepted(self, **goal):
        handle = self.send(**goal)
        assert handle.accepted
        return handle

    def result(self, handle):
        future = handle.get_result_async()
        wait_for(future.done, 'the result')
        return future.result()

    def place(self, x, y, frame='odom', yaw=None):
        message = PoseStamped()
        turn = message.pose.orientation
        turn.z, turn.w = (0.0, 0.0) if yaw is None else (math.sin(yaw / 2), math.cos(yaw / 2))
        message.header.frame_id = frame
        message.pose.position.x, message.pose.position.y = x, y
        return message

    @property
    def task(self):
        return self.node.subject._task

    def stops(self):
        return [at for at, chunk in self.node.received['action_chunk'] if chunk.tier == ActionChunk.TIER_STOP]

    def close(self):
        self.running = False
        self.camera.join()


def seen(name, backend, threads):
    made = forecasts('some forecast', backend, threads)
    made.open = Scene
    return made


@contextlib.contextmanager
def robot_of(node):
    PLACES.clear()
    GONE[0] = 0.0
    PLACES['red'], PLACES['blue'] = (2.0, 0.3), (1.5, -0.8)
    robot = Robot(node)
    try:
        yield robot
    finally:
        robot.close()


@pytest.fixture(scope='module')
def node():
    with active(goal='', load_forecast=seen, forecast='some forecast', deadline_s=0.3) as subject:
        yield subject


@pytest.fixture
def robot(node):
    with robot_of(node) as made:
        yield made
        made.running = False
        node.subject.executor.create_task(node.subject.stand)
        wait_for(lambda: not node.subject._task.terms, 'the robot to stand')
        assert node.trigger('reset').success  # the next test is in another room


def test_a_goal_is_driven_to_with_feedback_and_stood_at(robot):
    handle = robot.accepted(goal='red')
    begun = time.monotonic()
    time.sleep(2.0)
    told = [each for at, each in robot.feedback if at > begun]
    assert len(told) / 2.0 >= 5.0  # Hz
    assert told[-1].distance == pytest.approx(math.hypot(2.0, 0.3), abs=0.01) and told[-1].risk == 0.0
    decided = [each.tier in (ActionChunk.TIER_TWO_STEP, ActionChunk.TIER_ONE_STEP, ActionChunk.TIER_PLAN_ONLY) for each in told]
    assert sum(decided) > len(told) / 2  # on a busy machine a tick may be late
    PLACES['red'] = (0.9, 0.0)
    wait_for(lambda: 0.0 < robot.feedback[-1][1].predicted < 2.0, 'a prediction of the arrival')
    PLACES['red'] = (0.4, 0.0)
    answer = robot.result(handle)
    assert answer.status == GoalStatus.STATUS_SUCCEEDED
    assert answer.result.code == DriveTo.Result.REACHED and 'reached' in answer.result.reason
    assert answer.result.distance == pytest.approx(0.4, abs=0.01) and answer.result.seconds > 2.0
    wait_for(lambda: not robot.task.terms and robot.stops(), 'the robot to stand')


def test_cancelled_it_stands_within_300_ms(robot):
    handle = robot.accepted(goal='red')
    wait_for(lambda: robot.feedback, 'feedback')
    before, asked = len(robot.stops()), time.monotonic()
    handle.cancel_goal_async()
    answer = robot.result(handle)
    assert answer.status == GoalStatus.STATUS_CANCELED and answer.result.reason == 'cancelled'
    wait_for(lambda: len(robot.stops()) > before, 'a stop')
    assert robot.stops()[before] - asked < 0.3
    assert not robot.task.terms


def test_a_new_goal_takes_the_place_of_the_one_before_at_the_next_tick(robot):
    first = robot.accepted(goal='red')
    wait_for(lambda: robot.feedback, 'feedback')
    second = robot.accepted(goal='blue')
    at = time.monotonic()
    answer = robot.result(first)
    assert answer.status == GoalStatus.STATUS_ABORTED and answer.result.code == DriveTo.Result.PREEMPTED
    wait_for(lambda: robot.decisions[-1][1].task == 'blue', 'a decision for the new goal')
    later = [(when, decision.task) for when, decision in robot.decisions if when > at + 0.25]
    assert all(task == 'blue' for _, task in later)
    second.cancel_goal_async()
    assert robot.result(second).status == GoalStatus.STATUS_CANCELED


def test_a_goal_by_topic_pre_empts_it_and_is_not_stopped(robot):
    handle = robot.accepted(goal='red')
    wait_for(lambda: robot.feedback, 'feedback')
    robot.goals.publish(String(data='blue'))
    answer = robot.result(handle)
    assert answer.result.code == DriveTo.Result.PREEMPTED and 'topic' in answer.result.reason
    assert robot.task.name == 'blue'


def test_a_goal_that_takes_too_long_is_given_up(robot):
    answer = robot.result(robot.accepted(goal='red', timeout=0.5))
    assert answer.status == GoalStatus.STATUS_ABORTED and answer.result.code == DriveTo.Result.TIMEOUT
    assert not robot.task.terms


def test_a_goal_whose_image_cannot_be_evaluated_is_refused_and_others_are_served(robot, capfd):
    broken = Image(height=64, width=64, encoding='mono8', step=64, data=bytes(BROKEN) * 2048)
    robot.node.tester.create_publisher(Image, 'goal_image', STATUS).publish(broken)
    assert not robot.send(image=broken).accepted
    assert 'the device is lost' in capfd.readouterr().err
    robot.result(robot.accepted(goal='red', timeout=0.3))


def hold_up(executor, seconds=1.5):
    busy = threading.Event()

    def hold():
        busy.set()
        time.sleep(seconds)
    executor.create_task(hold)
    assert busy.wait(5.0)


def test_a_goal_that_is_cancelled_while_the_node_is_busy_is_stood_at_all_the_same(robot):
    handle = robot.accepted(goal='red')
    wait_for(lambda: robot.feedback, 'feedback')
    hold_up(robot.node.subject.executor)
    handle.cancel_goal_async()
    assert robot.result(handle).status == GoalStatus.STATUS_CANCELED
    wait_for(lambda: not robot.task.terms, 'the robot to stand', 5.0)


def test_a_goal_that_was_refused_because_the_node_was_busy_is_not_driven_to_later(robot, capfd):
    hold_up(robot.node.subject.executor)
    assert not robot.send(goal='red').accepted
    assert 'the node does not answer' in capfd.readouterr().err
    free = threading.Event()
    robot.node.subject.executor.create_task(free.set)
    assert free.wait(5.0) and not robot.task.terms
    robot.result(robot.accepted(goal='red', timeout=0.3))


def test_a_goal_outlasts_the_moment_in_which_its_node_is_deactivated(robot, monkeypatch):
    robot.accepted(goal='blue')
    wait_for(lambda: robot.feedback, 'feedback')
    handle = robot.accepted(goal='red', timeout=1.0)
    with monkeypatch.context() as during:
        during.setattr(robot.node.subject, 'newest_decision', lambda: None)  # as once the activation is gone
        time.sleep(0.3)
    assert robot.result(handle).result.code == DriveTo.Result.TIMEOUT


def test_a_task_is_a_goal_and_what_is_kept_goes_on(robot):
    terms = [Term(kind=Term.KEEP_DISTANCE, target='red', distance=2.0)]
    handle = robot.accepted(task=Task(name='follow', terms=terms))
    result = handle.get_result_async()
    wait_for(lambda: robot.feedback, 'feedback')
    time.sleep(0.5)
    assert not result.done() and robot.task.name == 'follow'


@pytest.mark.parametrize(('goal', 'why'), [
    ({}, 'none'), ({'goal': 'purple'}, 'unknown'), ({'goal': 'red', 'timeout': -1.0}, 'timeout'),
    ({'goal': 'red', 'task': Task(terms=[Term(kind=Term.REACH, target='blue')])}, 'goal and task'),
    ({'task': Task(terms=[Term(kind='fly')])}, 'unknown kind')])
def test_what_cannot_be_driven_to_is_refused(robot, capfd, goal, why):
    assert not robot.send(**goal).accepted
    assert why in capfd.readouterr().err


def test_a_pose_is_a_goal_where_odometry_tells_where_the_robot_is(robot, capfd):
    assert not robot.send(pose=robot.place(1.0, 2.0)).accepted
    assert 'none is heard on odom' in capfd.readouterr().err
    robot.stand_at(1.0, 1.0, math.pi / 2)
    assert not robot.send(pose=robot.place(1.0, 2.0, 'map')).accepted
    assert "frame 'map' is not understood" in capfd.readouterr().err
    assert not robot.send(pose=robot.place(math.nan, 2.0)).accepted

    handle = robot.accepted(pose=robot.place(1.0, 3.0))
    wait_for(lambda: robot.feedback and robot.feedback[-1][1].distance == pytest.approx(2.0, abs=0.01), 'feedback')
    def decided():
        return [m for _, m in robot.decisions if m.task == robot.task.name]
    wait_for(decided, 'a decision')
    ahead = decided()[-1]
    chosen = next((each for each in ahead.candidates if each.name == ahead.chosen), None)
    assert chosen is None or chosen.x[-1] > 0.3  # it is straight ahead
    PLACES.clear()  # they would go along
    for left in (1.81, 1.62, 1.43, 1.24, 1.05, 0.86, 0.67, 0.48, 0.29, 0.1):  # no jump, which would be a reset
        robot.pose, GONE[0] = (1.0, 3.0 - left, math.pi / 2), 2.0 - left
        if left > 0.1:
            wait_for(lambda left=left: robot.feedback[-1][1].distance == pytest.approx(left, abs=0.01), 'the next step')
    answer = robot.result(handle)
    assert answer.result.code == DriveTo.Result.REACHED and answer.result.distance == pytest.approx(0.1, abs=0.01)


def test_the_orientation_of_a_pose_is_turned_to(robot):
    robot.stand_at(1.0, 1.0, 0.0)
    handle = robot.accepted(pose=robot.place(1.0, 1.0, yaw=1.0))
    result = handle.get_result_async()
    wait_for(lambda: robot.feedback, 'feedback')
    time.sleep(0.5)
    assert not result.done()  # it is there, and looks elsewhere
    wait_for(lambda: robot.node.received['action_chunk'][-1][1].values[1] > 0.5, 'a turn to the left')
    looking = robot.accepted(pose=robot.place(1.0, 1.0, yaw=0.05))
    assert robot.result(handle).result.code == DriveTo.Result.PREEMPTED
    assert robot.result(looking).result.code == DriveTo.Result.REACHED


def white():
    return Image(height=64, width=64, encoding='rgb8', step=192, data=bytes([255]) * 64 * 192)


def test_an_image_is_a_goal_that_is_found_by_the_things_in_it(robot, capfd):
    robot.stand_at(1.0, 1.0, 0.0)
    SHOWN.clear()
    assert not robot.send(image=white()).accepted
    assert 'of one colour' in capfd.readouterr().err
    assert not robot.send(image=Image(height=4, width=4, encoding='unheard', step=4, data=bytes(16))).accepted
    assert 'the image is not understood' in capfd.readouterr().err
    assert not robot.send(image=white(), goal='red').accepted

    SHOWN.update(red=(1.5, 0.3), blue=(1.0, -0.8))  # as the robot sees them half a metre further on
    handle = robot.accepted(image=white())
    wait_for(lambda: robot.feedback and robot.feedback[-1][1].distance == pytest.approx(0.5, abs=0.05), 'feedback')
    # What the test's camera shows is nothing like what the image does, which is of one colour.
    assert all(math.isnan(told.similarity) for _, told in robot.feedback)
    handle.cancel_goal_async()
    assert robot.result(handle).status == GoalStatus.STATUS_CANCELED
    images = robot.node.tester.create_publisher(Image, 'goal_image', 10)
    wait_for(images.get_subscription_count, 'the node to listen to goal_image')
    images.publish(white())
    wait_for(lambda: robot.task.name == 'image', 'the image to be the goal')


@pytest.mark.parametrize('thing, turn, said', [(0.0, 0.0, True), (0.9, 0.0, False), (0.0, math.pi / 4, False)])
def test_the_answer_says_so_where_an_image_may_be_of_many_places(thing, turn, said):
    presence, walls = np.zeros(len(SLOTS)), np.array([math.cos(4 * turn), math.sin(4 * turn), 1.0, 1.0, 4.0, 4.0])
    presence[SLOT['red']] = thing
    walls[5] = walls[2]  # two walls of a corner, if it is turned to one
    sight = Sight(presence, np.tile((1.0, 0.0), (len(SLOTS), 1)), walls, np.zeros((64, 64, 3), np.uint8))
    reach = Reach(SIGHT, sight=sight)
    decided = SimpleNamespace(observation=SimpleNamespace(task=SimpleNamespace(terms=(reach,))))
    assert ('one wall alone' in said_of(decided)) == said


def test_a_pose_of_rviz_is_driven_to_and_one_in_base_link_is_where_the_robot_was(robot):
    robot.stand_at(1.0, 1.0, math.pi / 2)
    wait_for(robot.poses.get_subscription_count, 'the node to listen to goal_pose')
    robot.poses.publish(robot.place(0.0, 2.0))
    wait_for(lambda: robot.task.name == 'place (0.000, 2.000)', 'the place')

    def other_place():
        robot.poses.publish(robot.place(1.0, 0.5, 'base_link'))  # ahead is y, left is minus x
        time.sleep(0.05)
        return robot.task.terms and robot.task.terms[0].place == pytest.approx((0.5, 2.0), abs=1e-6)
    wait_for(other_place, 'the other place')
    refused = robot.node.refused().get('goal_pose', 0)
    robot.poses.publish(robot.place(0.0, 0.0, 'map'))
    wait_for(lambda: robot.node.refused().get('goal_pose', 0) > refused, 'the refusal')


def test_the_command_line_drives_to_a_goal(robot, capsys):
    PLACES['red'] = (0.4, 0.0)
    assert cli.main(['drive-to', 'red', '--timeout', '20']) == 0
    assert 'reached' in capsys.readouterr().out
    assert cli.main(['drive-to', '--pose', '1.0', '0.0', '--frame', 'map']) == 3
    PLACES['blue'] = (2.0, 0.0)
    assert cli.main(['drive-to', 'blue', '--timeout', '0.7']) == 1
    out = capsys.readouterr().out
    assert '2.00 m left' in out and 'not reached within 0.7 s' in out
    assert cli.main(['drive-to']) == 2
    assert cli.main(['drive-to', 'red', '--yaw', '1.0']) == 2


def test_feedback_leaves_out_what_is_not_known():
    told = DriveTo.Feedback(distance=math.nan, similarity=math.nan, predicted=math.nan, chosen='search')
    assert in_words(told) == 'not found yet, search, risk 0%'
    told = DriveTo.Feedback(distance=1.5, similarity=0.25, predicted=2.0, chosen='policy', risk=0.5)
    assert in_words(told) == ' 1.50 m left, 0.25 alike, policy, there in 2.0 s, risk 50%'


def test_the_command_line_takes_an_image(robot, tmp_path, capsys):
    robot.stand_at(1.0, 1.0, 0.0)
    SHOWN.update(PLACES)
    there = tmp_path / 'there.png'
    assert cli.main(['drive-to', '--image', str(there)]) == 2
    Pixels.fromarray(np.full((64, 64, 3), 255, np.uint8)).save(there)
    assert cli.main(['drive-to', '--image', str(there), '--timeout', '20']) == 0
    assert 'reached' in capsys.readouterr().out


def test_a_goal_ends_with_the_activation_and_nothing_is_accepted_without_a_forecast():
    # In a namespace: the node of the other tests has the same name.
    options = {'load_forecast': seen, 'forecast': 'some forecast', 'deadline_s': 0.3, 'namespace': 'other'}
    with active(goal='', **options) as node, robot_of(node) as robot:
        handle = robot.accepted(goal='red')
        wait_for(lambda: robot.feedback, 'feedback')
        assert node.change('deactivate')
        assert robot.result(handle).result.code == DriveTo.Result.STOPPED
        assert not robot.send(goal='red').accepted
        wait_for(lambda: not robot.task.terms, 'the goal to be forgotten')
        before = len(node.messages())
        assert node.change('activate')
        wait_for(lambda: 'no goal' in node.statuses[-1].reason, 'the robot to stand')
        assert all(chunk.tier not in MOTION for chunk in node.messages()[before:])
    with rig('configure', 'activate', namespace='other') as node, robot_of(node) as robot:
        assert not robot.send(goal='red').accepted
