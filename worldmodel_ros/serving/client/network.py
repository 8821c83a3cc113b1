"""The connection of a robot's node to an engine on another machine: through its gateway, over a WebSocket."""
from __future__ import annotations

import json
import logging
import queue
import ssl
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from worldmodel_ros.model.presets import Preset
from worldmodel_ros.serving.transport import messages
from worldmodel_ros.serving.transport.address import is_loopback, socket_path
from worldmodel_ros.serving.transport.codec import MessageError
from worldmodel_ros.serving.transport.connection import ConnectionLost
from worldmodel_ros.serving.transport.frames import SLOTS
from worldmodel_ros.serving.transport.network import PATH, RemoteClock, Stamps, unwrap, wrap

HANDSHAKE_TIMEOUT = 2.0  # s, for TLS, the account and a session
_EXCHANGES = 8           # to estimate the other clock before the first observation
_quiet = logging.getLogger('worldmodel_ros.client.websockets')
_quiet.setLevel(logging.CRITICAL)  # it logs a traceback if both sides end a connection at once
_CLOSE = 0.2             # s for the other side to agree that the connection ends
_OF_TIMES = {messages.Planned: ('predicted', 'finish'), messages.Refused: ('predicted',)}


class EndpointError(ValueError):
    """An address, or one of its files, that cannot be used; the text says why."""


@dataclass(frozen=True)
class Endpoint:
    """
    A gateway: ``url``, wss://host:port, or ws:// on this machine only. Files: ``token``, whose text is sent to the gateway;
    ``ca``, the authorities trusted for its certificate, the system's if empty; ``certificate``, the robot's own with its key,
    PEM.
    """

    url: str
    token: str = ''
    ca: str = ''
    certificate: str = ''

    def __post_init__(self) -> None:
        """Raise EndpointError for an invalid URL, or ws:// to another machine."""
        parts = urlsplit(self.url)
        try:
            known = parts.scheme in ('ws', 'wss') and parts.hostname and (parts.port or True)
        except ValueError:  # no port
            known = False
        if not known or parts.path.strip('/') or parts.query or parts.username:
            raise EndpointError(f'{self.url} is no wss://host:port')
        if parts.scheme == 'ws' and not is_loopback(parts.hostname):
            raise EndpointError(f'{self.url} is another machine, and everybody on the way could drive the robot: use wss://')

    def __str__(self) -> str:
        return self.url

    @property
    def files(self) -> tuple[str, str, str]:
        """Token, authorities and certificate, which also serve for the other gateways of the fleet."""
        return self.token, self.ca, self.certificate

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS context. Raises EndpointError."""
        if not self.url.startswith('wss'):
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            if self.certificate:
                context.load_cert_chain(self.certificate)
            return context
        except (OSError, ssl.SSLError) as error:
            raise EndpointError(f'the files of {self.url} cannot be used: {error}') from error

    def headers(self) -> dict[str, str]:
        """Return the authorization header. Raises EndpointError."""
        try:
            return {'Authorization': f'Bearer {Path(self.token).read_text().strip()}'} if self.token else {}
        except (OSError, UnicodeDecodeError) as error:
            raise EndpointError(f'{self.token} has no token: {error}') from error


def server_address(server: str, token: str = '', ca: str = '', certificate: str = '') -> Path | Endpoint:
    """
    Return the address of a named server: a gateway's, with its files, if it is a URL, otherwise a socket's (``socket_path``).

    Raises EndpointError, AddressError.
    """
    return Endpoint(server, token, ca, certificate) if '://' in server else socket_path(server)


class NetworkSlots:
    """Holds frames until they are sent; as ``transport.frames.FrameSlots``."""

    def __init__(self, size: tuple[int, int]) -> None:
        self._shape = (*size, 3)
        self.frames: list[np.ndarray | None] = [None] * SLOTS

    def __len__(self) -> int:
        return SLOTS

    def write(self, slot: int, number: int, frame: np.ndarray) -> None:
        """Put the frame of tick ``number`` into a slot. Raises ValueError for another shape."""
        if frame.shape != self._shape or frame.dtype != np.uint8:
            raise ValueError(f'the frame is {frame.dtype} {frame.shape}, and the server takes uint8 {self._shape}')
        self.frames[slot] = frame.copy()


class NetworkConnection:
    """
    As ``transport.connection.Connection``, over a WebSocket. Times in messages are of this machine's steady clock: they are
    converted, and a deadline is sent as the time at which the answer must leave the other machine.

    ``send`` never waits: the socket has a thread of its own, since the caller may be the executor of a node.
    """

    def __init__(self, dialed: Dialed) -> None:
        self._dialed, self._socket = dialed, dialed.socket
        self.clock = RemoteClock()
        self.slots: NetworkSlots | None = None
        self._heard = Stamps(0.0)  # when the newest frame was sent, and received here
        self._outgoing: queue.Queue = queue.Queue(2 * SLOTS)
        self._gone = ''
        self._sender = threading.Thread(target=self._send, name='server, sending', daemon=True)
        self._sender.start()

    def send(self, message: Any) -> None:
        """Send a message; a Tick with its frame. Raises ConnectionLost if the other side does not read."""
        frame = None
        if isinstance(message, messages.Tick):
            frame, self.slots.frames[message.slot] = self.slots.frames[message.slot][None], None
        if self._gone:
            raise ConnectionLost(self._gone)
        try:
            self._outgoing.put_nowait((message, frame))
        except queue.Full:
            raise ConnectionLost('it does not read what it is sent') from None

    def receive(self, timeout: float) -> tuple[Any, np.ndarray | None] | None:
        """Return the next message and the images that came with it, uint8 (T, H, W, 3); None: none within ``timeout`` s.
        Raises MessageError, ConnectionLost."""
        from websockets.exceptions import ConnectionClosed
        end = time.monotonic() + timeout
        while True:
            try:
                data = self._socket.recv(max(0.0, end - time.monotonic()), decode=False)
            except TimeoutError:
                return None
            except (ConnectionClosed, OSError) as error:
                raise ConnectionLost(self._gone or f'it has closed the connection: {error}') from error
            received = time.monotonic()
            message, stamps, pixels = unwrap(data)
            self.clock.take(stamps, received)
            self._heard = Stamps(0.0, stamps.sent, received)
            if message is not None:
                return self._here(message), pixels

    def exchange(self) -> None:
        """Exchange times with the other side, and wait for its answer. Raises ConnectionLost, MessageError."""
        from websockets.exceptions import ConnectionClosed
        try:
            self._socket.send(wrap(None, self._stamps()))
            data = self._socket.recv(HANDSHAKE_TIMEOUT, decode=False)
        except (ConnectionClosed, OSError) as error:  # TimeoutError too
            raise ConnectionLost(f'it does not tell the time: {error}') from error
        received = time.monotonic()
        message, stamps, _ = unwrap(data)
        if message is not None:
            raise MessageError(f'{type(message).__name__} instead of the time')
        self.clock.take(stamps, received)

    def shutdown(self) -> None:
        """End the connection for both sides; a waiting ``receive`` raises ConnectionLost."""
        self._gone = self._gone or 'the connection is ended'
        try:
            self._outgoing.put_nowait(None)
        except queue.Full:
            pass  # the sender notices by itself
        self._dialed.shutdown()

    def close(self) -> None:
        """Close the socket, from the thread that receives."""
        self.shutdown()
        self._dialed.close()

    def _send(self) -> None:
        from websockets.exceptions import WebSocketException
        while (item := self._outgoing.get()) is not None:
            message, frame = item
            try:
                self._socket.send(wrap(self._there(message), self._stamps(), frame))
            except (WebSocketException, OSError, MessageError) as error:
                self._gone = f'it has gone: {error}'
                self.shutdown()
                return

    def _stamps(self) -> Stamps:
        return replace(self._heard, sent=time.monotonic())

    def _there(self, message: Any) -> Any:
        if isinstance(message, (messages.Tick, messages.Question)):
            return replace(message, due=self.clock.there(message.due) - self.clock.back)
        return message

    def _here(self, message: Any) -> Any:
        names = _OF_TIMES.get(type(message), ())
        return replace(message, **{name: self.clock.here(getattr(message, name)) for name in names}) if names else message


class Dialed:
    """A WebSocket to a gateway. ``socket`` is that of ``websockets.sync``."""

    def __init__(self, opening: AbstractContextManager) -> None:
        """``opening``: opens the socket and closes it. Raises what it raises."""
        self._opening = opening
        self.socket = opening.__enter__()

    def shutdown(self) -> None:
        """End it for both sides at once, without waiting for the other side."""
        try:
            self.socket.socket.shutdown(2)
        except OSError:
            pass  # it has ended already

    def close(self) -> None:
        """Close the socket."""
        self._opening.__exit__(None, None, None)


def dial(endpoint: Endpoint, path: str) -> Dialed:
    """Open a WebSocket to a path of a gateway. Raises EndpointError, ConnectionLost."""
    try:
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect as open_socket
    except ImportError as error:
        raise EndpointError(f'{error.name} is not installed: pip install "worldmodel-ros[net]"') from error
    try:
        return Dialed(open_socket(
            endpoint.url.rstrip('/') + path, ssl=endpoint.context(), compression=None, max_size=None, proxy=None,
            open_timeout=HANDSHAKE_TIMEOUT, close_timeout=_CLOSE, additional_headers=endpoint.headers(), logger=_quiet))
    except (WebSocketException, OSError) as error:  # TimeoutError and TLS too
        raise ConnectionLost(_explained(error)) from error


def connect(endpoint: Endpoint, hello: messages.Hello, patience: float = HANDSHAKE_TIMEOUT
            ) -> tuple[NetworkConnection, messages.Welcome] | messages.Moved:
    """
    Open a session for the node that ``hello`` names, within ``patience`` s; return the connection and the server's Welcome, or
    where else the session is.

    Raises EndpointError, ConnectionLost, MessageError.
    """
    connection = NetworkConnection(dial(endpoint, PATH))
    try:
        connection.send(hello)
        received = connection.receive(patience)
        if received is None:
            raise ConnectionLost(f'it did not answer within {patience:g} s')
        welcome, _ = received
        if isinstance(welcome, messages.Moved):
            connection.close()
            return welcome
        if not isinstance(welcome, messages.Welcome):
            raise ConnectionLost(getattr(welcome, 'reason', '') or f'it answered with {type(welcome).__name__}')
        for _ in range(_EXCHANGES):
            connection.exchange()
        size = Preset.from_dict(json.loads(welcome.spec)).image_size
    except BaseException:
        connection.close()
        raise
    connection.slots = NetworkSlots(size)
    return connection, welcome


def _explained(error: Exception) -> str:
    status = getattr(getattr(error, 'response', None), 'status_code', None)
    body = (getattr(getattr(error, 'response', None), 'body', b'') or b'').decode(errors='replace').strip()
    return f'it refuses the connection: {status} {body}' if status else f'it cannot be reached: {error}'
