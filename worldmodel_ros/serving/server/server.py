"""Takes connections, and passes their messages to the sessions of one service."""
from __future__ import annotations

import json
import logging
import os
import selectors
import threading
import time
from concurrent.futures import Future as Promise, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from worldmodel_ros.engine.session_folder import SessionFolder
from worldmodel_ros.interrupts import End
from worldmodel_ros.serving.fleet.keeper import in_words
from worldmodel_ros.serving.fleet.move import MoveError, move
from worldmodel_ros.serving.service.messages import ServiceFull
from worldmodel_ros.serving.service.quotas import TokenBuckets
from worldmodel_ros.serving.transport import messages
from worldmodel_ros.serving.transport.address import ListeningSocket
from worldmodel_ros.serving.transport.codec import MessageError
from worldmodel_ros.serving.transport.connection import Connection, ConnectionLost
from .robot import Robot

if TYPE_CHECKING:
    from worldmodel_ros.serving.fleet.keeper import Keeper
    from worldmodel_ros.serving.service.service import Service

_log = logging.getLogger(__name__)
_CONNECTIONS = 256  # at most, of robots and of status requests
_OF_A_PROCESS = 64   # of them without a session, from one process: a gateway has a connection for each of its sessions
_ATTEMPTS = 4.0     # sessions per second that one process may open, since each costs the others time
_ATTEMPTS_SAVED = 4.0  # s of that allowed in one burst
_IN_A_ROW = 16      # messages of one connection before the others have their turn
_HELLO = 5.0        # s in which a connection must send its first message
_LOOK = 1.0         # s between two checks for idle connections
_SAVED = 2.0        # s of messages allowed in one burst
_ROBOT_COMES = 10.0  # s after which a session that was taken over is given up unless its robot has come


@dataclass(frozen=True)
class Limits:
    """
    Of each connection; 0 is no limit. ``idle`` [s]: a connection that is silent for this long is closed. ``messages``: as many
    are read per second; the rest waits in the sender's buffer, since even refusing them would take time from the others.
    """

    idle: float = 0.0
    messages: float = 0.0


@dataclass
class _Peer:
    pid: int
    heard: float  # time of its last message, steady, in s
    robot: Robot | None = None  # None before its Hello
    resumed: float = 0.0        # when reading resumes after too many messages; 0: it is being read

    @property
    def account(self) -> tuple[int, str]:
        """The account for its messages: not the connection, since a new one would be read at once."""
        return self.pid, self.robot.name if self.robot else ''


class Server:
    """
    Serves while ``run`` runs.

    One thread takes in messages; networks run in the service's thread, images are sent from a third one, and a fourth one
    saves and loads sessions, in ``folder``. ``keeper``: keeps sessions in a store, in threads of its own.
    """

    def __init__(self, service: Service, listening: ListeningSocket, folder: SessionFolder,
                 limits: Limits = Limits(), keeper: Keeper | None = None) -> None:
        self._service, self._listening, self._limits, self._keeper = service, listening, limits, keeper
        self._messages = TokenBuckets(limits.messages, _SAVED)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)
        self._hellos = TokenBuckets(_ATTEMPTS, _ATTEMPTS_SAVED)
        self._peers: dict[Connection, _Peer] = {}
        self._parked: dict[str, tuple[Robot, float]] = {}  # sessions waiting for their robots, and until when
        self._ending: dict[Promise, Robot | None] = {}  # ends of sessions that are stored first, and who gets their places
        self._shows = ThreadPoolExecutor(1, 'pictures')
        self._files, self._folder = ThreadPoolExecutor(1, 'files'), folder
        self._begun = self._looked = time.monotonic()
        self._refused = self._paused = 0
        # Own thread: one session moves out at a time, and waiting moves do not block incoming sessions.
        self._moves = ThreadPoolExecutor(1, 'moves')

    def run(self, timeout: float | None = None, end: End | None = None) -> None:
        """Serve, until ``end`` is asked for; with a ``timeout`` [s], return after the first events, or after that time without
        any."""
        if end:
            self._selector.register(end, selectors.EVENT_READ)
        while not (end and end.asked):
            for key, _ in self._selector.select(self._patience(_LOOK if timeout is None else timeout)):
                if key.fileobj is self._listening:
                    self._accept()
                elif key.fileobj in self._peers:
                    self._receive(key.fileobj)
            self._resume()
            self._end_idle()
            if timeout is not None:
                return

    def close(self) -> None:
        """Close all connections and sessions. The service and the listening socket are not touched."""
        for connection in list(self._peers):
            self._drop(connection, 'the server ends')
        for session in list(self._parked):
            self._end_parked(session)
        self._shows.shutdown(cancel_futures=True)
        self._files.shutdown(wait=False, cancel_futures=True)  # transfers in progress end with their sessions
        self._moves.shutdown(cancel_futures=True)
        if self._keeper:
            self._keeper.close()
        self._selector.close()

    def status(self) -> dict[str, Any]:
        """Return the state of the server: its robots, and the service's numbers."""
        return {'pid': os.getpid(), 'socket': str(self._listening.path), 'uptime_s': time.monotonic() - self._begun,
                'robots': [peer.robot.status() for peer in self._peers.values() if peer.robot],
                'waiting': len(self._parked), 'connections_refused': self._refused, 'connections_paused': self._paused,
                **({'store': self._keeper.status()} if self._keeper else {}), 'preset': self._service.spec.to_dict(),
                'service': self._service.stats()}

    def _accept(self) -> None:
        accepted = self._listening.accept()
        if accepted is None:
            self._refused += 1
            return
        connected, pid = accepted
        connection = Connection(connected)
        of_process = sum(peer.pid == pid and peer.robot is None for peer in self._peers.values())
        if len(self._peers) >= _CONNECTIONS or of_process >= _OF_A_PROCESS:
            self._reject(connection, f'{len(self._peers)} connections are open, of which {of_process} without a session are of '
                                     f'process {pid}: at most {_CONNECTIONS} are allowed, and {_OF_A_PROCESS} of those')
            connection.close()
            return
        self._peers[connection] = _Peer(pid, time.monotonic())
        self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: Connection) -> None:
        try:
            for _ in range(_IN_A_ROW):
                received = connection.receive(0.0)
                if received is None:
                    return
                self._heard(connection)
                message, descriptor = received
                if descriptor is not None:
                    os.close(descriptor)
                    raise MessageError('no memory is taken from a robot')
                self._handle(connection, message)
                if connection not in self._peers or self._peers[connection].resumed:
                    return
        except ConnectionLost as error:
            self._drop(connection, str(error), waits=True)
        except (MessageError, ServiceFull) as error:
            self._reject(connection, str(error))
            self._drop(connection, f'rejected: {error}')
        except Exception as error:  # the other robots go on
            _log.exception('a message failed')
            self._reject(connection, f'{type(error).__name__}: {error}')
            self._drop(connection, 'a message failed')

    def _handle(self, connection: Connection, message: Any) -> None:
        peer = self._peers[connection]
        if isinstance(message, messages.StatusRequest):
            connection.send(messages.Status(json.dumps(self.status())))
        elif isinstance(message, messages.Goodbye):
            self._drop(connection, 'it is over')
        elif peer.robot is not None:
            peer.robot.receive(message)
        elif isinstance(message, messages.Hello):
            # Not limited for sessions that were moved here: many of their robots may come through one gateway.
            expected = self._keeper is not None and self._keeper.expects(message.session)
            if not expected and (wait := self._hellos.take(peer.pid, time.monotonic())):
                raise MessageError(f'process {peer.pid} has opened sessions too often: again in {wait:.2f} s')
            self._open(connection, peer, message)
        elif isinstance(message, (messages.Move, messages.Prepare, messages.TakeOver)):
            self._fleet(connection, message)
        else:
            raise MessageError(f'{type(message).__name__} before Hello')

    def _open(self, connection: Connection, peer: _Peer, hello: messages.Hello) -> None:
        linger = min(max(0.0, hello.linger), messages.LONGEST_LINGER) if hello.session else 0.0  # NaN counts as 0
        before = next((each for each, other in self._peers.items() if hello.session and other.robot is not None
                       and (other.robot.linger or self._keeper) and other.robot.session == hello.session), None)
        if before is not None:  # its loss was not noticed yet; it waits for this one, or is stored
            self._drop(before, 'its session goes on over a newer connection', waits=True)
        robot, _ = self._parked.pop(hello.session, (None, 0.0))
        # Assigned before it is opened: if the connection is lost during the welcome, the robot is closed with it.
        if robot is not None:
            peer.robot = robot
            robot.attach(connection, peer.pid, linger)
        else:
            peer.robot = robot = Robot(hello.robot, peer.pid, connection, self._service, self._shows, self._files,
                                       self._folder, self._keeper, linger)
            robot.open(hello.session, self._make_room(robot))
        _log.info('%s (process %d) is connected', robot.name, peer.pid)

    def _make_room(self, robot: Robot) -> Promise | None:
        """
        If there is no place for another session, give ``robot`` that of a session which ends: of one that is being stored, or
        of the one that has waited longest for its own robot. Return the promise of its end; None: there is none to wait for.
        """
        if not self._service.full:
            return None
        room = self._free_end()
        if room is None and self._parked:
            self._end_parked(min(self._parked, key=lambda session: self._parked[session][1]))
            room = self._free_end()
        if room:
            self._ending[room] = robot
        return room

    def _free_end(self) -> Promise | None:
        """Return the end of a session whose place no robot waits for that is still here."""
        return next((end for end, taker in self._ending.items() if not end.done() and (taker is None or taker.gone)), None)

    def _close(self, robot: Robot) -> None:
        end = robot.close()
        self._ending = {other: taker for other, taker in self._ending.items() if not other.done()}
        if end:
            self._ending[end] = None

    def _end_parked(self, session: str) -> None:
        robot, _ = self._parked.pop(session)
        _log.info('%s has not come back', robot.name)
        self._close(robot)

    def _fleet(self, connection: Connection, message: messages.Move | messages.Prepare | messages.TakeOver) -> None:
        """Handle a request of another server or an operator, in another thread since it takes a while."""
        keeper = self._keeper
        if keeper is None:
            raise MessageError('this server keeps no sessions in a store: start it with --store')
        if isinstance(message, messages.Prepare):
            work = partial(keeper.prepare, message.session)
        elif isinstance(message, messages.TakeOver):
            work = partial(self._take_over, message.session, message.generation)
        else:
            robot = next((peer.robot for peer in self._peers.values()
                          if peer.robot and peer.robot.kept and peer.robot.session == message.session), None)
            work = partial(self._move, robot, message.session, message.target)

        def run() -> None:
            refusal = ''
            try:
                work()
            except Exception as error:  # the peer waits for an answer
                refusal = str(error) or type(error).__name__
                _log.warning('%s of session %s: %s', type(message).__name__, message.session, refusal)
            try:
                connection.send(messages.Done(message.number, refusal))
            except ConnectionLost:
                pass  # it waits no more
        (self._moves if isinstance(message, messages.Move) else keeper).submit(run)

    def _take_over(self, session: str, generation: int) -> None:
        kept = self._keeper.take_over(session, generation)
        giving_up = threading.Timer(_ROBOT_COMES, self._keeper.give_up, [kept])
        giving_up.daemon = True
        giving_up.start()

    def _move(self, robot: Robot | None, session: str, target: str) -> None:
        if robot is None:
            raise MoveError(f'session {session} is not open here')
        with self._keeper.here(robot.kept):
            moved = move(self._keeper, robot.kept, robot, target)
        _log.info('session %s has moved to %s: its robot was held for %.1f ms, of which %.1f to store what was new: %s',
                  session, target, moved.held * 1e3, moved.stored * 1e3, in_words(moved.parts))

    def _heard(self, connection: Connection) -> None:
        """Note that a message has come, and pause the connection if there are too many."""
        peer, now = self._peers[connection], time.monotonic()
        peer.heard = now
        wait = self._messages.take(peer.account, now)
        if wait and not peer.resumed:
            peer.resumed = now + wait
            self._selector.unregister(connection)
            self._paused += 1

    def _patience(self, longest: float) -> float:
        """Return how long to wait for messages [s]."""
        resumed = [peer.resumed for peer in self._peers.values() if peer.resumed]
        return max(0.0, min(longest, min(resumed) - time.monotonic())) if resumed else longest

    def _resume(self) -> None:
        """Resume reading paused connections whose time has come."""
        now = time.monotonic()
        for connection, peer in self._peers.items():
            if peer.resumed and peer.resumed <= now:
                peer.resumed = 0.0
                self._messages.take(peer.account, now)  # for the message that was read before it was paused
                self._selector.register(connection, selectors.EVENT_READ)

    def _end_idle(self) -> None:
        """Close idle connections, and end parked sessions whose time is over."""
        now = time.monotonic()
        if now - self._looked < _LOOK:
            return
        self._looked = now
        for session in [session for session, (_, until) in self._parked.items() if until < now]:
            self._end_parked(session)
        for connection, peer in list(self._peers.items()):
            longest = self._limits.idle if peer.robot else _HELLO
            if not longest or now - peer.heard < longest or (peer.robot and peer.robot.waiting):
                continue
            reason = f'nothing has come for {longest:g} s'
            try:
                connection.send(messages.Idle(f'{reason}; the next observation may open a session again'))
            except (ConnectionLost, MessageError):
                pass  # it is being closed anyway
            self._drop(connection, reason, waits=True)

    def _reject(self, connection: Connection, reason: str) -> None:
        self._refused += 1
        try:
            connection.send(messages.Rejected(reason))
        except (ConnectionLost, MessageError):
            pass  # it is being closed anyway

    def _drop(self, connection: Connection, reason: str, waits: bool = False) -> None:
        """Drop a connection; ``waits``: the session may wait for its robot to come back."""
        peer = self._peers.pop(connection)
        robot = peer.robot
        if not peer.resumed:
            self._selector.unregister(connection)
        if robot is not None:
            _log.info('%s (process %d) is gone: %s', robot.name, robot.pid, robot.gone or reason)
            if waits and robot.park():
                self._parked[robot.session] = robot, time.monotonic() + robot.linger
            else:
                self._close(robot)
        connection.close()
