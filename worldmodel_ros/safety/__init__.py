"""
Rules that keep a robot safe, as pure functions and state machines: chunks, limits, the gate. No ROS, no torch.

The process that applies them is ``nodes.command_gate``.
"""
