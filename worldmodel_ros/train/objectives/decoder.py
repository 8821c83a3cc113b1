"""Stage ``decoder``: what is imagined is drawn as sharply as the world is, against an adversary.

What a model imagines is a mean of what may come, of which a decoder that learns from squared errors draws a blur. Here the
decoder alone goes on learning, from latents that the other networks imagine and encode: near the truth, and such that its
patches cannot be told from true ones (Isola et al., "Image-to-Image Translation with Conditional Adversarial Networks", 2017;
the hinge loss of Lim and Ye, "Geometric GAN", 2017; weighed against the error by the norms of both gradients, as in Esser et
al., "Taming Transformers for High-Resolution Image Synthesis", 2021, here of each image: one that is nearly right is left so).
Latents, plans and futures stay the same, bit for bit.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from worldmodel_ros.model.world_model import WorldModel
from worldmodel_ros.train.data.episodes import Episodes
from worldmodel_ros.train.run.options import DecoderOptions
from .objective import Objective
from .sampler import roll_out
from .vae import reconstruction

_DETAIL = 4.0  # by which details, what differs from the mean of 3 x 3 pixels, are raised to about the images' own deviation


class Adversary(nn.Module):
    """Images (B, 3, H, W) to how true each patch of 28 x 28 pixels looks, (B, 1, H / 4, W / 4): above zero, rather true. It is
    shown their details apart, which blur takes away first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after, stride in ((6, width, 2), (width, 2 * width, 2), (2 * width, 4 * width, 1)):
            kernel = 4 if stride == 2 else 3
            layers += [spectral_norm(nn.Conv2d(before, after, kernel, stride, 1)), nn.LeakyReLU(0.2)]
        self.layers = nn.Sequential(*layers, spectral_norm(nn.Conv2d(4 * width, 1, 3, padding=1)))

    def forward(self, images: Tensor) -> Tensor:
        details = images - F.avg_pool2d(F.pad(images, (1, 1, 1, 1), mode='replicate'), 3, 1)
        return self.layers(torch.cat([images, _DETAIL * details], 1))


@dataclass
class Drawn:
    """B latents (B, h, w, Z) to be drawn, those of the frames before them, and the true images (B, 3, H, W)."""

    latents: Tensor
    before: Tensor
    images: Tensor


class DecoderObjective(Objective):
    """Error and adversary of images drawn from imagined and from encoded latents."""

    def __init__(self, model: WorldModel, episodes: Episodes, options: DecoderOptions) -> None:
        """Raises ValueError for frames ahead that are no whole chunks."""
        if options.ahead % model.preset.chunk_frames:
            raise ValueError(f'ahead is {options.ahead}: it must be whole chunks of {model.preset.chunk_frames} frames')
        self.model, self.episodes, self.options = model, episodes, options
        device = episodes.frames.device
        self.adversary = Adversary(options.adversary_width).to(device)
        self.optimiser = torch.optim.AdamW(self.adversary.parameters(), options.adversary_rate, betas=(0.5, 0.99))
        self.left = 0  # steps until others are imagined
        self.seen: tuple[Tensor, Tensor] | None = None  # images drawn in this step, and the true ones
        self.told = torch.zeros((), device=device)  # the adversary's loss at the step before: 2 where it can tell nothing

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.vae.decoder.parameters())

    def draw(self, rng: np.random.Generator, generator: torch.Generator) -> Drawn:
        if not self.left:
            self._imagine(rng, generator)
            self.left = self.options.reuse
        self.left -= 1
        count, ahead = self.options.batch, self.options.ahead
        stream = torch.from_numpy(rng.integers(len(self.frame), size=count))
        step = torch.from_numpy(rng.integers(1, ahead + 1, size=count))
        kind = torch.from_numpy((rng.random(count) < self.options.encoded_share).astype(np.int64))
        device = self.latents.device
        stream, step, kind = stream.to(device), step.to(device), kind.to(device)
        episode, frame = self.episode[stream], self.frame[stream, step][:, None]
        return Drawn(self.latents[kind, stream, step], self.latents[kind, stream, step - 1],
                     self.episodes.images(episode, frame)[:, 0])

    @torch.no_grad()
    def _imagine(self, rng: np.random.Generator, generator: torch.Generator) -> None:
        """Imagine the futures of other streams."""
        options, window = self.options, self.model.preset.window_frames
        episode, frame = self.episodes.clips(options.streams, window + options.ahead, generator)
        clip, device = self.episodes.latents[episode, frame].float(), frame.device
        noise = torch.randn((len(clip), options.ahead, *clip.shape[2:]), device=device, generator=generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == 'cuda'):
            imagined = roll_out(self.model.dit, clip[:, :window], self.episodes.actions[episode, frame], noise,
                                1 if rng.random() < options.one_step_share else 2).float()
        observed = clip[:, window - 1:window]
        self.latents = torch.stack([torch.cat([observed, imagined], 1), clip[:, window - 1:]])  # imagined, encoded
        self.episode, self.frame = episode, frame[:, window - 1:]

    def loss(self, batch: Drawn) -> tuple[Tensor, dict[str, Tensor]]:
        images = self.model.vae.decode_after(batch.latents, batch.before).float()
        error, values = reconstruction(images, batch.images)
        believed = self.adversary(images).float().mean((1, 2, 3))
        weights = self.options.adversary_weight * _norms(error, images) / _norms(believed.sum(), images).clamp_min(1e-8)
        self.seen = images.detach(), batch.images
        return error - weights @ believed, {**values, 'believed': believed.detach().mean(), 'told': self.told}

    def after_update(self, step: int) -> None:
        """The adversary learns to tell the images of this step from true ones."""
        drawn, true = self.seen
        with torch.enable_grad(), torch.autocast(drawn.device.type, torch.bfloat16, enabled=drawn.is_cuda):
            loss = F.relu(1.0 - self.adversary(true)).mean() + F.relu(1.0 + self.adversary(drawn)).mean()
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        self.told = loss.detach()

    def state(self) -> dict[str, Tensor]:
        moments = self.optimiser.state_dict()['state']
        state = {f'adversary.{name}': value for name, value in self.adversary.state_dict().items()}
        state |= {f'moments.{index}.{name}': value for index, values in moments.items() for name, value in values.items()}
        streams = {name: getattr(self, name) for name in ('latents', 'episode', 'frame')} if self.left else {}
        return state | streams | {'left': torch.tensor(self.left)}

    def restore(self, state: dict[str, Tensor]) -> None:
        def part(prefix: str) -> dict[str, Tensor]:
            return {name[len(prefix):]: value for name, value in state.items() if name.startswith(prefix)}

        self.adversary.load_state_dict(part('adversary.'))
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in part('moments.').items():
            index, _, key = name.partition('.')
            moments.setdefault(int(index), {})[key] = value
        self.optimiser.load_state_dict({**self.optimiser.state_dict(), 'state': moments})
        self.left = int(state['left'])
        if self.left:
            self.latents, self.episode, self.frame = (state[name] for name in ('latents', 'episode', 'frame'))


def _norms(loss: Tensor, images: Tensor) -> Tensor:
    """Of the gradient of a loss by each of the images (B, 3, H, W): (B,)."""
    return torch.autograd.grad(loss, images, retain_graph=True)[0].flatten(1).norm(dim=1)
