"""
Training data: simulated and recorded episodes as LeRobot datasets, and the clips that a step learns from.

The files themselves belong to ``datasets``.
"""
