"""
Many servers as one: sessions are kept in a store, restored from it, and moved from server to server.

Scheduling within one server is in ``serving.scheduler``, the stored form of a session in ``engine.session_store``.
"""
