"""
What a robot's owner would have to guess: its latency, its gains, its slip and the pitch of its camera, fitted to a recording.

Signals and images only: no ROS and no model. How a recording becomes signals is here, too; what drives a robot for one is a
node.
"""
