"""
Plays a recording into the ROS graph, in real time or at another rate.

Reading the recording belongs to ``bags``.
"""
