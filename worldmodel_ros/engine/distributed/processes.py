"""The other processes of a model, which rank 0 starts, gives orders to, watches and ends."""
from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from worldmodel_ros.engine.device_failure import RankFailure

_log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[3]  # where the package is imported from
ENDING_S = 10.0  # timeout from SIGKILL to the end of a process, which a GPU driver can delay


class Processes:
    """One process for each of ``orders``, its first one: ranks 1, 2 and so on.

    They end by themselves when this process does, however it ends.
    """

    def __init__(self, orders: Sequence[Any]):
        self._children: list[subprocess.Popen] = []
        self._pipes: list[Connection] = []
        self._lifeline, theirs = os.pipe()[::-1]  # never written to: it reads as closed when this process is gone
        try:
            for order in orders:
                self._start(theirs, order)
        finally:
            os.close(theirs)

    def _start(self, lifeline: int, order: Any) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(
                [str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])])}
            # In a new session, so that Ctrl-C reaches only rank 0, which then ends the others.
            self._children.append(subprocess.Popen(
                [sys.executable, '-m', 'worldmodel_ros.engine.distributed.worker', str(theirs.fileno()), str(lifeline)],
                pass_fds=(theirs.fileno(), lifeline), env=environment, start_new_session=True,
                stdin=subprocess.DEVNULL))
        # Loading occupies a core for long, so it must not inherit rank 0's real-time priority.
        os.sched_setscheduler(self._children[-1].pid, os.SCHED_OTHER, os.sched_param(0))
        self._pipes.append(Connection(ours.detach()))
        self._pipes[-1].send(order)

    @property
    def pids(self) -> list[int]:
        """Process ids, of ranks 1 and up."""
        return [child.pid for child in self._children]

    def tell(self, order: Any) -> None:
        """Send an order to all. Raises OSError when one is gone."""
        data = ForkingPickler.dumps(order)  # once for all
        for pipe in self._pipes:
            pipe.send_bytes(data)

    def check(self, patience: float = 0.0, also: Connection | None = None) -> None:
        """Raise RankFailure, with the reason, if a process has ended or has reported a failure. Waits for that up to
        ``patience`` seconds, or until there is something to read from ``also``."""
        for pipe in wait([*self._pipes, *([also] if also else [])], patience):
            if pipe is not also:
                raise self._failure(pipe)

    def _failure(self, pipe: Connection) -> RankFailure:
        """Return the failure behind an unexpected message or end of a process."""
        # Prefer one that was killed, if any: the others fail because of it.
        rank = next((rank for rank, child in enumerate(self._children, 1) if (child.poll() or 0) < 0),
                    1 + self._pipes.index(pipe))
        child = self._children[rank - 1]
        try:
            return RankFailure(f'rank {rank} of the model failed: {self._pipes[rank - 1].recv()}')
        except (EOFError, OSError):
            code = child.wait(5.0)
            how = f'was ended by signal {-code}' if code < 0 else f'ended with code {code}'
            return RankFailure(f'rank {rank} of the model (process {child.pid}) {how}')

    def expect(self, answer: Any, patience: float) -> None:
        """Wait until each has sent ``answer``; raise RankFailure when one sends another, ends, or takes too long."""
        deadline = time.monotonic() + patience
        missing = list(self._pipes)
        while missing:
            ready = wait(missing, max(0.0, deadline - time.monotonic()))
            if not ready:
                ranks = ', '.join(str(1 + self._pipes.index(pipe)) for pipe in missing)
                raise RankFailure(f'no answer from rank {ranks} of the model within {patience:g} s')
            for pipe in ready:
                try:
                    said = pipe.recv()
                except (EOFError, OSError):
                    raise self._failure(pipe) from None
                if said != answer:
                    raise RankFailure(f'rank {1 + self._pipes.index(pipe)} of the model failed: {said}')
                missing.remove(pipe)

    def kill(self) -> None:
        """Kill all, stopped ones, too, without waiting."""
        for child in self._children:
            child.kill()  # it may be in a collective that will never complete

    def stop(self) -> None:
        """Kill all, and wait for their end."""
        self.kill()
        deadline = time.monotonic() + ENDING_S
        for rank, child in enumerate(self._children, 1):
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _log.error('rank %d of the model (process %d) was killed and has not ended within %g s; its GPU may '
                           'not be free', rank, child.pid, ENDING_S)
        for pipe in self._pipes:
            pipe.close()
        if self._lifeline is not None:
            os.close(self._lifeline)
        self._children, self._pipes, self._lifeline = [], [], None
