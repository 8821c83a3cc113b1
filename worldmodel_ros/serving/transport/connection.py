"""Messages over a connected socket, each with at most one file descriptor."""
from __future__ import annotations

import array
import fcntl
import os
import select
import socket
import struct
import termios
import threading
from typing import Any

from .codec import MAX_MESSAGE, MessageError, pack, unpack

_ONE_DESCRIPTOR = socket.CMSG_LEN(array.array('i').itemsize)
_INT = struct.Struct('i')
_BUFFER = 2 * MAX_MESSAGE  # bytes of the send buffer, as far as the system allows


class ConnectionLost(ConnectionError):
    """The other side has gone, or does not read what it is sent."""


class Connection:
    """
    One side of a SOCK_SEQPACKET connection: message boundaries are kept, and the end of a process is noticed at once.

    ``send`` may be called from any thread and never waits; ``receive`` from one thread.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._socket.setblocking(False)
        self._readable = select.poll()
        self._readable.register(self._socket, select.POLLIN)
        self._sending = threading.Lock()  # a socket closed during a call may have its descriptor reused for another file

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any, descriptor: int | None = None) -> None:
        """
        Send a message, and a descriptor of which the other side gets a copy.

        Raises MessageError for a message that is too long, and ConnectionLost if the other side has gone, or has so
        much unread that it must hang.
        """
        ancillary = [] if descriptor is None else [
            (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [descriptor]))]
        data = pack(message)
        try:
            with self._sending:
                self._socket.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
        except BlockingIOError as error:
            raise ConnectionLost('it does not read what it is sent') from error
        except OSError as error:
            raise ConnectionLost(f'it has gone ({error.strerror})') from error

    def receive(self, timeout: float | None = None) -> tuple[Any, int | None] | None:
        """
        Return the next message and the descriptor that came with it, which the caller owns; None: none within
        ``timeout`` s (None: wait).

        Raises MessageError for an invalid message, and ConnectionLost when the connection has ended.
        """
        if not self._readable.poll(None if timeout is None else timeout * 1e3):
            return None
        try:
            data, ancillary, flags, _ = self._received()
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionLost(f'it has gone ({error.strerror})') from error
        descriptors = array.array('i')
        for _, _, passed in ancillary:
            descriptors.frombytes(passed[:len(passed) - len(passed) % descriptors.itemsize])
        try:
            if not data:
                raise ConnectionLost('it has closed the connection')
            if flags & socket.MSG_TRUNC or len(data) > MAX_MESSAGE:
                raise MessageError(f'a message of more than {MAX_MESSAGE} bytes')
            if flags & socket.MSG_CTRUNC:
                raise MessageError('more than one descriptor came with a message')
            message = unpack(data)
        except Exception:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return message, descriptors[0] if descriptors else None

    def _received(self) -> tuple[bytes, list, int, Any]:
        # socket.recv_fds does not pass on flags before Python 3.13.
        arguments = MAX_MESSAGE + 1, _ONE_DESCRIPTOR, socket.MSG_CMSG_CLOEXEC
        try:
            return self._socket.recvmsg(*arguments)
        except ConnectionResetError:
            # If the other side closed with unread data, the kernel reports that first, and then what it had sent.
            return self._socket.recvmsg(*arguments)

    def unread(self) -> int:
        """Return how many sent bytes the other side has not read, as the kernel counts them."""
        with self._sending:
            try:
                return _INT.unpack(fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(_INT.size)))[0]
            except (OSError, ValueError):
                return 0  # it has ended

    def shutdown(self) -> None:
        """End the connection for both sides; a waiting ``receive`` raises ConnectionLost."""
        with self._sending:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has ended already

    def close(self) -> None:
        """Close the socket, from the thread that receives; a ``send`` after this raises ConnectionLost."""
        with self._sending:
            self._socket.close()
