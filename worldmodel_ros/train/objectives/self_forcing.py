"""Stage ``self_forcing``: the student's losses on what the student itself has imagined, so that errors do not compound.

A long rollout continues from its own predictions, which no recorded clip contains. Self Forcing (Huang
et al. 2025) trains on roll-outs by back-propagating a distribution loss into their last step. Here the true episode under
the same actions is known, which allows a cheaper, parallel form: the averaged student rolls clips out without
gradients, exactly as a session does; then one pass over a crop of each, with the imagined frames as (constant) context,
trains all kinds of steps. A roll-out serves several steps.

An imagined episode diverges from the true one within a second: wheel gains are unknown, and what comes into view was
never seen. From there the truth is one future among many, and a network trained to predict it learns their blurred mean,
which degrades the near predictions too. Hence three safeguards. Most roll-outs are held near the truth (tethered): their
context has the student's flaws, but the true continuation is still correct, so that the student learns to correct its
own errors. The truth is weighted by how near the imagined frames still are to it; for the rest the flow follows the
frozen teacher's, given the same context. And half of each batch are recorded clips, with the loss of the previous stage.
"""
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from worldmodel_ros.model.world_model import WorldModel
from worldmodel_ros.train.data.batches import Batch, expand, noisy_chunks, noisy_context, per_chunk
from worldmodel_ros.train.data.episodes import Episodes
from worldmodel_ros.train.run.options import SelfForcingOptions
from .dmd import DistributionMatching
from .sampler import ChunkSampler, roll_out
from .student import StudentObjective


class SelfForcingObjective(StudentObjective):
    """Keeps the roll-outs of a batch, and draws crops of them until new ones are due."""

    options: SelfForcingOptions

    def __init__(self, model: WorldModel, averaged: WorldModel, teacher: WorldModel, episodes: Episodes,
                 options: SelfForcingOptions):
        super().__init__(model, averaged, teacher, episodes, options)
        self.window, k = self.preset.window_frames, self.preset.chunk_frames
        imagined = options.clip_frames - self.window
        if imagined < k or imagined % k:
            raise ValueError(f'clip_frames is {options.clip_frames}: choose the window of {self.window} frames and '
                             f'whole chunks of {k} after it, {self.window + k} for one')
        if not k < options.crop_frames <= options.clip_frames:
            raise ValueError(f'crop_frames is {options.crop_frames}: choose more than a chunk of {k} frames, and no '
                             f'more than clip_frames, {options.clip_frames}')
        if not 0.0 <= options.recorded_share < 1.0:
            raise ValueError(f'recorded_share is {options.recorded_share}: choose from 0 to less than 1')
        self.rolled = options.batch - int(options.recorded_share * options.batch)  # clips of a batch
        self.matching = DistributionMatching(self, averaged, teacher, options) if options.dmd_weight else None
        self.left = 0  # steps that the roll-outs still serve
        self.latents: Tensor  # (rolled, clip_frames, h, w, Z), observed and then imagined
        self.episode: Tensor  # (rolled, 1)
        self.frame: Tensor  # (rolled, clip_frames)

    def draw(self, rng: np.random.Generator, generator: torch.Generator) -> Batch:
        if not self.left:
            self._roll_out(rng, generator)
            self.left = self.options.reuse
        self.left -= 1
        batch = self.draw_steps(self._clips(rng, generator), generator)
        if self.matching:
            batch.far = self.matching.draw(rng, generator)
        return batch

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        loss, values = super().loss(batch)
        if self.matching:
            values['dmd'] = self.matching.loss(batch.far)
            loss = loss + self.options.dmd_weight * values['dmd']
        return loss, values

    def after_update(self, step: int) -> None:
        if self.matching:
            self.matching.after_update()

    def networks(self) -> list[nn.Module]:
        return super().networks() + (list(self.matching.fake.blocks) if self.matching else [])

    def _roll_out(self, rng: np.random.Generator, generator: torch.Generator) -> None:
        options, device = self.options, self.episodes.frames.device
        self.episode, self.frame = self.episodes.clips(self.rolled, options.clip_frames, generator)
        clean = self.episodes.latents[self.episode, self.frame].float()
        actions = self.episodes.actions[self.episode, self.frame]
        noise = torch.randn(clean[:, self.window:].shape, device=device, generator=generator)
        steps = 1 if rng.random() < options.one_step_share else 2
        strength, held = torch.rand(2, self.rolled, device=device, generator=generator)
        tether = torch.where(held < options.tether_share, strength, 0.0)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == 'cuda'):
            imagined = roll_out(self.averaged.dit, clean[:, :self.window], actions, noise, steps,
                                clean[:, self.window:], tether)
        self.latents = torch.cat([clean[:, :self.window], imagined.float()], 1)

    def _clips(self, rng: np.random.Generator, generator: torch.Generator) -> Batch:
        """Draw a crop of each roll-out, its frames as context and the true ones as targets; and recorded clips."""
        options, device = self.options, self.latents.device
        b, crop = self.rolled, options.crop_frames
        index = (torch.randint(options.clip_frames - crop + 1, (b, 1), device=device, generator=generator)
                 + torch.arange(crop, device=device))
        episode, frame = self.episode, self.frame.gather(1, index)
        context = self.latents[torch.arange(b, device=device)[:, None], index]
        if b < options.batch:
            recorded = self.episodes.clips(options.batch - b, crop, generator)
            episode, frame = torch.cat([episode, recorded[0]]), torch.cat([frame, recorded[1]])
            context = torch.cat([context, noisy_context(self.episodes.latents[recorded].float(), options.context_noise,
                                                        generator)])
        batch = noisy_chunks(self.preset, options, self.episodes.latents[episode, frame].float(), context,
                             self.episodes.actions[episode, frame], episode, frame, rng, generator)
        batch.observed[:b] = index < self.window
        apart = self._apart(batch)
        batch.trust = self._trust(apart)
        batch.flow_trust = self._trust(apart / (1.0 + apart * (batch.tau / (1.0 - batch.tau)).square()))
        return batch

    def _apart(self, batch: Batch) -> Tensor:
        """How far (B, N) the imagined frames right before each chunk are from the true ones: mean squared distance of
        the latents, 0 where they were observed."""
        k = self.preset.chunk_frames
        distance = (batch.context - batch.clean).square().mean((2, 3, 4)) * ~batch.observed
        before = (batch.starts[:, None] - 1 - np.arange(k)).clip(0)
        return per_chunk(self.preset, distance[:, torch.from_numpy(before).to(distance.device)].mean(-1))

    def _trust(self, apart: Tensor) -> Tensor:
        return 1.0 / (1.0 + (apart / self.options.truth_distance).square())

    def flow_target(self, batch: Batch, z: Tensor) -> Tensor:
        """Return the truth as far as it is trusted, and for the rest what the frozen teacher predicts in the same place.

        Noisy latents reveal what the context does not: ``flow_trust`` follows from the error that remains after the
        optimal mean of two sources of the same image, of squared error ``apart`` and (1 - tau)^2 / tau^2.
        """
        told = ChunkSampler(self.teacher, batch).predict(z, batch.tau, batch.step)
        return torch.lerp(told, batch.target, expand(batch.flow_trust))

    def state(self) -> dict[str, Tensor]:
        state = super().state() | {'left': torch.tensor(self.left)} | (self.matching.state() if self.matching else {})
        return state | {name: getattr(self, name) for name in ('latents', 'episode', 'frame')} if self.left else state

    def restore(self, state: dict[str, Tensor]) -> None:
        super().restore(state)
        if self.matching:
            self.matching.restore(state)
        self.left, device = int(state['left']), self.episodes.frames.device
        if self.left:
            for name in ('latents', 'episode', 'frame'):
                setattr(self, name, state[name].to(device))
            # Episodes simulated during training arrive in another order.
            observed = self.episodes.latents[self.episode, self.frame[:, :self.window]].float()
            if not torch.equal(observed, self.latents[:, :self.window]):
                self.left = 0
