"""Noise levels of distilled flow-matching models, as objects: what a step embeds, removes and adds."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

TRAINED_STEPS = 1000


@dataclass(frozen=True)
class Step:
    """One pass of a chunk.

    ``timestep`` is what the network embeds; ``sigma`` the noise in its input, by which the clean latents are
    x - sigma * velocity; ``entry`` the noise level to which the clean latents of the step before are brought,
    (1 - entry) * clean + entry * noise. The first step has pure noise, and 1.0.
    """

    timestep: float
    sigma: float
    entry: float


@dataclass(frozen=True)
class Schedule:
    """The steps of a chunk, and the timestep of the pass on the clean latents that writes the cache. ``renewed``: what a step
    adds is new noise; else it is the noise that the network found in the step before, as an Euler step leaves it."""

    steps: tuple[Step, ...]
    commit: float = 0.0
    renewed: bool = True

    def __post_init__(self):
        levels = [step.sigma for step in self.steps]
        if not levels or sorted(levels, reverse=True) != levels or not 0.0 < levels[-1] <= levels[0] <= 1.0:
            raise ValueError(f'noise levels {levels} must fall, from at most 1 to more than 0')

    @property
    def timesteps(self) -> tuple[float, ...]:
        """All that the network is asked for, the commit last."""
        return (*(step.timestep for step in self.steps), self.commit)

    def fewer(self, count: int) -> Schedule:
        """So many of the steps, the first among them and the others as far apart as can be. The networks were distilled for
        all: quality is lost. Raises ValueError for none or for more than there are."""
        if not 1 <= count <= len(self.steps):
            raise ValueError(f'{count} steps of {len(self.steps)}')
        return replace(self, steps=tuple(self.steps[at * len(self.steps) // count] for at in range(count)))

    @classmethod
    def unipc(cls, indices: Sequence[int], shift: float) -> Schedule:
        """Steps of the table of ``TRAINED_STEPS`` levels that UniPC (Zhao et al. 2023) has for flow matching, with its
        resolution ``shift`` (Esser et al. 2024).

        The published models embed its timesteps cut to integers, of which some are there twice: they read the level to
        remove at the first one and the level to add at the second.
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
        """Steps out of ``TRAINED_STEPS``, warped by ``shift`` as by Self-Forcing (Huang et al. 2025)."""
        sigmas = _shifted(np.linspace(1.0, 0.0, TRAINED_STEPS + 1, dtype=np.float32)[:-1], np.float32(shift))
        levels = [float(np.float32(sigmas[TRAINED_STEPS - step])) for step in steps]
        return cls(tuple(Step(float(np.float32(level) * np.float32(TRAINED_STEPS)), level, level) for level in levels))

    @classmethod
    def euler(cls, levels: Sequence[float]) -> Schedule:
        """Euler steps of the flow from each noise level to the next one, and from the last one to none."""
        return cls(tuple(Step(float(np.float32(level) * np.float32(TRAINED_STEPS)), float(level), float(level) if at else 1.0)
                         for at, level in enumerate(levels)), renewed=False)


def _shifted(sigmas: np.ndarray, shift: float) -> np.ndarray:
    return shift * sigmas / (1 + (shift - 1) * sigmas)
