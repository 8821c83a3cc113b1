"""
LeRobot datasets on disk, format v3.0: the storage format of recordings and simulated episodes for training.

ROS bags are in ``bags``.
"""
