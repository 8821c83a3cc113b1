"""Pools that start a fleet's servers, and restart those that have ended: as processes of this machine, or by Ray."""
from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from worldmodel_ros.exit_codes import BAD_CONFIGURATION
from worldmodel_ros.serving.client.link import Unavailable, ask_status

_log = logging.getLogger(__name__)
_PATIENCE = 10.0  # s for a server to shut down cleanly
_ATTEMPTS = 3     # to start Ray
REFUSED = 'refused'  # state of a server that refuses its configuration
UNHEARD = 'actor'  # prefix of a state that is unknown, since the server's Ray actor does not report it
_AGAIN = 1.0      # s before a server that has ended is restarted


class PoolError(RuntimeError):
    """Servers that cannot be started; the text says why, and what to do."""


class Pool(Protocol):
    """Servers by number, each at a socket of its own."""

    name: str

    def start(self, number: int, arguments: Sequence[str], log: Path) -> None:
        """Run ``worldmodel serve`` with these arguments, and restart it whenever it has ended. Raises PoolError."""

    def look(self) -> dict[int, str]:
        """Return what each server does, in a word or two; restart those that have ended. Raises PoolError where that is of no
        use."""

    def stop(self, number: int) -> None:
        """Shut down a server cleanly, for good."""

    def close(self) -> None:
        """End all servers."""


class ServerProcess:
    """A server as a child process, or one that an earlier owner has left running."""

    def __init__(self, arguments: Sequence[str], socket: str, log: str) -> None:
        self._arguments, self._socket, self._log = list(arguments), Path(socket), log
        self._child: subprocess.Popen | None = None
        self._adopted = -1  # file descriptor of its process, which no later process with its number can be taken for
        self._ended = 0.0
        self.starts = 0
        self.adopt() or self._start()

    def adopt(self) -> bool:
        """Adopt a server that runs already, left by a lost owner; return whether there is one. One with other options is ended
        first: sessions of two stores would have two owners."""
        try:
            pid = int(ask_status(self._socket)['pid'])
            self._adopted = os.pidfd_open(pid)
        except (Unavailable, KeyError, ValueError, TypeError, OSError):
            return False
        if self._differs(pid):
            _log.warning('process %d, which serves at %s, was left with other options: it is replaced', pid, self._socket)
            self.stop()
        return True

    def state(self) -> str:
        """Return ``runs``, ``ended`` or ``refused``; one that has ended is restarted, unless it refused its configuration."""
        if self._child is None:
            if not select.select([self._adopted], [], [], 0.0)[0]:  # readable once the process has ended
                return 'runs'
        elif self._child.poll() is None:
            return 'runs'
        elif self._child.returncode == BAD_CONFIGURATION:
            return REFUSED
        now = time.monotonic()
        if not self._ended:
            self._ended = now
        elif now - self._ended >= _AGAIN:
            self._start()
        return 'ended'

    def stop(self) -> None:
        """Shut it down cleanly."""
        if self._child is None:
            with suppress(OSError):
                signal.pidfd_send_signal(self._adopted, signal.SIGTERM)
        else:
            self._child.terminate()
            try:
                self._child.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()

    def _differs(self, pid: int) -> bool:
        """Return whether a process was started with other options than these."""
        try:
            words = Path(f'/proc/{pid}/cmdline').read_bytes().decode(errors='replace').split('\0')[:-1]
        except OSError:
            return False
        wanted = ['serve', '--socket', str(self._socket), *self._arguments]
        return words[-len(wanted):] != wanted

    def _start(self) -> None:
        self._ended = 0.0
        self.starts += 1
        if self._child is None and self._adopted >= 0:
            os.close(self._adopted)
        with open(self._log, 'a') as log:
            # In its own session, it outlives its parent, so that robots continue when that is lost.
            self._child = subprocess.Popen([sys.executable, '-m', 'worldmodel_ros.cli', 'serve', '--socket',
                                            str(self._socket), *self._arguments], stdout=log, stderr=log,
                                           start_new_session=True)


class LocalPool:
    """Processes of this machine."""

    name = 'local'

    def __init__(self) -> None:
        self._servers: dict[int, ServerProcess] = {}

    def start(self, number: int, arguments: Sequence[str], log: Path) -> None:
        socket, *rest = arguments
        self._servers[number] = ServerProcess(rest, socket, str(log))

    def look(self) -> dict[int, str]:
        return {number: server.state() for number, server in self._servers.items()}

    def stop(self, number: int) -> None:
        self._servers.pop(number).stop()

    def close(self) -> None:
        for number in list(self._servers):
            self.stop(number)


class RayPool:
    """Actors of Ray, one for each server, in a placement group; extra ``[ray]``.

    Ray places and restarts the actors, and reports whether they live; each runs its server as a process of its own, which
    continues while Ray is away, and is adopted by the next actor. No frames or pages go through Ray.
    """

    name = 'ray'

    def __init__(self, servers: int, address: str | None = None, cpus: float = 1.0) -> None:
        """``address``: of a cluster; None: RAY_ADDRESS, or, if that is not set, one is started here. ``cpus``: of each server.
        Raises PoolError."""
        try:
            import ray
            from ray.util.placement_group import placement_group
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
        except ImportError as error:
            raise PoolError('ray is not installed: pip install "worldmodel-ros[ray]"') from error
        self._ray, self._owned = ray, not ray.is_initialized()
        if self._owned:
            address = address or os.environ.get('RAY_ADDRESS')
            self._begin(address, {} if address else {'num_cpus': max(1, round(servers * cpus))})
        self._group = placement_group([{'CPU': cpus}] * servers, strategy='PACK')
        if not self._group.wait(60):
            raise PoolError(f'Ray has no room for {servers} servers of {cpus:g} CPUs each')
        self._cpus, self._strategy = cpus, PlacementGroupSchedulingStrategy
        self._actors: dict[int, Any] = {}

    def start(self, number: int, arguments: Sequence[str], log: Path) -> None:
        socket, *rest = arguments
        actor = self._ray.remote(ServerProcess).options(
            num_cpus=self._cpus, max_restarts=-1, max_task_retries=-1, name=f'worldmodel-{os.getpid()}-{number}',
            scheduling_strategy=self._strategy(self._group, placement_group_bundle_index=number),
            runtime_env={'env_vars': {'RAY_kill_child_processes_on_worker_exit': '0'}})  # servers outlive Ray
        self._actors[number] = actor.remote(rest, socket, str(log))

    def look(self) -> dict[int, str]:
        asked = {number: actor.state.remote() for number, actor in self._actors.items()}
        done, _ = self._ray.wait(list(asked.values()), num_returns=len(asked), timeout=2.0)
        states = {}
        for number, answer in asked.items():
            try:
                states[number] = self._ray.get(answer) if answer in done else f'{UNHEARD} does not answer'
            except self._ray.exceptions.RayError as error:
                states[number] = f'{UNHEARD}: {type(error).__name__}'
        return states

    def stop(self, number: int) -> None:
        actor = self._actors.pop(number)
        with suppress(self._ray.exceptions.RayError):
            self._ray.get(actor.stop.remote(), timeout=2 * _PATIENCE)
        self._ray.kill(actor)

    def _begin(self, address: str | None, options: dict[str, Any]) -> None:
        # Ray waits 30 s for its own processes, which may take longer on a busy machine.
        for attempt in range(_ATTEMPTS):
            try:
                # None would mean the newest cluster of this machine, which may be another user's, or dead.
                self._ray.init(address=address or 'local', include_dashboard=False, log_to_driver=False,
                               configure_logging=False, **options)
                return
            except Exception as error:  # Ray raises no specific class
                self._ray.shutdown()
                if attempt + 1 == _ATTEMPTS:
                    raise PoolError(f'Ray cannot be started: {error}') from error

    def close(self) -> None:
        for number in list(self._actors):
            self.stop(number)
        self._ray.util.remove_placement_group(self._group)
        if self._owned:
            self._ray.shutdown()
