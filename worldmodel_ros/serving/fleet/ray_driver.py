"""Ray's driver in a process of its own: Ray ends a driver whose head is lost, and the fleet's front must survive that."""
from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from worldmodel_ros.serving.client.link import Unavailable, ask_status
from .pools import UNHEARD, PoolError, RayPool

_log = logging.getLogger(__name__)
_PATIENCE = 30.0  # s for an answer of the driver
_BEGIN = 240.0    # s for the first driver to reach Ray, or to start it
_SILENT = 3       # looks, each of 2 s, without an answer of any actor after which the driver is replaced,
_NEVER_HEARD = 30  # if none has ever answered: a busy machine takes long to start one
_AGAIN = 2.0      # s until the next driver after one was lost
_CONTEXT = multiprocessing.get_context('spawn')  # Ray and the front have threads


class RayDriver:
    """
    A ``Pool`` of Ray's actors, in a child process that is replaced when it is lost. The next one gives each server that still
    runs to a new actor, and starts the others.
    """

    name = 'ray'

    def __init__(self, servers: int, address: str | None = None) -> None:
        """As for ``RayPool``. Waits; raises PoolError."""
        self._arguments = servers, address
        self._wanted: dict[int, tuple[list[str], str]] = {}
        self._begin()
        if not self._link.poll(_BEGIN):
            self._end()
            raise PoolError(f'Ray has not been reached or started within {_BEGIN:g} s')
        try:
            refusal = self._link.recv()
        except EOFError:
            refusal = 'Ray\'s driver has ended as it began: see what it has printed'
        if refusal:
            self._end()
            raise PoolError(refusal)
        self._ready = True

    def start(self, number: int, arguments: Sequence[str], log: Path) -> None:
        self._wanted[number] = list(arguments), str(log)
        if self._ready:  # otherwise it is started with the others later
            self._ask('start', number, list(arguments), str(log))

    def look(self) -> dict[int, str]:
        away = dict.fromkeys(self._wanted, 'Ray is away')
        if not self._ready and not self._is_back():
            return away
        try:
            states = self._ask('look')
            heard = not states or any(not state.startswith(UNHEARD) for state in states.values())
            self._heard |= heard
            self._silent = 0 if heard else self._silent + 1
            if self._silent >= (_SILENT if self._heard else _NEVER_HEARD):
                self._lose()  # Ray may not notify its driver that its head is gone
                raise PoolError('none of Ray\'s actors answers')
            return states
        except PoolError as error:
            _log.error('%s: servers go on, and what has ended meanwhile is started when Ray is back', error)
            return away

    def stop(self, number: int) -> None:
        arguments, _ = self._wanted.pop(number)
        with suppress(PoolError):
            if self._ready and not self._silent:
                self._ask('stop', number)
                return
        _end_server(Path(arguments[0]))

    def close(self) -> None:
        with suppress(PoolError):
            if self._ready and not self._silent:
                self._ask('close')
        for arguments, _ in self._wanted.values():
            _end_server(Path(arguments[0]))  # in case Ray has not
        self._end()

    def _is_back(self) -> bool:
        """Replace a driver that was lost; return whether the new one has reached Ray."""
        if not self._process.is_alive():
            if time.monotonic() - self._lost >= _AGAIN:
                self._end()
                self._begin()
            return False
        try:
            if not self._link.poll() or self._link.recv():
                return False  # it is still trying, or has given up and ends
        except (EOFError, OSError):
            return False
        self._ready = True
        try:
            for number, (arguments, log) in self._wanted.items():
                self._ask('start', number, arguments, log)
        except PoolError:
            return False
        _log.info('Ray is back')
        return True

    def _ask(self, what: str, *arguments: Any) -> Any:
        try:
            self._link.send((what, *arguments))
            if self._link.poll(_PATIENCE):
                error, result = self._link.recv()
                if error:
                    raise PoolError(error)
                return result
        except (EOFError, OSError):
            pass
        self._lose()
        raise PoolError('Ray is away')

    def _lose(self) -> None:
        self._ready, self._lost = False, time.monotonic()
        self._process.kill()  # it may hang

    def _begin(self) -> None:
        self._ready, self._lost, self._silent, self._heard = False, time.monotonic(), 0, False
        self._link, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_drive, args=(theirs, *self._arguments), name='ray driver', daemon=True)
        self._process.start()
        theirs.close()

    def _end(self) -> None:
        self._link.close()
        self._process.join(_AGAIN)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _drive(link: Connection, servers: int, address: str | None) -> None:
    """Run the child process: handle one request after the other, until the front ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front ends this process
    try:
        pool = RayPool(servers, address)
    except PoolError as error:
        link.send(str(error))
        return
    link.send('')
    while True:
        try:
            what, *arguments = link.recv()
        except EOFError:
            return
        try:
            answer = '', getattr(pool, what)(*arguments)
        except Exception as error:  # the front waits
            answer = f'{type(error).__name__}: {error}', None
        link.send(answer)
        if what == 'close':
            return


def _end_server(socket: Path) -> None:
    """Shut down the server at a socket cleanly, if one runs."""
    with suppress(Unavailable, KeyError, ValueError, TypeError, OSError):
        os.kill(int(ask_status(socket)['pid']), signal.SIGTERM)
