"""
Frames, plans and pictures between processes of one machine: a Unix socket, and memory that both map.

Who may ask for what belongs to ``serving.server`` and ``serving.service``.
"""
