"""Training batches: committed frames, and noisy chunks after them."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from worldmodel_ros.model.presets import Preset
from worldmodel_ros.model.sampling import FLOW
from worldmodel_ros.model.tile_mask import FOR_GOOD, FrameOrder
from worldmodel_ros.train.objectives.policy import PolicyDraw, draw_policy
from worldmodel_ros.train.run.options import TeacherOptions
from . import clips
from .episodes import Episodes

if TYPE_CHECKING:
    from worldmodel_ros.train.objectives.dmd import Far


@dataclass
class Chunks:
    """B clips of F committed frames, and noise for the N frames of the chunks that begin at ``starts`` in all of them."""

    context: Tensor  # (B, F, h, w, Z) committed latents: true, noisy or imagined
    actions: Tensor  # (B, F, A), the one that led to each frame
    starts: np.ndarray  # (chunks,)
    noise: Tensor  # (B, N, h, w, Z)
    noisy_actions: Tensor  # (B, N, A)
    # (F,) numbers of the committed frames in their session; None: 0 to F - 1
    times: np.ndarray | None = field(default=None, kw_only=True)
    # (F,) number of the first frame that no longer sees each, see ``tile_mask.FrameOrder``; None: the window decides
    until: np.ndarray | None = field(default=None, kw_only=True)
    # (B, F) [rad], the robot's heading at the committed frames; None: integrated from their actions
    headings: Tensor | None = field(default=None, kw_only=True)

    @property
    def frame_times(self) -> np.ndarray:
        """Numbers (F,) of the committed frames in their session."""
        return np.arange(self.context.shape[1]) if self.times is None else self.times

    @property
    def noisy_times(self) -> np.ndarray:
        """Numbers (N,) of the frames of the chunks."""
        size = self.noise.shape[1] // len(self.starts)
        return (self.frame_times[self.starts - 1][:, None] + 1 + np.arange(size)).reshape(-1)

    def rotary(self, preset: Preset) -> tuple[Tensor, Tensor]:
        """Return the rotary phases of the committed frames and of the chunks' frames."""
        before = self.headings if self.headings is not None else clips.headings(preset, self.actions)
        turned = clips.headings(preset, self.noisy_actions.unflatten(1, (len(self.starts), -1)))
        noisy = before[:, clips.indices(self.starts - 1, before.device)][..., None] + turned
        return clips.rotary(preset, self.frame_times, before), clips.rotary(preset, self.noisy_times, noisy.flatten(1))


@dataclass
class Batch(Chunks):
    """Chunks whose true continuation is known, and the random draws of the losses."""

    clean: Tensor  # (B, F, h, w, Z) true latents
    episode: Tensor  # (B, 1)
    frame: Tensor  # (B, F)
    target: Tensor  # (B, N, h, w, Z) true latents of the noisy frames
    tau: Tensor  # (B, N) noise levels, 1 is clean
    step: Tensor  # (B, N) rows of the step embedding
    halfway: Tensor  # bool (B, N): half steps from tau 1/2 that start where the student's own first one ends
    trust: Tensor  # (B, N) in (0, 1]: weight of the truth as a target; 1 where the context is observed
    flow_trust: Tensor  # (B, N) the same for the flow, whose noisy latents reveal more of the truth the cleaner they are
    observed: Tensor  # bool (B, F): frames that were observed
    policy: PolicyDraw
    blind: bool = False  # whether the last chunk sees no context
    own_halfway: bool = False  # whether half steps from tau 1/2 start where the model's own first ones end
    # Mean squared distance of the newest imagined context frames from the true ones; None: all context is observed.
    apart: Tensor | None = None
    far: Far | None = None  # input of the distribution matching

    @property
    def noisy_index(self) -> Tensor:
        """Indices (N,) of the noisy frames in the clip."""
        return clips.indices((self.starts[:, None] + np.arange(self.noise.shape[1] // len(self.starts))).ravel(),
                             self.noise.device)


FAR = 40  # gap after a sink, in frames, from which on its length can no longer be told
RECALL_AFTER = 24  # least frames of a clip before a view returns; the window layers see 16
RECALL_LASTS = 10  # chunks that begin within this many frames of that moment profit from it
LONGEST = 6000  # most frames of the session that a clip stands for, ten minutes
WHOLE_SHARE = 0.25  # of the batches of a preset with sinks, whose clips are the unbroken start of their episode


def draw(episodes: Episodes, preset: Preset, options: TeacherOptions, rng: np.random.Generator,
         generator: torch.Generator, contacts: Tensor | None = None, pieces: int = 1) -> Batch:
    """Draw clips of recordings, half of them with noise on the context, each chunk at its own flow level.

    contacts (N, 2): episodes and frames, one of which is in each of a ``contact_share`` of the clips; None: no such share. For
    a preset whose sinks are slabs, clips begin with the sinks of their episode and continue later in it, all at the same frame.
    With several ``pieces``, a clip consists of that many short sessions, none of which sees another.
    """
    if pieces > 1:
        return _pieces(episodes, preset, options, rng, generator, pieces)
    if options.recall_share:
        batch = _recalling(episodes, preset, options, rng, generator)
        if batch is not None:
            return batch
    around = 0 if contacts is None else round(options.contact_share * options.batch)
    episode, frame = episodes.clips(options.batch - around, options.clip_frames, generator)
    if around:
        lead = min(preset.window_frames, options.clip_frames - 1)
        others = episodes.clips_around(contacts, around, options.clip_frames, lead, generator)
        episode, frame = torch.cat([episode, others[0]]), torch.cat([frame, others[1]])
    times = None
    if preset.sink_slabs and episodes.lengths is None:
        index, times = after_sinks(preset, options.clip_frames, episodes.frames.shape[1], rng)
        return _after_sinks(episodes, preset, options, episode, index, times, None, rng, generator)
    clean = episodes.latents[episode, frame].float()
    context = noisy_context(clean, options.context_noise, generator)
    actions = episodes.actions[episode, frame]
    return noisy_chunks(preset, options, clean, context, actions, episode, frame, rng, generator, times)


def _recalling(episodes: Episodes, preset: Preset, options: TeacherOptions, rng: np.random.Generator,
               generator: torch.Generator) -> Batch | None:
    """Draw clips in which every robot turns back, at the same frame, to what left its view; None if too few episodes do."""
    recalls, size, length = episodes.recalls(preset), preset.tile[0], options.clip_frames
    stays = preset.staying_frames
    first = stays + RECALL_AFTER
    count = recalls.sum(0) * (np.arange(recalls.shape[1]) >= first)
    count[length - preset.chunk_frames + size * ((recalls.shape[1] - length) // size) + 1:] = 0
    if count.max() < options.batch:
        return None
    count[count < options.batch] = 0
    moment = int(rng.choice(len(count), p=count / count.sum()))
    episode = rng.choice(np.flatnonzero(recalls[:, moment]), options.batch, replace=False)
    index, times = after_sinks(preset, length, recalls.shape[1], rng, moment)
    place = moment - int(index[-1]) + length - 1
    starts = clips.draw_starts(preset, length, options.chunks, rng, options.full_windows, stays + 1)
    near = round(options.recall_share * options.chunks)
    starts[:near] = (place + rng.integers(-2, RECALL_LASTS, near)).clip(stays + 1, length - preset.chunk_frames)
    chosen = clips.indices(episode, episodes.actions.device)[:, None]
    return _after_sinks(episodes, preset, options, chosen, index, times, starts, rng, generator)


def _after_sinks(episodes: Episodes, preset: Preset, options: TeacherOptions, episode: Tensor, index: np.ndarray,
                 times: np.ndarray, starts: np.ndarray | None, rng: np.random.Generator, generator: torch.Generator) -> Batch:
    """Draw chunks over the frames ``index`` (F,) of episodes (B, 1), numbered ``times`` in their sessions, see
    ``after_sinks``; keyframes are each episode's own."""
    sinks, stays = preset.sink_slabs * preset.tile[0], preset.staying_frames
    until = FrameOrder.committed(preset, times).until
    until[sinks:stays] = FOR_GOOD
    index = np.tile(index, (len(episode), 1))
    if preset.keyframe_slabs:
        index[:, sinks:stays] = episodes.keyframes(preset, episode[:, 0].tolist(), int(index[0, stays]) // preset.tile[0])
    frame = clips.indices(index, episode.device)
    clean, executed = episodes.latents[episode, frame].float(), episodes.actions[episode[:, 0]]
    context = noisy_context(clean, options.context_noise, generator)
    headings = clips.headings(preset, executed).gather(1, frame)
    if sinks and times[stays] != index[0, stays]:  # after minutes of odometry the initial heading is unknown
        headings[:, :sinks] += 2.0 * torch.pi * torch.rand(len(episode), 1, device=clean.device, generator=generator)
    return noisy_chunks(preset, options, clean, context, executed.gather(1, frame[..., None].expand(-1, -1, preset.actions)),
                        episode, frame, rng, generator, times, headings, starts, until)


def _pieces(episodes: Episodes, preset: Preset, options: TeacherOptions, rng: np.random.Generator,
            generator: torch.Generator, pieces: int) -> Batch:
    length, k, size = options.clip_frames // pieces, preset.chunk_frames, preset.tile[0] if preset.tile else 1
    episode, frame = episodes.clips(options.batch * pieces, length, generator)
    episode, frame = episode.expand(frame.shape).reshape(options.batch, -1), frame.reshape(options.batch, -1)
    actions = episodes.actions[episode, frame]
    headings = clips.headings(preset, actions.unflatten(1, (pieces, -1))).flatten(1)
    clean = episodes.latents[episode, frame].float()
    context = noisy_context(clean.unflatten(1, (pieces, -1)).flatten(0, 1), options.context_noise, generator).view_as(clean)
    # Frame numbers so far apart that no window spans two pieces, and no piece counts as sinks.
    gap = -(-(preset.window_frames + length) // size) * size * 2
    times = (gap * np.arange(1, pieces + 1)[:, None] + np.arange(length)).ravel()
    first = np.arange(pieces)[:, None] * length
    starts = (first + rng.integers(1, length - k + 1, (pieces, options.chunks // pieces))).ravel()
    observed = torch.ones(clean.shape[:2], dtype=torch.bool, device=clean.device)
    observed.view(-1, pieces, length)[..., -k:] = False  # the commands after these are another session's
    return over_clips(preset, clean, context, actions, episode, frame, observed, starts, generator, times, headings)


def after_sinks(preset: Preset, frames: int, total: int, rng: np.random.Generator, moment: int | None = None
                ) -> tuple[np.ndarray, np.ndarray]:
    """Draw the frames (F,) of a clip from an episode of ``total`` frames, and their numbers in the session.

    The clip has the episode's first slabs (the sinks, and as many as there are keyframes), then consecutive frames; among these
    are a chunk that begins at ``moment``, if given, and RECALL_AFTER frames before it. Any time may have passed since the
    sinks, unless they were seen just before; keyframes were seen at any time in between.
    """
    size, stays = preset.tile[0], preset.staying_frames
    least, most = 0, (total - frames) // size
    if moment is not None:
        least = max(0, -(-(moment + preset.chunk_frames - frames) // size))
        most = min(most, (moment - stays - RECALL_AFTER) // size)
        if preset.keyframe_slabs:  # nothing between these and the window, which no session would have forgotten
            least = max(least, min(most, (moment - stays - preset.window_frames) // size))
    skipped = size * int(rng.integers(least, most + 1)) if least or rng.random() >= WHOLE_SHARE else 0
    later = size * int(rng.integers(skipped // size, LONGEST // size)) if skipped >= FAR and rng.random() < 0.5 else skipped
    behind = np.where(np.arange(frames) < stays, 0, 1)
    times = np.arange(frames) + later * behind
    if preset.keyframe_slabs:
        first = preset.sink_slabs
        slabs = first + np.sort(rng.choice((stays + later) // size - first, preset.keyframe_slabs, replace=False))
        times[first * size:stays] = (slabs[:, None] * size + np.arange(size)).ravel()
    return np.arange(frames) + skipped * behind, times


def noisy_context(clean: Tensor, most: float, generator: torch.Generator) -> Tensor:
    """Add noise of a standard deviation up to ``most`` to clips (B, F, ...); half stay exact, as in a live session."""
    def uniform() -> Tensor:
        return torch.rand(len(clean), 1, 1, 1, 1, device=clean.device, generator=generator)

    level = most * uniform() * (uniform() < 0.5)
    return clean + level * torch.randn(clean.shape, device=clean.device, generator=generator)


def noisy_chunks(preset: Preset, options: TeacherOptions, clean: Tensor, context: Tensor, actions: Tensor,
                 episode: Tensor, frame: Tensor, rng: np.random.Generator, generator: torch.Generator,
                 times: np.ndarray | None = None, headings: Tensor | None = None, starts: np.ndarray | None = None,
                 until: np.ndarray | None = None) -> Batch:
    """Draw chunks over clips with observed context; their step rows are the flow's. ``times``, ``until`` and ``headings`` are
    for clips that leave out the frames between those that stay in the session and the rest. ``starts`` of the chunks are drawn
    if not given."""
    b, f = clean.shape[:2]
    stays = 0 if times is None else preset.staying_frames
    if starts is None:
        starts = clips.draw_starts(preset, f, options.chunks, rng, options.full_windows, stays + 1)
    observed = torch.ones(b, f, dtype=torch.bool, device=clean.device)
    observed[:, :stays] = False  # the commands after these are not those of the next frames
    return over_clips(preset, clean, context, actions, episode, frame, observed, starts, generator, times, headings, until)


def over_clips(preset: Preset, clean: Tensor, context: Tensor, actions: Tensor, episode: Tensor, frame: Tensor,
               observed: Tensor, starts: np.ndarray, generator: torch.Generator, times: np.ndarray | None = None,
               headings: Tensor | None = None, until: np.ndarray | None = None) -> Batch:
    """Return the batch of the chunks at ``starts`` over these clips; step rows are the flow's."""
    b, f = clean.shape[:2]
    index = clips.indices(clips.chunk_frames(preset, starts), clean.device)
    target = clean[:, index]
    tau = per_chunk(preset, torch.rand(b, len(starts), device=clean.device, generator=generator))
    noise = torch.randn(target.shape, device=clean.device, generator=generator)
    return Batch(context, actions, starts, noise, actions[:, index], clean, episode, frame, target, tau,
                 torch.full_like(tau, FLOW, dtype=torch.long), torch.zeros_like(tau, dtype=torch.bool),
                 torch.ones_like(tau), torch.ones_like(tau), observed, draw_policy(preset, b, f, clean.device, generator),
                 times=times, headings=headings, until=until)


def per_chunk(preset: Preset, values: Tensor) -> Tensor:
    """Repeat one value per chunk (B, chunks) for each frame (B, chunks * K)."""
    return values.repeat_interleave(preset.chunk_frames, 1)


def expand(level: Tensor) -> Tensor:
    """(B, N) to (B, N, 1, 1, 1)."""
    return level[..., None, None, None]


def mix(noise: Tensor, clean: Tensor, tau: Tensor) -> Tensor:
    """Return latents at noise level tau (B, N)."""
    return (1 - expand(tau)) * noise + expand(tau) * clean
