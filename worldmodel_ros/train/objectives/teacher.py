"""Stage ``teacher``: flow matching in x-prediction with the ramp weight (Dreamer 4, Hafner et al. 2025), each chunk of a
clip at a noise level of its own (diffusion forcing, Chen et al. 2024); and what all stages of the DiT share, one pass over
committed and noisy frames and the losses of the heads."""
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from worldmodel_ros.model.sampling import FLOW, HALF, WHOLE
from worldmodel_ros.model.world_model import WorldModel
from worldmodel_ros.train.data import clips
from worldmodel_ros.train.data.batches import RECALL_AFTER, Batch, Chunks, draw, expand, mix, per_chunk
from worldmodel_ros.train.data.episodes import Episodes
from worldmodel_ros.train.run.options import TeacherOptions
from .imagined import ImaginedClips
from .objective import Objective
from .policy import check_labels, imitation_loss, policy_labels
from .pose import PoseHead, pose_errors

MOST_VELOCITY_WEIGHT = 100.0


class WorldObjective(Objective):
    """The loss of a stage that trains the DiT and the heads."""

    def __init__(self, model: WorldModel, episodes: Episodes, options: TeacherOptions):
        self.model, self.preset, self.episodes, self.options = model, model.preset, episodes, options
        check_labels(episodes, options.search)
        if options.pieces > 1 and self.preset.tile is None:
            raise ValueError(f'pieces is {options.pieces}, and preset {self.preset.name!r} has no tiles, whose masks keep '
                             'pieces apart: set it to 1')
        if options.clip_frames // options.pieces <= self.preset.chunk_frames:
            raise ValueError(f'clip_frames is {options.clip_frames}, in {options.pieces} pieces: each must be longer than a '
                             f'chunk ({self.preset.chunk_frames} frames)')
        preset, tile = self.preset, self.preset.tile
        stays = preset.staying_frames
        if options.clip_frames <= stays + preset.chunk_frames:
            raise ValueError(f'clip_frames is {options.clip_frames}, and a clip of preset {preset.name!r} begins with {stays} '
                             f'frames of sinks and keyframes: it must be longer than these and a chunk')
        least = tile and RECALL_AFTER + preset.chunk_frames + stays + tile[0]
        if options.recall_share and (least is None or options.clip_frames < least):
            raise ValueError(f'recall_share is for presets with tiles, and clips of {least or "more"} frames or more; not for '
                             f'preset {preset.name!r} and {options.clip_frames} frames: set it to 0')
        self.contacts = None
        if options.contact_share and (preset.sink_slabs or options.recall_share):
            raise ValueError(f'contact_share is for presets without sinks, whose clips begin anywhere; not for preset '
                             f'{preset.name!r}: set it to 0')
        if options.contact_share:
            self.contacts = episodes.contact_frames(options.clip_frames) if episodes.labelled else ()
            if not len(self.contacts):
                raise ValueError('contact_share needs drives that tell of contacts, and these record none: train on '
                                 'simulated episodes, or set it to 0')
        self.pose_head = None
        if options.pose_weight:
            if episodes.poses is None:
                raise ValueError('pose_weight needs the true poses, which these episodes lack: train on simulated '
                                 'episodes, or set it to 0')
            self.pose_head = PoseHead(self.preset).to(episodes.frames.device)

    def draw(self, rng: np.random.Generator, generator: torch.Generator) -> Batch:
        options = self.options
        pieces = options.pieces if self.done < options.pieces_until else 1
        return draw(self.episodes, self.preset, options, rng, generator, self.contacts, pieces)

    def parameters(self) -> list[nn.Parameter]:
        """Return what is trained: the DiT, the heads, and a head for training only."""
        parts = [self.model.dit]
        if self.episodes.labelled:
            parts += [self.model.action_head, self.model.outcome_head]
        if self.pose_head:
            parts.append(self.pose_head)
        return [parameter for part in parts for parameter in part.parameters()]

    def networks(self) -> list[nn.Module]:
        """Return the layers: they are alike, so that one compiled graph per shape serves them all."""
        return [block for model in self.models() for block in model.dit.blocks]

    def models(self) -> list[WorldModel]:
        return [self.model]

    def state(self) -> dict[str, Tensor]:
        return {} if self.pose_head is None else {f'pose.{name}': t for name, t in self.pose_head.state_dict().items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        if self.pose_head is not None:
            self.pose_head.load_state_dict({name.removeprefix('pose.'): tensor for name, tensor in state.items()
                                            if name.startswith('pose.')})

    def forward(self, batch: Chunks, z: Tensor, tau: Tensor, step: Tensor, blind: bool = False
                ) -> tuple[Tensor, Tensor, Tensor]:
        """Run one pass over committed and noisy frames; return predicted latents and features of the noisy frames, and
        features of the committed ones. ``blind``: the last chunk sees no context."""
        frames = batch.context.shape[1]
        times = batch.frame_times
        ones = torch.ones(batch.context.shape[:2], device=z.device)
        x, features, _, _ = self.model.dit(
            torch.cat([batch.context, z], 1), torch.cat([ones, tau], 1), torch.cat([ones.long() * FLOW, step], 1),
            torch.cat([batch.actions, batch.noisy_actions], 1),
            torch.cat(batch.rotary(self.preset), -3),
            clips.sequence_mask(self.preset, times, batch.starts, z.device, blind, batch.until))
        return x[:, frames:].float(), features[:, frames:], features[:, :frames]

    def flow_weight(self, tau: Tensor) -> Tensor:
        """Return the weight of the squared error of the predicted clean latents at level tau."""
        if self.options.flow_weight == 'velocity':
            return (1.0 - tau).square().reciprocal().clamp_max(MOST_VELOCITY_WEIGHT)
        return 0.9 * tau + 0.1

    def head_losses(self, batch: Batch, committed: Tensor, noisy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted losses of the heads, from the features of committed and noisy frames. Without labels, the
        heads stay as they are."""
        total, values = torch.zeros((), device=noisy.device), {}
        if self.episodes.labelled:
            labels = policy_labels(self.episodes, (batch.episode, batch.frame), self.preset, self.options.search)
            values = {'imitation': imitation_loss(self.model.action_head, committed, labels, batch.actions,
                                                  batch.observed, batch.policy), **self._outcomes(batch, noisy)}
            heads = values['imitation'] + 0.2 * values['contact'] + 0.2 * values['progress']
            total = self.options.heads_weight * heads
        if self.pose_head:
            past, ahead = pose_errors(self.pose_head, committed, noisy, self.episodes.poses[batch.episode, batch.frame],
                                      batch.actions, clips.indices(batch.starts, noisy.device), self.preset)
            # Imagined frames show no deviation that could be learned.
            values['pose'] = (past * batch.observed).mean() + (ahead * batch.trust).mean()
            total = total + self.options.pose_weight * values['pose']
        return total, values

    def _outcomes(self, batch: Batch, noisy: Tensor) -> dict[str, Tensor]:
        logits, progress = self.model.outcome_head(noisy)
        index = batch.noisy_index
        collided = self.episodes.collided[batch.episode, batch.frame][:, index].float()
        distance = self.episodes.goal_distance[batch.episode, batch.frame]
        before = clips.indices(batch.starts - 1, noisy.device).repeat_interleave(self.preset.chunk_frames)
        contact = F.binary_cross_entropy_with_logits(logits.float(), collided, batch.trust)
        towards = F.smooth_l1_loss(progress.float() * 5.0, (distance[:, before] - distance[:, index]) * 5.0,
                                   reduction='none', beta=0.1).mean(-1)
        return {'contact': contact, 'progress': (towards * batch.trust).mean()}


class TeacherObjective(WorldObjective):
    """Predicts the true latents of chunks from noisy ones and from what was committed before."""

    def __init__(self, model: WorldModel, episodes: Episodes, options: TeacherOptions):
        super().__init__(model, episodes, options)
        self.imagined = ImaginedClips(self) if options.imagined_share else None

    def draw(self, rng: np.random.Generator, generator: torch.Generator) -> Batch:
        # What a barely trained model predicts is unlike any context that it will have later.
        imagined = self.imagined and self.done >= max(0.5, self.options.pieces_until) and self.imagined.due()
        batch = self.imagined.draw(super().draw, rng, generator) if imagined else super().draw(rng, generator)
        batch.blind = bool(rng.random() < self.options.blind_share)
        if self.options.served_share:
            self._served(batch, generator)
            if self.done >= 0.5 and rng.random() < self.options.own_halfway:
                batch.own_halfway = True
        return batch

    def _served(self, batch: Batch, generator: torch.Generator) -> None:
        """Give some chunks a served step: half steps from noise, half steps from tau 1/2, whole steps, a third each."""
        shape, device = (len(batch.clean), len(batch.starts)), batch.clean.device
        chosen = per_chunk(self.preset, torch.rand(shape, device=device, generator=generator) < self.options.served_share)
        kind = per_chunk(self.preset, torch.randint(3, shape, device=device, generator=generator))
        batch.tau = torch.where(chosen, torch.where(kind == 1, 0.5, 0.0), batch.tau)
        batch.step = torch.where(chosen, torch.where(kind == 2, WHOLE, HALF), batch.step)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        z = mix(batch.noise, batch.target, batch.tau)
        if batch.own_halfway:
            with torch.no_grad():
                first = self.forward(batch, batch.noise, torch.zeros_like(batch.tau), torch.full_like(batch.step, HALF))[0]
            torch.clear_autocast_cache()  # it holds casts of the weights without gradients
            batch.halfway = (batch.tau == 0.5) & (batch.step == HALF)
            z = torch.where(expand(batch.halfway), 0.5 * (batch.noise + first), z)
        x, noisy, committed = self.forward(batch, z, batch.tau, batch.step, batch.blind)
        error, flow = (x - batch.target).square().mean((2, 3, 4)), batch.step == FLOW
        weighted = torch.where(flow, self.flow_weight(batch.tau), 1.0) * error * batch.trust
        heads, values = self.head_losses(batch, committed, noisy)
        parts = {'flow': (weighted * flow).sum() / flow.sum().clamp_min(1)}
        if self.options.served_share:
            parts |= {name: (error * rows).sum() / rows.sum().clamp_min(1)
                      for name, rows in (('half', batch.step == HALF), ('whole', batch.step == WHOLE))}
        if batch.apart is not None:
            parts = {f'imagined_{name}': value for name, value in (parts | {'apart': batch.apart}).items()}
        return weighted.mean() + heads, {**parts, **values}

    def state(self) -> dict[str, Tensor]:
        own = self.imagined.state() if self.imagined else {}
        return super().state() | {f'imagined.{name}': tensor for name, tensor in own.items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        super().restore(state)
        if self.imagined:
            self.imagined.restore({name.removeprefix('imagined.'): tensor for name, tensor in state.items()
                                   if name.startswith('imagined.')})
