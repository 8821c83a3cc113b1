"""
The demo: drive the simulated robot, observe it from outside, evaluate the run and write a report.

The observing ROS node is ``nodes.demo``.
"""
