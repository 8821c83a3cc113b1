"""The server as a process: loads the models, serves until a signal comes, ends in good order."""
from __future__ import annotations

import logging
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from worldmodel_ros import realtime

from .log_throttle import LogThrottle

_log = logging.getLogger(__name__)
_LOG_INTERVAL = 10.0  # s, between two lines that are alike


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    model: str = 'tiny'
    smaller: str = ''     # model for robots for which there is no time for the other one; empty: none
    backend: str = 'auto'
    sessions: int = 8     # robots at a time
    threads: int = 1      # of one network call on a CPU
    gpus: int = 1         # that `model` is divided among,
    parallel: str = 'sequence'  # and how
    realtime_priority: int = 0


class _Interrupted(BaseException):
    """A signal came. No Exception: no handler on the way may swallow it."""


def serve(path: Path, options: Options) -> int:
    """
    Serve at a socket until SIGINT or SIGTERM; return the exit code. To be called from the main thread.

    Raises AddressError, ModelError, ValueError for what cannot be served.
    """
    from ..transport.address import ListeningSocket

    logging.basicConfig(handlers=[log_handler(sys.stderr)])
    logging.getLogger('worldmodel_ros').setLevel(logging.INFO)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    listening = ListeningSocket(path)  # first: loading takes long
    try:
        _serve(listening, options)
    except _Interrupted:
        _log.info('ended by a signal')
    finally:
        listening.close()
    return 0


def log_handler(stream: TextIO) -> logging.Handler:
    """Return what writes the server's log; of what is repeated all the time, a line now and then."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter('%(asctime)s %(levelname)s %(message)s'))
    handler.addFilter(LogThrottle(_LOG_INTERVAL))
    return handler


def _serve(listening, options: Options) -> None:
    from ..engine import load
    from ..engine.service import Service, ServiceSettings
    from .server import Server

    # A robot that connects anew may find its former session not closed yet: room for one more.
    common = options.backend, options.threads, options.sessions + 1
    engine = load(options.model, *common, options.gpus, options.parallel)
    smaller = load(options.smaller, *common) if options.smaller else None
    service = Service(engine, smaller, ServiceSettings(sessions=options.sessions))
    # Before the calibration, whose times it changes. The threads that are started later inherit it.
    realtime.apply(_log, options.realtime_priority, all_threads=True)
    # As in the node: the engine's thread may hold the interpreter for so long while an answer waits to be sent.
    sys.setswitchinterval(0.0005)
    try:
        service.start()
        listening.listen()
        server = Server(service, listening)
        try:
            _log.info('process %d serves %s%s to at most %d robots at %s', os.getpid(), options.model,
                      f' (and {options.smaller})' if options.smaller else '', options.sessions, listening.path)
            server.run()
        finally:
            _ignore_signals()  # Ctrl-C in a terminal under `ros2 launch` arrives twice
            server.close()
    finally:
        _ignore_signals()
        service.stop()


def _interrupt(*_) -> None:
    _ignore_signals()
    raise _Interrupted


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
