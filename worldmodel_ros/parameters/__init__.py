"""
The parameters of each node, each declared once: name, type, default, bounds, unit and description. No ROS, no node.

The nodes declare them to ROS and check values against these tables (``nodes.common.parameters``). ``docs/parameters.md``, the
help of the launch files and the tests of ``config/`` use them, too. What a value does is defined by the nodes.
"""
