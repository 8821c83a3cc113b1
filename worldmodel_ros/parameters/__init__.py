"""
The parameters of each node, each declared once: name, type, default, bounds, unit and text. No ROS, no node.

The nodes declare them to ROS and check values against them (``nodes.common.parameters``); ``docs/parameters.md``, the help
of the launch files and the tests of ``config/`` use the same tables. The nodes define what a value does.
"""
