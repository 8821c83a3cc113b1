"""
The robot's side of a shared engine: sends observations, notices a loss, and falls back to the robot's own model.

The own model's loop is ``control``; bytes on the socket are ``serving.transport``.
"""
