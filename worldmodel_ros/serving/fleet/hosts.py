"""Another host of a fleet, through its gateway: its store, and requests to its server. Extra ``[net]``."""
from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future as Promise
from typing import Any

from worldmodel_ros.cache.stores.protocol import AlreadyStored, Blob, NotStored, StoreError, Threads, check_key
from worldmodel_ros.serving.client.link import Unavailable, status_values
from worldmodel_ros.serving.client.network import Dialed, Endpoint, EndpointError, dial
from worldmodel_ros.serving.transport import messages, peers
from worldmodel_ros.serving.transport.codec import MessageError, pack, unpack
from worldmodel_ros.serving.transport.connection import ConnectionLost

_PATIENCE = 5.0  # s for a store to answer
_MORE = 1.0      # s for an answer to come back, besides the time that the other server may take
_STATUS = 0.5    # s for a server to report its status
_FRESH = 60.0    # s after which an unused connection is not reused: the gateway closes idle ones
_ERRORS = {'not stored': NotStored, 'already stored': AlreadyStored}


class HostLink:
    """A pool of connections to one host's gateway, one per concurrent request. From any thread."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._free: list[tuple[Dialed, float]] = []  # with the time of last use
        self._lock = threading.Lock()
        self._closed = False

    def request(self, about: dict[str, Any], blobs: Sequence[Blob] = (), patience: float = _PATIENCE, again: bool = False
                ) -> tuple[dict[str, Any], list[memoryview]]:
        """
        Return the answer to a request; ``again``: the request may be sent again if its connection is lost.

        Raises ConnectionLost, MessageError, EndpointError.
        """
        try:
            return self._request(about, blobs, patience)
        except ConnectionLost:
            if not again:
                raise
        return self._request(about, blobs, patience, fresh=True)

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            self._closed, free, self._free = True, self._free, []
        for connection, _ in free:
            _end(connection)

    def _request(self, about: dict[str, Any], blobs: Sequence[Blob], patience: float, fresh: bool = False
                 ) -> tuple[dict[str, Any], list[memoryview]]:
        from websockets.exceptions import WebSocketException
        connection = self._take(fresh)
        try:
            connection.socket.send(peers.wrap(about, blobs))
            data = connection.socket.recv(patience, decode=False)
        except TimeoutError:
            _end(connection)  # a late answer would be taken for the answer to the next request
            raise ConnectionLost(f'{self.endpoint} has not answered for {patience:g} s') from None
        except (WebSocketException, OSError) as error:
            _end(connection)
            raise ConnectionLost(f'{self.endpoint} was lost: {error}') from error
        try:
            answer = peers.unwrap(data)
        except MessageError:
            _end(connection)
            raise
        with self._lock:
            keep = not self._closed
            if keep:
                self._free.append((connection, time.monotonic()))
        if not keep:
            _end(connection)
        return answer

    def _take(self, fresh: bool) -> Dialed:
        stale = []
        try:
            with self._lock:
                if self._closed:
                    raise ConnectionLost(f'the link to {self.endpoint} is closed')
                while self._free:
                    connection, used = self._free.pop()
                    if not fresh and time.monotonic() - used < _FRESH:
                        return connection
                    stale.append(connection)
        finally:
            for each in stale:
                _end(each)
        return dial(self.endpoint, peers.PATH)


class RemoteStore:
    """A ``SlabStore`` on another host: blobs are sent over TLS, each in a request of its own."""

    def __init__(self, endpoint: Endpoint, threads: int = 8) -> None:
        """Does not connect yet. Raises StoreError for files of the endpoint that cannot be used."""
        try:
            endpoint.context(), endpoint.headers()
        except EndpointError as error:
            raise StoreError(str(error)) from error
        self._link, self._threads = HostLink(endpoint), Threads('remote store', threads)

    def put(self, items: Sequence[tuple[str, Sequence[Blob]]], create: bool = False) -> Promise[None]:
        for key, _ in items:
            check_key(key)

        def put(key: str, parts: Sequence[Blob]) -> None:
            # A claim is never sent twice: a lost request may have made it.
            self._call('put', [key], [b''.join(parts)], again=not create, create=create)
        return self._threads.each(put, items)

    def get(self, keys: Sequence[str]) -> Promise[list[memoryview]]:
        def get(key: str) -> memoryview:
            check_key(key)
            _, blobs = self._call('get', [key])
            if len(blobs) != 1:
                raise StoreError(f'{key} came as {len(blobs)} blobs')
            return blobs[0]
        return self._threads.each(get, [(key,) for key in keys])

    def delete(self, keys: Sequence[str]) -> Promise[None]:
        return self._threads.submit(self._each, 'delete', keys)

    def list(self, prefix: str) -> Promise[list[str]]:
        check_key(prefix)
        return self._threads.submit(self._each, 'list', [prefix])

    def head(self, keys: Sequence[str]) -> Promise[list[int | None]]:
        return self._threads.submit(self._each, 'head', keys)

    def held(self, keys: Sequence[str]) -> dict[str, memoryview]:
        return {}

    def close(self) -> None:
        self._threads.close()
        self._link.close()

    def _each(self, what: str, keys: Sequence[str]) -> Any:
        for key in keys:
            check_key(key)
        return self._call(what, list(keys))[0].get('result') if keys else []

    def _call(self, what: str, keys: Sequence[str], blobs: Sequence[Blob] = (), again: bool = True, **options: Any
              ) -> tuple[dict[str, Any], list[memoryview]]:
        try:
            about, answer = self._link.request({'what': what, 'keys': keys, **options}, blobs, again=again)
        except (ConnectionLost, MessageError, EndpointError) as error:
            raise StoreError(f'{keys[0]}: {error}') from error
        if 'error' in about:
            raise _ERRORS.get(about.get('kind'), StoreError)(str(about['error']))
        return about, answer


def ask(link: HostLink, message: Any, patience: float) -> Any:
    """Return the answer of a host's server to a message. Raises ConnectionLost, MessageError, EndpointError."""
    about, blobs = link.request({'what': 'ask', 'patience': patience}, [pack(message)], patience + _MORE)
    if 'error' in about or not blobs:
        raise MessageError(str(about.get('error', 'an answer without a message')))
    return unpack(blobs[0])


def ask_host_status(link: HostLink) -> dict[str, Any]:
    """Return the status of a host's server, within 4 s if a connection has to be made, 1.5 s otherwise. Raises Unavailable."""
    try:
        answer = ask(link, messages.StatusRequest(), _STATUS)
    except (ConnectionLost, MessageError, EndpointError) as error:
        raise Unavailable(str(error)) from error
    return status_values(answer, link.endpoint)


def _end(connection: Dialed) -> None:
    connection.shutdown()
    connection.close()
