"""
The node that predicts and commands: subscriptions to ticks, answers to messages, services, lifecycle.

The loop that answers within the deadline is ``control.worker``, or the server of ``serving``.
"""
