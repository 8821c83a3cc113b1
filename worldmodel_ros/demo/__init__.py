"""
The demonstration: drive the simulated robot, watch it from outside, judge it and draw what happened.

The ROS node that watches is ``nodes.demo``.
"""
