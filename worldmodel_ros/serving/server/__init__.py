"""
The server's process: takes connections over a Unix socket, and passes robots' messages to their sessions.

Batching and admission are in ``serving.service`` and ``serving.scheduler``.
"""
