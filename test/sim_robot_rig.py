"""A simulated robot as a process, and a node that talks to it, for tests."""
import itertools
import os
import time
from contextlib import contextmanager

import numpy as np
import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from geometry_msgs.msg import Twist, TwistStamped
from nav_msgs.msg import Odometry
from rcl_interfaces.srv import SetParametersAtomically
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import Parameter
from sensor_msgs.msg import CameraInfo, CompressedImage, Image
from std_srvs.srv import Trigger
from visualization_msgs.msg import MarkerArray

from worldmodel_ros.bringup.description import NodeDescription
from worldmodel_ros.bringup.supervisor import Supervisor
from worldmodel_ros.nodes.common import qos
from worldmodel_ros.srv import WhatIf

TIMEOUT = 20.0  # s; most need far less
_numbers = itertools.count(1)


def nanoseconds(stamp):
    return stamp.sec * 1_000_000_000 + stamp.nanosec


def picture(message):
    return np.frombuffer(message.data, np.uint8).reshape(message.height, message.width, 3)


class Onlooker(Node):
    """Keeps everything that a robot publishes, and commands it."""

    def __init__(self, context, namespace):
        super().__init__('onlooker', context=context, namespace=namespace)
        self.executor_ = SingleThreadedExecutor(context=context)
        self.executor_.add_node(self)
        self.robot = f'{self.get_namespace()}/sim_robot'
        self.received = {}
        for topic, kind, profile in (
                ('camera/image_raw', Image, qos.CAMERA),
                ('camera/image_raw/compressed', CompressedImage, qos.CAMERA),
                ('camera/camera_info', CameraInfo, qos.CAMERA), ('odom', Odometry, qos.STATUS),
                ('sim/ground_truth', Odometry, qos.STATUS), ('sim/objects', MarkerArray, qos.LATCHED),
                ('/diagnostics', DiagnosticArray, qos.STATUS)):
            self.listen(topic, kind, profile)
        self.stamped = self.create_publisher(TwistStamped, 'cmd_vel', qos.COMMAND)
        self.plain = self.create_publisher(Twist, 'cmd_vel_plain', qos.COMMAND)
        self.what_if = self.create_client(WhatIf, 'sim_robot/what_if')
        self.reset = self.create_client(Trigger, 'sim_robot/reset')
        self.parameters = self.create_client(SetParametersAtomically, 'sim_robot/set_parameters_atomically')

    def listen(self, topic, kind, profile):
        messages = self.received[topic] = []

        def keep(message):
            # All robots report on one topic.
            if topic == '/diagnostics' and f'/{message.status[0].hardware_id}' != self.robot:
                return
            messages.append(message)

        self.create_subscription(kind, topic, keep, profile)

    def wait(self, condition, timeout=TIMEOUT):
        """Spin until the condition holds."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f'timed out after {timeout} s'
            self.executor_.spin_once(timeout_sec=0.02)

    def pass_time(self, seconds):
        """Spin for ``seconds``."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0.0:
            self.executor_.spin_once(timeout_sec=left)

    def next(self, topic, count=1):
        """Return the next messages that arrive on a topic, some of which may already be in flight."""
        have = len(self.received[topic])
        self.wait(lambda: len(self.received[topic]) >= have + count)
        return self.received[topic][have:have + count]

    def call(self, client, request):
        self.wait(client.service_is_ready)
        future = client.call_async(request)
        self.wait(future.done)
        return future.result()

    def set_parameters(self, **values):
        request = SetParametersAtomically.Request(
            parameters=[Parameter(name, value=value).to_parameter_msg() for name, value in values.items()])
        return self.call(self.parameters, request).result

    def command(self, v, w, stamp=None):
        message = TwistStamped()
        if stamp is not None:
            message.header.stamp = stamp
        message.twist.linear.x, message.twist.angular.z = v, w
        self.stamped.publish(message)

    def drive(self, v, w, seconds):
        """Answer each image with a command for ``seconds``; return the ground truth meanwhile."""
        have = len(self.received['sim/ground_truth'])
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.command(v, w, self.next('camera/image_raw')[0].header.stamp)
        return self.received['sim/ground_truth'][have:]

    def report(self, task):
        """Return the values of the next diagnostics of one part of the robot, which cover everything so far."""
        self.next('/diagnostics')
        message, = self.next('/diagnostics')
        status, = (status for status in message.status if status.name.endswith(task))
        return {value.key: value.value for value in status.values}


@contextmanager
def robot(directory, remappings=None, **parameters):
    """Run a robot in its own namespace; yield its process and an onlooker that receives its images."""
    node = NodeDescription('sim_robot', 'worldmodel_ros', 'sim_robot', parameters={'allow_faults': True, **parameters},
                           remappings=remappings or {})
    namespace = f'robot{next(_numbers)}'
    context = rclpy.Context()
    rclpy.init(args=[], context=context)
    try:
        onlooker = Onlooker(context, namespace)
        with Supervisor({}, directory, int(os.environ['ROS_DOMAIN_ID'])) as supervisor:
            supervisor.add([node], namespace)
            supervisor.start()
            process = supervisor.processes[onlooker.robot]
            onlooker.wait(lambda: onlooker.received['camera/image_raw'] or process.exit_codes)
            assert not process.exit_codes, process.log_file.read_text()
            onlooker.wait(lambda: (onlooker.stamped.get_subscription_count()
                                   or onlooker.plain.get_subscription_count()))
            yield process, onlooker
        onlooker.destroy_node()
    finally:
        rclpy.try_shutdown(context=context)
