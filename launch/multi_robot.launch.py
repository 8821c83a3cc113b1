"""Starts several simulated robots, each with its world model and command gate in a namespace of its own."""
from worldmodel_ros.bringup.ros_launch import fleet_description


def generate_launch_description():
    return fleet_description('sim')
