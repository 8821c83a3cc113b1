"""
Drives a robot through steps for ``worldmodel calibrate``, as long as a person holds a deadman, and hears its odometry.

What follows from that is ``worldmodel_ros.calibrate``'s.
"""
