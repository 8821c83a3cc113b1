"""Runs a world model node with the test's own engine, plays its camera and robot, and listens to it."""
import contextlib
import gc
import os
import threading
import time
import traceback
from array import array

import numpy as np
import rclpy
from dds import on_its_thread
from diagnostic_msgs.msg import DiagnosticArray
from fake_engine import FakeEngine
from geometry_msgs.msg import Twist, TwistStamped
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.experimental.events_executor import EventsExecutor
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import String
from std_srvs.srv import Trigger
from visualization_msgs.msg import MarkerArray

from worldmodel_ros.msg import ActionChunk, DeadlineStatus, PredictedFuture
from worldmodel_ros.nodes.common import diagnostics
from worldmodel_ros.nodes.common.messages import nanoseconds, time_message, to_jpeg
from worldmodel_ros.nodes.common.qos import CAMERA, COMMAND, LATCHED
from worldmodel_ros.nodes.world_model.node import WorldModelNode

NS = 1_000_000_000
DEADLINE = 20.0  # s, for anything to happen on a busy machine
TRANSITIONS = {'configure': Transition.TRANSITION_CONFIGURE, 'activate': Transition.TRANSITION_ACTIVATE,
               'deactivate': Transition.TRANSITION_DEACTIVATE, 'cleanup': Transition.TRANSITION_CLEANUP}
# Tiers that move the robot; which one depends on the machine's load.
MOTION = (ActionChunk.TIER_TWO_STEP, ActionChunk.TIER_ONE_STEP, ActionChunk.TIER_PLAN_ONLY,
          ActionChunk.TIER_LAST_PLAN)
# The shares of the tiny model on one core.
TINY = {'encode': 0.002, 'commit': 0.004, 'policy': 0.001, 'denoise': 0.005, 'decode': 0.004,
        'what_if': 0.005}


class Spinning:
    """A node and the thread that spins it."""

    def __init__(self, node, executor):
        self.node, self.executor, self.running = node, executor, True
        executor.add_node(node)
        self.thread = threading.Thread(target=self._spin, daemon=True)
        self.thread.start()

    def _spin(self):
        while self.running:
            try:
                self.executor.spin_once(timeout_sec=0.05)
            except Exception:  # does not end the node: nodes/common/spin.py
                traceback.print_exc()

    def close(self):
        self.running = False
        self.thread.join()
        self.executor.remove_node(self.node)
        self.executor.shutdown()
        self.node.destroy_node()


class Rig:
    """
    Messages of the node are kept in ``received[topic]``, each with the steady time of its arrival.

    Queues are deeper than a robot's, so that later messages do not replace earlier ones.
    """

    def __init__(self, load_engine=None, namespace='', load_forecast=None, **parameters):
        # A node collects garbage when activated; freezing spares it the session's objects, which take half a second.
        gc.freeze()
        self.context = Context()
        rclpy.init(context=self.context)
        self.engine = FakeEngine(time.sleep, **TINY)
        overrides = [Parameter(name, value=value) for name, value in {'allow_faults': True, **parameters}.items()]
        self.subject = WorldModelNode(
            load_engine or (lambda **chosen: self.engine), load_forecast, context=self.context,
            parameter_overrides=overrides, namespace=namespace)
        self.tester = Node('tester', context=self.context, namespace=namespace)
        create = self.tester.create_publisher
        self.images = create(Image, 'camera/image_raw', CAMERA)
        self.compressed = create(CompressedImage, 'camera/image_raw/compressed', CAMERA)
        self.twists = create(TwistStamped, 'cmd_vel', COMMAND)
        self.plain_twists = create(Twist, 'cmd_vel_plain', COMMAND)
        self.goals = create(String, 'goal', LATCHED)
        self.received = {}
        for topic, kind in (('action_chunk', ActionChunk), ('deadline_status', DeadlineStatus),
                            ('predicted_future', PredictedFuture),
                            ('predicted_image/compressed', CompressedImage),
                            ('predicted_path', MarkerArray), ('/diagnostics', DiagnosticArray)):
            messages = self.received[topic] = []
            self.tester.create_subscription(
                kind, topic, lambda m, messages=messages: messages.append((time.monotonic(), m)),
                QoSProfile(depth=1000))
        self.clients = {}
        self.value = 0
        self.spinning = [Spinning(self.subject, EventsExecutor(context=self.context)),
                         Spinning(self.tester, SingleThreadedExecutor(context=self.context))]

    def close(self):
        for spinning in self.spinning:
            spinning.close()
        rclpy.shutdown(context=self.context)

    def forget(self, subscription):
        """Drop one of the tester's subscriptions."""
        on_its_thread(self.spinning[1].executor, self.tester.destroy_subscription, subscription)

    def call(self, kind, name, request, timeout=DEADLINE):
        client = self.clients.get(name)
        if client is None:
            client = self.clients[name] = self.tester.create_client(kind, f'world_model_node/{name}')
        assert client.wait_for_service(timeout)
        future = client.call_async(request)
        wait_for(future.done, f'an answer of {name}', timeout)
        return future.result()

    def change(self, *transitions, timeout=DEADLINE):
        """Perform lifecycle transitions, each within ``timeout`` s; return whether all succeeded."""
        succeeded = []
        for name in transitions:
            request = ChangeState.Request(transition=Transition(id=TRANSITIONS[name]))
            succeeded.append(self.call(ChangeState, 'change_state', request, timeout).success)
        return all(succeeded)

    @property
    def state(self):
        return self.call(GetState, 'get_state', GetState.Request()).current_state.label

    def trigger(self, name):
        return self.call(Trigger, name, Trigger.Request())

    def messages(self, topic='action_chunk'):
        return [message for _, message in self.received[topic]]

    @property
    def statuses(self):
        return self.messages('deadline_status')

    def set_goal(self, goal):
        self.goals.publish(String(data=goal))
        wait_for(lambda: self.subject._goal == goal, f'the goal {goal}')

    def image(self, stamp=None, value=None, size=(64, 64), encoding='rgb8'):
        """Return an image that differs from the last one, unless ``value`` sets its content."""
        self.value = (self.value + 1) % 256 if value is None else value
        height, width = size
        message = Image(height=height, width=width, encoding=encoding, step=width * 3,
                        data=array('B', np.full((height, width, 3), self.value, np.uint8).tobytes()))
        message.header.stamp = time_message(self.now() if stamp is None else stamp)
        message.header.frame_id = 'camera_optical_frame'
        return message

    def jpeg(self, stamp=None):
        self.value = (self.value + 1) % 256
        return to_jpeg(np.full((64, 64, 3), self.value, np.uint8),
                       time_message(self.now() if stamp is None else stamp), 'camera_optical_frame')

    def now(self):
        return self.tester.get_clock().now().nanoseconds

    def film(self, seconds, rate=10.0, publish=None):
        """Act as a camera for ``seconds``; ``publish`` sends one image."""
        publish = publish or (lambda: self.images.publish(self.image()))
        start = time.monotonic()
        for k in range(round(seconds * rate)):
            publish()
            time.sleep(max(0.0, start + (k + 1) / rate - time.monotonic()))

    def film_until(self, condition, what, timeout=60.0, publish=None):
        """Act as a camera of 10 Hz until a condition holds: of the images on a busy machine any number may be lost."""
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, f'filmed {timeout} s in vain for {what}'
            self.film(0.1, publish=publish)

    def film_until_well(self, timeout=60.0):
        """
        Act as a camera and a base that moves until a report tells of no fault; return the values of all reports meanwhile.

        On busy cores a tick is late now and then; and a camera that pauses, or a base that is silent, is a fault of its own.
        """
        def publish():
            self.twists.publish(self.twist())
            self.images.publish(self.image())

        before = len(self.messages('/diagnostics'))

        def reports():
            return [report_of(message) for message in self.messages('/diagnostics')[before:]]
        try:
            self.film_until(lambda: (told := reports()) and told[-1][0] == diagnostics.OK, 'a report without a fault',
                            timeout, publish)
        except AssertionError as error:
            raise AssertionError(f'{error}; the newest: {reports()[-1:]}') from None
        return [values for *_, values in reports()]

    @staticmethod
    def twist(v=0.3, w=0.0):
        message = TwistStamped()
        message.twist.linear.x, message.twist.angular.z = v, w
        return message

    def drive(self, v=0.3, w=0.0):
        self.twists.publish(self.twist(v, w))
        wait_for(lambda: self.subject._executed.actions.moving(self.now()) == bool(v or w), 'the executed action')

    def refused(self):
        return {key.removeprefix('refused: '): count for key, count in self.subject.refusals.values().items()}

    def report(self):
        """Return level, text and values of the next report on /diagnostics."""
        have = len(self.received['/diagnostics'])
        wait_for(lambda: len(self.received['/diagnostics']) > have, 'diagnostics')
        return report_of(self.messages('/diagnostics')[-1])


def report_of(message):
    """Return level, text and values of the one status of a DiagnosticArray."""
    status, = message.status
    return status.level, status.message, {value.key: value.value for value in status.values}


def wait_for(condition, what, timeout=DEADLINE):
    """Wait for a condition; fail with ``what`` was awaited."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.005)
    raise AssertionError(f'waited {timeout} s in vain for {what}')


@contextlib.contextmanager
def rig(*transitions, goal='', load_engine=None, namespace='', patience=DEADLINE, **parameters):
    """Run a node until the end of the block; after ``transitions``, within ``patience`` s each, with a goal if given."""
    subject = Rig(load_engine, namespace, **parameters)
    try:
        assert subject.change(*transitions, timeout=patience)
        if goal:
            subject.set_goal(goal)
        yield subject
    finally:
        subject.close()


def active(goal='red', **options):
    """Run an active node with a goal."""
    return rig('configure', 'activate', goal=goal, **options)


def stamp_of(message):
    return nanoseconds(message.header.stamp)


def open_files():
    return len(os.listdir('/proc/self/fd'))
