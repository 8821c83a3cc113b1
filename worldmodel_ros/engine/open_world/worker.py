"""A thread that predicts for one robot: the future under its current motion, for image after image, and what-if questions."""
from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future as Promise
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...cache.pool import OutOfPages
from ...model.wan import camera
from ..session_folder import SessionFileError, SessionFolder
from ..session_transfer import wait
from ..what_if import Answer, Question, QuestionError
from .ladder import Ladder, Rung
from .session import WorldSession
from .world import FPS, OpenWorld

_LONGEST = 240  # images of a branch, 15 s
_PATIENCE = 60.0  # s for a session to be written or read, at least: a chunk in progress may take seconds
_LATE = 2.5  # periods after the previous image: a later one begins a new session
_BEHIND = 3  # chunks of waiting images from which the newest begins a new session, as this machine cannot keep up
PERIOD = 1.0 / FPS
GAP = 2.0  # periods between two images that a FramePacer may leave: nothing is commanded, so keeping time comes first


@dataclass(frozen=True)
class Seen:
    """An image uint8 (H, W, 3) of the world's size, its ``stamp`` [ns], steady time of its receipt [s], the base's pose (4, 4)
    at that time, and the twist (2,), linear.x and angular.z, that the robot executes."""

    image: np.ndarray
    stamp: int
    received: float
    base: np.ndarray
    twist: np.ndarray
    intrinsics: camera.Intrinsics
    episode: int = 0
    sequence: int = 0


@dataclass
class VideoFuture:
    """The future under ``actions`` (T, 2), each for ``PERIOD`` s: frames uint8 (T, H, W, 3). These models predict neither
    contacts nor goals."""

    actions: np.ndarray
    frames: np.ndarray
    collision_risk: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    progress: dict[str, float] = field(default_factory=dict)


Listener = Callable[[Seen, VideoFuture, 'Made'], None]


@dataclass(frozen=True)
class Made:
    """How a prediction was made: the ``rung``, the ``seconds`` that it took and the ``expected`` ones."""

    rung: Rung
    seconds: float
    expected: float


class WorldWorker:
    """Predicts from the newest image only, and takes the next when the prediction is out; questions come before predictions.

    ``observes``: real images are committed to one long session, chunk by chunk (``WorldSession.observe``), and predictions
    follow the newest chunk; else each prediction begins a new session with the newest image (it is anchored there). ``chunks``:
    length of each prediction. ``deadline``: the time that a prediction should take, s, 0 for none; a ladder chooses the quality
    that meets it (fewer steps and, where predictions are anchored, the world's ``smaller`` one). ``failed`` is called with each
    exception, which ends the session, and nothing else.
    """

    def __init__(self, world: OpenWorld, predicted: Listener, failed: Callable[[Exception], None], observes: bool = False,
                 chunks: int = 1, deadline: float = 0.0):
        self._world, self._observes, self._chunks = world, observes, chunks
        self._predicted, self._failed = predicted, failed
        self._deadline = deadline or math.inf
        # Observed images are in the pages of one model only.
        smaller = None if observes or world.smaller is None else len(world.smaller.preset.schedule.steps)
        self._ladder = Ladder(len(world.preset.schedule.steps), smaller)
        self._session_world = world
        self.optical: np.ndarray | None = None  # the camera's optical frame in the base (4, 4); None: as world.json says
        self._wake = threading.Condition()
        self._newest: Seen | None = None
        self._done: Seen | None = None  # the last image that was predicted from
        self._waiting: list[Seen] = []  # observed images that are not in a chunk yet
        self._last: Seen | None = None  # the last one added to these
        self._begins = True  # whether the first of these begins a new session
        self._jobs: deque[tuple[Callable[[], Any], Promise]] = deque()
        self._session: WorldSession | None = None
        self._root: Seen | None = None  # the newest image that the session knows
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name='open world', daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current work; waiting questions are cancelled."""
        with self._wake:
            self._stopped = True
            self._wake.notify()
        if self._thread.ident:
            self._thread.join()
        for _, promise in self._jobs:
            promise.cancel()
        self._forget()

    def submit(self, seen: Seen) -> None:
        """Take an image. With ``observes``, images must come every ``PERIOD`` s on average, as a FramePacer selects them; a gap
        or another episode begins a new session."""
        with self._wake:
            self._newest = seen
            if self._observes:
                self._queue(seen)
            self._wake.notify()

    def ask(self, question: Question) -> Promise:
        """Ask a what-if question; the promise holds a ``what_if.Answer``, or raises QuestionError."""
        for branch in question.branches:
            if branch.actions is None:
                raise QuestionError(f'branch {branch.name!r} is the model\'s own plan, and open world models have none: name a '
                                    'motion or give actions')
            if len(branch.actions) > _LONGEST:
                raise QuestionError(f'branch {branch.name!r} has {len(branch.actions)} steps, and at most {_LONGEST} are '
                                    'imagined')
        return self._do(lambda: self._answer(question))

    def save(self, folder: SessionFolder, name: str, patience: float) -> str:
        """Write the session to a file; return a report of size and time. Raises SessionFileError, and
        CancelledError if the worker is stopped."""
        def content() -> bytes:
            if self._session is None or self._root is None:
                raise SessionFileError('no image has been seen yet')
            return self._session.save()
        start = time.monotonic()
        written = wait(self._do(content), max(patience, _PATIENCE))
        size = folder.save(name, len(written), lambda file: file.write(written))
        return f'{size} bytes in {time.monotonic() - start:.2f} s'

    def load(self, folder: SessionFolder, name: str, patience: float) -> str:
        """Replace the session by one from a file, and continue from it as long as only images are observed, as if the camera
        had not moved since it was saved. Raises SessionFileError, after which the session may start over with the next image,
        and CancelledError if the worker is stopped."""
        if not self._observes:
            raise SessionFileError('each image begins a session of its own here: set world_observes to go on from a session')

        def adopt() -> None:
            if self._newest is None:
                raise SessionFileError('no image has been seen yet, so the camera is not known')
            self._forget()  # first, as a world has pages for one session
            self._session = folder.load(name, WorldSession.read(self._world))
            with self._wake:  # images kept coming while the file was read: what follows is the next one
                self._root = self._newest
                self._waiting.clear()
                self._begins = False
            self._session.rebase(self._root.base @ self._optical)  # poses of two origins must not be mixed
        start = time.monotonic()
        wait(self._do(adopt), max(patience, _PATIENCE))
        return f'in {time.monotonic() - start:.2f} s'

    def _do(self, call: Callable[[], Any]) -> Promise:
        promise: Promise = Promise()
        with self._wake:
            if self._stopped:
                promise.cancel()
            self._jobs.append((call, promise))
            self._wake.notify()
        return promise

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopped or self._jobs or self._newest is not self._done)
                if self._stopped:
                    return
                job = self._jobs.popleft() if self._jobs else None
                newest = self._newest
            if job:
                call, promise = job
                if promise.set_running_or_notify_cancel():
                    try:
                        promise.set_result(call())
                    except Exception as error:  # reported to the caller
                        promise.set_exception(error)
                continue
            self._done = newest
            try:
                self._take(newest)
            except Exception as error:
                self._forget()
                self._failed(error)

    def _take(self, newest: Seen) -> None:
        """Bring the session up to the newest image, and predict the future under the robot's current motion."""
        start = time.monotonic()
        rung, expected = self._ladder.choose(self._deadline, self._chunks)
        if not self._observes:
            self._anchor(newest, rung.smaller)
        elif not self._observe():
            return
        else:
            start = time.monotonic()
        count = sum(self._sizes(self._chunks))
        future = self._imagine(np.tile(newest.twist, (count, 1)), math.inf, rung)
        if future:
            seconds = time.monotonic() - start
            self._ladder.took(rung, seconds, self._chunks)
            self._predicted(self._root, future, Made(rung, seconds, expected))

    @property
    def _optical(self) -> np.ndarray:
        return self._session_world.description.optical if self.optical is None else self.optical

    def _anchor(self, seen: Seen, smaller: bool = False) -> None:
        self._forget()
        self._session_world = self._world.smaller if smaller else self._world
        self._session = self._session_world.open(seen.image, seen.base @ self._optical)
        self._root = seen

    def _queue(self, seen: Seen) -> None:
        """Add an image to the observed video, or begin another one with it."""
        before = self._last
        passed = math.inf if before is None or seen.episode != before.episode else (seen.stamp - before.stamp) * 1e-9
        behind = len(self._waiting) >= _BEHIND * self._world.frame_images * self._world.preset.chunk_frames
        if behind or not 0.0 <= passed <= _LATE * PERIOD:
            self._waiting.clear()
            self._begins = True
        self._waiting.append(seen)
        self._last = seen

    def _observe(self) -> bool:
        """Commit the waiting images; return whether there is a new moment to predict from: the first image of a session, or a
        committed chunk."""
        with self._wake:
            waiting, begins = self._waiting, self._begins or self._session is None
            self._waiting, self._begins = [], False
        moved = begins and bool(waiting)
        if moved:
            self._anchor(waiting.pop(0))
        every = self._world.frame_images
        while self._session and len(waiting) >= (count := self._session.images_of_chunk):
            chunk, waiting = waiting[:count], waiting[count:]
            poses = np.stack([seen.base @ self._optical for seen in chunk[every - 1::every]])
            self._session.observe(np.stack([seen.image for seen in chunk]), poses, chunk[-1].intrinsics)
            self._root, moved = chunk[-1], True
        with self._wake:
            if not self._begins:
                self._waiting = waiting + self._waiting
        return moved

    def _answer(self, question: Question) -> Answer:
        root = self._root
        if self._session is None or root is None:
            raise QuestionError('no image has been seen yet')
        if question.stamp and question.stamp != root.stamp:
            raise QuestionError(f'observation_stamp {question.stamp / 1e9:.9f} is not that of the image that is imagined from '
                                f'({root.stamp / 1e9:.9f}), and older ones are not kept: leave it zero')
        answer = Answer(root.stamp)
        sizes = [self._chunks_of(len(branch.actions)) for branch in question.branches]
        smaller = self._session_world is not self._world
        for at, branch in enumerate(question.branches):
            left = question.due - time.monotonic()
            rung, _ = self._ladder.choose(left, sum(sizes[at:]), smaller)
            start = time.monotonic()
            try:
                future = self._imagine(branch.actions, question.due, rung)
            except OutOfPages as error:
                raise QuestionError(f'no memory is left to imagine in: {error}') from error
            if future is None:
                return answer
            self._ladder.took(rung, time.monotonic() - start, sizes[at])
            answer.branches.append((branch.name, future))
        answer.complete = True
        return answer

    def _chunks_of(self, images: int) -> int:
        """Return how many chunks the next ``images`` images take."""
        first, whole = self._sizes(2)
        return 1 + max(0, -(-(images - first) // whole))

    def _imagine(self, actions: np.ndarray, due: float, rung: Rung) -> VideoFuture | None:
        """Imagine actions (T, 2) on a fork; return None if the steady time ``due`` comes first. A last chunk that they do not
        fill repeats the last action, and is cut off."""
        root, session, frames = self._root, self._session.fork(), []
        try:
            base, at, every = root.base, 0, self._world.frame_images
            while at < len(actions):
                if time.monotonic() >= due or self._stopped:
                    return None
                count = session.images_of_chunk
                part = actions[at:at + count]
                part = np.concatenate([part, np.repeat(part[-1:], count - len(part), 0)])
                twists = np.zeros((count, 6))
                twists[:, 0], twists[:, 5] = part.T
                bases = camera.twist_poses(base, twists, PERIOD, np.eye(4))[every - 1::every]
                frames.append(session.imagine(bases @ self._optical, root.intrinsics, rung.steps))
                base, at = bases[-1], at + count
            return VideoFuture(np.asarray(actions, np.float32), np.concatenate(frames)[:len(actions)])
        finally:
            session.close()

    def _sizes(self, chunks: int) -> list[int]:
        """Return the number of images of each of the next ``chunks`` chunks."""
        whole = self._world.frame_images * self._world.preset.chunk_frames
        return [self._session.images_of_chunk, *[whole] * (chunks - 1)]

    def _forget(self) -> None:
        session, self._session, self._root = self._session, None, None
        if session:
            session.close()
