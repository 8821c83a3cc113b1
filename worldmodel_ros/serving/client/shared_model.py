"""The server's world model, for a robot that decides for itself on a forecast of the scene."""
from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future as Promise
from dataclasses import replace
from pathlib import Path

import numpy as np

from worldmodel_ros.control.deciding_worker import Decided
from worldmodel_ros.control.responder import Listener, Observation, Responder
from worldmodel_ros.engine.what_if import Question
from worldmodel_ros.inputs.images import fit
from worldmodel_ros.model.presets import Preset
from .link import Link
from .network import Endpoint
from .worker import RemoteWorker

_KEPT = 4  # observations that may wait to be decided on


class SharedModel:
    """
    Takes in the robot's observations, and imagines its decisions, in a session on the server at ``path``.

    No command waits for it, so it needs no trials: it is used from the first observation after it is connected, and the
    robot's own model from the first one that cannot be sent to it. The public methods may be called from any thread.
    """

    def __init__(self, path: Path | Endpoint, robot: str, own: Preset, executed: Callable[[int | None, int], np.ndarray],
                 responder: Responder, listener: Listener, say: Callable[[str], None],
                 files: tuple[str, str, str] = ('', '', '')) -> None:
        """As for ``FailoverWorker``; ``own``: preset of the robot's own model."""
        self._own, self._say, self._path = own, say, path
        self._remote = RemoteWorker(path, robot, own, executed, responder, listener, self, files=files)
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._reason = 'it is being connected'
        self._observations: deque[Observation] = deque(maxlen=_KEPT)  # as they came

    @property
    def here(self) -> bool:
        """Whether there is a session on the server."""
        with self._lock:
            return self._link is not None

    @property
    def backend(self) -> str:
        """What runs the server's networks; empty while it is away."""
        with self._lock:
            return f'{self._link.backend} of the server' if self._link else ''

    @property
    def degraded_reason(self) -> str:
        """Why the own model imagines; empty if the server's does."""
        with self._lock:
            return '' if self._link else f'the server is not used: {self._reason}'

    @property
    def image_size(self) -> tuple[int, int]:
        """Size (H, W) of observations that suits both models [pixels]."""
        with self._lock:
            return max([self._own.image_size, *([self._link.spec.image_size] if self._link else [])])

    def start(self) -> None:
        """Start connecting."""
        self._remote.start()

    def stop(self) -> None:
        """Close the session."""
        self._remote.stop()
        with self._lock:
            self._link = None

    def keep(self, observation: Observation) -> Observation:
        """Keep an observation as it came until it is shown; return it with an image of the own model's size."""
        self._observations.append(observation)
        return replace(observation, image=fit(observation.image, self._own.image_size))

    def show(self, observation: Observation, plan: np.ndarray | None, decided: Decided | None) -> bool:
        """See ``control.deciding_worker.Imagines``."""
        kept = next((each for each in list(self._observations) if each.number == observation.number), observation)
        return self._remote.show(kept, plan, decided)

    def ask(self, question: Question) -> Promise:
        """Ask a what-if question; as ``Worker.ask``."""
        return self._remote.ask(question)

    def save(self, name: str) -> str:
        """As ``RemoteWorker.save``."""
        return self._remote.save(name)

    def load(self, name: str) -> str:
        """As ``RemoteWorker.load``."""
        return self._remote.load(name)

    def connected(self, link: Link) -> None:
        with self._lock:
            self._link = link
        self._say(f'the server at {self._path} imagines: model {link.spec.name} on {link.backend}')

    def away(self, reason: str, observation: Observation | None, idle: bool = False) -> None:
        with self._lock:
            news = self._link is not None or reason != self._reason
            self._link, self._reason = None, reason
        if news:
            self._say(f'{self.degraded_reason}; imagining with the own model {self._own.name}')

    def tried(self, good: bool) -> None:
        """See ``Chooser``: no trials are made."""
