"""
The parameters of each node: name, type, default, bounds, unit and text, each declared once. No ROS, no node.

The nodes declare them to ROS and check values by them (``nodes.common.parameters``); ``docs/parameters.md``, the help of the
launch files and the tests of ``config/`` are made from the same tables. What a value does is the node's.
"""
