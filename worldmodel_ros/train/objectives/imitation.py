"""Stage ``imitation``: trains the policy alone, on the features of a frozen network.

An episode's features are computed once, so that a step costs only the policy's small head: minutes on a CPU, where the other
stages take a GPU. The world model stays the same, bit for bit.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from worldmodel_ros.model.dit import DiT
from worldmodel_ros.model.rollout import Rollout
from worldmodel_ros.model.world_model import WorldModel
from worldmodel_ros.train.data.episodes import Episodes
from worldmodel_ros.train.run.options import ImitationOptions
from .objective import Objective
from .policy import PolicyDraw, check_labels, draw_policy, imitation_loss, policy_labels, unseen

BLOCK = 8  # frames of an episode that one pass commits; 16 are no faster per frame on a CPU
FRAMES = 2048  # of all episodes that one pass commits


@dataclass
class PolicyBatch:
    """Clips, as indices (B, 1) of episodes and (B, F) of frames, and the random draws of the policy's loss on them."""

    episode: Tensor
    frame: Tensor
    policy: PolicyDraw


class ImitationObjective(Objective):
    """Flow matching (or regression) of the commands to be learned. Raises ValueError if the episodes have none."""

    def __init__(self, model: WorldModel, episodes: Episodes, options: ImitationOptions):
        if not episodes.labelled:
            raise ValueError('these episodes have no labels to imitate: train on simulated episodes, or leave the stage '
                             'out')
        if options.clip_frames <= model.preset.chunk_frames:
            raise ValueError(f'clip_frames is {options.clip_frames}: it must be more than a chunk of '
                             f'{model.preset.chunk_frames}')
        check_labels(episodes, options.search)
        self.model, self.episodes, self.options = model, episodes, options
        share = max(1, FRAMES // BLOCK)
        self.features = torch.cat([
            committed_features(model.dit, episodes.latents[first:first + share], episodes.actions[first:first + share])
            for first in range(0, len(episodes), share)])
        episode, frame = (torch.arange(size, device=episodes.actions.device) for size in episodes.actions.shape[:2])
        every = episode[:, None], frame
        self.labels = policy_labels(episodes, every, model.preset, options.search)
        if options.keep:
            search = unseen(episodes, every, model.preset)[..., None]
            self.labels = torch.where(search, self.labels, self._plans())

    @torch.no_grad()
    def _plans(self) -> Tensor:
        """The policy's commands at every frame, (E, T, goals, A)."""
        return torch.stack([self.model.action_head(features.float())[:, :, 0] for features in self.features])

    def parameters(self) -> list[nn.Parameter]:
        """Return the policy's parameters."""
        return list(self.model.action_head.parameters())

    def draw(self, rng: np.random.Generator, generator: torch.Generator) -> PolicyBatch:
        options, device = self.options, self.features.device
        episode, frame = self.episodes.clips(options.batch, options.clip_frames, generator)
        return PolicyBatch(episode, frame, draw_policy(self.model.preset, *frame.shape, device, generator))

    def loss(self, batch: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        clip = batch.episode, batch.frame
        observed = torch.ones(batch.frame.shape, dtype=torch.bool, device=batch.frame.device)
        loss = imitation_loss(self.model.action_head, self.features[clip].float(), self.labels[clip],
                              self.episodes.actions[clip], observed, batch.policy)
        return loss, {'imitation': loss}


@torch.no_grad()
def committed_features(dit: DiT, latents: Tensor, actions: Tensor) -> Tensor:
    """Return features (B, T, P, D), in bfloat16, of frames that sessions commit one after another, each seeing the window
    before it; latents (B, T, h, w, Z), actions (B, T, A), the one that led to each frame."""
    device, streams, found = latents.device, None, []
    rollout = Rollout(dit)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == 'cuda'):
        for first in range(0, latents.shape[1], BLOCK):
            block = slice(first, first + BLOCK)
            streams, features = rollout.commit(streams, latents[:, block].float(), actions[:, block])
            found.append(features.bfloat16())
    return torch.cat(found, 1)
