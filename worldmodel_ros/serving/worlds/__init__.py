"""
An open world model as a server: worlds outlive the gateways through which clients walk in them.

The model itself is in ``engine.open_world``, the dialect of its clients in ``serving.gateway``, the server for robots in
``serving.server``.
"""
