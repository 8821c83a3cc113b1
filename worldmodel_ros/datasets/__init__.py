"""
LeRobot datasets on disk, format v3.0: what recordings and simulated episodes are kept in, and training reads.

ROS bags belong to ``bags``.
"""
