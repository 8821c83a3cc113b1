"""The front of a fleet: robots come here first, and are told which server has, or gets, their session."""
from __future__ import annotations

import json
import logging
import os
import selectors
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from worldmodel_ros.serving.client.link import Unavailable, ask_status
from worldmodel_ros.serving.transport import messages
from worldmodel_ros.serving.transport.address import ListeningSocket
from worldmodel_ros.serving.transport.codec import MessageError
from worldmodel_ros.serving.transport.connection import Connection, ConnectionLost
from .move import MoveError, ask_move
from .router import Claim, Demand, NoRoom, Router, RouterSettings

_log = logging.getLogger(__name__)
POLL = 0.5        # s, between two looks at a server
_SILENT = 3       # looks without an answer, after which a server is taken to be lost
_CONNECTIONS = 256
_DEFAULT_COST = 0.02  # s of a tick, before a server has said what it takes
# The phases of cameras are not known here; the server's own scheduler advises them.
SETTINGS = RouterSettings(lease=10.0, blocking=1.0, phase=0.0)


@dataclass
class Server:
    """A server as its last status told it."""

    path: Path
    silent: int = _SILENT  # looks in a row without an answer
    status: dict[str, Any] = field(default_factory=dict)

    @property
    def cost(self) -> float:
        """s that a tick in two steps takes it alone, typically."""
        rows = self.status.get('service', {}).get('step_times', [])
        times = {row['network'].rpartition('/')[2]: row['p50_ms'] / 1e3 for row in rows if row['batch'] == 1}
        return times['observe'] + 2.0 * times['denoise'] if {'observe', 'denoise'} <= times.keys() else _DEFAULT_COST


class Front:
    """
    Answers robots at one socket by where to go (``messages.Moved``), by a ``Router`` that knows the servers by their statuses.

    No tick comes through here: a robot that has its server does not notice that the front is lost. One that comes up again
    learns from the servers what they run. ``run`` belongs to one thread, the looks at the servers to another one.
    """

    def __init__(self, listening: ListeningSocket, servers: list[Path], sessions: int, period: float = 0.1,
                 settings: RouterSettings = SETTINGS) -> None:
        """``servers``: sockets of all that there may be; ``wanted`` are those that are to run. ``sessions``: that one takes."""
        self._listening, self._period = listening, period
        self.servers = [Server(path) for path in servers]
        self.wanted = set(range(len(servers)))
        self._settings, self._sessions = settings, sessions
        self._router = Router([1.0] * len(servers), settings=settings, sessions=sessions)
        self._router.lose(range(len(servers)))  # until they answer
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)
        self._connections: set[Connection] = set()
        self._looks = ThreadPoolExecutor(max(2, len(servers)), 'looks')
        self._moves = ThreadPoolExecutor(2, 'moves')
        self._moving: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.pool: dict[int, str] = {}  # what the pool says of its servers
        self._begun = time.monotonic()
        self._over = threading.Event()
        self._looking = threading.Thread(target=self._look_always, name='looking', daemon=True)
        self._looking.start()

    def run(self, timeout: float | None = None) -> None:
        """Serve; with a ``timeout`` [s], return after the first events, or after that time without any."""
        while True:
            for key, _ in self._selector.select(timeout):
                if key.fileobj is self._listening:
                    self._accept()
                else:
                    self._receive(key.fileobj)
            if timeout is not None:
                return

    def close(self) -> None:
        """End; the servers and the listening socket are not touched."""
        self._over.set()
        self._looking.join()
        for connection in list(self._connections):
            self._drop(connection)
        self._looks.shutdown(cancel_futures=True)
        self._moves.shutdown(cancel_futures=True)
        self._selector.close()

    def wait_for_servers(self, patience: float) -> bool:
        """Wait until all servers answer; return whether they do."""
        end = time.monotonic() + patience
        while time.monotonic() < end:
            if all(not self.servers[number].silent for number in self.wanted):
                return True
            time.sleep(0.05)
        return False

    def place(self, session: str) -> Path:
        """Where a session is to be opened. Raises NoRoom."""
        with self._lock:
            claim = self._router.route(session, self._demand(), time.monotonic())
            self.counts['placed'] += 1
            return self.servers[claim.server].path

    def move(self, session: str, target: str) -> None:
        """Have a session moved to the server at a socket, or where the router puts it ('auto'). Waits; raises MoveError."""
        with self._lock:
            claim = self._router.claim(session)
            if claim is None:
                raise MoveError(f'session {session} is on no server')
            if session in self._moving:
                raise MoveError(f'session {session} is moving already')
            try:
                number = self._router.move(session, time.monotonic()).server if target == 'auto' else next(
                    number for number, server in enumerate(self.servers) if str(server.path) == target)
            except (NoRoom, StopIteration) as error:
                raise MoveError(str(error) or f'{target} is no server of this fleet') from error
            self._moving.add(session)
        try:
            ask_move(self.servers[claim.server].path, session, self.servers[number].path)
            self.counts['moved'] += 1
        except MoveError:
            self.counts['moves_refused'] += 1
            with self._lock:  # it is where it was
                if self._router.claim(session):
                    self._router.release(session)
                self._router.claims_of([(claim, self._demand())])
            raise
        finally:
            self._look_all()  # who has it now
            with self._lock:
                self._moving.discard(session)

    def status(self) -> dict[str, Any]:
        """Servers, claims and slack, as JSON values."""
        with self._lock:
            load, alive = self._router.load, self._router.alive
            servers = []
            for number, server in enumerate(self.servers):
                service = server.status.get('service', {})
                ticks = max(1, service.get('ticks', 0))
                servers.append({
                    'socket': str(server.path), 'pid': server.status.get('pid'), 'alive': bool(alive[number]),
                    'wanted': number in self.wanted,
                    'pool': self.pool.get(number, ''), 'load': round(float(load[number]), 3), 'busy': service.get('busy'),
                    'tick_ms': round(server.cost * 1e3, 2), 'sessions': len(self._router.sessions(number)),
                    'ticks': service.get('ticks', 0), 'late': service.get('late', 0),
                    'two_steps': round(service.get('tiers', {}).get('TWO_STEP', 0) / ticks, 4),
                    'slack_ms': round((self._period - server.cost * len(self._router.sessions(number))) * 1e3, 1),
                    'places': server.status.get('store', {}).get('residency', {}).get('here'),
                    'store': server.status.get('store', {})})
            claims = [{'session': session, 'server': number, 'generation': self._router.claim(session).generation}
                      for number in range(len(self.servers)) for session in self._router.sessions(number)]
            known = next((server.status for server in self.servers if not server.silent), {})
        # As one server would tell it: what a gateway, which may be before a fleet, wants to know.
        about = {'preset': known['preset'], 'service': {'backend': known['service']['backend']}} if 'preset' in known else {}
        return {'pid': os.getpid(), 'socket': str(self._listening.path), 'uptime_s': round(time.monotonic() - self._begun, 1),
                **about, 'fleet': {'servers': servers, 'claims': claims, **self.counts}}

    def room(self) -> tuple[dict[int, int], dict[int, int]]:
        """Of each server that answers: for how many more robots it has time and memory, and how many it has."""
        with self._lock:
            load, demand = self._router.load, self._demand()
            robots = {number: len(self._router.sessions(number)) for number in np.flatnonzero(self._router.alive).tolist()}
            time_for = {number: int((self._settings.full - load[number]) * demand.period / demand.cost + 1e-9)
                        for number in robots}
            return {number: max(0, min(time_for[number], self._sessions - count)) for number, count in robots.items()}, robots

    def empty(self, number: int) -> bool:
        """Place nothing on a server any more, and have its sessions moved; return whether none is left. Does not wait."""
        with self._lock:
            sessions = self._router.drain(number)
            moves = [session for session in sessions if session not in self._moving]
        for session in moves[:1]:  # one at a time, so that a robot waits for its own move only
            self._moves.submit(self._balance_one, session)
        return not sessions

    def fill(self, number: int) -> None:
        """Place robots on a server again that was being emptied."""
        with self._lock:
            self._router.restore(number)

    # --- robots ---

    def _accept(self) -> None:
        accepted = self._listening.accept()
        if accepted is None:
            return
        connection = Connection(accepted[0])
        if len(self._connections) >= _CONNECTIONS:
            connection.close()
            return
        self._connections.add(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: Connection) -> None:
        try:
            received = connection.receive(0.0)
            if received is None:
                return
            message, descriptor = received
            if descriptor is not None:
                os.close(descriptor)
            self._handle(connection, message)
        except ConnectionLost:
            self._drop(connection)
        except Exception as error:  # the others go on
            try:
                connection.send(messages.Rejected(str(error)))
            except (ConnectionLost, MessageError):
                pass  # it is being closed anyway
            self._drop(connection)

    def _handle(self, connection: Connection, message: Any) -> None:
        if isinstance(message, messages.StatusRequest):
            connection.send(messages.Status(json.dumps(self.status())))
        elif isinstance(message, messages.Hello):
            connection.send(messages.Moved(str(self.place(message.session or message.robot)), message.generation))
            self._drop(connection)
        elif isinstance(message, messages.Move):
            self._moves.submit(self._move, connection, message)
        else:
            raise MessageError(f'{type(message).__name__}: this is the front of a fleet, which takes no frames')

    def _move(self, connection: Connection, message: messages.Move) -> None:
        refusal = ''
        try:
            self.move(message.session, message.target)
        except Exception as error:  # somebody waits for the answer
            refusal = str(error) or type(error).__name__
        try:
            connection.send(messages.Done(message.number, refusal))
        except ConnectionLost:
            pass  # it waits no more

    def _drop(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._selector.unregister(connection)
        connection.close()

    # --- servers ---

    def _demand(self) -> Demand:
        costs = [server.cost for server in self.servers if not server.silent]
        return Demand(max(costs, default=_DEFAULT_COST), self._period)

    def _look_always(self) -> None:
        while not self._over.wait(POLL):
            try:
                self._look_all()
                self._balance()
            except Exception:  # the next look may do better
                _log.exception('a look at the servers failed')

    def _look_all(self) -> None:
        for number, status in enumerate(self._looks.map(_status, [server.path for server in self.servers])):
            self._take(number, status)

    def _take(self, number: int, status: dict[str, Any] | None) -> None:
        server, now = self.servers[number], time.monotonic()
        with self._lock:
            if status is None:
                server.silent += 1
                if server.silent >= _SILENT and self._router.alive[number]:
                    lost = self._router.lose([number])
                    self.counts['servers_lost'] += 1
                    _log.error('the server at %s is lost, with %d sessions', server.path, len(lost))
                return
            server.silent, server.status = 0, status
            if not self._router.alive[number]:
                self._router.restore(number)
            demand = self._demand()
            running = {robot['session']: robot['generation'] for robot in status.get('robots', ()) if robot.get('session')}
            for session, generation in running.items():
                # The generation is the store's: exactly one server can have it.
                self._router.claims_of([(Claim(session, number, generation, now + SETTINGS.lease), demand)])
                self._router.renew(session, generation, now)
            for session in self._router.sessions(number):
                if session not in running and self._router.claim(session).lease < now:
                    self._router.release(session)

    def _balance(self) -> None:
        with self._lock:
            moves = [session for session, _ in self._router.overloaded() if session not in self._moving]
        for session in moves[:1]:  # and look again
            self._moves.submit(self._balance_one, session)

    def _balance_one(self, session: str) -> None:
        try:
            self.move(session, 'auto')
        except MoveError as error:
            _log.warning('session %s stays: %s', session, error)


def _status(path: Path) -> dict[str, Any] | None:
    try:
        return ask_status(path)
    except Unavailable:
        return None
