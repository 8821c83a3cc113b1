"""
Recorded drives: rosbag2 folders and files read and written without ROS, damaged ones too, and made into ticks.

``source`` reads messages, ``mapping`` tells which are images and actions, ``drive`` gives what the live node would have been
given.
"""
