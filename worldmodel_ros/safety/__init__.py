"""
Rules that keep a robot safe, as pure functions and state machines: chunks, limits, the gate. No ROS, no torch.

The process ``nodes.command_gate`` applies them.
"""
