"""Open requests to the server besides the ticks: questions, and sessions saved to or loaded from files."""
from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future as Promise
from typing import Any

import numpy as np

from worldmodel_ros.control.worker import uncancellable_future
from worldmodel_ros.engine.session import Future
from worldmodel_ros.engine.what_if import Answer, QuestionError
from worldmodel_ros.model.presets import Preset
from worldmodel_ros.serving.transport import messages
from worldmodel_ros.serving.transport.codec import MessageError


class RemoteRequests:
    """Promises by message number. Requests come from any thread, answers from one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._promises: dict[int, Promise] = {}
        self._branches: dict[int, list[tuple[str, Future]]] = {}

    def send(self, send: Callable[[Any], bool], make: Callable[[int], Any]) -> Promise:
        """
        Send the message that ``make`` returns for a number; return a promise of its answer.

        ``send`` returns whether there is a server to send to. Once it has been called, ``give_up`` reaches the promise.
        """
        promise = uncancellable_future()
        with self._lock:
            self._number += 1
            number = self._number
            self._promises[number] = promise
        try:
            if not send(make(number)):
                self._settle(number, QuestionError('the engine\'s server is away: ask again'))
        except MessageError as error:
            self._settle(number, QuestionError(str(error)))
        return promise

    def add_branch(self, message: messages.ImaginedBranch, future: Future) -> None:
        """Take one branch of the answer to a question."""
        self._branches.setdefault(message.number, []).append((message.name, future))

    def answered(self, message: messages.Answered | messages.Done) -> None:
        """Take the end of an answer."""
        branches = self._branches.pop(message.number, [])
        if isinstance(message, messages.Done):
            self._settle(message.number, ValueError(message.refusal) if message.refusal else None)
        elif message.refusal:
            self._settle(message.number, QuestionError(message.refusal))
        else:
            self._settle(message.number, Answer(message.stamp, branches, message.complete))

    def give_up(self, reason: str) -> None:
        """Answer all open requests with a refusal."""
        with self._lock:
            promises = list(self._promises.values())
            self._promises.clear()
        self._branches.clear()
        for promise in promises:
            promise.set_exception(QuestionError(reason))

    def _settle(self, number: int, result: Any) -> None:
        with self._lock:
            promise = self._promises.pop(number, None)
        if promise is None:
            return
        if isinstance(result, Exception):
            promise.set_exception(result)
        else:
            promise.set_result(result)


def to_future(spec: Preset, message: messages.Imagined | messages.ImaginedBranch, frames: np.ndarray | None) -> Future:
    """Return the future in a message; its latents stay with the server. Raises MessageError for an invalid one."""
    count = len(message.actions)
    if frames is None or not len(frames) == len(message.collision_risk) == count:
        raise MessageError(f'{type(message).__name__}: actions, risks and pictures are not of one length')
    if message.progress.shape != (len(spec.goals),):
        raise MessageError(f'{type(message).__name__}: progress for {message.progress.shape} goals')
    none = np.zeros(0, np.float32)
    progress = dict(zip(spec.goals, map(float, message.progress)))
    return Future(message.actions, none, message.collision_risk, progress, none, frames)
