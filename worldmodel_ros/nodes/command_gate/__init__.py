"""
The process between the model and the motors: passes a command only if it is fresh, valid, limited and in order.

The state machine and its limits are ``safety``; nothing here imports torch.
"""
