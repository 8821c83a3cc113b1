"""Moves a session from this server to another one while its robot continues."""
from __future__ import annotations

import itertools
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from worldmodel_ros.cache.stores.protocol import AlreadyStored, StoreError
from worldmodel_ros.engine.session_store import Fenced
from worldmodel_ros.serving.client.network import Endpoint, EndpointError, server_address
from worldmodel_ros.serving.transport import messages
from worldmodel_ros.serving.transport.address import AddressError, connect
from worldmodel_ros.serving.transport.codec import MessageError
from worldmodel_ros.serving.transport.connection import Connection, ConnectionLost
from .hosts import HostLink, ask
from .keeper import Keeper, Kept

_log = logging.getLogger(__name__)
CONNECT = 0.5   # s
PREPARE = 5.0   # s for the other server to read the session
TAKE_OVER = 1.0  # s for it to read what is new, while the robot has no answer
_ROUNDS = 3     # of copying what is new before the robot is held
_numbers = itertools.count(1)


class MoveError(RuntimeError):
    """A session that was not moved; the text says why."""


class Moving(Protocol):
    """The robot whose session moves, as seen by its server."""

    def hold(self, patience: float) -> None:
        """Wait at most ``patience`` s until no tick is in flight; from then on ticks are held back, not served."""

    def release(self) -> None:
        """Serve the held ticks, and continue."""

    def send_to(self, address: str, generation: int) -> None:
        """Tell the robot where its session is; nothing more is served here."""


@dataclass(frozen=True)
class Moved:
    """The cost of a move: s that the robot was held, of which ``stored`` to store what was new, itself split into ``parts``;
    ``total`` s; ``rounds`` of copying before."""

    held: float
    stored: float
    parts: dict[str, float]
    total: float
    rounds: int
    generation: int


def move(keeper: Keeper, kept: Kept, robot: Moving, target: str) -> Moved:
    """
    Have the server at ``target`` (its socket) serve a session from the next tick on.

    Copies the session while the robot ticks; holds it between two ticks to copy the rest; then the other server claims the
    next generation, which exactly one can, and the robot is sent there. Waits. Raises MoveError if the session stays: then
    this server has claimed that generation, and the other one cannot continue it.
    """
    start = time.perf_counter()
    if target == keeper.address:
        raise MoveError('it is here already')
    if kept.closed or kept.fenced:
        raise MoveError(kept.fenced or 'the session has ended')
    peer = None
    try:
        peer = Peer(target, keeper.settings.files)
        manifest, rounds, new = keeper.checkpoint(kept), 0, 2
        peer.ask(messages.Prepare, PREPARE, kept.name)
        while new > 1 and rounds < _ROUNDS:
            before, manifest, rounds = manifest, keeper.checkpoint(kept), rounds + 1
            new = len(set(manifest.slabs) - set(before.slabs))
            if new:  # afterwards it lacks only what comes from now on
                peer.ask(messages.Prepare, PREPARE, kept.name)
    except Exception as error:
        if peer:
            peer.close()
        raise MoveError(f'the server at {target} cannot take it: {error}') from error
    held = stored = time.perf_counter()
    parts: dict[str, float] = {}  # where nothing could be stored, another server may have the session all the same
    generation = kept.generation + 1
    kept.moving = True  # no periodic checkpoint right before the last one
    try:
        robot.hold(2.0 * keeper.settings.patience)
        held = stored = time.perf_counter()
        keeper.checkpoint(kept, held=True)
        stored, parts = time.perf_counter(), dict(kept.parts)
        peer.ask(messages.TakeOver, TAKE_OVER, kept.name, generation)
    except Exception as error:
        _stay(keeper, kept, robot, target, error)
    finally:
        kept.moving = False
        peer.close()
    end = time.perf_counter()
    kept.fenced = f'session {kept.name} has moved to {target}'
    robot.send_to(target, generation)
    with suppress(StoreError):  # a failure only costs space in the store
        kept.log.prune()
    return Moved(end - held, stored - held, parts, end - start, rounds, generation)


def _stay(keeper: Keeper, kept: Kept, robot: Moving, target: str, error: Exception) -> None:
    """Keep the session and raise MoveError, unless another server was faster and owns it now."""
    try:
        keeper.reclaim(kept)
    except (AlreadyStored, Fenced):  # a later generation may be a third server's: the target reads what that has stored
        _log.info('session %s has gone to %s, whose answer did not come: %s', kept.name, target, error)
        return
    except Exception as failed:  # the store is gone: no server can claim it, so it stays
        _log.error('session %s: its generation could not be raised: %s', kept.name, failed)
    robot.release()
    raise MoveError(f'the server at {target} did not take it over: {error}') from error


class Peer:
    """A client of another server: on this host, or on another one behind its gateway."""

    def __init__(self, address: str, files: tuple[str, str, str] = ('', '', '')) -> None:
        """``address``: a socket's path, or a gateway's wss:// URL with ``files`` as ``Endpoint.files``. Raises AddressError,
        EndpointError."""
        where = server_address(address, *files)
        self._link = HostLink(where) if isinstance(where, Endpoint) else Connection(connect(where, CONNECT))

    def ask(self, kind: type, patience: float, *values: Any) -> None:
        """Send a message of a kind; wait until it is done. Raises MoveError with the server's refusal, or why none came."""
        number = next(_numbers)
        try:
            message = self._said(kind(number, *values), patience)
        except (ConnectionLost, MessageError, EndpointError) as error:
            raise MoveError(str(error)) from error
        if not isinstance(message, messages.Done) or message.number != number:
            raise MoveError(getattr(message, 'reason', f'it answered with {type(message).__name__}'))
        if message.refusal:
            raise MoveError(message.refusal)

    def close(self) -> None:
        """End the connection."""
        self._link.close()

    def _said(self, message: Any, patience: float) -> Any:
        if isinstance(self._link, HostLink):
            return ask(self._link, message, patience)
        self._link.send(message)
        received = self._link.receive(patience)
        if received is None:
            raise MoveError(f'it has not answered for {patience:g} s')
        return received[0]


def ask_move(server: Path | Endpoint, session: str, target: Path | str, patience: float = 15.0) -> None:
    """Have the server at a socket, or behind a gateway, move a session to another one. Waits; raises MoveError with the reason
    if it does not."""
    try:
        peer = Peer(str(server), (server.token, server.ca, server.certificate) if isinstance(server, Endpoint)
                    else ('', '', ''))
    except (AddressError, EndpointError) as error:
        raise MoveError(str(error)) from error
    try:
        peer.ask(messages.Move, patience, session, str(target))
    finally:
        peer.close()
