"""
One engine for many robots: the server's process and scheduler, the transport, and the client in each robot's node.

Without a server a robot's own loop is ``control``; the client falls back to it.
"""
