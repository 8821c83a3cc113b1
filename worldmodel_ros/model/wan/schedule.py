"""Noise schedules of distilled flow-matching models: what a step embeds, removes and adds."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

TRAINED_STEPS = 1000


@dataclass(frozen=True)
class Step:
    """One pass of a chunk.

    ``timestep`` is what the network embeds; ``sigma`` the noise level of its input, so that the clean latents are
    x - sigma * velocity; ``entry`` the noise level to which the previous step's clean latents are brought,
    (1 - entry) * clean + entry * noise. The first step has pure noise, and 1.0.
    """

    timestep: float
    sigma: float
    entry: float


@dataclass(frozen=True)
class Schedule:
    """The steps of a chunk, and the timestep of the pass on the clean latents that writes the cache. ``renewed``: a step
    adds new noise; otherwise it adds the noise that the network found in the previous step, as an Euler step does."""

    steps: tuple[Step, ...]
    commit: float = 0.0
    renewed: bool = True

    def __post_init__(self):
        levels = [step.sigma for step in self.steps]
        if not levels or sorted(levels, reverse=True) != levels or not 0.0 < levels[-1] <= levels[0] <= 1.0:
            raise ValueError(f'noise levels {levels} must fall, from at most 1 to more than 0')

    @property
    def timesteps(self) -> tuple[float, ...]:
        """All timesteps that the network is evaluated at, the commit last."""
        return (*(step.timestep for step in self.steps), self.commit)

    def fewer(self, count: int) -> Schedule:
        """Return a schedule with ``count`` of the steps, the first among them and the others as far apart as possible. The
        networks were distilled for all, so quality is lost. Raises ValueError for none or for more than there are."""
        if not 1 <= count <= len(self.steps):
            raise ValueError(f'{count} steps of {len(self.steps)}')
        return replace(self, steps=tuple(self.steps[at * len(self.steps) // count] for at in range(count)))

    @classmethod
    def unipc(cls, indices: Sequence[int], shift: float) -> Schedule:
        """Return steps of UniPC's table (Zhao et al. 2023) of ``TRAINED_STEPS`` levels for flow matching, with its resolution
        ``shift`` (Esser et al. 2024).

        The published models embed its timesteps truncated to integers, some of which occur twice: they read the level to remove
        at the first one and the level to add at the second.
        """
        top = np.float32(1.0 - 1.0 / TRAINED_STEPS)
        sigmas = _shifted(np.linspace(top, 0.0, TRAINED_STEPS + 1)[:-1], shift)
        timesteps = (sigmas * TRAINED_STEPS).astype(np.int64)
        steps = []
        for index in indices:
            same = np.flatnonzero(timesteps == timesteps[index])
            entry = float(np.float32(sigmas[same[:2][-1]])) if steps else 1.0
            steps.append(Step(float(timesteps[index]), float(np.float32(sigmas[same[0]])), entry))
        return cls(tuple(steps))

    @classmethod
    def self_forcing(cls, steps: Sequence[int], shift: float) -> Schedule:
        """Return steps out of ``TRAINED_STEPS``, warped by ``shift`` as in Self-Forcing (Huang et al. 2025)."""
        sigmas = _shifted(np.linspace(1.0, 0.0, TRAINED_STEPS + 1, dtype=np.float32)[:-1], np.float32(shift))
        levels = [float(np.float32(sigmas[TRAINED_STEPS - step])) for step in steps]
        return cls(tuple(Step(float(np.float32(level) * np.float32(TRAINED_STEPS)), level, level) for level in levels))

    @classmethod
    def euler(cls, levels: Sequence[float]) -> Schedule:
        """Return Euler steps of the flow from each noise level to the next one, and from the last one to none."""
        return cls(tuple(Step(float(np.float32(level) * np.float32(TRAINED_STEPS)), float(level), float(level) if at else 1.0)
                         for at, level in enumerate(levels)), renewed=False)


def _shifted(sigmas: np.ndarray, shift: float) -> np.ndarray:
    return shift * sigmas / (1 + (shift - 1) * sigmas)
