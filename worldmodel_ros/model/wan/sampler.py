"""Chunk after chunk: denoised in the steps of a schedule, then passed once more, clean, for the chunks to come."""
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from .dit import CameraControl, Prompt, SelfAttention, WanDiT
from .schedule import Schedule, Step


class Sequence(Protocol):
    """What a chunk is appended to: ``sequence.PagedSequence`` or ``dense.DenseSequence``."""

    frame: int

    def chunk(self, frames: int, observed: bool = False) -> AbstractContextManager[SelfAttention]: ...


class Sampler:
    """Samples and commits chunks of one network by one schedule; holds nothing of a sequence."""

    def __init__(self, dit: WanDiT, schedule: Schedule):
        self.dit, self.schedule = dit, schedule
        with torch.inference_mode():
            self._modulation = {timestep: dit.modulation(timestep) for timestep in schedule.timesteps}

    @torch.inference_mode()
    def chunk(self, sequence: Sequence, prompt: Prompt, noise: Callable[[int], Tensor], condition: Tensor | None = None,
              camera: CameraControl | None = None) -> Tensor:
        """The next chunk's clean latents, float32 (C, F, h, w), appended to the sequence.

        ``noise`` gives that of a step, standard normal float32 (C, F, h, w), counted from 0; ``condition``
        (condition_channels, F, h, w) as ``condition`` makes it, for networks that take one.
        """
        latents = noise(0)
        with sequence.chunk(latents.shape[1]) as attention:
            return self.passes(attention, prompt, lambda step: noise(step) if step else latents, condition, camera)

    @torch.inference_mode()
    def passes(self, attention: SelfAttention, prompt: Prompt, noise: Callable[[int], Tensor], condition: Tensor | None,
               camera: CameraControl | None) -> Tensor:
        """All passes of a chunk, as ``chunk``, whose keys and values ``attention`` keeps."""
        def velocity(step: Step, latents: Tensor) -> Tensor:
            return self.dit(with_condition(latents, condition), self._modulation[step.timestep], prompt, camera, attention)
        clean = denoise(self.schedule, noise, velocity)
        self._keep(clean, prompt, condition, camera, attention)
        return clean

    @torch.inference_mode()
    def commit(self, sequence: Sequence, prompt: Prompt, latents: Tensor, condition: Tensor | None = None,
               camera: CameraControl | None = None) -> None:
        """Append observed frames: clean latents (C, F, h, w) of real images, which no step denoises."""
        with sequence.chunk(latents.shape[1], observed=True) as attention:
            self._keep(latents, prompt, condition, camera, attention)

    def _keep(self, clean: Tensor, prompt: Prompt, condition: Tensor | None, camera: CameraControl | None,
              attention: SelfAttention) -> None:
        self.dit.keep(with_condition(clean, condition), self._modulation[self.schedule.commit], prompt, camera, attention)


def denoise(schedule: Schedule, noise: Callable[[int], Tensor], velocity: Callable[[Step, Tensor], Tensor]) -> Tensor:
    """Clean latents, float32, from the noise of the steps, by what a network says of a step's latents."""
    latents, clean, found = noise(0), None, None
    for index, step in enumerate(schedule.steps):
        if index:
            # The noise that the network found, or new noise.
            added = noise(index) if schedule.renewed else (clean.double() + found).float()
            latents = (1.0 - step.entry) * clean + step.entry * added
        found = velocity(step, latents).double()
        # What is left of rounding here would be amplified by the steps to come.
        clean = (latents.double() - step.sigma * found).float()
    return clean


def with_condition(latents: Tensor, condition: Tensor | None) -> Tensor:
    """What a network takes: noisy latents, and what the first image says, if it takes that."""
    return latents if condition is None else torch.cat([latents, condition.to(latents)])
