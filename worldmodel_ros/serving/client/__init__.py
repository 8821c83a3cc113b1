"""
The robot's side of a shared engine: sends observations, detects a lost server, and falls back to the robot's own model.

The own model's loop is in ``control``, the socket protocol in ``serving.transport``.
"""
