"""The front of a fleet: robots connect here first, and are told which server has, or gets, their session."""
from __future__ import annotations

import json
import logging
import math
import os
import selectors
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from worldmodel_ros.interrupts import End
from worldmodel_ros.serving.client.link import Unavailable, ask_status
from worldmodel_ros.serving.client.network import Endpoint
from worldmodel_ros.serving.transport import messages
from worldmodel_ros.serving.transport.address import ListeningSocket
from worldmodel_ros.serving.transport.codec import MessageError
from worldmodel_ros.serving.transport.connection import Connection, ConnectionLost
from .hosts import HostLink, ask_host_status
from .move import PREPARE, TAKE_OVER, MoveError, Peer, ask_move
from .router import Claim, Demand, NoRoom, Router, RouterSettings
from .scaling import Homecoming

_log = logging.getLogger(__name__)
POLL = 0.5        # s between two looks at a server
_SILENT = 3       # looks without an answer after which a server is considered lost
_CONNECTIONS = 256
_QUIET = 60.0     # s without a message after which a connection makes room for another; no answer takes as long
_AWAY = 1e6       # s of cost for another host, so that it is taken only if no own server is feasible
_DEFAULT_COST = 0.02  # s of a tick, before a server has reported it
_OWN_MOVES = 2    # at once, begun by this front; with a server or host that hangs, each waits for as long as ``ask_move``
# The phases of cameras are not known here; each server's own scheduler advises on them.
SETTINGS = RouterSettings(lease=10.0, blocking=1.0, phase=0.0)


@dataclass(frozen=True)
class ServerStatus:
    """What the front uses of a server's status."""

    values: dict[str, Any]
    cost: float              # s that a single tick in two steps typically takes
    running: dict[str, int]  # the generation of each session
    nameless: frozenset[str]  # robots and clients that name no session: nothing of theirs is stored, and they cannot move
    sessions: int | None     # that it has memory for; None: not reported

    @classmethod
    def read(cls, values: dict[str, Any]) -> ServerStatus:
        """Return the status in ``values``. Raises Unavailable if it cannot be understood."""
        try:
            service = values.get('service', {})
            times = {row['network'].rpartition('/')[2]: float(row['p50_ms']) / 1e3 for row in service.get('step_times', [])
                     if row['batch'] == 1}
            cost = times['observe'] + 2.0 * times['denoise'] if {'observe', 'denoise'} <= times.keys() else _DEFAULT_COST
            most = service.get('most_sessions')
            if not 0.0 < cost < math.inf or (most is not None and type(most) is not int):
                raise ValueError(f'ticks of {cost} s, {most} sessions')
            robots = values.get('robots', ())
            running = {str(robot['session']): int(robot['generation']) for robot in robots if robot.get('session')}
            nameless = frozenset(str(robot['robot']) for robot in robots if not robot.get('session'))
            return cls(values, cost, running, nameless, most)
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise Unavailable(f'its status cannot be understood: {type(error).__name__}: {error}') from error


@dataclass
class Server:
    """A server as of its last status: on this host, by its socket, or on another one, by its gateway."""

    address: Path | Endpoint
    silent: int = _SILENT  # looks in a row without an answer
    status: dict[str, Any] = field(default_factory=dict)
    cost: float = _DEFAULT_COST  # as ``ServerStatus``,
    nameless: frozenset[str] = frozenset()
    problem: str = ''      # why another host is not used


class _HandedOn(MoveError):
    """A session was not at the server that was asked to move it, nor where it was to go."""


class Front:
    """
    Tells robots at one socket where to go (``messages.Moved``), by a ``Router`` that knows the servers by their statuses.

    No tick comes through here: a robot that has its server does not notice that the front is lost. A restarted front learns
    from the servers what they run. Servers of other hosts get robots that no own server has time for, if these can go there.
    ``run`` has one thread, the looks at the own servers another one, and those at each other host one of their own.
    """

    def __init__(self, listening: ListeningSocket, servers: list[Path], sessions: int, period: float = 0.1,
                 settings: RouterSettings = SETTINGS, hosts: Sequence[Endpoint] = (), home: str = '') -> None:
        """``servers``: sockets of all that there may be; ``wanted`` are those that should run. ``sessions``: that one takes.
        ``hosts``: gateways of other hosts, each of one server, whose numbers follow those of ``servers``.
        ``home``: this front's gateway, by which sessions come back from other hosts; empty: they stay there."""
        self._listening, self._period = listening, period
        self.servers = [Server(address) for address in (*servers, *hosts)]
        self._own = frozenset(range(len(servers)))
        self.wanted = set(self._own)
        self._settings, self._sessions = settings, sessions
        self._router = Router([1.0] * len(self.servers), settings=settings, sessions=sessions)
        self._router.lose(range(len(self.servers)))  # until they answer
        self._mobile: set[str] = set()  # sessions whose robots can go to another host
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)
        self._connections: dict[Connection, float] = {}  # time of the last message, quietest first
        self._looks = ThreadPoolExecutor(max(2, len(servers)), 'looks')
        self._moves = ThreadPoolExecutor(2, 'moves')  # that a peer asks for
        self._own_moves = ThreadPoolExecutor(_OWN_MOVES, 'own moves')
        self._own_moving: set[str] = set()  # sessions of those: at most one per thread, so that none waits
        self._home, self._homecoming = home, Homecoming(settings.low)
        self._stayed: set[str] = set()  # sessions that should have moved and could not; others are tried first
        # Own threads: a move that waits for another host depends on that host's requests here.
        self._forwards = ThreadPoolExecutor(2, 'forwards')
        self._moving: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.pool: dict[int, str] = {}  # states of the servers, by the pool
        self._begun = time.monotonic()
        self._over = threading.Event()
        self._links = {number: HostLink(server.address) for number, server in enumerate(self.servers)
                       if isinstance(server.address, Endpoint)}
        self._looking = [threading.Thread(target=self._look_always, name='looking', daemon=True), *(
            threading.Thread(target=self._look_at_host_always, args=(number,), name=f'host {number}', daemon=True)
            for number in self._links)]
        for thread in self._looking:
            thread.start()

    def run(self, timeout: float | None = None, end: End | None = None) -> None:
        """Serve, until ``end`` is asked for; with a ``timeout`` [s], return after the first events, or after that time without
        any."""
        if end:
            self._selector.register(end, selectors.EVENT_READ)
        while not (end and end.asked):
            for key, _ in self._selector.select(timeout):
                if key.fileobj is self._listening:
                    self._accept()
                elif key.fileobj in self._connections:  # otherwise it has made room for another
                    self._receive(key.fileobj)
            if timeout is not None:
                return

    def close(self) -> None:
        """End; the servers and the listening socket are not touched."""
        self._over.set()
        for thread in self._looking:
            thread.join()
        for link in self._links.values():
            link.close()
        for connection in list(self._connections):
            self._drop(connection)
        self._looks.shutdown(cancel_futures=True)
        self._moves.shutdown(cancel_futures=True)
        self._own_moves.shutdown(cancel_futures=True)
        self._forwards.shutdown(cancel_futures=True)
        self._selector.close()

    def wait_for_servers(self, patience: float) -> bool:
        """Wait until all servers answer; return whether they do."""
        end = time.monotonic() + patience
        while time.monotonic() < end:
            if all(not self.servers[number].silent for number in self.wanted):
                return True
            time.sleep(0.05)
        return False

    def place(self, session: str, mobile: bool = False) -> Path | Endpoint:
        """Return where to open a session; ``mobile``: its robot can go to another host. Raises NoRoom."""
        with self._lock:
            (self._mobile.add if mobile else self._mobile.discard)(session)
            claim = self._router.route(session, self._demand(session), time.monotonic())
            self.counts['placed'] += 1
            return self.servers[claim.server].address

    def move(self, session: str, target: str) -> None:
        """Have a session moved to the server at a socket or gateway, or to one that the router chooses ('auto'). Waits; raises
        MoveError unless the session is where it was to go, or for 'auto' on any other server."""
        try:
            self._move(session, target)
        except _HandedOn:
            self._move(session, target)

    def _move(self, session: str, target: str) -> None:
        """As ``move``; raises _HandedOn where the session has just gone to a server that is not the target."""
        with self._lock:
            claim = self._router.claim(session)
            if claim is None:
                raise MoveError(f'session {session} is on no server')
            source = self.servers[claim.server].address
            returns = isinstance(source, Endpoint)
            if returns and (not self._home or target != 'auto' or session not in self._mobile):
                raise MoveError(f'session {session} is at {source}, and is for that host to move')
            if session in self._moving:
                raise MoveError(f'session {session} is moving already')
            try:
                number = self._router.move(session, time.monotonic(),
                                           only=self._own if returns else None).server if target == 'auto' else next(
                    number for number, server in enumerate(self.servers) if str(server.address) == target)
            except (NoRoom, StopIteration) as error:
                raise MoveError(str(error) or f'{target} is no server of this fleet') from error
            if number in self._links and session not in self._mobile:  # only the router checks this, not a named target
                raise MoveError(f'session {session} stays on this host: its robot has not said that it can go to another one')
            self._moving.add(session)
        refused = None
        try:
            ask_move(source, session, self._home if returns else str(self.servers[number].address))
            self.counts['moved'] += 1
            self.counts['returned'] += returns
        except Exception as error:
            refused = error
            self.counts['moves_refused'] += 1
            with self._lock:
                if self._router.claim(session):
                    self._router.release(session)
                if self._router.alive[claim.server]:  # it is where it was; otherwise lost with its server
                    self._router.claims_of([(claim, self._demand(session))])
        finally:
            try:
                self._look_all()  # to learn which server has it now
                for each in self._links if refused else {number, claim.server} & self._links.keys():
                    self._look_at_host(each)
            finally:
                with self._lock:
                    self._moving.discard(session)
                    now = self._router.claim(session)
        if refused and (not isinstance(refused, MoveError) or now is None or now.server == claim.server):
            raise refused
        # Otherwise the last status of the server that was asked was too old, or its answer was lost.
        if refused and target != 'auto' and now.server != number:
            raise _HandedOn(str(refused)) from refused

    def status(self) -> dict[str, Any]:
        """Return servers, claims and slack, as JSON values."""
        with self._lock:
            load, alive = self._router.load, self._router.alive
            servers = []
            for number, server in enumerate(self.servers):
                service = server.status.get('service', {})
                ticks = max(1, service.get('ticks', 0))
                servers.append({
                    'socket': str(server.address), 'pid': server.status.get('pid'), 'alive': bool(alive[number]),
                    'wanted': number in self.wanted, 'host': number in self._links, 'problem': server.problem,
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
        # As in a single server's status: a gateway needs these, also in front of a fleet.
        about = {'preset': known['preset'], 'service': {'backend': known['service']['backend']}} if 'preset' in known else {}
        return {'pid': os.getpid(), 'socket': str(self._listening.path), 'uptime_s': round(time.monotonic() - self._begun, 1),
                **about, 'fleet': {'servers': servers, 'claims': claims, **self.counts}}

    def room(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return, for each own server that answers, how many more robots it has time and memory for, and how many it has."""
        with self._lock:
            load, demand = self._router.load, self._demand()
            robots = {number: len(self._router.sessions(number)) for number in np.flatnonzero(self._router.alive).tolist()
                      if number in self._own}
            time_for = {number: int((self._settings.full - load[number]) * demand.period / demand.cost + 1e-9)
                        for number in robots}
            return {number: max(0, min(time_for[number], self._sessions - count)) for number, count in robots.items()}, robots

    def empty(self, number: int) -> bool:
        """Place nothing more on a server, and have its sessions moved; return whether none is left. Does not wait."""
        with self._lock:
            sessions = self._router.drain(number)
            self._begin_move(sessions)  # one at a time, so that a robot only waits for its own move
        return not sessions

    def fill(self, number: int) -> None:
        """Place robots again on a server that was being emptied."""
        with self._lock:
            self._router.restore(number)

    # --- robots ---

    def _accept(self) -> None:
        accepted = self._listening.accept()
        if accepted is None:
            return
        connection, now = Connection(accepted[0]), time.monotonic()
        if len(self._connections) >= _CONNECTIONS:
            quietest, heard = next(iter(self._connections.items()))
            if now - heard < _QUIET:
                with suppress(ConnectionLost):
                    connection.send(messages.Rejected(f'{_CONNECTIONS} connections are open: no more are allowed'))
                connection.close()
                return
            self._drop(quietest)
        self._connections[connection] = now
        self._selector.register(connection, selectors.EVENT_READ)
        self._receive(connection)  # the message is nearly always there by now

    def _receive(self, connection: Connection) -> None:
        try:
            received = connection.receive(0.0)
            if received is None:
                return
            message, descriptor = received
            if descriptor is not None:
                os.close(descriptor)
            del self._connections[connection]  # to move it to the end
            self._connections[connection] = time.monotonic()
            self._handle(connection, message)
        except ConnectionLost:
            self._drop(connection)
        except Exception as error:  # the others continue
            try:
                connection.send(messages.Rejected(str(error)))
            except (ConnectionLost, MessageError):
                pass  # it is being closed anyway
            self._drop(connection)

    def _handle(self, connection: Connection, message: Any) -> None:
        if isinstance(message, messages.StatusRequest):
            connection.send(messages.Status(json.dumps(self.status())))
        elif isinstance(message, messages.Hello):
            address = self.place(message.session or message.robot, message.mobile and bool(message.session))
            connection.send(messages.Moved(str(address), message.generation))
            self._drop(connection)
        elif isinstance(message, messages.Move):
            self._moves.submit(self._answer, connection, message.number, self.move, message.session, message.target)
        elif isinstance(message, (messages.Prepare, messages.TakeOver)):
            self._forwards.submit(self._answer, connection, message.number, self._forward, message)
        else:
            raise MessageError(f'{type(message).__name__}: this is the front of a fleet, which takes no frames')

    def _answer(self, connection: Connection, number: int, work: Callable[..., None], *arguments: Any) -> None:
        """Handle a peer's request, and tell it the result."""
        refusal = ''
        try:
            work(*arguments)
        except Exception as error:  # the peer waits for the answer
            refusal = str(error) or type(error).__name__
        try:
            connection.send(messages.Done(number, refusal))
        except ConnectionLost:
            pass  # it no longer waits

    def _forward(self, message: messages.Prepare | messages.TakeOver) -> None:
        """Forward a request about a returning session from its host to the own server that it comes back to."""
        with self._lock:
            claim = self._router.claim(message.session)
            if message.session not in self._moving or claim is None or claim.server not in self._own:
                raise MoveError(f'session {message.session} is not expected here')
            address = self.servers[claim.server].address
        peer = Peer(str(address))
        try:
            if isinstance(message, messages.TakeOver):
                peer.ask(messages.TakeOver, TAKE_OVER, message.session, message.generation)
            else:
                peer.ask(messages.Prepare, PREPARE, message.session)
        finally:
            peer.close()

    def _drop(self, connection: Connection) -> None:
        self._connections.pop(connection, None)
        self._selector.unregister(connection)
        connection.close()

    # --- servers ---

    def _demand(self, session: str = '') -> Demand:
        own = [self.servers[number] for number in self._own]
        cost = max((server.cost for server in own if not server.silent), default=0.0)
        cost = cost or max((server.cost for server in own if server.status), default=_DEFAULT_COST)
        if not self._links:
            return Demand(cost, self._period)
        # The store is on this host: another one would have to read the session over the network.
        return Demand(cost, self._period, resident=self._own, transfer=_AWAY,
                      only=None if session in self._mobile else self._own)

    @property
    def _nameless(self) -> frozenset[str]:
        return frozenset().union(*(server.nameless for server in self.servers))

    def _look_always(self) -> None:
        while not self._over.wait(POLL):
            try:
                self._look_all()
                self._balance()
            except Exception:  # the next look may do better
                _log.exception('a look at the servers failed')

    def _look_all(self) -> None:
        own = sorted(self._own)
        for number, status in zip(own, self._looks.map(_status, [self.servers[number].address for number in own]), strict=True):
            try:
                self._take(number, None if status is None else ServerStatus.read(status))
            except Unavailable as error:  # continue with the others
                self._take(number, None, str(error))

    def _look_at_host_always(self, number: int) -> None:
        while not self._over.wait(POLL):
            try:
                self._look_at_host(number)
            except Exception:  # the next look may do better
                _log.exception('a look at the host at %s failed', self.servers[number].address)

    def _look_at_host(self, number: int) -> None:
        """Ask another host's server for its status, which takes at most as long as ``ask_host_status``."""
        try:
            self._take(number, ServerStatus.read(ask_host_status(self._links[number])))
        except Unavailable as error:
            self._take(number, None, str(error))

    def _take(self, number: int, said: ServerStatus | None, problem: str = '') -> None:
        server, now = self.servers[number], time.monotonic()
        with self._lock:
            if said is not None and number in self._links:
                problem = self._unfit(said)
            if problem != server.problem and number in self._links:
                _log.log(logging.WARNING if problem else logging.INFO, 'the host at %s %s', server.address,
                         f'is not used: {problem}' if problem else 'is used')
            server.problem = problem
            if said is None or problem:
                server.silent += 1
                if server.silent >= _SILENT and self._router.alive[number]:
                    lost = self._router.lose([number])
                    self.counts['servers_lost'] += 1
                    _log.error('the server at %s is lost, with %d sessions', server.address, len(lost))
                return
            server.silent, server.status, server.cost, server.nameless = 0, said.values, said.cost, said.nameless
            if not self._router.alive[number] and number in self._links:
                self._router.restore(number, self._demand().cost / server.cost, said.sessions)
            elif not self._router.alive[number]:
                self._router.restore(number)
            for session, generation in said.running.items():
                # The store assigns the generation: exactly one server can have it.
                claim = Claim(session, number, generation, now + self._settings.lease)
                self._router.claims_of([(claim, self._demand(session))])
                self._router.renew(session, generation, now)
            for robot in said.nameless:  # placed by its own name; no store has a generation of it
                claim = self._router.claim(robot)
                if claim is None:
                    claim = Claim(robot, number, 0, now + self._settings.lease)
                    self._router.claims_of([(claim, self._demand(robot))])
                if claim.server == number:
                    self._router.renew(robot, claim.generation, now)
            for session in self._router.sessions(number):
                if session not in said.running and self._router.claim(session).lease < now:
                    self._router.release(session)
            self._mobile = {session for session in self._mobile if self._router.claim(session)}

    def _unfit(self, said: ServerStatus) -> str:
        """Return why robots cannot be sent to another host with this status; empty: they can."""
        own = [self.servers[number].status for number in self._own if self.servers[number].status]
        if not own:
            return 'no own server has answered yet, with which it could be compared'
        if 'fleet' in said.values:
            return 'its gateway is before the front of a fleet, and must be before one server'
        if 'store' not in said.values:
            return 'its server keeps no sessions: start it with --store'
        if said.values.get('preset') != own[0].get('preset'):
            return 'its server has another model'
        return ''

    def _balance(self) -> None:
        with self._lock:
            self._stayed = {session for session in self._stayed if self._router.claim(session)}
            nameless = self._nameless
            moves = [session for session, server in self._router.overloaded(self._stayed | nameless) if server in self._own]
            if not moves and self._stayed:  # all have been tried
                moves = [session for session, server in self._router.overloaded(nameless) if server in self._own]
                self._stayed.difference_update(*(self._router.sessions(self._router.claim(each).server) for each in moves))
            self._begin_move(moves or self._to_come_home())  # one at a time, then look again

    def _begin_move(self, sessions: list[str]) -> None:
        """Begin to move the first of ``sessions`` that is not moving, unless all threads are busy: none is queued, since the
        reason for its move may change while it waits. Under the lock."""
        staying = self._moving | self._own_moving | self._nameless
        session = next((each for each in sessions if each not in staying), None)
        if session is not None and len(self._own_moving) < _OWN_MOVES:
            self._own_moving.add(session)
            self._own_moves.submit(self._balance_one, session)

    def _to_come_home(self) -> list[str]:
        """Return a session at another host that should come back, if any: the last one placed there, of those that have not
        failed to come back since all were tried."""
        if not self._home:
            return []
        load, demand = self._router.load, self._demand()
        loads = {number: float(load[number]) for number in np.flatnonzero(self._router.takes).tolist() if number in self._own}
        away = [session for number in self._links for session in self._router.sessions(number)
                if session in self._mobile and session not in self._moving]
        if not self._homecoming.decide(loads, demand.cost / demand.period, bool(away), time.monotonic()):
            return []
        if self._stayed.issuperset(away):
            self._stayed.difference_update(away)
        return [session for session in reversed(away) if session not in self._stayed][:1]

    def _balance_one(self, session: str) -> None:
        try:
            self.move(session, 'auto')
        except Exception as error:  # the result of this thread is not read
            with self._lock:
                self._stayed.add(session)
            _log.warning('session %s stays: %s', session, error)
        finally:
            with self._lock:
                self._own_moving.discard(session)


def _status(path: Path) -> dict[str, Any] | None:
    try:
        return ask_status(path)
    except Unavailable:
        return None
