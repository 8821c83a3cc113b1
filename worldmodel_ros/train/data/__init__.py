"""
Training data: simulated and recorded episodes as LeRobot datasets, and the clips that a step learns from.

File layout and writing are in ``datasets``.
"""
