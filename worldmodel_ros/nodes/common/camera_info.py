"""Finds the CameraInfo of the camera that the world model uses, for all nodes that need it."""

from rclpy.node import Node

from worldmodel_ros.inputs.topics import info_topic

INFO_TOPIC = 'camera/camera_info'


def camera_info_topic(node: Node, image_topic: str) -> str:
    """Return the topic of CameraInfo, resolved: what INFO_TOPIC is remapped to, else the sibling of the image topic."""
    named = node.resolve_topic_name(INFO_TOPIC)
    if named != node.resolve_topic_name(INFO_TOPIC, only_expand=True):
        return named
    return info_topic(node.resolve_topic_name(image_topic))
