"""
Recorded drives: reads rosbag2 folders and files without ROS, finds what in them the model takes, makes ticks.

`source` reads messages, `mapping` says which of them are images and actions, `drive` turns them into what the
live node would have been given.
"""
