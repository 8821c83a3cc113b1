"""Episodes on the training device, and random clips of them."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from worldmodel_ros.model.presets import Preset
from worldmodel_ros.model.vae import VAE
from .recall import keyframes_of, moments_of

ARRAYS = ('frames', 'actions', 'expert', 'search', 'collided', 'goal_distance', 'visible', 'poses', 'lengths')
# Executed and expert action agree when they differ by less than this share of the action's range: then the next
# label of the expert belongs to the same plan.
SAME_ACTION = 0.06


class DatasetError(ValueError):
    """A dataset that cannot be trained on: says which, why, and what to do."""


@dataclass
class Episodes:
    """E episodes of T frames on one device.

    frames uint8 (E, T, H, W, 3); actions (E, T, A), the one executed over the period before each frame; expert
    (E, T, goals, A), the expert's action at each frame; search (E, T, A), that of a search for a goal out of view, None
    where a dataset lacks it; collided (E, T), contact in the period before each frame;
    goal_distance (E, T, goals) in m; visible (E, T, goals), whether the camera sees each goal; poses (E, T, 3), x and y
    in m and yaw in rad; latents (E, T, h, w, Z) once encoded.

    Recordings have no labels: what only a simulator knows is None. lengths (E,), if episodes differ in length: frames
    beyond it are padding.
    """

    frames: Tensor
    actions: Tensor
    expert: Tensor | None = None
    search: Tensor | None = None
    collided: Tensor | None = None
    goal_distance: Tensor | None = None
    visible: Tensor | None = None
    poses: Tensor | None = None
    latents: Tensor | None = None
    lengths: Tensor | None = None
    _recalls: np.ndarray | None = field(default=None, init=False, repr=False)
    _keyframes: dict[int, list[list[int]]] = field(default_factory=dict, init=False, repr=False)  # by episode

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray], device: str = 'cpu') -> Episodes:
        """Return the episodes of the arrays that ``sim.rollout.collect`` returns."""
        return cls(**{name: torch.from_numpy(np.asarray(arrays[name])).to(device) for name in ARRAYS if name in arrays})

    def __len__(self) -> int:
        return self.frames.shape[0]

    def reading(self) -> AbstractContextManager:
        """Return a context in which no episode is replaced: what is drawn in it belongs together."""
        return nullcontext()

    @property
    def labelled(self) -> bool:
        """Whether there are labels to train the heads on."""
        return self.expert is not None

    @property
    def frame_count(self) -> int:
        """Frames of all episodes, without padding."""
        e, t = self.frames.shape[:2]
        return e * t if self.lengths is None else int(self.lengths.sum())

    def images(self, episode: Tensor, frame: Tensor) -> Tensor:
        """Images (..., 3, H, W) in [-1, 1] at the given indices."""
        return to_network(self.frames[episode, frame])

    @torch.no_grad()
    def encode(self, vae: VAE, images: int = 1024) -> None:
        """Fill ``latents``: every episode encoded as one stream, stored in bfloat16; about ``images`` at a time."""
        e, t = self.frames.shape[:2]
        batch = max(1, images // t)
        frame = torch.arange(t, device=self.frames.device)[None]
        episodes = torch.arange(e, device=self.frames.device)[:, None]
        self.latents = torch.cat([vae.encode_clips(self.images(episodes[start:start + batch], frame)).bfloat16()
                                  for start in range(0, e, batch)])

    def recalls(self, preset: Preset) -> np.ndarray:
        """Return ``recall.moments_of`` all episodes, (E, T); none of an episode shorter than T frames, beyond whose end
        a clip of the batch's frames could go on."""
        if self._recalls is None:
            self._recalls = np.stack([moments_of(preset, each) for each in self.actions.cpu().numpy()])
            if self.lengths is not None:
                self._recalls[(self.lengths < self.frames.shape[1]).cpu().numpy()] = False
        return self._recalls

    def keyframes(self, preset: Preset, episodes: Iterable[int], slab: int) -> np.ndarray:
        """Return the frames int64 (B, F) of the slabs that sessions in these episodes keep once all before ``slab`` have left
        their window, which must be at least as many as are kept."""
        size, kept = preset.tile[0], []
        for episode in episodes:
            if episode not in self._keyframes:
                self._keyframes[episode] = keyframes_of(preset, self.actions[episode].cpu().numpy())
            kept.append(self._keyframes[episode][slab])
        return (np.array(kept)[..., None] * size + np.arange(size)).reshape(len(kept), -1)

    def clips(self, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw indices (count, 1) of episodes and (count, length) of consecutive frames, each such clip equally likely.

        Raises ValueError if no episode is that long.
        """
        device = self.frames.device
        if self.lengths is not None:
            return self._clips_of_lengths(count, length, generator)
        self._require(length, self.frames.shape[1])
        episode = torch.randint(len(self), (count, 1), device=device, generator=generator)
        start = torch.randint(self.frames.shape[1] - length + 1, (count, 1), device=device, generator=generator)
        return episode, start + torch.arange(length, device=device)

    def clips_around(self, moments: Tensor, count: int, length: int, lead: int, generator: torch.Generator
                     ) -> tuple[Tensor, Tensor]:
        """Draw like ``clips``, each clip holding one of the ``moments`` (N, 2), episode and frame, all equally likely, with at
        least ``lead`` frames before it, where the episode has them."""
        device = self.frames.device
        moment = moments[torch.randint(len(moments), (count,), device=device, generator=generator)]
        episode, at = moment[:, :1], moment[:, 1:]
        total = self.frames.shape[1] if self.lengths is None else self.lengths[episode]
        before = torch.randint(lead, length, (count, 1), device=device, generator=generator)
        start = (at - before).clamp_min(0).minimum(torch.as_tensor(total - length, device=device))
        return episode, start + torch.arange(length, device=device)

    def contact_frames(self, length: int) -> Tensor:
        """Return all moments (N, 2), episode and frame, with a contact in the period before, in episodes of at least
        ``length`` frames."""
        moments = self.collided.nonzero()
        if self.lengths is None:
            return moments
        frames = self.lengths[moments[:, 0]]
        return moments[(moments[:, 1] < frames) & (frames >= length)]

    def _require(self, length: int, longest: int) -> None:
        if longest < length:
            raise ValueError(f'the longest of {len(self)} episodes has {longest} frames, and a clip takes {length}: record '
                             'longer drives without gaps')

    def _clips_of_lengths(self, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        device = self.frames.device
        self._require(length, int(self.lengths.max()))
        starts = (self.lengths - length + 1).clamp_min(0)
        episode = torch.multinomial(starts.double(), count, replacement=True, generator=generator)[:, None]
        drawn = torch.rand((count, 1), device=device, generator=generator, dtype=torch.double)
        start = (drawn * starts[episode]).long()
        return episode, start + torch.arange(length, device=device)


def to_network(frames: Tensor) -> Tensor:
    """Return images uint8 (..., H, W, 3) as the autoencoder takes them, (..., 3, H, W) in [-1, 1]."""
    return frames.float().div_(127.5).sub_(1.0).movedim(-1, -3)
