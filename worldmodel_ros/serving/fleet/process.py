"""``worldmodel fleet up`` as a process: the servers, their front, and the status page."""
from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from worldmodel_ros import interrupts, realtime
from worldmodel_ros.engine.session_folder import default_folder
from worldmodel_ros.serving.client.link import Unavailable, ask_status
from worldmodel_ros.serving.client.network import Endpoint
from worldmodel_ros.serving.transport.address import ListeningSocket
from .dashboard import Dashboard
from .front import SETTINGS, Front
from .pools import REFUSED, LocalPool, Pool, PoolError
from .ray_driver import RayDriver
from .scaling import Scaler, ScalingSettings

_log = logging.getLogger(__name__)
_LOOK = 1.0  # s between two looks at the pool


@dataclass(frozen=True)
class Options:
    """Options of the command line. ``arguments``: of ``worldmodel serve``, for each server."""

    servers: int = 2
    pool: str = 'local'
    ray_address: str = ''  # of a cluster; empty: one is started on this machine
    store: str = ''        # empty: default_store()
    sessions: int = 8      # robots of one server
    full: float = 0.85     # fraction of a server's time beyond which no robot is placed there
    page: int = 8090       # port of the page; 0: any free one, -1: none
    arguments: tuple[str, ...] = ()
    most: int = 0          # servers at most, when ``servers`` of them have no slack left; 0: ``servers``
    hosts: tuple[str, ...] = ()  # wss://host:port of other hosts' gateways, each of one server; files for these,
    host_token: str = ''         # as of worldmodel serve
    host_ca: str = ''
    host_certificate: str = ''
    host_address: str = ''       # wss://host:port of this fleet's gateway, by which sessions come back from other hosts
    realtime_priority: int = 10  # of the thread that answers robots, under SCHED_FIFO where permitted; 0: none

    def __post_init__(self) -> None:
        """Raise ValueError for invalid values."""
        if self.servers < 1 or self.sessions < 1 or not self.full > 0.0:
            raise ValueError(f'{self.servers} servers of {self.sessions} robots, full at {self.full}: at least 1 of each, and '
                             'a share above 0')
        if not -1 <= self.page < 65536:
            raise ValueError(f'page is {self.page}: it must be a port, 0 (any free one) or -1 (no page)')
        self.scaling()
        if len(set(self.hosts)) < len(self.hosts):
            raise ValueError(f'a host is named twice: {", ".join(self.hosts)}')
        own = [Endpoint(self.host_address)] if self.host_address else []
        if self.host_address and not self.hosts:
            raise ValueError(f'sessions come back to {self.host_address} from other hosts, and there is none: name them')
        for endpoint in (*self.endpoints(), *own):
            endpoint.context(), endpoint.headers()

    def endpoints(self) -> tuple[Endpoint, ...]:
        """Return the other hosts. Raises ValueError for an invalid address."""
        return tuple(Endpoint(host, self.host_token, self.host_ca, self.host_certificate) for host in self.hosts)

    @property
    def host_arguments(self) -> list[str]:
        """Arguments for each server of this host, for moving sessions to the others."""
        files = {'--host-token': self.host_token, '--host-ca': self.host_ca, '--host-certificate': self.host_certificate}
        return [word for name, file in files.items() if file for word in (name, file)]

    @property
    def where(self) -> str:
        """URL or absolute path of the store: the same text is the same store, wherever a fleet is started."""
        store = self.store or str(default_store())
        return store if '://' in store else str(Path(store).expanduser().absolute())

    def scaling(self) -> ScalingSettings:
        """Return the settings for the number of servers. Raises ValueError."""
        return ScalingSettings(self.servers, self.most or self.servers)


def default_store() -> Path:
    """Return ``worldmodel_store`` next to saved sessions."""
    return default_folder().with_name('worldmodel_store')


def up(socket: Path, options: Options) -> int:
    """
    Run a fleet until SIGINT or SIGTERM; return the exit code. Call it from the main thread.

    Raises AddressError, PoolError or OSError if it cannot run.
    """
    logging.basicConfig(stream=sys.stderr, format='%(asctime)s %(levelname)s %(message)s')
    logging.getLogger('worldmodel_ros').setLevel(logging.INFO)
    interrupts.raise_interrupted()
    listening = ListeningSocket(socket)
    pool: Pool | None = None
    front: Front | None = None
    page: Dashboard | None = None
    looking: threading.Thread | None = None
    over = threading.Event()
    try:
        scaling = options.scaling()
        paths = [socket.with_name(f'{socket.stem}-{number}.sock') for number in range(scaling.most)]
        pool = RayDriver(scaling.most, options.ray_address or None) if options.pool == 'ray' else LocalPool()
        _tell_of_others(socket, paths)
        # Sessions are moved away a little above the load at which no robot is placed on a server.
        settings = replace(SETTINGS, full=options.full, high=options.full + 0.05, low=0.8 * options.full)
        front = Front(listening, paths, options.sessions, settings=settings, hosts=options.endpoints(),
                      home=options.host_address)
        front.wanted = set(range(scaling.fewest))
        page = Dashboard(front.status, options.page) if options.page >= 0 else None

        log = paths[0].with_suffix('.log')  # of former fleets at this socket, too
        before = log.stat().st_size if log.exists() else 0

        def start(number: int) -> None:
            path = paths[number]
            pool.start(number, [str(path), '--store', options.where, '--sessions', str(options.sessions),
                                *options.host_arguments, *options.arguments], path.with_suffix('.log'))
        for number in range(scaling.fewest):  # last: if anything above is refused, servers of a lost front go on
            start(number)
        end = interrupts.End()
        looking = threading.Thread(target=_look, args=(pool, front, Scaler(scaling), start, over, end), name='pool',
                                   daemon=True)
        looking.start()
        listening.listen()
        _log.info('a fleet of %d servers (%s)%s at %s%s', options.servers, pool.name,
                  f' and {len(options.hosts)} other hosts' if options.hosts else '', socket,
                  f', shown at {page.url}' if page else '')
        # Robots that open a session wait for this thread. Servers and threads started later must not inherit its priority.
        realtime.apply(_log, options.realtime_priority, inherited=False)
        sys.setswitchinterval(realtime.SWITCH_INTERVAL)  # a look at the servers may hold the GIL this long
        front.run(end=end)
        if REFUSED in front.pool.values():
            said = log.read_bytes()[before:].decode(errors='replace')
            raise PoolError(f'its servers refuse their configuration: {said[-500:]}')
    except interrupts.Interrupted:
        pass
    finally:
        interrupts.ignore()
        over.set()
        if looking:
            looking.join()  # it could start a server again that is being ended
        for part in (page, front, pool):
            if part:
                part.close()
        listening.close()
    _log.info('ended by a signal')
    return 0


def _tell_of_others(socket: Path, paths: list[Path]) -> None:
    """Log servers that a lost front with more of them has left: their robots drive on, and no front knows of them."""
    for path in sorted(set(socket.parent.glob(f'{socket.stem}-[0-9]*.sock')) - set(paths)):
        with suppress(Unavailable):
            _log.warning('process %s serves at %s, and is no server of this fleet: end it with SIGTERM, and its robots come '
                         'here', ask_status(path).get('pid'), path)


def _look(pool: Pool, front: Front, scaler: Scaler, start: Callable[[int], None], over: threading.Event,
          end: interrupts.End) -> None:
    while not over.wait(_LOOK):
        try:
            front.pool = pool.look()
            scale(pool, front, scaler, start, time.monotonic())
        except Exception:  # Ray itself may be away: the servers continue
            _log.exception('the pool cannot be asked')
            continue
        if REFUSED in front.pool.values():
            end.ask()
            return


def scale(pool: Pool, front: Front, scaler: Scaler, start: Callable[[int], None], now: float) -> None:
    """Start or end a server, if the scaler says so."""
    step = scaler.decide(*front.room(), frozenset(front.wanted), now)
    if step:
        what, number = step
        if what == 'start' and number in front.wanted:
            front.fill(number)
        elif what == 'start':
            start(number)
            front.wanted.add(number)
        _log.info('server %d is %s', number, 'started' if what == 'start' else 'emptied: the others have slack for its robots')
    emptying = scaler.emptying
    if emptying is not None and front.empty(emptying):
        pool.stop(emptying)
        front.wanted.discard(emptying)
        scaler.ended(emptying)
        _log.info('server %d has ended', emptying)
