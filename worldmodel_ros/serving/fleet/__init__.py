"""
Many servers as one: sessions that are kept in a store, come back from it, and move from server to server.

What one server computes when is ``serving.scheduler``; what a session is in a store, ``engine.session_store``.
"""
