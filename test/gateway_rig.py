"""A gateway in a thread of this process, in front of a server whose service is chosen by a test."""
from __future__ import annotations

import asyncio
import contextlib
import threading
import urllib.error
import urllib.request

import numpy as np
from fake_service import serving
from websockets.sync.client import connect

from worldmodel_ros.serving.gateway.msgpack import decode, encode
from worldmodel_ros.serving.gateway.security import LimitedSocket
from worldmodel_ros.serving.gateway.server import Gateway
from worldmodel_ros.serving.service.quotas import TokenBuckets

TIMEOUT = 60.0  # s, on a busy machine


class Running:
    """A gateway, its port, and the server behind it."""

    def __init__(self, path, port=0, connects=0.0, tls=None, **settings):
        """``path``: the engine's socket; ``settings``: of Gateway."""
        self.listening = LimitedSocket('127.0.0.1', port, connects)
        self.port, self.tls = self.listening.getsockname()[1], tls
        self.gateway = None
        self._settings, self._path = settings, path
        self._ready = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(),), daemon=True)
        self._thread.start()
        assert self._ready.wait(TIMEOUT)

    def url(self, path='/'):
        return f'{"wss" if self.tls else "ws"}://127.0.0.1:{self.port}{path}'

    def call(self, function, *arguments):
        """Call a function in the gateway's thread; return its result."""
        done, results = threading.Event(), []

        def run():
            results.append(function(*arguments))
            done.set()
        self._loop.call_soon_threadsafe(run)
        assert done.wait(TIMEOUT)
        return results[0]

    def stop(self):
        if not self._thread.is_alive():
            return  # a test has stopped it
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _run(self):
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.gateway = Gateway(self._path, self.listening, tls=self.tls, **self._settings)
        await self.gateway.run(self._stop, self._ready.set)


@contextlib.contextmanager
def gateway(folder, service=None, **settings):
    """Run a server and a gateway in front of it until the end of the block; ``server`` is an attribute of the latter."""
    with serving(folder / 'engine.sock', service) as server:
        server.server._hellos = TokenBuckets(0.0, 1.0)  # tests open sessions faster than robots do
        running = Running(server.path, **settings)
        running.server, running.service = server, server.service
        try:
            yield running
        finally:
            running.stop()


@contextlib.contextmanager
def client(running, path='/', token='', **options):
    """Connect as a client of openpi does; yield the connection."""
    headers = {'Authorization': f'Api-Key {token}'} if token else None
    with connect(running.url(path), compression=None, max_size=None, additional_headers=headers, open_timeout=TIMEOUT,
                 **options) as connection:
        yield connection


def robot(running, **options):
    """Connect to the openpi dialect, and receive its metadata."""
    return _with_metadata(client(running, **options))


@contextlib.contextmanager
def _with_metadata(connecting):
    with connecting as connection:
        connection.metadata = decode(connection.recv(TIMEOUT))
        yield connection


def observation(**changes):
    """Return an observation of a robot, as a map."""
    return {'observation/image': np.full((96, 128, 3), 7, np.uint8), 'prompt': 'drive to the red ball', **changes}


def say(connection, **changes):
    connection.send(encode(observation(**changes)))


def heard(connection):
    """Return the next reply: a map, or a text."""
    message = connection.recv(TIMEOUT)
    return message if isinstance(message, str) else decode(message)


def infer(connection, **changes):
    say(connection, **changes)
    return heard(connection)


def get(running, path, token='', context=None):
    """Return status, headers and text of an HTTP request."""
    request = urllib.request.Request(running.url(path).replace('ws', 'http', 1),
                                     headers={'Authorization': f'Bearer {token}'} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT, context=context) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()
