"""Starts the world model and the command gate for a robot that has its own camera and base."""
from worldmodel_ros.bringup.ros_launch import launch_description


def generate_launch_description():
    return launch_description('robot')
