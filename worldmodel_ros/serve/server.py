"""Takes connections, and hands what comes over them to the sessions of one service."""
from __future__ import annotations

import json
import logging
import os
import selectors
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ..engine.service_messages import ServiceFull
from ..transport import messages
from ..transport.address import ListeningSocket
from ..transport.codec import MessageError
from ..transport.connection import Connection, ConnectionLost
from .robot import Robot

if TYPE_CHECKING:
    from ..engine.service import Service

_log = logging.getLogger(__name__)
_CONNECTIONS = 256  # at most, of robots and of those that ask for the status
_IN_A_ROW = 16      # messages of one connection, before the others have their turn


class Server:
    """
    Serves until `run` is left by an exception, such as one that a signal's handler raises.

    One thread takes in messages; networks run in the service's, and pictures are sent from a third one.
    """

    def __init__(self, service: Service, listening: ListeningSocket) -> None:
        self._service, self._listening = service, listening
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)
        self._robots: dict[Connection, Robot | None] = {}  # None: it has not said hello
        self._pids: dict[Connection, int] = {}
        self._shows = ThreadPoolExecutor(1, 'pictures')
        self._begun = time.monotonic()
        self._refused = 0

    def run(self, timeout: float | None = None) -> None:
        """Serve; with a `timeout` [s], return after the first events, or after that time without any."""
        while True:
            for key, _ in self._selector.select(timeout):
                if key.fileobj is self._listening:
                    self._accept()
                elif key.fileobj in self._robots:
                    self._receive(key.fileobj)
            if timeout is not None:
                return

    def close(self) -> None:
        """Close all connections and sessions. The service and the listening socket are not touched."""
        for connection in list(self._robots):
            self._drop(connection, 'the server ends')
        self._shows.shutdown(cancel_futures=True)
        self._selector.close()

    def status(self) -> dict[str, Any]:
        """Return the state of the server: its robots, and the service's numbers."""
        return {'pid': os.getpid(), 'socket': str(self._listening.path), 'uptime_s': time.monotonic() - self._begun,
                'robots': [robot.status() for robot in self._robots.values() if robot],
                'connections_refused': self._refused, 'service': self._service.stats()}

    def _accept(self) -> None:
        accepted = self._listening.accept()
        if accepted is None:
            self._refused += 1
            return
        connected, pid = accepted
        connection = Connection(connected)
        if len(self._robots) >= _CONNECTIONS:
            self._reject(connection, f'{_CONNECTIONS} connections are open')
            connection.close()
            return
        self._robots[connection], self._pids[connection] = None, pid
        self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: Connection) -> None:
        try:
            for _ in range(_IN_A_ROW):
                received = connection.receive(0.0)
                if received is None:
                    return
                message, descriptor = received
                if descriptor is not None:
                    os.close(descriptor)
                    raise MessageError('no memory is taken from a robot')
                self._handle(connection, message)
        except ConnectionLost as error:
            self._drop(connection, str(error))
        except (MessageError, ServiceFull) as error:
            self._reject(connection, str(error))
            self._drop(connection, f'rejected: {error}')
        except Exception as error:  # the other robots go on
            _log.exception('a message failed')
            self._reject(connection, f'{type(error).__name__}: {error}')
            self._drop(connection, 'a message failed')

    def _handle(self, connection: Connection, message: Any) -> None:
        robot = self._robots[connection]
        if isinstance(message, messages.StatusRequest):
            connection.send(messages.Status(json.dumps(self.status())))
        elif robot is not None:
            robot.receive(message)
        elif isinstance(message, messages.Hello):
            robot = Robot(message.robot, self._pids[connection], connection, self._service, self._shows)
            self._robots[connection] = robot
            robot.welcome()
            _log.info('%s (process %d) is connected', robot.name, robot.pid)
        else:
            raise MessageError(f'{type(message).__name__} before Hello')

    def _reject(self, connection: Connection, reason: str) -> None:
        self._refused += 1
        try:
            connection.send(messages.Rejected(reason))
        except (ConnectionLost, MessageError):
            pass  # it is being closed anyway

    def _drop(self, connection: Connection, reason: str) -> None:
        robot = self._robots.pop(connection)
        del self._pids[connection]
        self._selector.unregister(connection)
        if robot is not None:
            _log.info('%s (process %d) is gone: %s', robot.name, robot.pid, robot.gone or reason)
            robot.close()
        connection.close()
