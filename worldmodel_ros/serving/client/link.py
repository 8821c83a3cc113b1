"""The front end's handshake with the server: whether it is there and serves this robot."""
from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from worldmodel_ros.model.presets import Preset
from worldmodel_ros.serving.transport import messages, pictures
from worldmodel_ros.serving.transport.address import AddressError, connect
from worldmodel_ros.serving.transport.codec import MessageError
from worldmodel_ros.serving.transport.connection import Connection, ConnectionLost
from worldmodel_ros.serving.transport.frames import FrameSlots
from .network import HANDSHAKE_TIMEOUT as NETWORK_TIMEOUT, Endpoint, EndpointError, NetworkConnection, NetworkSlots
from .network import server_address
from .network import connect as connect_over_network

HANDSHAKE_TIMEOUT = 0.5  # s
STORE_TIMEOUT = 3.0      # s for a session that the server may have to read from its store
_Answer = TypeVar('_Answer')
_REDIRECTS = 4  # a fleet's front end tells where a session is, which may just have changed
# What commands mean, and their timing: these must agree between the server's model and the robot's own.
_OF_THE_ROBOT = ('step_period', 'action_names', 'action_low', 'action_high', 'goals')


class Unavailable(RuntimeError):
    """There is no server for this robot; the text says why."""


class Rejected(Unavailable):
    """A server is there, and refuses the request."""


class Outdated(Unavailable):
    """The server has an older generation of the session than the robot was told, or no longer knows it."""


class SentOn(Unavailable):
    """The session is on another host, at the gateway ``address``, to which its robot must connect itself."""

    def __init__(self, address: str) -> None:
        super().__init__(f'the session is at {address}')
        self.address = address


@dataclass(frozen=True)
class Link:
    """An open session on a server."""

    connection: Connection | NetworkConnection
    slots: FrameSlots | NetworkSlots
    spec: Preset
    backend: str
    generation: int = 0  # of the session, if the server keeps it in a store
    frames: int = 0      # that the session had seen before
    number: int = 0      # of the newest tick that it got before,
    answered: bool = False  # whether the answer to that will come,
    note: str = ''       # and the newest note

    def receive(self, timeout: float) -> tuple[Any, np.ndarray | None] | None:
        """Return the next message and the images that came with it, uint8 (T, H, W, 3); None: none within ``timeout`` s.
        Raises MessageError, ConnectionLost."""
        received = self.connection.receive(timeout)
        if received is None or isinstance(self.connection, NetworkConnection):
            return received
        message, descriptor = received
        return message, None if descriptor is None else pictures.take(descriptor)

def open_link(server: Path | Endpoint, robot: str, own: Preset | None, session: str = '', generation: int = 0,
              patience: float = HANDSHAKE_TIMEOUT, linger: float = 0.0, files: tuple[str, str, str] = ('', '', ''),
              for_mobile: bool = False) -> Link:
    """
    Open a session on the server at a socket or behind a gateway, for the node ``robot``, whose own model has the preset
    ``own``; None: it has none, and accepts a server of any robot. A server with a store continues ``session`` from there; it
    is rejected if its generation is below ``generation``. Any server keeps the session for ``linger`` s after the connection
    is lost, for a client that comes back with its name. ``files``: as ``Endpoint.files``, for a redirect to another host; a
    fleet does not redirect robots without a certificate. ``for_mobile``: it is opened for a robot that connects to another
    host itself.

    Raises Unavailable; SentOn if that robot must do so; Outdated for a generation that is too old.
    """
    hello = messages.Hello(robot, session, generation, linger, for_mobile or bool(files[2]))
    for _ in range(_REDIRECTS):
        found = _open(server, robot, own, hello, patience)
        if isinstance(found, Link):
            return found
        try:
            server = server_address(found.address, *files)
            if for_mobile and isinstance(server, Endpoint):
                raise SentOn(found.address)
        except (AddressError, EndpointError) as error:
            raise Unavailable(f'it was sent to {found.address}: {error}') from error
    raise Unavailable(f'it was sent from one server to the next {_REDIRECTS} times, last to {server}')


def _open(server: Path | Endpoint, robot: str, own: Preset | None, hello: messages.Hello, patience: float
          ) -> Link | messages.Moved:
    """Return a session on the server, or the message that tells where it is."""
    connection = None
    try:
        if isinstance(server, Endpoint):
            found = connect_over_network(server, hello, max(patience, NETWORK_TIMEOUT))
            if isinstance(found, messages.Moved):
                return found
            connection, welcome = found
            return _believed(Link(connection, connection.slots, _preset(welcome, own), welcome.backend, welcome.generation,
                                  welcome.frames, welcome.number, welcome.answered, welcome.note), hello)
        connection = Connection(connect(server, HANDSHAKE_TIMEOUT))
        received = _said(connection, hello, patience)
        if received is None:
            raise Unavailable(f'it did not answer within {patience:g} s')
        if isinstance(received[0], messages.Moved):
            connection.close()
            return received[0]
        return _believed(_agree(connection, *received, own), hello)
    except Outdated:
        connection.close()
        raise
    except (AddressError, EndpointError, ConnectionLost, MessageError, Unavailable) as error:
        if connection:
            connection.close()
        raise Unavailable(str(error)) from error


def _believed(link: Link, hello: messages.Hello) -> Link:
    """Return the link, if its session is not of an older generation than the robot was told. Raises Outdated."""
    if link.generation < hello.generation:
        raise Outdated(f'its session {hello.session} is of generation {link.generation}, and {hello.generation} is '
                       'owned by another server')
    return link


def ask_status(server: Path) -> dict:
    """Return the status of the server at a socket. Raises Unavailable, Rejected."""
    connection, status = say(server, messages.StatusRequest(), messages.Status)
    connection.close()
    return status_values(status, server)


def status_values(status: object, server: Path | Endpoint) -> dict:
    """Return the status in a message of a server. Raises Unavailable."""
    if not isinstance(status, messages.Status):
        raise _refusal(status)
    try:
        values = json.loads(status.json)
    except (ValueError, RecursionError) as error:
        raise Unavailable(f'the status of the server at {server} cannot be read: {error}') from error
    if not isinstance(values, dict):
        raise Unavailable(f'the status of the server at {server} is a {type(values).__name__}')
    return values


def say(server: Path, message: object, kind: type[_Answer]) -> tuple[Connection, _Answer]:
    """Return a connection to the server at a socket, and its answer, of ``kind``, to a first message. Raises Unavailable,
    Rejected."""
    connection = None
    try:
        connection = Connection(connect(server, HANDSHAKE_TIMEOUT))
        received = _said(connection, message)
        if received is None:
            raise Unavailable(f'the server did not answer within {HANDSHAKE_TIMEOUT:g} s')
        answer, descriptor = received
        if descriptor is not None:
            os.close(descriptor)
        if not isinstance(answer, kind):
            raise _refusal(answer)
        return connection, answer
    except Rejected:
        connection.close()
        raise
    except (AddressError, ConnectionLost, MessageError, Unavailable) as error:
        if connection:
            connection.close()
        raise Unavailable(str(error)) from error


def _refusal(message: object) -> Unavailable:
    if isinstance(message, messages.Rejected):
        return Rejected(message.reason)
    return Unavailable(f'the server answered with {type(message).__name__}')


def _said(connection: Connection, message: object, patience: float = HANDSHAKE_TIMEOUT
          ) -> tuple[Any, int | None] | None:
    """Return the server's answer to a message, or what it sent before it closed the connection; None: nothing."""
    try:
        connection.send(message)
    except ConnectionLost:
        pass  # a server that refuses a connection sends the reason first and does not read
    return connection.receive(patience)


def _agree(connection: Connection, message: object, descriptor: int | None, own: Preset | None) -> Link:
    if not isinstance(message, messages.Welcome) or descriptor is None:
        if descriptor is not None:
            os.close(descriptor)
        raise _refusal(message)
    try:
        spec = _preset(message, own)
    except Unavailable:
        os.close(descriptor)
        raise
    return Link(connection, FrameSlots(descriptor, spec.image_size, message.slots, writable=True), spec,
                message.backend, message.generation, message.frames, message.number, message.answered, message.note)


def _preset(welcome: messages.Welcome, own: Preset | None) -> Preset:
    """Return the preset of the server's model, if it is for this robot. Raises Unavailable."""
    try:
        spec = Preset.from_dict(json.loads(welcome.spec))
    except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise Unavailable(f'its model cannot be understood: {error}') from error
    for name in _OF_THE_ROBOT if own else ():
        if getattr(spec, name) != getattr(own, name):
            raise Unavailable(f'it serves another robot: {name} of its model {spec.name} is {getattr(spec, name)}, '
                              f'and of this robot\'s own model {own.name} {getattr(own, name)}')
    return spec
