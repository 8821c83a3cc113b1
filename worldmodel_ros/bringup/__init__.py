"""
Starts the nodes from one description, which both the launch files and the supervisor read.

The nodes themselves are in ``nodes``.
"""
