"""
The node that predicts and commands: turns subscriptions into ticks and answers into messages; services, lifecycle.

The loop that answers within the deadline is ``control.worker``, or the server of ``serving``.
"""
