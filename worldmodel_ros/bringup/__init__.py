"""
Starts the nodes: one description of what runs, read by the launch files and by the supervisor.

What each node does belongs to ``nodes``.
"""
