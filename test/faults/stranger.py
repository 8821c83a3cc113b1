"""A stranger's process on the robot's network: ``python stranger.py KIND SECONDS``. It prints how much it has sent."""

import math
import os
import random
import socket
import sys
import time
from array import array

import rclpy
from rclpy.node import Node
from rclpy.qos import HistoryPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Image
from std_msgs.msg import String

from worldmodel_ros.msg import ActionChunk, PredictedFuture
from worldmodel_ros.nodes.common.qos import CAMERA, COMMAND


def chunks(node: Node, end: float) -> int:
    """Publish commands without sense, as fast as it goes."""
    publisher = node.create_publisher(ActionChunk, 'action_chunk', COMMAND)
    message = ActionChunk(step_period=0.1, names=['linear.x', 'angular.z'], values=[math.nan] * 8)
    message.header.stamp.sec = 1
    return _send(publisher, message, end)


def images(node: Node, end: float) -> int:
    """Publish images without sense, as fast as it goes."""
    message = Image(height=64, width=64, step=192, encoding='rgb7', data=array('B', bytes(64 * 192)))
    message.header.stamp.sec = 1
    return _send(node.create_publisher(Image, 'camera/image_raw', CAMERA), message, end)


def other_types(node: Node, end: float) -> int:
    """Publish text under the names of images and commands."""
    publishers = [node.create_publisher(String, topic, 10) for topic in ('camera/image_raw', 'action_chunk', 'cmd_vel')]
    sent = 0
    while time.monotonic() < end:
        for publisher in publishers:
            publisher.publish(String(data='x' * 1000))
        sent += 1
        time.sleep(0.01)
    return sent


def participants(node: Node, end: float) -> int:
    """Come and go."""
    number = 0
    while time.monotonic() < end:
        context = rclpy.Context()
        rclpy.init(context=context)
        passer = Node(f'passer_{number}', context=context)
        passer.create_subscription(ActionChunk, 'action_chunk', lambda m: None, COMMAND)
        time.sleep(0.05)
        passer.destroy_node()
        rclpy.shutdown(context=context)
        number += 1
    return number


def slow(node: Node, end: float) -> int:
    """Subscribe to what is large and to what is urgent, reliably, and take nothing but one message in a second."""
    all_of_it = QoSProfile(history=HistoryPolicy.KEEP_ALL, reliability=ReliabilityPolicy.RELIABLE)
    taken = 0

    def take(message: object) -> None:
        nonlocal taken
        taken += 1
        time.sleep(1.0)

    node.create_subscription(PredictedFuture, 'predicted_future', take, all_of_it)
    node.create_subscription(ActionChunk, 'action_chunk', take, all_of_it)
    while time.monotonic() < end:
        rclpy.spin_once(node, timeout_sec=0.1)
    return taken


def datagrams(node: Node, end: float) -> int:
    """Send noise, and noise that begins as RTPS does, to the ports of all participants."""
    first = 7400 + 250 * int(os.environ['ROS_DOMAIN_ID'])
    noise, sent = random.Random(0), 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        while time.monotonic() < end:
            for port in range(first, first + 40):
                head = noise.choice((b'', b'RTPS\x02\x03\x01\x0f', b'RTPS'))
                try:
                    sender.sendto(head + noise.randbytes(noise.randrange(1, 600)), ('127.0.0.1', port))
                except OSError:
                    continue
                sent += 1
            time.sleep(0.002)
    return sent


def _send(publisher: object, message: object, end: float) -> int:
    sent = 0
    while time.monotonic() < end:
        publisher.publish(message)
        sent += 1
        time.sleep(0.0005)  # 1000 to 1500 a second
    return sent


def main() -> None:
    """Do one of these, for so many seconds."""
    os.nice(5)
    rclpy.init()
    node = Node('stranger')
    time.sleep(0.5)  # to be discovered
    print('begins', flush=True)
    print(globals()[sys.argv[1]](node, time.monotonic() + float(sys.argv[2])), flush=True)


if __name__ == '__main__':
    main()
