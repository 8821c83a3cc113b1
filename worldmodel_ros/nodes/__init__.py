"""
ROS 2 adapters, a folder for each node; the only part of the package that imports rclpy.

A node turns messages into calls and results into messages. What it decides is decided in ``control``, ``safety``, ``bags`` or
``sim``.
"""
