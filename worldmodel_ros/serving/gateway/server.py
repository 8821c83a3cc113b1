"""The gateway's loop: takes connections, authenticates them, and hands them to the dialect of their path."""
from __future__ import annotations

import asyncio
import http
import json
import logging
import math
import ssl
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.protocol import State

from worldmodel_ros.model.presets import Preset
from worldmodel_ros.serving.service.quotas import TokenBuckets
from worldmodel_ros.cache.stores.protocol import SlabStore
from worldmodel_ros.serving.transport import network, peers
from worldmodel_ros.serving.transport.address import is_address_or_localhost
from . import camera, fleet, node, open_world, openpi, page, rest
from .accounts import ANYBODY, Account, Accounts, certificate_name
from .contract import Contract
from .engine import EngineAway
from .msgpack import WireError
from .security import AuditLog, LimitedSocket
from .sessions import Refusal, Session, Sessions

_log = logging.getLogger(__name__)
_CONNECTIONS = 256     # at most
_SPARE = 32            # connections of an account besides one for each of its sessions, such as lost ones
_HANDSHAKE = 10.0      # s for TLS and for the request of a connection
_PING = 20.0           # s between two pings
_SILENT = 60.0         # s without an answer to a ping after which the other side has gone
_SEND = 5.0            # s for a reply to be sent, after which the other side does not read
_EXPIRE = 1.0          # s between two checks for expired sessions and connections
_SAVED = 2.0           # s of messages and bytes allowed in one burst
_UNREAD = 2            # messages of a connection that wait here; the rest wait in its own buffers
_PROTOCOL_ERROR = 1011
_POLICY = 1008

Dialect = openpi.Dialect | camera.Dialect | node.Dialect | open_world.Dialect | fleet.Dialect


@dataclass(frozen=True)
class Limits:
    """``message`` [bytes]: the longest one. ``idle`` [s]: a connection that is silent for this long is closed."""

    message: int = 8 << 20
    idle: float = 300.0
    linger: float = 30.0


class Client:
    """One connection, and its account."""

    def __init__(self, gateway: Gateway, connection: ServerConnection, account: Account) -> None:
        self.gateway, self.connection, self.account = gateway, connection, account
        self.address = (connection.remote_address or ('?',))[0]
        self.dialect: Dialect = connection.dialect
        self.extensions: Any = None  # of the dialect, as requested by the client
        self.given_up = False        # it was silent, or did not read
        self._paid = -1                  # size of the next message for which the account was charged already; -1: of none
        self._silent_since = math.inf    # steady time [s]; infinite: no message is waited for
        self._sending: list[float] = []  # since when each outgoing message is being sent

    async def receive(self) -> bytes | str:
        """
        Return the next message within the account's limits. Those that come too fast are refused unread, and the following ones
        wait in the sender's own buffers, until it is this connection's turn among those of its account that wait.

        Raises ConnectionClosed.
        """
        while True:
            self._silent_since = time.monotonic()
            message = await self.connection.recv()
            self._silent_since = math.inf
            size, paid, self._paid = _megabytes(message), self._paid, -1
            wait = self.gateway.wait(self.account, size) if size > paid else 0.0
            if not wait:
                return message
            await self.refuse(Refusal('rate', f'{self.account.name} sends too much: again in {wait:.2f} s'))
            async with self.gateway.slowed(self.account):  # the limit holds for all its connections together
                while self.connection.state is State.OPEN and (wait := self.gateway.wait(self.account, size)):
                    with suppress(asyncio.TimeoutError, TimeoutError):
                        await asyncio.wait_for(self.connection.wait_closed(), wait)
                self._paid = size  # otherwise another connection could use what this one has waited for

    async def send(self, message: bytes | str) -> None:
        """Send a message; raises ConnectionClosed."""
        begun = time.monotonic()
        self._sending.append(begun)
        try:
            await self.connection.send(message)
        finally:
            self._sending.remove(begun)

    def look(self, now: float) -> None:
        """Abort the connection if nothing has been received, or a message could not be sent, for too long. Called every second,
        in place of a timeout for each message, which costs a task and two turns of the loop."""
        if now - min(self._sending, default=now) > _SEND or now - self._silent_since > self.gateway.limits.idle:
            self.given_up = True
            self.connection.transport.abort()

    async def refuse(self, refusal: Refusal) -> None:
        """Count a refusal, and send it to the client."""
        self.gateway.refused(refusal.kind)
        await self.send(self.dialect.refusal(refusal))


class Gateway:
    """Serves until it is told to stop, in one event loop, which it never blocks."""

    def __init__(self, socket: Path, listening: LimitedSocket, contract: Contract = Contract(),
                 accounts: Accounts | None = None, limits: Limits = Limits(), tls: ssl.SSLContext | None = None,
                 origins: tuple[str, ...] = (), audit: AuditLog | None = None, world: Path | None = None,
                 store: SlabStore | None = None) -> None:
        """``socket``: the engine's. Without ``accounts``, clients are not authenticated. ``origins``: of browsers' pages.
        ``world``: socket of the server of an open world model, which answers the camera dialect in the engine's place.
        ``store``: of sessions, kept by this host for its fleet."""
        self.limits, self.contract = limits, contract
        self._socket, self._listening, self._tls, self._origins = socket, listening, tls, origins
        self._accounts, self._store = accounts, store
        self._audit = audit or AuditLog(None)
        self.sessions = Sessions(socket, limits.linger, self._audit)
        self._status = rest.EngineStatus(socket)
        self._clients: dict[ServerConnection, Client] = {}
        self._refusals: Counter[str] = Counter()
        self._times = rest.Histogram()
        self._messages: dict[Account, tuple[TokenBuckets, TokenBuckets]] = {}  # an account whose limits change is another one
        self._slowed: dict[str, asyncio.Lock] = {}
        self._about: tuple[Preset, str] | None = None  # the engine's model and back end
        self._dialects: dict[str, Dialect] = {
            **dict.fromkeys(openpi.PATHS, openpi.Dialect(contract)), camera.PATH: camera.Dialect(contract.mount),
            network.PATH: node.Dialect(), peers.PATH: fleet.Dialect()}
        if world:
            self._dialects[camera.PATH] = open_world.Dialect(world, limits.linger)

    async def run(self, stop: asyncio.Event, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until ``stop`` is set; ``ready`` is called when clients can connect."""
        quiet = logging.getLogger('worldmodel_ros.gateway.websockets')
        quiet.setLevel(logging.CRITICAL)  # it logs a traceback for each connection that is not a WebSocket
        async with serve(
                self._serve, sock=self._listening, ssl=self._tls, origins=[None, *self._origins], compression=None,
                process_request=self._process, open_timeout=_HANDSHAKE, ping_interval=_PING, ping_timeout=_SILENT,
                close_timeout=1.0, max_size=self.limits.message, max_queue=_UNREAD, server_header=None, logger=quiet):
            ready()
            expiring = asyncio.create_task(self._expire())
            try:
                await stop.wait()
            finally:
                expiring.cancel()
                self.sessions.close()

    def wait(self, account: Account, size: int) -> float:
        """Charge an account for a message of ``size`` MB and return 0, if it may send it; otherwise, in how many s it may."""
        messages, megabytes = self._messages.setdefault(account, (
            TokenBuckets(account.messages, _SAVED), TokenBuckets(account.megabytes, _SAVED)))
        now = time.monotonic()
        wait = messages.take(account.name, now)
        if not wait and (wait := megabytes.take(account.name, now, size)):
            messages.take(account.name, now, -1)
        return wait

    def slowed(self, account: Account) -> asyncio.Lock:
        """Return the lock that an account's connections hold while they wait after sending too much."""
        return self._slowed.setdefault(account.name, asyncio.Lock())

    def refused(self, kind: str) -> None:
        """Count a refusal."""
        self._refusals[kind] += 1
        if kind == 'engine':
            self._about = None  # another model may come back
            self._status.forget()

    def replace_accounts(self, accounts: Accounts) -> None:
        """Replace the accounts; connections of accounts that are not among them are closed."""
        self._accounts = accounts
        for connection, client in list(self._clients.items()):
            if client.account not in accounts:
                asyncio.get_running_loop().create_task(connection.close(_POLICY, 'the account has ended'))

    # --- who connects, and for what ---

    async def _process(self, connection: ServerConnection, request: Request) -> Response | None:
        path = request.path.partition('?')[0].rstrip('/') or '/'
        if path == '/healthz':
            return connection.respond(http.HTTPStatus.OK, 'OK\n')
        account = self._account(connection, request)
        if account is None:
            self.refused('authorization')
            self._audit('unauthorized', address=(connection.remote_address or ('?',))[0], path=path[:100])
            response = connection.respond(http.HTTPStatus.UNAUTHORIZED, 'a token is needed: Authorization: Bearer ...\n')
            response.headers['WWW-Authenticate'] = 'Bearer'
            response.headers['WWW-Authenticate'] = 'Basic realm="worldmodel gateway: the token as password"'  # besides
            return response
        if 'Upgrade' not in request.headers and (refusal := self._foreign(request)):  # WebSockets: see ``serve``
            self.refused('origin')
            return connection.respond(http.HTTPStatus.FORBIDDEN, f'{refusal}\n')
        answers = {'/readyz': self._ready, '/metrics': self._metrics, '/v1/models': self._models,
                   '/v1/sessions': self._own_sessions, '/v1/sessions/frames': self._frames}
        if path in answers:
            return await answers[path](connection, account)
        if path == '/' and 'Upgrade' not in request.headers:
            return _typed(connection.respond(http.HTTPStatus.OK, page.HTML), 'text/html; charset=utf-8', page.HEADERS)
        if path not in self._dialects:
            return connection.respond(http.HTTPStatus.NOT_FOUND, 'there is no such path\n')
        if refusal := self._crowded(account):
            self.refused('connections')
            return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, f'{refusal}\n')
        try:
            if path != peers.PATH:  # the store does not need an engine
                await self._answered_by(self._dialects[path])
        except EngineAway as error:
            self.refused('engine')
            return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, f'the engine is away: {error}\n')
        connection.dialect = self._dialects[path]
        connection.client = Client(self, connection, account)
        return None

    def _foreign(self, request: Request) -> str:
        """Return why a request may be one of a foreign web page, in a browser that reaches this gateway; empty: it is none."""
        host, = hosts if len(hosts := request.headers.get_all('Host')) == 1 else ['']
        if self._accounts is None and not is_address_or_localhost(host):
            return 'without accounts, the gateway is reached by an IP address or as localhost alone'
        if any(each not in self._origins and each.partition('://')[2] != host for each in request.headers.get_all('Origin')):
            return 'no page of this origin may ask: --origin'
        return ''

    def _crowded(self, account: Account) -> str:
        """Return why an account cannot have another connection; empty: it can."""
        if len(self._clients) >= _CONNECTIONS:
            return f'{_CONNECTIONS} connections are open'
        own = sum(client.account.name == account.name for client in self._clients.values())
        # One client that leaks them locks out no others. The hosts of a fleet have some for each of their servers.
        if self._accounts is not None and not account.fleet and own >= account.sessions + _SPARE:
            return f'{own} connections of {account.name} are open: at most {_SPARE} more than its sessions are allowed'
        return ''

    def _account(self, connection: ServerConnection, request: Request) -> Account | None:
        if self._accounts is None:
            return ANYBODY
        secured = connection.transport.get_extra_info('ssl_object')
        headers = request.headers.get_all('Authorization')
        return self._accounts.find(headers[0] if len(headers) == 1 else '',
                                   certificate_name(secured.getpeercert() if secured else None))

    async def about(self) -> tuple[Preset, str]:
        """Return the engine's model and back end, without opening a session. Raises EngineAway."""
        if self._about is None:
            status = await self._status.get()
            if status is None:
                raise EngineAway('it does not answer')
            if 'world' in status:
                raise EngineAway('it has an open world model, which drives no robot: give its socket as --world')
            try:
                self._about = Preset.from_dict(status['preset']), status['service']['backend']
            except (KeyError, TypeError, ValueError, ArithmeticError) as error:
                raise EngineAway(f'its model cannot be understood: {error}') from error
        return self._about

    async def _answered_by(self, dialect: Dialect) -> tuple[Any, str]:
        """Return the model that answers in a dialect, and its back end. Raises EngineAway."""
        if not isinstance(dialect, open_world.Dialect):
            return await self.about()
        about = await dialect.about()
        return about, about.backend

    async def _ready(self, connection: ServerConnection, _: Account) -> Response:
        if await self._status.get() is None:
            return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, 'the engine does not answer\n')
        return connection.respond(http.HTTPStatus.OK, 'OK\n')

    async def _metrics(self, connection: ServerConnection, _: Account) -> Response:
        gauges = {'sessions': len(self.sessions.all()), 'connections': len(self._clients)}
        refusals = self._refusals + Counter({'connect_rate': self._listening.refused})
        text = rest.metrics(self.sessions.counts(), refusals, gauges, self._times, await self._status.get())
        return _typed(connection.respond(http.HTTPStatus.OK, text), 'text/plain; version=0.0.4')

    async def _models(self, connection: ServerConnection, _: Account) -> Response:
        models, away = [], ''
        for dialect in (self._dialects['/'], self._dialects[camera.PATH]):
            try:
                spec, backend = await self._answered_by(dialect)
            except EngineAway as error:
                away = str(error)
                continue
            model = {'id': spec.name, 'object': 'model', 'owned_by': 'worldmodel_ros', 'backend': backend,
                     'image_size': spec.image_size, 'step_period': spec.step_period}
            if isinstance(spec, Preset):
                model |= {'action_names': spec.action_names, 'action_horizon': spec.chunk_frames, 'goals': spec.goals}
            models += [model] * (model not in models)
        if not models:
            return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, f'the engine is away: {away}\n')
        return _json(connection, {'object': 'list', 'data': models})

    async def _own_sessions(self, connection: ServerConnection, account: Account) -> Response:
        return _json(connection, {'sessions': [session.status() for session in self.sessions.of(account)],
                                  'engine': await self._status.get() is not None})

    async def _frames(self, connection: ServerConnection, account: Account) -> Response:
        query = parse_qs(connection.request.path.partition('?')[2])
        name, = query.get('session_id', ['']) if len(query.get('session_id', [])) < 2 else ['']
        newest = next((session.newest for session in self.sessions.of(account) if session.name == name), None)
        if newest is None:
            return connection.respond(http.HTTPStatus.NOT_FOUND, 'no frames of such a session of yours\n')
        response = _typed(connection.respond(http.HTTPStatus.OK, ''), 'image/jpeg', {'Cache-Control': 'private, max-age=60'})
        response.body = await asyncio.to_thread(page.strip, newest)
        del response.headers['Content-Length']
        response.headers['Content-Length'] = str(len(response.body))
        return response

    # --- what a connection says ---

    async def _serve(self, connection: ServerConnection) -> None:
        client: Client = connection.client
        if self._accounts is not None and client.account not in self._accounts:  # they were replaced while it was let in
            await connection.close(_POLICY, 'the account has ended')
            return
        self._clients[connection] = client
        self._audit('connected', account=client.account.name, address=client.address, path=connection.request.path[:100])
        reason = 'it has closed'
        try:
            if client.dialect.name == node.NAME:
                await node.Bridge(client).run()
            elif client.dialect.name == fleet.NAME:
                await fleet.Peer(client, self._store, self._socket).run()
            else:
                await self._converse(client)
        except ConnectionClosed:
            if client.given_up:
                reason = 'it was silent, or did not read'
        except Refusal as refusal:
            reason = str(refusal)
            await self._refused_for_good(client, refusal)
        except WireError as error:
            reason = f'malformed: {error}'
            self.refused('malformed')
            await self._end(client, f'fatal: malformed message: {error}')
        except Exception as error:  # other connections continue
            reason = f'{type(error).__name__}'
            _log.exception('a connection of %s failed', client.account.name)
            await self._end(client, 'fatal: an error of the gateway: see its log')
        finally:
            del self._clients[connection]
            self._audit('disconnected', account=client.account.name, address=client.address, reason=reason)

    async def _refused_for_good(self, client: Client, refusal: Refusal) -> None:
        try:
            await client.refuse(refusal)
            await client.connection.close(_POLICY, 'refused')
        except ConnectionClosed:
            pass

    async def _end(self, client: Client, text: str) -> None:
        """Send the reason and close, as openpi's server does: a text and then 1011."""
        try:
            await client.send(text)
            await client.connection.close(_PROTOCOL_ERROR, text.partition(':')[0])
        except ConnectionClosed:
            pass

    async def _converse(self, client: Client) -> None:
        dialect = client.dialect
        spec, backend = await self._answered_by(dialect)
        if refusal := dialect.refuses(spec):
            await client.send(refusal)
            return
        await client.send(dialect.greeting(spec, backend))
        session: Session | None = None
        try:
            while True:
                message = await client.receive()
                arrival = time.monotonic()
                try:
                    request = dialect.read(message)
                    if request is None:
                        continue
                    if session is None or session.holder is not client or (
                            request.session_id and request.session_id != session.name):
                        session = self._claim(client, request.session_id, session)
                    async with aclosing(dialect.answer(session, request, arrival, client)) as replies:
                        async for reply in replies:
                            await client.send(reply)
                    self._times.add(time.monotonic() - arrival)
                except Refusal as refusal:
                    await client.refuse(refusal)
        finally:
            if session:
                self.sessions.release(session, client)

    def _claim(self, client: Client, name: str, before: Session | None) -> Session:
        """Return the session of a name, in place of the one before. Raises Refusal."""
        if before is not None and before.holder is not client and (not name or name == before.name):
            raise Refusal('session', f'{before.name} goes on over a newer connection')
        session = self.sessions.claim(client.account, name, client.dialect.name, client)
        if before is not None:
            self.sessions.release(before, client)
        return session

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRE)
            self.sessions.expire()
            now = time.monotonic()
            for client in list(self._clients.values()):
                client.look(now)


def _megabytes(message: bytes | str) -> int:
    return -(-len(message) // 1_000_000)  # rounded up


def _json(connection: ServerConnection, value: Any) -> Response:
    return _typed(connection.respond(http.HTTPStatus.OK, json.dumps(value) + '\n'), 'application/json')


def _typed(response: Response, kind: str, headers: Mapping[str, str] = MappingProxyType({})) -> Response:
    del response.headers['Content-Type']
    response.headers['Content-Type'] = kind
    response.headers.update(headers)
    return response
