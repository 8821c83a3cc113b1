"""Selects the engine that drives the robot: the server's while it is available, otherwise the robot's own."""
from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future as Promise
from dataclasses import replace
from pathlib import Path

import numpy as np

from worldmodel_ros.control.responder import Listener, Observation, Responder
from worldmodel_ros.control.worker import Worker
from worldmodel_ros.engine.session_folder import SessionFolder
from worldmodel_ros.engine.session_transfer import PATIENCE
from worldmodel_ros.engine.what_if import Question
from worldmodel_ros.inputs.images import fit
from worldmodel_ros.model.presets import Preset
from .link import Link
from .network import Endpoint
from .worker import RemoteWorker

TRIALS = 20    # observations with which a server that was away is tried before it is trusted again: 2 s at 10 Hz
_MISSES = 0.1  # fraction of them that may be left without a plan in time
_MOST = 80     # trials at most, for a server that is repeatedly lost soon after it was trusted
_SETTLED = 30  # s of driving after which earlier losses no longer count


class FailoverWorker:
    """
    A ``control.worker.Worker`` made of two, the server's and ``own``, which share one responder.

    While the server drives, the own engine is loaded and idle. When the server is lost, the own engine takes over with
    the observation that is not answered yet, and begins a session of its own; meanwhile the last plan bridges the gap. A
    server that is back gets the observations as trials, whose answers are not used, and drives again once it has answered
    nearly all of the last TRIALS in time; it needs twice as many each time that it is soon lost again. The first server
    of an activation drives at once.
    """

    def __init__(self, path: Path | Endpoint, robot: str, own: Worker, spec: Preset,
                 executed: Callable[[int | None, int], np.ndarray], responder: Responder, listener: Listener,
                 say: Callable[[str], None], earlier: Callable[[float], None] = lambda seconds: None,
                 files: tuple[str, str, str] = ('', '', '')) -> None:
        """``spec``: of the own model. ``say`` is called with a text for each change of the driving engine; ``earlier`` and
        ``files`` as for ``RemoteWorker``."""
        self._own, self._spec, self._say, self._path = own, spec, say, path
        self._remote = RemoteWorker(path, robot, spec, executed, responder, listener, self, earlier, files)
        self._lock = threading.RLock()
        self._link: Link | None = None
        self._driving = False  # whether the server drives
        self._untried = True
        self._trials: deque[bool] = deque(maxlen=TRIALS)
        self._trusted = -math.inf  # when the server passed its trials, steady time in s
        self._newest: tuple[int, int] | None = None  # number of the newest observation
        self._reason = 'it is being connected'

    @property
    def backend(self) -> str:
        """What runs the networks at present, and whether on the server."""
        with self._lock:
            return f'{self._link.backend} of the server' if self._driving and self._link else self._own.backend

    @property
    def degraded_reason(self) -> str:
        """Why the own engine drives; empty if the server does."""
        with self._lock:
            return '' if self._driving else f'the server is not used: {self._reason}'

    @property
    def image_size(self) -> tuple[int, int]:
        """Size (H, W) of observations that suits both models [pixels]."""
        with self._lock:
            sizes = [self._spec.image_size, *([self._link.spec.image_size] if self._link else [])]
            return max(sizes)

    def start(self) -> None:
        """Start both."""
        self._own.start()
        self._remote.start()

    def stop(self) -> None:
        """Stop both."""
        self._remote.stop()
        self._own.stop()
        with self._lock:
            self._link, self._driving = None, False

    def submit(self, observation: Observation) -> bool:
        """Hand over an observation; as ``Worker.submit``."""
        with self._lock:
            self._newest = observation.number
            if self._driving:
                if self._remote.offer(observation):
                    return False
                self._own.forget()  # the server is being lost
                return self._submit_own(observation)
            dropped = self._submit_own(observation)
            self._remote.offer(observation, trial=True)
            return dropped

    def ask(self, question: Question) -> Promise:
        """Ask a what-if question; as ``Worker.ask``."""
        return self._engine().ask(question)

    def save(self, folder: SessionFolder, name: str, patience: float = PATIENCE) -> str:
        """Write the driving session to a file; as ``Worker.save``, but into the server's folder if the server drives."""
        engine = self._engine()
        return self._remote.save(name) if engine is self._remote else self._own.save(folder, name, patience)

    def load(self, folder: SessionFolder, name: str, patience: float = PATIENCE) -> str:
        """Replace the driving session; as ``save``."""
        engine = self._engine()
        return self._remote.load(name) if engine is self._remote else self._own.load(folder, name, patience)

    def connected(self, link: Link) -> None:
        with self._lock:
            self._link = link
            self._reason = f'it is back, and is tried with {self._trials.maxlen} observations first'
            if self._untried:
                self._drive(link)
            self._untried = False

    def away(self, reason: str, observation: Observation | None, idle: bool = False) -> None:
        with self._lock:
            # A server that has only ended an idle session drives again at once.
            self._untried, self._link = idle, None
            drove, self._driving = self._driving, False
            news, self._reason = drove or reason != self._reason, reason
            self._trials.clear()
            if drove and not idle:
                settled = time.monotonic() - self._trusted > _SETTLED
                self._trials = deque(maxlen=TRIALS if settled else min(2 * self._trials.maxlen, _MOST))
            if drove:
                self._own.forget()
                if observation and observation.number == self._newest:
                    self._submit_own(observation)
        if news:
            self._say(f'{self.degraded_reason}; driving with the own model {self._spec.name}')

    def tried(self, good: bool) -> None:
        with self._lock:
            if self._driving or self._link is None:
                return
            self._trials.append(good)
            needed = self._trials.maxlen
            if len(self._trials) == needed and self._trials.count(False) <= _MISSES * needed:
                self._trusted = time.monotonic()
                self._drive(self._link)

    def _drive(self, link: Link) -> None:
        self._driving = True
        self._say(f'the server at {self._path} drives: model {link.spec.name} on {link.backend}')

    def _engine(self) -> Worker | RemoteWorker:
        with self._lock:
            return self._remote if self._driving else self._own

    def _submit_own(self, observation: Observation) -> bool:
        return self._own.submit(replace(observation, image=fit(observation.image, self._spec.image_size)))
