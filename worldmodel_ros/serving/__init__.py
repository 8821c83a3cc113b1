"""
One engine for many robots: the server's process and scheduler, the transport, and the client in each robot's node.

The client falls back to the robot's own loop in ``control`` when there is no server.
"""
