"""The node heeds camera_info: images are warped to the trained view, refused where that is not seen, left where told so."""
import math
import time
from array import array
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import rclpy
from camera_infos import camera_info
from diagnostic_msgs.msg import DiagnosticStatus
from fake_engine import SPEC, FakeEngine
from rclpy.context import Context
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile
from sensor_msgs.msg import CameraInfo, Image
from test_mount import OPTICAL, transform
from test_world_model_node_deciding import Stream
from tf2_msgs.msg import TFMessage
from world_model_rig import TINY, rig, wait_for

from worldmodel_ros.cli import checks
from worldmodel_ros.cli.checks import Level
from worldmodel_ros.engine.forecast.loading import Forecasts
from worldmodel_ros.evaluate.control.cameras import CAMERAS
from worldmodel_ros.model.presets import SIMULATED
from worldmodel_ros.nodes.common.messages import time_message
from worldmodel_ros.nodes.common.qos import CAMERA
from worldmodel_ros.nodes.world_model.camera import CameraTopics
from worldmodel_ros.sim.cameras import WIDER
from worldmodel_ros.sim.world import World

pytestmark = [pytest.mark.ros, pytest.mark.untimed]
DISTORTED = (-0.05, 0.003, 0.001, -0.001, 0.0)


class CameraRig:
    """A node whose model was trained with the simulator's camera, and a camera of the test's."""

    def __init__(self, node):
        self.node = node
        self.publisher = node.tester.create_publisher(CameraInfo, 'camera/camera_info', CAMERA)
        wait_for(self.publisher.get_subscription_count, 'the node to listen to camera_info')

    def info(self, told):
        """Publish a CameraInfo until the node has heard it; best effort may lose one."""
        message = CameraInfo(height=told.height, width=told.width, distortion_model=told.distortion_model, d=told.d, k=told.k,
                             p=told.p)
        message.header.frame_id = 'camera_optical_frame'
        camera = self.node.subject._camera

        def heard():
            self.publisher.publish(message)
            time.sleep(0.02)
            return camera._newest and camera._newest[-2] == tuple(told.k)
        wait_for(heard, 'the camera_info to be heard')

    def show(self, picture):
        """Publish one image, and return what the engine was given of it."""
        height, width, _ = picture.shape
        message = Image(height=height, width=width, encoding='rgb8', step=3 * width, data=array('B', picture.tobytes()))
        shown = self.node.engine.shown
        before = len(shown)

        def given():
            message.header.stamp = time_message(self.node.now())
            self.node.images.publish(message)
            time.sleep(0.11)
            return len(shown) > before
        wait_for(given, 'an image that the engine is given')
        return shown[-1]


class Keeping(FakeEngine):
    """Keeps what its sessions observe in ``shown``."""

    def open_session(self):
        session = super().open_session()
        observe = session.observe

        def kept(frame, executed):
            self.shown.append(np.array(frame))
            return observe(frame, executed)
        session.observe = kept
        return session


@pytest.fixture
def trained():
    """Return what opens a rig whose model says what camera it was trained with."""
    def open_rig(*transitions, **parameters):
        engine = Keeping(time.sleep, **TINY)
        engine.shown = []
        engine.spec = SimpleNamespace(**{**vars(SPEC), 'camera': SIMULATED})
        opened = rig(*transitions, load_engine=lambda **chosen: engine, **{'diagnostic_updater.period': 0.1, **parameters})
        node = opened.__enter__()
        node.engine = engine
        rigs.append(opened)
        return node
    rigs = []
    yield open_rig
    for opened in rigs:
        opened.__exit__(None, None, None)


def camera_info_of(camera):
    info = camera_info(camera.size, 90.0, camera.distortion)
    info.k = [camera.focal, 0.0, camera.centre[0], 0.0, camera.focal, camera.centre[1], 0.0, 0.0, 1.0]
    return info


def test_images_of_a_wide_distorted_camera_reach_the_engine_as_the_trained_one_saw_them(trained):
    node = trained('configure', 'activate')
    camera = CameraRig(node)
    world = World(7_000_001)
    cropped = camera.show(WIDER.render(world))
    begun = node.subject._activation.intake.episode
    camera.info(camera_info_of(WIDER))
    shown = camera.show(WIDER.render(world))
    assert np.array_equal(shown, CAMERAS['camera_wider'].look(world, (64, 64)))
    assert np.array_equal(cropped, CAMERAS['camera_wider_uncorrected'].look(world, (64, 64)))
    assert node.subject._activation.intake.episode != begun  # the past was seen by another view
    wait_for(lambda: 'warped to the 90 x 90 degrees' in node.report()[2]['camera'], 'the report of the camera')


def test_a_camera_that_does_not_see_enough_is_refused_and_stops_the_robot_until_another_one_comes(trained):
    node = trained('configure', 'activate', goal='red')
    camera = CameraRig(node)
    camera.info(camera_info((480, 640), 60.0))
    node.film(0.5, publish=lambda: node.images.publish(node.image(size=(480, 640))))
    wait_for(lambda: node.refused().get('image: camera'), 'the refusal')
    level, text, values = node.report()
    assert level == DiagnosticStatus.ERROR and 'take a wider lens' in text and values['camera'] == text
    camera.info(camera_info((480, 640), 110.0))
    assert camera.show(np.full((480, 640, 3), 99, np.uint8)).shape == (64, 64, 3)


def test_a_pitch_that_parameters_tell_is_corrected(trained):
    node = trained('configure', 'activate', camera_height_m=0.25, camera_pitch_deg=13.0)
    camera, pitched = CameraRig(node), CAMERAS['camera_pitched']
    world = World(7_000_001)
    camera.info(camera_info_of(WIDER))
    assert np.array_equal(camera.show(pitched.camera.render(world)), pitched.look(world, (64, 64)))
    assert not node.subject._camera.differences()


def test_camera_info_is_ignored_where_told_so(trained):
    node = trained('configure', 'activate', use_camera_info=False)
    camera = CameraRig(node)
    camera.info(camera_info((480, 640), 60.0))
    picture = np.random.default_rng(0).integers(0, 256, (480, 640, 3), np.uint8)
    assert camera.show(picture).shape == (64, 64, 3)
    assert 'use_camera_info is false' in node.report()[2]['camera']


def test_a_mount_that_is_told_by_parameters_is_compared_with_the_training(trained):
    node = trained('configure', 'activate', camera_height_m=0.40, camera_pitch_deg=8.5)
    node.film(0.2)
    level, text, values = node.report()
    assert level == DiagnosticStatus.WARN
    assert '0.15 m higher than in training (0.25 m)' in text and 'degrees further' not in text
    assert 'what that costs, by 0.1 m higher: 18% of goal objects' in text
    assert (float(values['camera_height_m']), float(values['camera_pitch_deg'])) == (0.40, 8.5)


LATCHED = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)


def test_a_mount_is_read_from_tf(trained):
    node = trained('configure', 'activate')
    static = node.tester.create_publisher(TFMessage, '/tf_static', LATCHED)
    static.publish(TFMessage(transforms=[transform('base_link', 'camera', (0.1, 0.0, 0.45), (0.0, 0.3, 0.0)),
                                         transform('camera', 'camera_optical_frame', rpy=OPTICAL)]))
    CameraRig(node).info(camera_info((64, 64), 90.0))
    wait_for(lambda: node.subject._camera.mount, 'the mount')
    assert '0.20 m higher' in node.subject._camera.differences() and node.subject._camera._moving is None
    node.film(0.2)
    level, text, values = node.report()
    assert level == DiagnosticStatus.WARN and '0.20 m higher than in training' in text
    assert (float(values['camera_height_m']), float(values['camera_pitch_deg'])) == pytest.approx((0.45, 17.2), abs=0.05)


def test_a_mount_is_put_together_from_a_joint_and_what_is_fixed_to_it(trained):
    node = trained('configure', 'activate')
    static, moving = (node.tester.create_publisher(TFMessage, topic, profile)
                      for topic, profile in (('/tf_static', LATCHED), ('/tf', 10)))
    static.publish(TFMessage(transforms=[transform('base_footprint', 'base_link', (0.0, 0.0, 0.05)),
                                         transform('head', 'camera_optical_frame', rpy=OPTICAL)]))
    CameraRig(node).info(camera_info((64, 64), 90.0))

    def found():
        moving.publish(TFMessage(transforms=[transform('base_link', 'head', (0.1, 0.0, 0.20), (0.0, math.radians(8.0), 0.0))]))
        return node.subject._camera.mount
    wait_for(found, 'the mount')
    mount = node.subject._camera.mount
    assert (mount.height, mount.pitch) == pytest.approx((0.25, 8.0)) and not node.subject._camera.differences()


def test_what_is_heard_on_tf_is_the_message_of_every_distribution(trained):
    node = trained('configure', 'activate')
    publisher = node.tester.create_publisher(TFMessage, '/tf_static', LATCHED)
    told, = (each for each in node.tester.get_publishers_info_by_topic('/tf_static')
             if each.node_name == node.tester.get_name())
    assert told.topic_type == 'tf2_msgs/msg/TFMessage'
    # As `ros2 topic info --verbose /tf` of Jazzy has it: programs of a distribution and those of wheels hear each other.
    assert str(told.topic_type_hash) == 'RIHS01_e369d0f05a23ae52508854b66f6aa0437f3449d652e8cbf22d5abe85d020f087'
    wait_for(publisher.get_subscription_count, 'the node to listen to it')


def test_a_forecast_that_was_trained_with_another_camera_is_refused(trained):
    def narrow(name, backend, threads):
        return Forecasts(name, backend, (64, 64), 0.1, Stream, replace(SIMULATED, vertical_fov=60.0))
    node = trained(load_forecast=narrow, forecast='narrow')
    assert not node.change('configure')


@pytest.mark.parametrize(('remapped', 'expected'), [
    ({}, '/camera/camera_info'), ({'camera/image_raw': '/front/image_raw'}, '/front/camera_info'),
    ({'camera/image_raw': '/front/image_raw', 'camera/camera_info': '/calibrated'}, '/calibrated')])
def test_camera_info_is_next_to_the_images_unless_it_is_remapped(remapped, expected):
    context = Context()
    arguments = [word for source, target in remapped.items() for word in ('-r', f'{source}:={target}')]
    rclpy.init(context=context)
    try:
        node = Node('camera', context=context, cli_args=['--ros-args', *arguments])
        heard = CameraTopics(node, node.resolve_topic_name('camera/image_raw'), SPEC, {
            'camera_height_m': None, 'camera_pitch_deg': None, 'base_frame': 'base_link', 'use_camera_info': True,
            'image_rectified': False}, lambda: None)
        assert heard._subscriptions[0].topic_name == expected
    finally:
        rclpy.shutdown(context=context)


@pytest.mark.parametrize(('across', 'level', 'words'), [
    (110.0, Level.OK, 'warped to the 90 x 90 degrees of training'), (60.0, Level.FAIL, 'take a wider lens'),
    (None, Level.WARN, 'camera_info not heard')])
def test_doctor_compares_a_running_camera_with_that_of_the_model(across, level, words):
    with rig() as node:
        if across:
            publisher = node.tester.create_publisher(CameraInfo, '/front/camera_info', CAMERA)
            told = camera_info((480, 640), across)
            message = CameraInfo(height=told.height, width=told.width, k=told.k, p=told.p)
            message.header.frame_id = 'front'
            node.tester.create_timer(0.1, lambda: publisher.publish(message))
        finding = checks.camera('/front/image_raw', 'tiny')
    assert finding.level is level and words in finding.text, finding
    assert ('where it stands is not known' in finding.text) == (level is Level.OK)


def test_doctor_needs_a_model_to_compare_with():
    assert checks.camera('/front/image_raw', 'nowhere').level is Level.FAIL
