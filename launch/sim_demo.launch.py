"""Starts a simulated robot with its world model and command gate."""
from worldmodel_ros.bringup.ros_launch import launch_description


def generate_launch_description():
    return launch_description('sim')
