"""Plays a recorded drive into the world model: the bag in, predictions and planned actions out, no robot moved."""
from worldmodel_ros.bringup.ros_launch import launch_description


def generate_launch_description():
    return launch_description('replay')
