"""Chunk-by-chunk sampling: denoise in the steps of a schedule, then pass the clean latents once more to fill the cache."""
from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from .dit import CameraControl, Prompt, SelfAttention, WanDiT
from .schedule import Schedule, Step


Passes = Generator[None, None, Tensor]  # yields after each pass; returns the chunk's clean latents


class Sequence(Protocol):
    """What a chunk is appended to: ``sequence.PagedSequence`` or ``dense.DenseSequence``."""

    frame: int

    def chunk(self, frames: int, observed: bool = False) -> AbstractContextManager[SelfAttention]: ...


class Sampler:
    """Samples and commits chunks of one network by one schedule; holds no state of a sequence."""

    def __init__(self, dit: WanDiT, schedule: Schedule):
        self.dit, self.schedule = dit, schedule
        with torch.inference_mode():
            self._modulation = {timestep: dit.modulation(timestep) for timestep in schedule.timesteps}

    @torch.inference_mode()
    def chunk(self, sequence: Sequence, prompt: Prompt, noise: Callable[[int], Tensor], condition: Tensor | None = None,
              rays: Tensor | None = None) -> Tensor:
        """Return the next chunk's clean latents, float32 (C, F, h, w), and append it to the sequence.

        ``noise`` returns that of a step, standard normal float32 (C, F, h, w), counted from 0; ``condition``
        (condition_channels, F, h, w) as ``ImageCondition.next`` makes it, and ``rays`` (N, camera_width) as
        ``camera.ray_tokens`` does, for networks that take them.
        """
        return finished(self.pass_by_pass(sequence, prompt, noise, condition, rays))

    @torch.inference_mode()
    def pass_by_pass(self, sequence: Sequence, prompt: Prompt, noise: Callable[[int], Tensor], condition: Tensor | None = None,
                     rays: Tensor | None = None) -> Passes:
        """``chunk`` as a generator that yields after each pass except the last one, which commits. Other sequences may go on
        in between; the sequence has the chunk at the end, or nothing of it if the generator is closed before."""
        latents, camera = noise(0), self._control(rays)
        with sequence.chunk(latents.shape[1]) as attention:
            denoising = denoise(self.schedule, lambda step: noise(step) if step else latents)
            clean = yield from each_pass(denoising, lambda step, noisy: self._velocity(
                step, noisy, prompt, condition, camera, attention))
            self._keep(clean, prompt, condition, camera, attention)
        return clean

    @torch.inference_mode()
    def passes(self, attention: SelfAttention, prompt: Prompt, noise: Callable[[int], Tensor], condition: Tensor | None,
               rays: Tensor | None) -> Tensor:
        """Run all passes of a chunk, as ``chunk``; ``attention`` keeps its keys and values."""
        camera = self._control(rays)
        clean = finished(each_pass(denoise(self.schedule, noise), lambda step, latents: self._velocity(
            step, latents, prompt, condition, camera, attention)))
        self._keep(clean, prompt, condition, camera, attention)
        return clean

    @torch.inference_mode()
    def commit(self, sequence: Sequence, prompt: Prompt, latents: Tensor, condition: Tensor | None = None,
               rays: Tensor | None = None) -> None:
        """Append observed frames: clean latents (C, F, h, w) of real images, which are not denoised."""
        camera = self._control(rays)
        with sequence.chunk(latents.shape[1], observed=True) as attention:
            self._keep(latents, prompt, condition, camera, attention)

    def _control(self, rays: Tensor | None) -> CameraControl | None:
        return None if rays is None else self.dit.camera_control(rays)

    def _velocity(self, step: Step, latents: Tensor, prompt: Prompt, condition: Tensor | None, camera: CameraControl | None,
                  attention: SelfAttention) -> Tensor:
        return self.dit(with_condition(latents, condition), self._modulation[step.timestep], prompt, camera, attention)

    def _keep(self, clean: Tensor, prompt: Prompt, condition: Tensor | None, camera: CameraControl | None,
              attention: SelfAttention) -> None:
        self.dit.keep(with_condition(clean, condition), self._modulation[self.schedule.commit], prompt, camera, attention)


def denoise(schedule: Schedule, noise: Callable[[int], Tensor]) -> Generator[tuple[Step, Tensor], Tensor, Tensor]:
    """Return clean latents, float32, from the noise of the steps: yields each step and its latents, and is sent the
    network's velocity for them."""
    latents, clean, found = noise(0), None, None
    for index, step in enumerate(schedule.steps):
        if index:
            # New noise, or the noise that the network found.
            added = noise(index) if schedule.renewed else (clean.double() + found).float()
            latents = (1.0 - step.entry) * clean + step.entry * added
        found = (yield step, latents).double()
        # In float64: later steps would amplify a rounding error.
        clean = (latents.double() - step.sigma * found).float()
    return clean


def each_pass(denoising: Generator[tuple[Step, Tensor], Tensor, Tensor], velocity: Callable[[Step, Tensor], Tensor]) -> Passes:
    """Denoise by a network, yielding after each pass."""
    step, latents = next(denoising)
    while True:
        found = velocity(step, latents)
        yield
        try:
            step, latents = denoising.send(found)
        except StopIteration as end:
            return end.value


def finished(passes: Passes) -> Tensor:
    """Run all passes; return their result."""
    while True:
        try:
            next(passes)
        except StopIteration as end:
            return end.value


def with_condition(latents: Tensor, condition: Tensor | None) -> Tensor:
    """Return a network's input: noisy latents, and the first image's condition, if it takes one."""
    return latents if condition is None else torch.cat([latents, condition.to(latents)])
