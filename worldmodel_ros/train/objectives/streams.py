"""Latents that the frozen networks imagine for stage ``decoder``, next to the true ones of the same frames."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from worldmodel_ros.model.sampling import Steps
from worldmodel_ros.model.world_model import WorldModel
from worldmodel_ros.motion import MOVING_V, MOVING_W
from worldmodel_ros.train.data import clips
from worldmodel_ros.train.data.episodes import Episodes
from worldmodel_ros.train.run.options import DecoderOptions, TeacherOptions
from .imagined import ImaginedClips
from .sampler import roll_out
from .teacher import WorldObjective

_MOMENTS = 256  # that presets without tiles are judged on


@dataclass
class Streams:
    """S streams of N imagined frames, each after an observed one: ``latents`` (2, S, 1 + N, h, w, Z), imagined and encoded;
    ``episode`` (S, 1) and ``frame`` (S, 1 + N) of the true images; ``ahead`` (1 + N,), by how many frames at most each is
    ahead of what was observed."""

    latents: Tensor
    episode: Tensor
    frame: Tensor
    ahead: Tensor


@dataclass
class Moments:
    """B moments, all so many frames ahead: latents of each and of the frame before it (B, 2, h, w, Z), imagined in so many
    steps and encoded; and the true images uint8 (B, H, W, 3)."""

    imagined: dict[int, Tensor]
    encoded: Tensor
    images: Tensor


class Source(Protocol):
    """Where streams come from."""

    def draw(self, rng: np.random.Generator, generator: torch.Generator) -> Streams:
        """Return new streams."""

    def moments(self, ahead: int) -> Moments:
        """Return the same moments each time, of robots that move, where there are any. Raises ValueError if no episode is
        long enough."""

    def state(self) -> dict[str, Tensor]:
        """Return what a resumed training needs."""

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore what ``state`` returned."""


def source(model: WorldModel, episodes: Episodes, options: DecoderOptions) -> Source:
    """Return what imagines for a model. Raises ValueError if the frames ahead are not whole chunks."""
    if options.ahead % model.preset.chunk_frames:
        raise ValueError(f'ahead is {options.ahead}: it must be whole chunks of {model.preset.chunk_frames} frames')
    return (OverTiles if model.preset.tile else Rolled)(model, episodes, options)


class Rolled:
    """Rollouts that follow a window of observed frames."""

    def __init__(self, model: WorldModel, episodes: Episodes, options: DecoderOptions) -> None:
        self._model, self._episodes, self._options = model, episodes, options

    @torch.no_grad()
    def draw(self, rng: np.random.Generator, generator: torch.Generator) -> Streams:
        options, window, episodes = self._options, self._model.preset.window_frames, self._episodes
        episode, frame = episodes.clips(options.streams, window + options.ahead, generator)
        clip, device = episodes.latents[episode, frame], frame.device
        noise = torch.randn((len(clip), options.ahead, *clip.shape[2:]), device=device, generator=generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == 'cuda'):
            imagined = roll_out(self._model.dit, clip[:, :window].float(), episodes.actions[episode, frame], noise,
                                1 if rng.random() < options.one_step_share else 2).to(clip.dtype)
        latents = torch.stack([torch.cat([clip[:, window - 1:window], imagined], 1), clip[:, window - 1:]])
        return Streams(latents, episode, frame[:, window - 1:], torch.arange(1 + options.ahead, device=device))

    @torch.no_grad()
    def moments(self, ahead: int) -> Moments:
        preset, episodes = self._model.preset, self._episodes
        window, device = preset.window_frames, episodes.frames.device
        episode, frame = episodes.clips(_MOMENTS, window + ahead, torch.Generator(device).manual_seed(0))
        chosen = _moving(episodes.actions[episode, frame[:, window:]])
        episode, frame = episode[chosen], frame[chosen]
        clip = episodes.latents[episode, frame].float()
        whole = -(-ahead // preset.chunk_frames) * preset.chunk_frames
        actions = torch.cat([episodes.actions[episode, frame], episodes.actions[episode, frame[:, -1:]].expand(
            -1, whole - ahead, -1)], 1)
        noise = torch.randn((len(clip), whole, *clip.shape[2:]), device=device,
                            generator=torch.Generator(device).manual_seed(1))
        return Moments({steps: roll_out(self._model.dit, clip[:, :window], actions, noise, steps)[:, ahead - 2:ahead]
                        for steps in (2, 1)}, clip[:, -2:], episodes.frames[episode[:, 0], frame[:, -1]])

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        pass


class OverTiles:
    """Clips that continue with what the model imagines (``imagined``), each time a chunk deeper."""

    def __init__(self, model: WorldModel, episodes: Episodes, options: DecoderOptions) -> None:
        preset = model.preset
        self._world = WorldObjective(model, episodes, TeacherOptions(
            batch=options.streams, clip_frames=preset.staying_frames + preset.window_frames + options.ahead,
            chunks=options.ahead // preset.chunk_frames, context_noise=0.0, imagined_share=1.0,
            imagined_depth=options.ahead // preset.chunk_frames))
        self._clips = ImaginedClips(self._world)

    def draw(self, rng: np.random.Generator, generator: torch.Generator) -> Streams:
        end = self._clips.go_on(self._world.draw, rng, generator)
        held, first, dtype = self._clips.held, self._clips.first, self._world.episodes.latents.dtype
        latents = torch.stack([held[name][:, first - 1:end].to(dtype) for name in ('context', 'clean')])
        frame = held['frame'][:, first - 1:end]
        ahead = torch.arange(1 + end - first, device=frame.device)
        return Streams(latents, held['episode'], frame, ahead.clamp_max(self._clips.depth))

    @torch.no_grad()
    def moments(self, ahead: int) -> Moments:
        world, imagining = self._world, self._clips
        k, device = world.preset.chunk_frames, world.episodes.frames.device
        passes, within = divmod(ahead - 1, k)
        if passes + 1 > world.options.chunks:
            raise ValueError(f'ahead is {k * world.options.chunks}, and images are judged {ahead} frames ahead: give at least '
                             f'{k * (passes + 1)}')
        drawn, imagined = world.draw(np.random.default_rng(0), torch.Generator(device).manual_seed(0)), {}
        for steps in (2, 1):
            imagining.begin(drawn, imagining.earliest)
            generator = torch.Generator(device).manual_seed(1)
            for _ in range(passes + 1):
                end = imagining.imagine(Steps.of(steps), generator)
            at = clips.indices(np.arange(imagining.first + passes * k + within, end, k), device)
            imagined[steps] = _pairs(imagining.held['context'], at)
        moved = drawn.actions[:, at[:, None] - torch.arange(ahead, device=device)].flatten(0, 1)
        chosen = _moving(moved)
        images = world.episodes.frames[drawn.episode, drawn.frame[:, at]].flatten(0, 1)
        return Moments({steps: pairs[chosen] for steps, pairs in imagined.items()}, _pairs(drawn.clean, at)[chosen],
                       images[chosen])

    def state(self) -> dict[str, Tensor]:
        return {f'clips.{name}': value for name, value in self._clips.state().items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        self._clips.restore({name.removeprefix('clips.'): value for name, value in state.items()
                             if name.startswith('clips.')})


def _pairs(latents: Tensor, at: Tensor) -> Tensor:
    """Return frames ``at`` (N,) of latents (B, F, h, w, Z), each behind the one before it: (B * N, 2, h, w, Z)."""
    return torch.stack([latents[:, at - 1], latents[:, at]], 2).flatten(0, 1)


def _moving(actions: Tensor) -> Tensor:
    """Return which of the actions (B, T, A) move the robot most of the time, (B,); all if none do."""
    limits = torch.tensor((MOVING_V, MOVING_W), device=actions.device)
    chosen = (actions.abs() > limits).any(2).float().mean(1) > 0.5
    return chosen if chosen.any() else torch.ones_like(chosen)
