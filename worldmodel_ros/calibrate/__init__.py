"""
Fits a robot's latency, gains, slip and camera pitch to a recording, so that its owner need not guess them.

Works on signals and images only: no ROS and no model. Reading signals from a recording is here, too; a node drives the robot
to make one.
"""
