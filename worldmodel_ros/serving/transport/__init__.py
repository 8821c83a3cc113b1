"""
Transport of frames, plans and images: a Unix socket with shared memory on one machine, a WebSocket between machines.

Authorization and limits are in ``serving.server`` and ``serving.service``.
"""
