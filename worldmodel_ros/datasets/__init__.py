"""
LeRobot datasets on disk, format v3.0: what recorded and simulated drives are kept in, and training reads.

ROS bags belong to `bags`.
"""
