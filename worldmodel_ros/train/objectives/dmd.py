"""Distribution matching on long rollouts: predictions after minutes should still look like recordings.

No episode lasts that long, so there is no ground truth; but any four frames must look like recorded ones. As in DMD
(Yin et al. 2024) and Self-Forcing++ (Cui et al. 2025), the student's chunk follows the difference of two scores: that of
the teacher, which models recorded chunks, and that of a copy continually trained on imagined ones. Both judge a chunk
alone, without its context, which may already have drifted; for that the teacher was trained with blind chunks.

Streams of imagined frames continue from step to step under recorded actions and restart when they are old, so that all
ages occur at any time.
"""
from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worldmodel_ros.model.dit import DiT
from worldmodel_ros.model.sampling import FLOW, HALF, WHOLE
from worldmodel_ros.train.data import clips
from worldmodel_ros.train.data.batches import Chunks, expand, mix, per_chunk
from worldmodel_ros.train.run.options import SelfForcingOptions
from worldmodel_ros.train.run.progress import moments_of, restore_moments
from .sampler import ChunkSampler, roll_out
from .teacher import WorldObjective

# Noise levels at which chunks are judged: the extremes say nothing, or only something about detail.
LEVELS = (0.1, 0.9)


@dataclass
class Far(Chunks):
    """Chunks of the streams: whole (B, N), whether they are made in one step; noise and levels (2, B * chunks, K, ...)
    for the two judgements, the student's and the copy's."""

    whole: Tensor
    judging_noise: Tensor
    level: Tensor


class DistributionMatching:
    """The loss on long rollouts; owns the streams and the network that models them."""

    def __init__(self, objective: WorldObjective, averaged, teacher, options: SelfForcingOptions):
        self.objective, self.averaged, self.teacher, self.options = objective, averaged, teacher, options
        self.preset, self.episodes = objective.preset, objective.episodes
        self.fake = copy.deepcopy(teacher.dit).requires_grad_(True)
        self.optimiser = torch.optim.AdamW(self.fake.parameters(), options.dmd_rate, betas=(0.5, 0.99))
        self.window, k = self.preset.window_frames, self.preset.chunk_frames
        self.ahead = max(1, (options.crop_frames - self.window) // k) * k  # frames by which the streams advance at once
        self.latents: Tensor | None = None  # (B, window + ahead, h, w, Z)
        self.left = 0
        self.seen: tuple[Tensor, Far] | None = None

    def draw(self, rng: np.random.Generator, generator: torch.Generator) -> Far:
        if not self.left:
            self._go_on(rng, generator)
            self.left = self.options.reuse
        self.left -= 1
        k, device = self.preset.chunk_frames, self.latents.device
        b, chunks = len(self.latents), self.ahead // k
        shape = (b, self.ahead, *self.latents.shape[2:])
        judged = (2, b * chunks, k, *self.latents.shape[2:])
        low, high = LEVELS

        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, device=device, generator=generator)
        return Far(self.latents, self.actions, self.window + k * np.arange(chunks),
                   torch.randn(shape, device=device, generator=generator), self.actions[:, self.window:],
                   per_chunk(self.preset, uniform(b, chunks) < 0.5),
                   torch.randn(judged, device=device, generator=generator),
                   (low + (high - low) * uniform(2, b * chunks, 1)).expand(*judged[:3]))

    def _go_on(self, rng: np.random.Generator, generator: torch.Generator) -> None:
        """Imagine the next frames of every stream."""
        options, device = self.options, self.episodes.frames.device
        episode, frame = self.episodes.clips(options.batch, self.window + self.ahead, generator)
        actions = self.episodes.actions[episode, frame]
        real = self.episodes.latents[episode, frame[:, :self.window]].float()
        if self.latents is None:
            self.age = options.dmd_frames * torch.rand(options.batch, device=device, generator=generator)
            begun, told = real, actions[:, :self.window]
        else:
            self.age = self.age + self.ahead
            old = self.age > options.dmd_frames
            self.age = torch.where(old, 0.0, self.age)
            begun = torch.where(old[:, None, None, None, None], real, self.latents[:, -self.window:])
            told = torch.where(old[:, None, None], actions[:, :self.window], self.actions[:, -self.window:])
        self.actions = torch.cat([told, actions[:, self.window:]], 1)
        noise = torch.randn((len(begun), self.ahead, *begun.shape[2:]), device=device, generator=generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == 'cuda'):
            imagined = roll_out(self.averaged.dit, begun, self.actions, noise,
                                1 if rng.random() < options.one_step_share else 2)
        self.latents = torch.cat([begun, imagined.float()], 1)

    def loss(self, far: Far) -> Tensor:
        """Return the loss that moves the student's chunks from its own distribution towards the recorded one."""
        zero = torch.zeros(far.noise.shape[:2], device=far.noise.device)
        with torch.no_grad():
            half_way = ChunkSampler(self.averaged, far).euler(far.noise, zero, 0.5, HALF)
        z = torch.where(expand(far.whole), far.noise, half_way)
        tau, step = torch.where(far.whole, 0.0, 0.5), torch.where(far.whole, WHOLE, HALF)
        x = self.objective.forward(far, z, tau, step)[0].unflatten(1, (-1, self.preset.chunk_frames)).flatten(0, 1)
        self.seen = x.detach(), far
        with torch.no_grad():
            noisy = mix(far.judging_noise[0], x, far.level[0])
            real, fake = (self._alone(dit, noisy, far.level[0], far) for dit in (self.teacher.dit, self.fake))
            away = (fake - real) / (x - real).abs().mean((1, 2, 3, 4), keepdim=True).clamp_min(1e-3)
        return 0.5 * (x - (x.detach() - away)).square().mean()

    def after_update(self) -> None:
        """Train the copy on the flow of the chunks that the student has just made."""
        x, far = self.seen
        device = x.device
        with torch.enable_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == 'cuda'):
            level = far.level[1]
            predicted = self._alone(self.fake, mix(far.judging_noise[1], x, level), level, far)
            loss = ((0.9 * level + 0.1) * (predicted - x).square().mean((2, 3, 4))).mean()
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()

    def _alone(self, dit: DiT, noisy: Tensor, level: Tensor, far: Far) -> Tensor:
        """Predicted clean latents of chunks (B * chunks, K, ...) that see nothing but themselves."""
        k, device = self.preset.chunk_frames, noisy.device
        actions = far.noisy_actions.unflatten(1, (-1, k)).flatten(0, 1)
        return dit(noisy, level, torch.full_like(level, FLOW, dtype=torch.long), actions,
                   clips.rotary(self.preset, np.arange(k), torch.zeros(1, k, device=device)),
                   torch.zeros(k, k, device=device))[0].float()

    def state(self) -> dict[str, Tensor]:
        """Return what ``restore`` needs, by names that begin with ``dmd.``."""
        state = {f'dmd.fake.{name}': tensor for name, tensor in self.fake.state_dict().items()}
        state |= {f'dmd.optimiser.{name}': value for name, value in moments_of(self.optimiser).items()}
        if self.latents is not None:
            state |= {'dmd.latents': self.latents, 'dmd.actions': self.actions, 'dmd.age': self.age,
                      'dmd.left': torch.tensor(self.left)}
        return state

    def restore(self, state: dict[str, Tensor]) -> None:
        device = self.episodes.frames.device
        self.fake.load_state_dict({name.removeprefix('dmd.fake.'): tensor for name, tensor in state.items()
                                   if name.startswith('dmd.fake.')})
        restore_moments(self.optimiser, {name.removeprefix('dmd.optimiser.'): tensor for name, tensor in state.items()
                                         if name.startswith('dmd.optimiser.')})
        if 'dmd.latents' in state:
            self.latents, self.actions, self.age = (state[f'dmd.{n}'].to(device) for n in ('latents', 'actions', 'age'))
            self.left = int(state['dmd.left'])
