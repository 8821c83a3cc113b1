"""
The server's process: takes connections over a Unix socket, and hands what robots send to their sessions.

Batches and promises belong to ``serving.service`` and ``serving.scheduler``.
"""
