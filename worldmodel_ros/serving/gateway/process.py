"""The gateway as a process: reads its files, serves until a signal comes, reloads certificates and accounts."""
from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import ssl
import sys
from dataclasses import dataclass
from pathlib import Path

from worldmodel_ros.cache.stores.files import FileStore, in_memory
from worldmodel_ros.cache.stores.protocol import StoreError
from worldmodel_ros.serving.transport import messages
from worldmodel_ros.serving.transport.address import AUTO, AddressError, is_loopback, socket_path
from .accounts import AccountError, Accounts
from .contract import Contract
from .security import AuditLog, LimitedSocket, server_context
from .server import Gateway, Limits

_log = logging.getLogger(__name__)
_LOOK = 2.0  # s between two checks for changed files
PORT = 8000


class GatewayError(ValueError):
    """An invalid configuration; the text says why and what to do."""


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    host: str = '127.0.0.1'
    port: int = PORT            # 0: any free one
    socket: str = AUTO          # of the engine
    contract: str = ''          # file; empty: the defaults of Contract
    accounts: str = ''          # file; empty: no authentication, on loopback only
    certificate: str = ''
    key: str = ''
    client_ca: str = ''
    plaintext: bool = False     # permitted off loopback
    origins: tuple[str, ...] = ()
    message_mb: float = 8.0
    connects: float = 20.0      # per second and address; 0: no limit
    idle: float = 300.0         # s
    linger: float = 30.0        # s
    audit: str = ''             # file; empty: none
    store: str = ''             # folder of sessions that this host keeps for its fleet; empty: none
    world: str = ''             # socket of an open world model's server; empty: the engine answers the camera dialect

    def __post_init__(self) -> None:
        """Raise GatewayError for values that are invalid or not safe."""
        numbers = {'message_mb': self.message_mb, 'idle': self.idle}
        for name, value in {**numbers, 'connects': self.connects, 'linger': self.linger}.items():
            if not 0.0 <= value < math.inf or (name in numbers and not value):
                raise GatewayError(f'{name} is {value}')
        if self.linger > messages.LONGEST_LINGER:  # the engine keeps no session for longer
            raise GatewayError(f'linger is {self.linger}: it may be up to {messages.LONGEST_LINGER:g} s')
        if self.world and Path(self.world).expanduser().is_dir():
            raise GatewayError(f'world is the folder {self.world}: worldmodel serve --model {self.world} --socket PATH serves '
                               'it, and --world takes that socket')
        if not 0 <= self.port < 65536:
            raise GatewayError(f'port is {self.port}')
        if bool(self.certificate) != bool(self.key) or (self.client_ca and not self.certificate):
            raise GatewayError('TLS needs both --certificate and --key, and --client-ca needs them')
        if self.store and not (self.client_ca and self.accounts):
            raise GatewayError('--store is for hosts of a fleet, which are known by certificates: give --client-ca and '
                               '--accounts')
        if is_loopback(self.host):
            return
        if not self.certificate and not self.plaintext:
            raise GatewayError(f'{self.host} is not this machine alone, and without TLS anyone on the path can read and '
                               'change the traffic: give --certificate and --key, or --plaintext')
        if not self.accounts:
            raise GatewayError(f'{self.host} is not this machine alone: give --accounts, or anyone could drive the robots')


def run(options: Options) -> int:
    """
    Serve until SIGINT or SIGTERM; return the exit code. On SIGHUP, certificate and accounts are read again at once.

    Raises GatewayError, AccountError, ContractError for an invalid configuration, AddressError, OSError.
    """
    logging.basicConfig(stream=sys.stderr, format='%(asctime)s %(levelname)s %(message)s')
    logging.getLogger('worldmodel_ros').setLevel(logging.INFO)
    path = socket_path(options.socket or AUTO)
    contract = Contract.read(Path(options.contract)) if options.contract else Contract()
    accounts = Accounts.read(Path(options.accounts)) if options.accounts else None
    for name in ('certificate', 'key', 'client_ca') if options.certificate else ():
        file = getattr(options, name)
        if file and not os.access(file, os.R_OK):
            raise GatewayError(f'--{name.replace("_", "-")} {file}: not there, or not readable for this user')
    try:
        tls = server_context(Path(options.certificate), Path(options.key),
                             Path(options.client_ca) if options.client_ca else None) if options.certificate else None
    except (OSError, ssl.SSLError) as error:
        raise GatewayError(f'the certificate, its key or the client CA cannot be used: {error}') from error
    world = socket_path(options.world) if options.world else None
    try:
        listening = LimitedSocket(options.host, options.port, options.connects)
    except OSError as error:
        raise AddressError(f'cannot listen on {options.host}:{options.port}: {error.strerror}') from error
    store = None
    try:
        audit = AuditLog(Path(options.audit) if options.audit else None)
    except OSError as error:
        listening.close()
        raise GatewayError(f'--audit {options.audit} cannot be written ({error.strerror}): give a file in a folder that this '
                           'user can write to') from error
    if options.store:
        folder = Path(options.store).expanduser()
        try:
            store = FileStore(folder, durable=not in_memory(folder))
        except StoreError as error:
            listening.close()
            audit.close()
            raise GatewayError(f'--store {options.store}: {error}') from error
    try:
        asyncio.run(_serve(options, Gateway(
            path, listening, contract, accounts, Limits(int(options.message_mb * (1 << 20)), options.idle, options.linger),
            tls, tuple(options.origins), audit, world, store), listening, tls))
    finally:
        if store:
            store.close()
        audit.close()
    return 0


async def _serve(options: Options, gateway: Gateway, listening: LimitedSocket, tls: ssl.SSLContext | None) -> None:
    stop, changed = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def end(number: signal.Signals) -> None:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)  # launchers send it again, which would kill an interpreter that is ending
        stop.set()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, number)
    loop.add_signal_handler(signal.SIGHUP, changed.set)
    renewing = asyncio.create_task(_renew(options, gateway, tls, changed))

    def ready() -> None:
        host, port = listening.getsockname()[:2]
        _log.info('process %d is the gateway at %s://%s:%d', os.getpid(), 'wss' if tls else 'ws', host, port)

    try:
        await gateway.run(stop, ready)
    finally:
        renewing.cancel()


async def _renew(options: Options, gateway: Gateway, tls: ssl.SSLContext | None, changed: asyncio.Event) -> None:
    """Read the certificate and the accounts again when their files change; invalid ones are logged and not used."""
    files = [Path(name) for name in (options.certificate, options.key, options.accounts) if name]
    known = _stamps(files)
    while True:
        try:
            await asyncio.wait_for(changed.wait(), _LOOK)
        except (asyncio.TimeoutError, TimeoutError):
            pass
        stamps = _stamps(files)
        if stamps == known and not changed.is_set():
            continue
        known = stamps
        changed.clear()
        try:
            # All is read before any of it is used: both are changed, or neither.
            accounts = Accounts.read(Path(options.accounts)) if options.accounts else None
            if tls:
                # Tried in another context first: a key that does not match would leave this one without a pair.
                server_context(Path(options.certificate), Path(options.key), None)
                tls.load_cert_chain(options.certificate, options.key)
            if accounts is not None:
                gateway.replace_accounts(accounts)
            _log.info('certificate and accounts reloaded')
        except (OSError, ssl.SSLError, AccountError) as error:
            _log.error('certificate or accounts invalid, the previous ones stay in use: %s', error)


def _stamps(files: list[Path]) -> list[tuple[int, int] | None]:
    stamps = []
    for file in files:
        try:
            about = file.stat()
            stamps.append((about.st_mtime_ns, about.st_ino))
        except OSError:
            stamps.append(None)
    return stamps
