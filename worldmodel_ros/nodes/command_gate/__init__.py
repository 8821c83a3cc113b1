"""
The process between the model and the motors: passes a command only if it is fresh, valid, within limits and in order.

The state machine and its limits are in ``safety``; nothing here imports torch.
"""
