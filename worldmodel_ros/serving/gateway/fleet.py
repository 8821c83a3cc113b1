"""
The other hosts of a fleet: their servers keep sessions in this host's store, and hand sessions over to this host's server.

Only for accounts with ``fleet``, which are authenticated by a client certificate: TLS is mutual.
"""
from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worldmodel_ros.cache.stores.protocol import AlreadyStored, NotStored, SlabStore, StoreError
from worldmodel_ros.serving.transport import messages, peers
from worldmodel_ros.serving.transport.address import AddressError, connect
from worldmodel_ros.serving.transport.codec import MessageError, pack, unpack
from worldmodel_ros.serving.transport.connection import Connection, ConnectionLost
from .msgpack import WireError
from .sessions import Refusal

if TYPE_CHECKING:
    from .server import Client

NAME = 'fleet'
_LONGEST = 15.0  # s that the server may take for a request of another one
_CONNECT = 0.5   # s
_KINDS = {NotStored: 'not stored', AlreadyStored: 'already stored'}
_ALLOWED = messages.Move, messages.Prepare, messages.TakeOver, messages.StatusRequest


class Dialect:
    """Encodes refusals for another host."""

    name = NAME

    def refusal(self, refusal: Refusal) -> bytes:
        """Return the answer to a refused request."""
        return peers.wrap({'error': str(refusal)})


class Peer:
    """One connection of another host. Used by the event loop's thread only."""

    def __init__(self, client: Client, store: SlabStore | None, socket: Path) -> None:
        """``store``: the one that this host keeps for others, if any; ``socket``: of its server."""
        self._client, self._store, self._socket = client, store, socket

    async def run(self) -> None:
        """Answer one request after the other. Raises WireError, ConnectionClosed, Refusal."""
        if not self._client.account.fleet:
            raise Refusal('fleet', f'{self._client.account.name} is not a host of this fleet: its account needs fleet: true, '
                                   'and a certificate')
        while True:
            data = await self._client.receive()
            try:
                if isinstance(data, str):
                    raise MessageError('a text')
                about, blobs = peers.unwrap(data)
            except MessageError as error:
                raise WireError(str(error)) from error
            try:
                answer = await self._answer(about, blobs)
            except (StoreError, MessageError, ValueError, TypeError, KeyError, OSError, ConnectionLost) as error:
                answer = peers.wrap({'error': str(error) or type(error).__name__, 'kind': _KINDS.get(type(error), '')})
            await self._client.send(answer)

    async def _answer(self, about: dict[str, Any], blobs: list[memoryview]) -> bytes:
        what = about['what']
        if what == 'ask':
            said = await asyncio.to_thread(self._ask, bytes(blobs[0]), min(float(about['patience']), _LONGEST))
            return peers.wrap({}, [said])
        store, keys = self._store, [str(key) for key in about['keys']]
        if store is None:
            raise StoreError('this host keeps no store for others: start its gateway with --store')
        if what == 'put':
            promise = store.put([(key, (blob,)) for key, blob in zip(keys, blobs, strict=True)], bool(about['create']))
        elif what == 'list':
            promise = store.list(*keys)
        elif what in ('get', 'delete', 'head'):
            promise = getattr(store, what)(keys)
        else:
            raise ValueError(f'a store has no operation {what!r}')
        result = await asyncio.wrap_future(promise)
        return peers.wrap({}, result) if what == 'get' else peers.wrap({'result': result})

    def _ask(self, packed: bytes, patience: float) -> bytes:
        """Return the server's answer to another one's message, as bytes."""
        message = unpack(packed)
        if not isinstance(message, _ALLOWED):
            raise MessageError(f'{type(message).__name__} is nothing that one host asks of another')
        if isinstance(message, messages.Move) and not message.target.startswith('wss://'):
            raise MessageError('for another host sessions are moved to gateways alone, by wss://: certificates are checked')
        try:
            connection = Connection(connect(self._socket, _CONNECT))
        except AddressError as error:
            raise MessageError(str(error)) from error
        try:
            connection.send(message)
            received = connection.receive(patience)
        finally:
            connection.close()
        if received is None:
            raise MessageError(f'it has not answered for {patience:g} s')
        return pack(received[0])
