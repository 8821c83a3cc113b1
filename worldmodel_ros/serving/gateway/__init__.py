"""
The network gateway: serves clients over WebSocket and HTTP, each with a session of the engine's server.

Holds no model: ticks and questions go over the Unix socket of ``serving.transport`` to ``serving.server``.
"""
