"""The world model node with an open world model: predicted video, what-if answers and sessions, and never a command."""
import importlib.util
import math
import signal
import subprocess
import sys
import time

import cv2
import numpy as np
import open_world
import pytest
from builtin_interfaces.msg import Duration
from diagnostic_msgs.msg import DiagnosticStatus
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from nav_msgs.msg import Odometry
from rclpy.parameter import Parameter
from test_mount import OPTICAL, transform
from tf2_msgs.msg import TFMessage
from sensor_msgs.msg import CameraInfo, Image
from world_model_rig import DEADLINE, TRANSITIONS, Rig, stamp_of, time_message, wait_for

from worldmodel_ros.engine.loading import load_world
from worldmodel_ros.engine.open_world.calibration import base_pose, fitted
from worldmodel_ros.engine.open_world.description import optical_frame
from worldmodel_ros.inputs.images import fit
from worldmodel_ros.msg import ActionChunk, PredictedFuture
from worldmodel_ros.nodes.common.qos import CAMERA, ODOMETRY
from worldmodel_ros.nodes.world_model.camera import STATIC
from worldmodel_ros.srv import SessionFile, SetTask, WhatIf

pytestmark = [pytest.mark.ros, pytest.mark.untimed, pytest.mark.skipif(
    importlib.util.find_spec('diffusers') is None, reason='diffusers is not installed: extra [wan]')]
H, W = open_world.SIZE
RATE = 16.0  # Hz, of the video
ALLOWED = Duration(sec=60)


class WorldRig(Rig):
    """A node with the model itself, whose camera is larger than the model's images."""

    def __init__(self, tiny_world, **parameters):
        super().__init__(lambda **chosen: load_world(chosen['model'], chosen['backend'], chosen['threads'], chosen['gpus']),
                         model=str(tiny_world), camera_timeout_s=20.0, executed_timeout_s=0.0, **parameters)
        self.infos = self.tester.create_publisher(CameraInfo, 'camera/camera_info', CAMERA)
        self.wheels = self.tester.create_publisher(Odometry, 'odom', ODOMETRY)

    def show(self, count=1):
        """Publish images of noise at the rate of the video."""
        def publish():
            message = self.image(size=(64, 96))
            pixels = np.random.default_rng(self.value).integers(0, 256, (64, 96, 3), dtype=np.uint8)
            message.data = pixels.tobytes()
            self.images.publish(message)
        self.film(count / RATE, RATE, publish)

    def predicted(self, count=1):
        """Show images until so many more predictions have come; return the newest."""
        have = len(self.messages('predicted_future'))
        end = time.monotonic() + DEADLINE
        while len(self.messages('predicted_future')) < have + count:
            assert time.monotonic() < end, 'no prediction'
            self.show()
        return self.messages('predicted_future')[-1]

    def report(self):
        """As of any rig, of this one's node among all that report on /diagnostics."""
        name, have = self.subject.get_fully_qualified_name().lstrip('/'), len(self.received['/diagnostics'])

        def own():
            new = [message.status[0] for message in self.messages('/diagnostics')[have:]]
            return [status for status in new if status.name.startswith(f'{name}: ')]
        status = wait_for(own, 'diagnostics')[-1]
        return status.level, status.message, {value.key: value.value for value in status.values}

    def ask(self, **fields):
        return self.call(WhatIf, 'what_if', WhatIf.Request(deadline=ALLOWED, **fields), timeout=70.0)


@pytest.fixture(scope='module')
def node(tiny_world, tmp_path_factory):
    rig = WorldRig(tiny_world, session_directory=str(tmp_path_factory.mktemp('home') / 'sessions'))
    try:
        assert rig.change('configure', 'activate')
        yield rig
    finally:
        rig.close()


def pixels(message):
    return cv2.imdecode(np.frombuffer(message.data, np.uint8), cv2.IMREAD_COLOR)


def test_predictions_are_video_from_the_newest_image_and_no_command_has_a_publisher(node):
    future = node.predicted()
    assert len(future.frames) == 8 and future.step_period == pytest.approx(1 / RATE)
    assert pixels(future.frames[0]).shape == (H, W, 3)
    assert [stamp_of(frame) - stamp_of(future) for frame in future.frames[:2]] == [62_500_000, 125_000_000]
    assert (future.tier, future.command_tier) == (ActionChunk.TIER_TWO_STEP, ActionChunk.TIER_NONE)
    assert future.header.frame_id == 'camera_optical_frame' and future.timings.total > 0.0
    assert list(future.actions.names) == ['linear.x', 'angular.z'] and not any(future.actions.values)
    assert not len(future.collision_risk) and math.isnan(future.progress) and future.age > 0.0
    image = wait_for(lambda: node.messages('predicted_image/compressed'), 'an image')[-1]
    assert pixels(image).shape == (H, 3 * W, 3)
    marker, = wait_for(lambda: node.messages('predicted_path'), 'a path')[-1].markers
    assert len(marker.points) == 9
    types = {name for name, kinds in node.subject.get_publisher_names_and_types_by_node(
        node.subject.get_name(), node.subject.get_namespace()) if 'worldmodel_ros/msg/ActionChunk' in kinds
        or any('Twist' in kind for kind in kinds)}
    assert not types and not node.messages('action_chunk') and not node.statuses


def test_predictions_follow_what_the_robot_does(node):
    end = time.monotonic() + DEADLINE
    while True:
        node.drive(0.3, 0.5)
        values = np.reshape(node.predicted().actions.values, (-1, 2))
        if np.allclose(values, (0.3, 0.5), atol=0.01):
            break
        assert time.monotonic() < end
    node.drive(0.0, 0.0)


def test_what_if_i_move_left_has_branches_of_their_own(node):
    node.predicted()
    explicit = ActionChunk(names=['linear.x', 'angular.z'], step_period=1 / RATE, values=[9.0, 0.0] * 3)
    answer = node.ask(names=['left', 'right'], actions=[explicit], horizon=0.75)
    assert answer.success and not answer.deadline_exceeded, answer.message
    left, right, third = answer.branches
    assert [branch.name for branch in answer.branches] == ['left', 'right', 'explicit_0']
    assert [len(branch.frames) for branch in answer.branches] == [12, 12, 3] and answer.step_period == pytest.approx(1 / RATE)
    assert any((pixels(one) != pixels(other)).any() for one, other in zip(left.frames, right.frames))
    assert left.yaw[-1] == pytest.approx(0.75) and left.y[-1] > 0.0 > right.y[-1]
    assert third.actions.values[0] == pytest.approx(0.5)  # the robot's top speed
    assert not len(left.collision_risk) and math.isnan(left.progress) and math.isnan(left.score)


@pytest.mark.parametrize(('fields', 'message'), [
    ({'names': ['policy']}, 'have none'), ({'names': ['left'], 'goal': 'red'}, "goal 'red' is unknown"),
    ({'names': ['upwards']}, 'is unknown'), ({'names': []}, 'no branch')])
def test_questions_that_such_a_model_cannot_answer_are_refused(node, fields, message):
    node.predicted()
    answer = node.ask(**fields)
    assert not answer.success and message in answer.message


def test_goals_and_tasks_are_refused_and_sessions_need_observed_images(node):
    result, = node.subject.set_parameters([Parameter('goal', value='red')])
    assert not result.successful and 'no policy' in result.reason
    assert not node.call(SetTask, 'set_task', SetTask.Request()).success
    node.predicted()
    assert node.call(SessionFile, 'save_session', SessionFile.Request(path='a.safetensors')).success
    loaded = node.call(SessionFile, 'load_session', SessionFile.Request(path='a.safetensors'))
    assert not loaded.success and 'world_observes' in loaded.message
    assert node.trigger('reset').success


def test_diagnostics_tell_how_it_goes(node):
    node.predicted()
    level, text, values = node.report()
    assert level == DiagnosticStatus.OK and 'commands nothing' in text
    assert values['model'] == 'tiny_world' and int(values['predictions']) > 0 and float(values['prediction_s']) > 0.0
    assert 'none is heard on odom' in values['odometry'] and values['calibration'] == 'world.json'


def test_observed_images_odometry_and_a_calibration_make_one_session(tiny_world, tmp_path):
    rig = WorldRig(open_world.write(tmp_path / 'uncalibrated', intrinsics=None), world_observes=True, world_chunks=2,
                   session_directory=str(tmp_path / 'sessions'), time_jump_s=60.0, namespace='observing')
    try:
        assert rig.change('configure', 'activate')
        rig.show(2)
        level, text, values = rig.report()
        assert level == DiagnosticStatus.ERROR and 'camera_info' in text and values['calibration'] == 'none'
        info = CameraInfo(height=64, width=96, k=[60.0, 0.0, 47.5, 0.0, 60.0, 31.5, 0.0, 0.0, 1.0])
        rig.infos.publish(CameraInfo(height=64, width=96))  # not calibrated
        wait_for(lambda: rig.refused().get('camera_info'), 'a refusal')
        info.header.frame_id = 'camera_optical_frame'
        rig.infos.publish(info)
        wait_for(lambda: rig.subject._world.intrinsics, 'the calibration')
        assert (rig.subject._world.intrinsics.fx, rig.subject._world.intrinsics.cx) == (30.0, 24.0)
        worker = rig.subject._activation.worker
        assert rig.report()[2]['camera_in_base'] == 'world.json' and worker.optical is None
        static = rig.tester.create_publisher(TFMessage, '/tf_static', STATIC)
        static.publish(TFMessage(transforms=[transform('base_link', 'camera', (0.2, 0.1, 0.5), (0.0, 0.2, 0.3)),
                                             transform('camera', 'camera_optical_frame', rpy=OPTICAL)]))
        wait_for(lambda: worker.optical is not None, 'the camera in tf')
        assert np.allclose(worker.optical, optical_frame([0.2, 0.1, 0.5, 0.0, 0.2, 0.3]))
        assert rig.report()[2]['camera_in_base'] == 'tf, camera_optical_frame'

        def observed():
            odometry = Odometry()
            odometry.header.stamp = time_message(rig.now())
            odometry.pose.pose.position.x, odometry.pose.pose.orientation.w = 0.01 * rig.value, 1.0
            rig.wheels.publish(odometry)
            rig.show()
            session = worker._session
            return session is not None and session.frame >= 3
        wait_for(observed, 'a chunk that was committed', 60.0)
        futures = rig.received['predicted_future']
        wait_for(lambda: futures and len(futures[-1][1].frames) == 24, 'two chunks')
        assert rig.call(SessionFile, 'save_session', SessionFile.Request(path='a.safetensors')).success
        answer = rig.call(SessionFile, 'load_session', SessionFile.Request(path='a.safetensors'))
        assert answer.success, answer.message
        branches = rig.ask(names=['left'], horizon=0.75)
        assert branches.success and len(branches.branches[0].frames) == 12
        assert rig.report()[2]['odometry'] == 'measured'
        assert rig.change('deactivate', 'cleanup', 'configure', 'activate')
    finally:
        rig.close()


def test_a_checkpoint_with_two_networks_predicts_and_answers(tmp_path):
    rig = WorldRig(open_world.write(tmp_path / 'pair', networks=2), namespace='pair')
    try:
        assert rig.change('configure', 'activate')
        assert len(rig.predicted().frames) == 8
        answer = rig.ask(names=['left', 'right'], horizon=0.5)
        assert answer.success and len(answer.branches) == 2, answer.message
    finally:
        rig.close()


def test_a_prediction_that_would_be_late_says_that_it_has_fewer_steps(tiny_world):
    rig = WorldRig(tiny_world, namespace='late', world_deadline_s=1e-6)
    try:
        assert rig.change('configure', 'activate')
        rig.predicted()
        assert rig.predicted(2).tier == ActionChunk.TIER_ONE_STEP
        values = rig.report()[2]
        assert int(values['late']) >= 3 and values['quality'] == '1 steps, fewer than published'
    finally:
        rig.close()


@pytest.mark.parametrize(('parameters', 'message'), [
    ({'goal': 'red'}, 'no policy'), ({'server': 'auto'}, 'server is set'), ({'gpus': 3}, 'cannot be divided among 3'),
    ({'backend': 'onnx'}, 'does not run open world models')])
def test_what_does_not_go_with_such_a_model_fails_to_configure(tiny_world, parameters, message, capfd):
    rig = WorldRig(tiny_world, namespace='refused', **parameters)
    try:
        assert not rig.change('configure')
        assert message in capfd.readouterr().err
    finally:
        rig.close()


def test_intrinsics_are_those_of_the_middle_that_is_seen():  # which is cut out by whole pixels
    k = np.array([[100.0, 0.0, 49.5], [0.0, 100.0, 39.5], [0.0, 0.0, 1.0]])  # the middle of 80x100 pixels
    seen = fitted(k, (80, 100), (32, 48))
    assert (seen.cx, seen.cy) == pytest.approx((24.0, 16.0), abs=0.3) and seen.fx == pytest.approx(48.0, rel=0.01)
    marked = np.zeros((80, 100, 3), np.uint8)
    marked[36:44, 46:54] = 255
    rows, columns = np.nonzero(fit(marked, (32, 48))[..., 0] > 127)
    assert (columns.mean() + 0.5, rows.mean() + 0.5) == pytest.approx((seen.cx, seen.cy), abs=0.51)
    with pytest.raises(ValueError, match='no calibrated camera'):
        fitted(np.zeros((3, 3)), (80, 100), (32, 48))
    assert np.allclose(base_pose(np.array([1.0, 2.0, math.pi / 2])) @ [1, 0, 0, 1], [1, 3, 0, 1])


def test_the_process_itself_predicts_from_a_folder(tiny_world):
    """What ``ros2 run worldmodel_ros world_model_node --ros-args -p model:=FOLDER`` starts."""
    code = 'from worldmodel_ros.nodes.world_model.node import main; raise SystemExit(main())'
    process = subprocess.Popen([sys.executable, '-c', code, '--ros-args', '-r', '__ns:=/alone', '-p', f'model:={tiny_world}',
                                '-p', 'camera_timeout_s:=5.0'])
    rig = Rig(namespace='quiet')
    try:
        client = rig.tester.create_client(ChangeState, '/alone/world_model_node/change_state')
        images = rig.tester.create_publisher(Image, '/alone/camera/image_raw', CAMERA)
        futures = []
        rig.tester.create_subscription(PredictedFuture, '/alone/predicted_future', futures.append, 10)
        for name in ('configure', 'activate'):
            assert client.wait_for_service(60.0)
            future = client.call_async(ChangeState.Request(transition=Transition(id=TRANSITIONS[name])))
            assert wait_for(future.done, name, 60.0) and future.result().success
        wait_for(lambda: images.publish(rig.image()) or time.sleep(0.1) or futures, 'a prediction', 60.0)
        assert len(futures[0].frames) == 8
    finally:
        rig.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(60.0) == 0
