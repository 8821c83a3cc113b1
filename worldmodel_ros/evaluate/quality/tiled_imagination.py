"""Open-loop predictions of a model with tiles, made by its paged sessions one after the other, as on robots."""
from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...engine.backends.torch import TorchBackend
from ...engine.engine import Engine
from ...engine.futures import Moment
from ...engine.network_calls import run
from ...engine.session import Session
from ...model.sampling import Steps
from ...model.world_model import WorldModel
from .imagination import Imagination


@dataclass(frozen=True, eq=False)
class SessionMemory:
    """Moments of sessions, one a stream, which hold their pages; ``newest`` is their newest frame, ``latent`` (B, h, w, Z)."""

    sessions: tuple[Session, ...]
    moments: tuple[Moment, ...]
    newest: int
    latent: Tensor

    def branches(self, count: int) -> SessionMemory:
        """Return each stream ``count`` times, one after the other."""
        return replace(self, sessions=tuple(each for each in self.sessions for _ in range(count)),
                       moments=tuple(each for each in self.moments for _ in range(count)),
                       latent=self.latent.repeat_interleave(count, 0))


class TiledImagination(Imagination):
    """Like ``Imagination``, for at most ``streams`` at a time: observing new ones closes earlier ones. ``backend`` runs the
    model; None: in float32. ``anchors``: as of ``Engine``."""

    def __init__(self, model: WorldModel, folder: Path, streams: int, backend: TorchBackend | None = None,
                 anchors: int = 0) -> None:
        self.model, self.spec = model, model.preset
        self.device = next(model.parameters()).device
        self._engine, self._open = Engine(backend or TorchBackend(model), folder, streams, anchors=anchors), []

    def observe(self, frames: np.ndarray, executed: np.ndarray, seeds: tuple[int, ...]) -> SessionMemory:
        for session in self._open:
            session.close()
        self._open = [self._engine.open_session(seed) for seed in seeds]
        for session, images, actions in zip(self._open, frames, executed, strict=True):
            for image, action in zip(images, actions, strict=True):
                session.observe(image, action)
        return self._memory(tuple(self._open), tuple(session.moment() for session in self._open))

    def roll(self, memory: SessionMemory, actions: np.ndarray, steps: Steps, keep: bool = True
             ) -> tuple[Tensor, SessionMemory | None]:
        latents, ends = [], []
        for session, moment, commands in zip(memory.sessions, memory.moments, actions, strict=True):
            roll = session.extending if keep else session.branching
            found = run(roll(np.asarray(commands, np.float32), steps, moment), self._engine.backend)
            future, end = found if keep else (found, None)
            latents.append(torch.from_numpy(future.latents))
            ends.append(end)
        return torch.stack(latents).to(self.device), self._memory(memory.sessions, tuple(ends)) if keep else None

    def _memory(self, sessions: tuple[Session, ...], moments: tuple[Moment, ...]) -> SessionMemory:
        latent = torch.stack([torch.as_tensor(moment.latent, device=self.device) for moment in moments])
        return SessionMemory(sessions, moments, moments[0].time, latent)
