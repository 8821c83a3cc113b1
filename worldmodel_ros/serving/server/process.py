"""The server as a process: loads the models, serves until a signal comes, and shuts down cleanly."""
from __future__ import annotations

import logging
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from worldmodel_ros import interrupts, realtime

from worldmodel_ros.engine.device_failure import end_if_lost
from worldmodel_ros.engine.session_folder import MAX_FILES, MAX_MB, SessionFolder, default_folder
from worldmodel_ros.serving.scheduler.settings import Settings
from worldmodel_ros.serving.service.quotas import Quotas
from .log_throttle import LogThrottle

if TYPE_CHECKING:
    from worldmodel_ros.engine.engine import Engine
    from worldmodel_ros.serving.fleet.keeper import Keeper
    from worldmodel_ros.serving.service.service import Service

_log = logging.getLogger(__name__)
SESSIONS = 8          # robots at a time, by default
_LOG_INTERVAL = 10.0  # s between two similar lines
RATE = 2.0            # ticks allowed to a robot per period of its model; normally it sends one
_MESSAGES = 4.0       # messages read from a robot for each allowed tick


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    model: str = 'tiny'
    smaller: str = ''     # model for robots when there is no time for ``model``; empty: none
    backend: str = 'auto'
    sessions: int = SESSIONS  # robots at a time
    threads: int = 1      # of one network call on a CPU
    gpus: int = 1         # that ``model`` is divided among,
    parallel: str = 'sequence'  # and how
    realtime_priority: int = 0
    ticks: float | None = None   # per second and robot; None: RATE per period of the model; 0: no limit
    questions: float = 4.0       # per second and robot; 0: no limit
    share: float = 0.0           # each robot's fraction of the compute time; 0: equal parts
    shortest_due: float = 0.002  # s from a tick's arrival to when its answer is due
    idle: float = 60.0           # s after which a robot that sends nothing loses its session; 0: never
    session_directory: str = ''  # for saved sessions; empty: see session_folder.default_folder
    session_files_max: int = MAX_FILES  # in it
    session_disk_mb: float = MAX_MB     # MB of all of them
    store: str = ''              # folder or URL in which sessions are kept while they tick; empty: they are not
    store_memory_mb: float = 256.0  # MB of them that are also kept in this process's memory; 0: none
    host_address: str = ''       # wss://host:port of this server's gateway, by which other hosts' servers reach it;
    host_token: str = ''         # files with which it reaches theirs: the token,
    host_ca: str = ''            # the authorities of their certificates,
    host_certificate: str = ''   # and its own with the key
    resident: int = 0            # sessions that have pages at a time, the others being in the store; 0: all
    anchors: int = 0             # observed moments that a session keeps, to imagine for minutes (engine.anchors)

    def __post_init__(self) -> None:
        """Raise ValueError for invalid values."""
        Quotas(self.ticks or 0.0, self.questions, self.shortest_due)
        if self.sessions < 1:
            raise ValueError(f'sessions is {self.sessions}: it must be 1 or more')
        if not 0.0 <= self.share <= 1.0:
            raise ValueError(f'share is {self.share}: it must be a part of the time, 0 (equal parts) to 1')
        if not 0.0 <= self.store_memory_mb < math.inf:
            raise ValueError(f'store_memory_mb is {self.store_memory_mb}: it must be a size in MB, 0 (none) or more')
        if not 0 <= self.resident or (self.resident and not self.store):
            raise ValueError(f'resident is {self.resident}: 0 (all sessions have pages), or how many have; the others are in '
                             f'the store, so that a store must be given: --store')
        if not 0 <= self.realtime_priority <= 99:
            raise ValueError(f'realtime_priority is {self.realtime_priority}: it must be 1 to 99, or 0 for none')
        if self.host_address:
            from worldmodel_ros.serving.client.network import Endpoint
            Endpoint(self.host_address)
        if not 0.0 <= self.idle < math.inf:
            raise ValueError(f'idle is {self.idle}: it must be a time in s, 0 (never) or more')
        self.folder()
        if self.session_directory:
            path = Path(self.session_directory).expanduser()
            there = next(each for each in (path, *path.absolute().parents) if each.exists())
            if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
                raise ValueError(f'session_directory is {path}: {there} is no folder that this user can write to')

    def folder(self) -> SessionFolder:
        """Return the folder for sessions; raises ValueError for invalid limits."""
        path = Path(self.session_directory).expanduser() if self.session_directory else default_folder()
        return SessionFolder(path, self.session_files_max, self.session_disk_mb)


def serve(path: Path, options: Options) -> int:
    """
    Serve at a socket until SIGINT or SIGTERM; return the exit code. Call it from the main thread.

    Raises AddressError, ModelError or ValueError if it cannot serve.
    """
    from worldmodel_ros.serving.transport.address import ListeningSocket

    logging.basicConfig(handlers=[log_handler(sys.stderr)])
    logging.getLogger('worldmodel_ros').setLevel(logging.INFO)
    interrupts.raise_interrupted()
    listening = ListeningSocket(path)  # first: loading takes long
    try:
        _serve(listening, options)
    except BaseException as error:
        # During start-up, a library that is being loaded may turn the signal into an error of its own.
        if not _is_of_signal(error):
            if isinstance(error, RuntimeError):
                end_if_lost(error)
            raise
    finally:
        listening.close()
    _log.info('ended by a signal')
    return 0


def _is_of_signal(error: BaseException | None) -> bool:
    return error is not None and (
        isinstance(error, interrupts.Interrupted) or _is_of_signal(error.__cause__ or error.__context__))


def log_handler(stream: TextIO) -> logging.Handler:
    """Return the handler of the server's log, which throttles repeated lines."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter('%(asctime)s %(levelname)s %(message)s'))
    handler.addFilter(LogThrottle(_LOG_INTERVAL))
    return handler


def _serve(listening, options: Options) -> None:
    from worldmodel_ros.engine import load
    from worldmodel_ros.serving.service.service import Service, ServiceSettings
    from .server import Limits, Server

    # One more, since a robot may reconnect before its former session is closed.
    places = min(options.resident or options.sessions, options.sessions) + 1
    engine = load(options.model, options.backend, options.threads, places, options.gpus, options.parallel,
                  options.anchors)
    smaller = load(options.smaller, options.backend, options.threads, options.sessions + 1) if options.smaller else None
    ticks = RATE / engine.spec.step_period if options.ticks is None else options.ticks
    quotas = Quotas(ticks, options.questions, options.shortest_due)
    service = Service(engine, smaller, ServiceSettings(
        sessions=options.sessions, scheduling=Settings(share=options.share), quotas=quotas))
    # Before the calibration, whose times it changes. Threads started later inherit it.
    realtime.apply(_log, options.realtime_priority, all_threads=True)
    try:
        service.start()
        end = interrupts.End()
        listening.listen()
        keeper = _keeper(service, engine, listening.path, options)
        server = Server(service, listening, options.folder(), Limits(options.idle, _MESSAGES * ticks), keeper)
        try:
            _log.info('process %d serves %s%s to at most %d robots at %s', os.getpid(), options.model,
                      f' (and {options.smaller})' if options.smaller else '', options.sessions, listening.path)
            server.run(end=end)
        finally:
            interrupts.ignore()
            server.close()
    finally:
        interrupts.ignore()
        service.stop()


def _keeper(service: Service, engine: Engine, listening: Path, options: Options) -> Keeper | None:
    from worldmodel_ros.cache.stores.files import FileStore, in_memory
    from worldmodel_ros.cache.stores.host import PinnedMemory
    from worldmodel_ros.cache.stores.objects import ObjectStore
    from worldmodel_ros.cache.stores.protocol import StoreError
    from worldmodel_ros.cache.stores.tiered import TieredStore
    from worldmodel_ros.serving.client.network import Endpoint, EndpointError
    from worldmodel_ros.serving.fleet.hosts import RemoteStore
    from worldmodel_ros.serving.fleet.keeper import Keeper, KeeperSettings

    if not options.store:
        return None
    files = options.host_token, options.host_ca, options.host_certificate
    address = options.host_address or str(listening)
    engine.fingerprint  # noqa: B018  computed now, since it reads all weights
    try:
        if options.store.startswith('wss://'):
            store = RemoteStore(Endpoint(options.store, *files))
        elif '://' in options.store:
            store = ObjectStore(options.store)
        else:
            folder = Path(options.store).expanduser()
            store = FileStore(folder, durable=not in_memory(folder))
    except (StoreError, EndpointError) as error:
        raise ValueError(f'--store {options.store}: {error}') from error
    settings = KeeperSettings(places=options.resident if options.resident < options.sessions else 0, files=files)
    if not options.store_memory_mb:
        return Keeper(service, engine, store, address, settings)
    on_gpu = not all(pool.storage.on_host for pool in engine.memory.pools)
    capacity = int(options.store_memory_mb * 1e6)
    tiers = TieredStore([store], capacity, PinnedMemory(capacity) if on_gpu else None)
    return Keeper(service, engine, tiers, address, settings, tiers.expect)
