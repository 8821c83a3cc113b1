"""One loaded model: its back end, its measured step times and the sessions that are opened on it."""
from __future__ import annotations

import hashlib
import json
import time
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..cache.slab_index import SlabIndex
from ..cache.stores.protocol import SlabStore
from .anchors import check_anchors
from .backends.protocol import Backend
from .memory import Memory
from .network_calls import SESSION, StepTimes
from .session import Session
from .session_file import Loaded, read
from .session_store import StoredSession

WARM_UP_TICKS = 24  # with 21 or more, a single interruption does not reach the 0.95 quantile
WARM_UP_PAUSE = 0.01  # s
_PIECE = 2**20  # bytes read at a time


class Engine:
    """One model, whose sessions share its weights, its step times and its pools of pages."""

    def __init__(self, backend: Backend, folder: Path, sessions: int, session_type: type[Session] = Session,
                 anchors: int = 0):
        """``folder`` holds the weights; ``sessions`` is how many sessions have memory at a time; ``anchors``: how many observed
        moments each of them keeps, see ``engine.anchors``. Raises ValueError for a preset whose actions do not tell where
        the robot is."""
        check_anchors(backend.preset, anchors)
        self.backend, self._session_type, self._anchors = backend, session_type, anchors
        self.spec = backend.preset
        self.folder = folder
        self.sessions = sessions
        self.memory = Memory(backend.preset, backend.storage, sessions, backend.older, backend.distant,
                             backend.before_writing, anchors)
        self.slab_index = SlabIndex()
        self.step_times = StepTimes()

    def open_session(self, seed: int = 0) -> Session:
        """Return a new session; ``seed`` fixes the noise that its predictions start from.

        Raises OutOfPages when more sessions are open than the engine was made for and there is no room for another.
        """
        return self._session(self.step_times, seed)

    def _session(self, step_times: StepTimes, seed: int = 0) -> Session:
        return self._session_type(self.backend, self.memory, step_times, seed, lambda: self.fingerprint, self._anchors)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the preset and the weight files: only models with the same one can exchange sessions. With
        random weights, of the preset alone. Takes seconds for a large model."""
        digest = hashlib.sha256(json.dumps(self.spec.to_dict(), sort_keys=True).encode())
        for path in sorted(self.folder.glob('weights-*.safetensors')):
            with path.open('rb') as file:
                while piece := file.read(_PIECE):
                    digest.update(piece)
        return digest.hexdigest()

    def read_session(self, file: BinaryIO, size: int) -> Loaded:
        """Read and check a session from a file of ``size`` bytes, in any thread. Raises SessionFileError."""
        loaded = read(file, size, self.spec, self.fingerprint, self.memory)
        loaded.epoch = self.backend.epoch
        return loaded

    def stored_session(self, store: SlabStore) -> StoredSession:
        """Return a session to be read from a store; it shares slabs that other sessions of this engine already hold."""
        stored = StoredSession(store, self.spec, self.fingerprint, self.memory, self.slab_index)
        stored.epoch = self.backend.epoch
        return stored

    @property
    def degraded_reason(self) -> str:
        """Why it cannot look ahead at present; empty when it can."""
        return self.backend.degraded_reason

    def close(self) -> None:
        """End the other processes of a model on several GPUs; does nothing for any other model."""
        self.backend.close()

    def warm_up(self, ticks: int = WARM_UP_TICKS) -> None:
        """Run ticks with one and two denoising steps on noise, to get slow first calls over and measure the step times."""
        with self.backend.starting_up():
            self._warm_up(ticks)

    def _warm_up(self, ticks: int) -> None:
        spec = self.spec
        rng = np.random.default_rng(0)
        # The first calls allocate, compile and capture, and would stay in the quantiles for minutes; a window that is
        # not full yet is a separate case.
        young = spec.tile[0] if spec.tile else spec.window_frames
        first = 2 + young if self.backend.asynchronous else 2
        for step_times, count in ((StepTimes(), first), (self.step_times, ticks)):
            session = self._session(step_times)
            for tick in range(count):
                frame = rng.integers(0, 256, (*spec.image_size, 3), dtype=np.uint8)
                session.observe(frame, np.zeros(spec.actions, np.float32))
                ahead = session.look_ahead(spec.goals[0], steps=1 + tick % 2)
                ahead.plan()
                session.decode(ahead.future())
                # A real-time thread that never sleeps would starve the machine's other processes.
                time.sleep(WARM_UP_PAUSE)
                if step_times is not self.step_times and tick in (0, count - 1):
                    for _ in session.what_if(np.zeros((spec.chunk_frames + 1, spec.actions), np.float32)):
                        pass
                if step_times is self.step_times and tick >= count // 2:
                    start = time.perf_counter()
                    session.capture()
                    step_times.record(SESSION, time.perf_counter() - start)
