"""Episodes on the training device, and random clips of them."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..model.presets import Preset
from ..model.vae import VAE

ARRAYS = ('frames', 'actions', 'expert', 'collided', 'goal_distance', 'visible')
# Executed and expert action agree when they differ by less than this share of the action's range: then the next
# label of the expert belongs to the same plan.
SAME_ACTION = 0.06


@dataclass
class Episodes:
    """E episodes of T frames on one device.

    frames uint8 (E, T, H, W, 3); actions (E, T, A), the one executed over the period before each frame; expert
    (E, T, goals, A), the expert's action at each frame; collided (E, T), contact in the period before each frame;
    goal_distance (E, T, goals) in m; latents (E, T, h, w, Z) once encoded.

    A recorded drive has no labels: then the four that only a simulator knows are None. lengths (E,), where episodes
    differ in length: the frames behind it are padding.
    """

    frames: Tensor
    actions: Tensor
    expert: Tensor | None = None
    collided: Tensor | None = None
    goal_distance: Tensor | None = None
    visible: Tensor | None = None
    latents: Tensor | None = None
    lengths: Tensor | None = None

    @classmethod
    def load(cls, folder: Path, device: str) -> Episodes:
        """Simulated episodes. Raises FileNotFoundError, with the remedy, where an array is missing."""
        missing = [name for name in ARRAYS if not (folder / f'{name}.npy').is_file()]
        if missing:
            raise FileNotFoundError(f'{folder} lacks {", ".join(missing)}; make it with '
                                    f'`python -m worldmodel_ros.sim.rollout --out {folder}`')
        return cls(*(torch.from_numpy(np.load(folder / f'{name}.npy')).to(device) for name in ARRAYS))

    def __len__(self) -> int:
        return self.frames.shape[0]

    @property
    def labelled(self) -> bool:
        """Whether there are labels to train the heads on."""
        return self.expert is not None

    @property
    def frame_count(self) -> int:
        """Frames of all episodes, without padding."""
        e, t = self.frames.shape[:2]
        return e * t if self.lengths is None else int(self.lengths.sum())

    def split(self, share: float) -> tuple[Episodes, Episodes]:
        """All but the last ``share`` of the episodes (at least one), and those."""
        held_out = max(1, round(share * len(self)))

        def part(s: slice) -> Episodes:
            arrays = {name: getattr(self, name) for name in (*ARRAYS, 'lengths')}
            return Episodes(**{name: array[s] for name, array in arrays.items() if array is not None})
        return part(slice(0, len(self) - held_out)), part(slice(len(self) - held_out, None))

    def images(self, episode: Tensor, frame: Tensor) -> Tensor:
        """Pictures (..., 3, H, W) in [-1, 1] at the given indices."""
        x = self.frames[episode, frame].float().div_(127.5).sub_(1.0)
        return x.movedim(-1, -3)

    @torch.no_grad()
    def encode(self, vae: VAE, batch: int = 64) -> None:
        """Fills ``latents``: every episode encoded as one stream, stored in bfloat16."""
        e, t = self.frames.shape[:2]
        out = []
        for start in range(0, e, batch):
            index = torch.arange(start, min(start + batch, e), device=self.frames.device)
            previous, row = None, []
            for frame in range(t):
                latent, previous = vae.encode(self.images(index, torch.full_like(index, frame)), previous)
                row.append(latent.bfloat16())
            out.append(torch.stack(row, 1))
        self.latents = torch.cat(out)

    def clips(self, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Indices (count, 1) of episodes and (count, length) of consecutive frames, each such clip equally likely.

        Raises ValueError if no episode is that long.
        """
        device = self.frames.device
        if self.lengths is not None:
            return self._clips_of_lengths(count, length, generator)
        episode = torch.randint(len(self), (count, 1), device=device, generator=generator)
        start = torch.randint(self.frames.shape[1] - length + 1, (count, 1), device=device, generator=generator)
        return episode, start + torch.arange(length, device=device)

    def _clips_of_lengths(self, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        device = self.frames.device
        starts = (self.lengths - length + 1).clamp_min(0)
        if not starts.any():
            raise ValueError(f'the longest of {len(self)} episodes has {int(self.lengths.max())} frames, and a clip '
                             f'takes {length}: record longer drives without gaps')
        episode = torch.multinomial(starts.double(), count, replacement=True, generator=generator)[:, None]
        drawn = torch.rand((count, 1), device=device, generator=generator, dtype=torch.double)
        start = (drawn * starts[episode]).long()
        return episode, start + torch.arange(length, device=device)


def command_chunks(clip_expert: Tensor, clip_actions: Tensor, preset: Preset) -> tuple[Tensor, Tensor]:
    """Targets of the action head and where they hold.

    clip_expert (B, F, goals, A) and clip_actions (B, F, A) to targets (B, F - K + 1, goals, K, A) and a mask
    (B, F - K + 1, goals, K) for K = chunk_frames. Step j of the chunk at frame f is the expert's label at frame f + j;
    it belongs to the expert's plan only while the robot really did what the expert would have done until then.
    """
    k = preset.chunk_frames
    span = torch.tensor([h - l for l, h in zip(preset.action_low, preset.action_high)], device=clip_expert.device)
    frames = clip_expert.shape[1] - k + 1
    targets = torch.stack([clip_expert[:, j:j + frames] for j in range(k)], 3)
    followed = ((clip_actions[:, 1:, None] - clip_expert[:, :-1]).abs() < SAME_ACTION * span).all(-1)
    valid = torch.ones(clip_expert.shape[0], frames, clip_expert.shape[2], dtype=torch.bool, device=span.device)
    mask = [valid]
    for j in range(1, k):
        mask.append(mask[-1] & followed[:, j - 1:j - 1 + frames])
    return targets, torch.stack(mask, 3)
