"""The server of an open world model as a process: loads the model, serves until a signal comes, and shuts down cleanly."""
from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from worldmodel_ros.engine.device_failure import end_if_lost
from worldmodel_ros.engine.loading import load_world
from worldmodel_ros.serving.server.process import log_handler
from worldmodel_ros.serving.transport.address import ListeningSocket
from .server import WorldServer

if TYPE_CHECKING:
    from worldmodel_ros.engine.open_world.world import OpenWorld

_log = logging.getLogger(__name__)


def serve_world(path: Path, model: str, backend: str = 'auto', threads: int = 1, worlds: int = 1, gpus: int = 1,
                parallel: str = 'sequence', deadline: float = 0.0) -> int:
    """
    Serve the open world model in a folder at a socket until SIGINT or SIGTERM; return the exit code. ``worlds``: at a time;
    ``gpus``, ``parallel``: see ``engine.loading.load``; ``deadline``: see ``turns.Turns``.

    Raises AddressError or ModelError if it cannot serve.
    """
    logging.basicConfig(handlers=[log_handler(sys.stderr)])
    logging.getLogger('worldmodel_ros').setLevel(logging.INFO)
    listening = ListeningSocket(path)  # first: loading takes long
    try:
        # Its smaller model is for robots' predictions: ``turns`` has no use for it.
        load = partial(load_world, model, backend, threads, gpus, worlds, parallel, smaller=False)
        asyncio.run(_serve(listening, worlds, load, model, deadline))
    except RuntimeError as error:  # while it is loaded
        end_if_lost(error)
        raise
    finally:
        listening.close()
    return 0


async def _serve(listening: ListeningSocket, worlds: int, load: Callable[[], OpenWorld], model: str,
                 deadline: float) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    # Loaded in the thread that runs it: the number of threads of an operation is a setting of the calling thread.
    networks, world = ThreadPoolExecutor(1, 'open world'), None
    try:
        world = await loop.run_in_executor(networks, load)
        if stop.is_set():
            return
        listening.listen()
        await WorldServer(world, listening, networks, deadline).run(stop, lambda: _log.info(
            'process %d serves %s to at most %d worlds at %s', os.getpid(), model, worlds, listening.path))
        _log.info('ended by a signal')
    finally:
        networks.shutdown(cancel_futures=True)
        if world:
            world.close()
