"""
ROS 2 adapters, one folder per node; the only part of the package that imports rclpy.

A node turns messages into calls and results into messages. The decisions are made in ``control``, ``safety``, ``bags`` and
``sim``.
"""
