"""
Recordings: reads rosbag2 folders and files without ROS, even damaged ones, turns them into ticks and exports them.

``source`` reads messages, ``mapping`` tells which are images and actions, ``drive`` yields the ticks that the live node would
have received.
"""
