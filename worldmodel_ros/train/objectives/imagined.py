"""Clips that continue with the model's own predictions, so that it learns to correct its errors instead of compounding them.

A long rollout is conditioned on its own predictions, which no recorded clip contains: blur is copied, and blurred again.
Rooms are static and the robot's path is known, so the truth stays the target however far ahead a chunk is (for errors injected
into the context on purpose, see Stable Video Infinity, Li et al. 2025). Predicting chunk after chunk, as a session does, would
take a pass for each. Here all chunks of a clip are predicted in one pass, each from its current context, and again whenever the
clip serves another step: after n passes the first n are what a session would predict, and the errors of the others are n chunks
deep. Then the clip moves on along its episode.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from worldmodel_ros.model.sampling import ONE_STEP, TWO_STEP, Steps
from worldmodel_ros.train.data import clips
from worldmodel_ros.train.data.batches import Batch, Chunks, over_clips, per_chunk

if TYPE_CHECKING:
    from .teacher import WorldObjective

ONE_STEP_EVERY = 4  # every n-th pass imagines clips in one step per chunk instead of two
NUMBERS = ('times', 'until')  # numpy arrays of a batch
HELD = ('clean', 'context', 'actions', 'episode', 'frame', 'observed', 'headings', *NUMBERS)  # fields kept for the clips
COUNTS = ('counted', 'drawn', 'left', 'first')


class ImaginedClips:
    """Holds the clips of a batch for ``imagined_depth`` steps, imagines them again before each, and moves them on once they
    have served half as many steps as they have chunks. Raises ValueError if a clip has no room for two chunks after its first
    observed frame."""

    def __init__(self, objective: WorldObjective):
        self._objective, self._preset, options = objective, objective.preset, objective.options
        self._depth, self._share, self._chunks = options.imagined_depth, options.imagined_share, options.chunks
        self._distance = options.imagined_distance
        k, f = self._preset.chunk_frames, options.clip_frames
        self._stays = self._preset.staying_frames
        # As many chunks as all other passes have, so that the compiler sees one shape.
        self.earliest = max(self._stays + 1, f - k * options.chunks)
        if options.chunks < 2 or f - self.earliest < 2 * k:
            raise ValueError(f'imagined_share needs two chunks or more after {self._stays + 1} frames of a clip: give chunks '
                             f'({options.chunks}) and clip_frames ({f}) for that')
        self._latest = min(self.earliest + self._preset.window_frames, f - 2 * k)
        self._counted, self._drawn = 0, 0  # steps requested, and those of them that were imagined
        self._left = 0  # steps that the clips still serve
        self._first = 0  # their first imagined frame
        self._clips: dict[str, Any] = {}  # see ``over_clips``

    @property
    def held(self) -> dict[str, Any]:
        """The clips, by names of ``Batch``: ``context`` has what was imagined."""
        return self._clips

    @property
    def first(self) -> int:
        """The clips' first imagined frame."""
        return self._first

    @property
    def depth(self) -> int:
        """How many frames ahead of what was observed any imagined frame is, at most."""
        return self._preset.chunk_frames * (self._depth - self._left)

    def due(self) -> bool:
        """Return whether the next step is one of the share: the same in all processes, which wait for each other."""
        self._counted += 1
        return math.ceil(self._counted * self._share) > math.ceil((self._counted - 1) * self._share)

    def draw(self, draw_clips: Callable[[np.random.Generator, torch.Generator], Batch], rng: np.random.Generator,
             generator: torch.Generator) -> Batch:
        """Return a batch whose chunks begin after imagined frames; ``draw_clips`` draws new clips when they are due."""
        end = self.go_on(draw_clips, rng, generator)
        frames, k = self._clips['context'].shape[1], self._preset.chunk_frames
        starts = rng.integers(self._first + 1, frames - k + 1, self._chunks)
        batch = over_clips(self._preset, **self._clips, starts=starts, generator=generator)
        apart = (batch.context - batch.clean).square().mean((2, 3, 4))
        batch.apart = apart[:, end - k:end].mean()
        if self._distance:
            before = clips.indices(starts[:, None] - 1 - np.arange(k), apart.device)
            trust = 1.0 / (1.0 + (apart[:, before].mean(-1) / self._distance).square())
            batch.trust = per_chunk(self._preset, trust / trust.mean())
        return batch

    def go_on(self, draw_clips: Callable[[np.random.Generator, torch.Generator], Batch], rng: np.random.Generator,
              generator: torch.Generator) -> int:
        """Imagine the clips again, new ones when they are due; return where the imagined frames end."""
        if not self._left:
            self.begin(draw_clips(rng, generator), int(rng.integers(self.earliest, self._latest + 1)))
            # The processes' first clips last differently, so that a step sees errors of all depths.
            self._left = self._depth if self._drawn else int(rng.integers(1, self._depth + 1))
        elif self._depth - self._left > self._chunks // 2:
            self._move_on()
        self._left -= 1
        self._drawn += 1
        return self.imagine(TWO_STEP if self._drawn % ONE_STEP_EVERY else ONE_STEP, generator)

    def begin(self, drawn: Batch, first: int) -> None:
        """Hold the clips of a batch, to be imagined from frame ``first`` on."""
        self._clips = {name: getattr(drawn, name) for name in HELD if getattr(drawn, name) is not None}
        self._first = first
        self._clips['observed'][:, first:] = False

    def _move_on(self) -> None:
        """Drop the oldest chunk after the frames that stay, and append the next one of the episodes, if they have another:
        errors get deeper than a clip is long."""
        held, episodes, k, stays = self._clips, self._objective.episodes, self._preset.chunk_frames, self._stays
        if episodes.lengths is not None or int(held['frame'].max()) + k >= episodes.frames.shape[1]:
            return
        later = torch.cat([held['frame'][:, :stays], held['frame'][:, stays:] + k], 1)
        clean, executed = episodes.latents[held['episode'], later].float(), episodes.actions[held['episode'][:, 0]]
        context, observed = (torch.cat([part[:, :stays], part[:, stays + k:], new], 1) for part, new in (
            (held['context'], clean[:, -k:]), (held['observed'], torch.zeros_like(held['observed'][:, -k:]))))
        held |= {'frame': later, 'clean': clean, 'context': context, 'observed': observed,
                 'actions': episodes.actions[held['episode'], later]}
        if 'headings' in held:
            moved = clips.headings(self._preset, executed).gather(1, later)[:, stays:]
            held['headings'] = torch.cat([held['headings'][:, :stays], moved], 1)
        for name in NUMBERS:
            if name in held:
                held[name] = held[name] + np.where(np.arange(later.shape[1]) < stays, 0, k)
        # The first chunk still needs a frame before it; what was imagined before that one stays as it is.
        self._first -= k if self._first - k >= self.earliest else 0

    @torch.no_grad()
    def imagine(self, steps: Steps, generator: torch.Generator) -> int:
        """Replace all frames from the first imagined one on with predictions, chunk by chunk, each from the previous context;
        return where the whole chunks end."""
        context, actions, k = self._clips['context'], self._clips['actions'], self._preset.chunk_frames
        device, frames = context.device, context.shape[1]
        starts = np.arange(self._first, frames - k + 1, k)
        end = int(starts[-1]) + k
        starts = np.append(starts, np.repeat(starts[-1:], self._chunks - len(starts)))
        index = clips.indices(clips.chunk_frames(self._preset, starts), device)
        z = torch.randn(context[:, index].shape, device=device, generator=generator)
        told = {name: self._clips[name] for name in ('times', 'until', 'headings') if name in self._clips}
        chunks = Chunks(context, actions, starts, z, actions[:, index], **told)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == 'cuda'):
            for step in range(steps.count):
                tau = torch.full(z.shape[:2], step / steps.count, device=device)
                x = self._objective.forward(chunks, z, tau, torch.full_like(tau, steps.row, dtype=torch.long))[0]
                z = z + (x - z) / (steps.count - step)
        self._clips['context'] = torch.cat([context[:, :self._first], z[:, :end - self._first], context[:, end:]], 1)
        return end

    def state(self) -> dict[str, Tensor]:
        """Return what a resumed training needs."""
        state = {name: torch.tensor(getattr(self, f'_{name}')) for name in COUNTS}
        return state | ({name: torch.as_tensor(value) for name, value in self._clips.items()} if self._left else {})

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore what ``state`` returned; clips of episodes that no longer exist are drawn again."""
        for name in COUNTS:
            setattr(self, f'_{name}', int(state[name]))
        if self._left:
            episodes = self._objective.episodes
            held = {name: state[name].to(episodes.frames.device) for name in HELD if name in state}
            self._clips = {name: each.cpu().numpy() if name in NUMBERS else each for name, each in held.items()}
            # Episodes simulated during training arrive in another order.
            if not torch.equal(episodes.latents[held['episode'], held['frame']].float(), held['clean']):
                self._left = 0
