"""
Drives a robot through step commands for ``worldmodel calibrate`` while a deadman switch is held, and records its odometry.

The fit belongs to ``worldmodel_ros.calibrate``.
"""
