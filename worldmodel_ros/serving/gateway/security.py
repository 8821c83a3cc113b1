"""TLS, the connection limits before it, and the audit log."""
from __future__ import annotations

import errno
import ipaddress
import json
import logging
import logging.handlers
import os
import queue
import socket
import ssl
import struct
import time
from pathlib import Path
from typing import Any

from worldmodel_ros.serving.service.quotas import TokenBuckets

_log = logging.getLogger(__name__)
_RESET = struct.pack('ii', 1, 0)  # SO_LINGER: refused connections are reset and leave no state
_AT_ONCE = 64                     # connections dropped in a row before the event loop goes on
_SAVED = 2.0                      # s of connects allowed in one burst
_ALL = 10.0                       # limit of all addresses together, as a multiple of that of one
_LOG_QUEUE = 10_000               # lines waiting for the disk; more are dropped


def server_context(certificate: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    """
    Return the context of TLS 1.3; with ``client_ca``, clients need a certificate that it has signed.

    Raises OSError, ssl.SSLError for files that cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # No session tickets: they follow the handshake, so a client of websockets' threads reads one while it writes its request,
    # which TLS in Python before 3.13 does not support; of 2,400 connections 7 hung for 10 s.
    context.num_tickets = 0
    context.load_cert_chain(certificate, key)
    if client_ca:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class LimitedSocket(socket.socket):
    """
    A listening socket that accepts a limited number of connections per second and address, and drops the others before a
    byte is read: a TLS handshake costs the server a hundred times what it costs the client.
    """

    def __init__(self, host: str, port: int, rate: float) -> None:
        """``rate``: connections per second of one address, 0 for no limit; of all addresses, ten times that."""
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        super().__init__(family, kind, protocol)
        self.refused = 0
        self._of_one, self._of_all = TokenBuckets(rate, _SAVED), TokenBuckets(_ALL * rate, _SAVED)
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.bind(address)
        self.setblocking(False)

    def accept(self) -> tuple[socket.socket, Any]:
        """As ``socket.accept``, within the limits."""
        for _ in range(_AT_ONCE):
            accepted, address = super().accept()
            now = time.monotonic()
            if not self._of_one.take(_neighbourhood(address[0]), now) and not self._of_all.take('', now):
                return accepted, address
            self.refused += 1
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            accepted.close()
        raise BlockingIOError  # the rest is accepted in the next turn of the loop


def _neighbourhood(address: str) -> str:
    """Return an IPv4 address, or the /64 network of an IPv6 address, which one host can have."""
    if ':' not in address:
        return address
    address = ipaddress.IPv6Address(address.partition('%')[0])
    if address.ipv4_mapped:  # how a socket for both versions, as of --host ::, gives all IPv4 addresses
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


class _AuditFile(logging.Handler):
    """Appends lines to a file. A disk that is full is told once, not for each line, and costs these lines alone."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._lost, self._torn = path, 0, False  # lines; whether the file ends within one
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        line = f'{record.getMessage()}\n'.encode()
        try:
            if self._torn:
                os.write(self._descriptor, b'\n')
                self._torn = False
            self._torn = os.write(self._descriptor, line) < len(line)
            if self._torn:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self._lost:
                _log.error('the audit log %s cannot be written: %s', self._path, error.strerror)
            self._lost += 1
            return
        if self._lost:
            _log.warning('the audit log %s is written again: %d lines are lost', self._path, self._lost)
            self._lost = 0

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
        super().close()


class AuditLog:
    """
    Logs who connected, was refused, began and ended a session: one JSON object per line, without tokens and payloads.

    Written by a thread of its own, so that the event loop does not wait for the disk.
    """

    def __init__(self, path: Path | None) -> None:
        """``path``: appended to, mode 0600; None: nothing is written. Raises OSError."""
        self._listener = None
        if path is None:
            return
        self._queue: queue.Queue = queue.Queue(_LOG_QUEUE)
        self._file = _AuditFile(path)
        self._listener = logging.handlers.QueueListener(self._queue, self._file)
        self._listener.start()

    def __call__(self, event: str, **facts: Any) -> None:
        """Log an event."""
        if self._listener is None:
            return
        line = json.dumps({'time': round(time.time(), 3), 'event': event, **facts})
        try:
            self._queue.put_nowait(logging.makeLogRecord({'msg': line}))
        except queue.Full:
            pass  # a flood; /metrics counts it

    def close(self) -> None:
        """Write what is left."""
        if self._listener:
            self._listener.stop()
            self._file.close()
