"""Stage ``decoder``: trains the decoder alone, so that predicted images are as sharp as real ones.

A predicted latent is a mean of possible futures, which a decoder trained on squared errors renders as blur. Here the decoder
alone continues to train, on latents that the frozen networks predict and encode. Its losses are the pixel error, with less
weight farther ahead; the energy of details (``detail``); and a patch adversary (Isola et al., "Image-to-Image Translation with
Conditional Adversarial Networks", 2017; the hinge loss of Lim and Ye, "Geometric GAN", 2017; spectral normalisation of Miyato
et al., 2018), whose gradient is scaled to that of the error (Esser et al., "Taming Transformers for High-Resolution Image
Synthesis", 2021). Camera noise is added to the adversary's input: otherwise it tells images apart by their noise alone, and the
decoder imitates that with a grid on smooth walls.
"""
from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from worldmodel_ros.model.vae import VAE, to_frames
from worldmodel_ros.model.world_model import WorldModel
from worldmodel_ros.train.data.episodes import Episodes
from worldmodel_ros.train.run.options import DecoderOptions
from worldmodel_ros.train.run.points import Points
from worldmodel_ros.train.run.progress import moments_of, restore_moments
from .detail import energy_error, sharpness
from .objective import Objective
from .streams import Streams, source

_RAISED = 4.0  # scales details, the difference from the mean of 3 x 3 pixels, to about the range of the images
_BLUR_NOISE = 1.0  # of 255, on all that the adversary sees: true images are integers, decoded ones are not
_AHEAD = 1.0  # s, how far ahead images are judged


class Adversary(nn.Module):
    """Scores how real each patch of 40 x 40 pixels of images (B, 3, H, W) looks, (B, 1, H / 8, W / 8): above zero, rather real.
    Details, which blur removes first, are separate input channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after, kernel, stride in ((6, width, 3, 1), (width, 2 * width, 4, 2), (2 * width, 4 * width, 4, 2),
                                              (4 * width, 8 * width, 4, 2)):
            layers += [spectral_norm(nn.Conv2d(before, after, kernel, stride, 1)), nn.LeakyReLU(0.2)]
        self.layers = nn.Sequential(*layers, spectral_norm(nn.Conv2d(8 * width, 1, 3, padding=1)))

    def forward(self, images: Tensor) -> Tensor:
        details = images - F.avg_pool2d(F.pad(images, (1, 1, 1, 1), mode='replicate'), 3, 1)
        # Channels last for tensor cores; the weights keep their layout, as they are saved.
        return self.layers(torch.cat([images, _RAISED * details], 1).contiguous(memory_format=torch.channels_last))


@dataclass
class Drawn:
    """B latents (B, h, w, Z) to decode, those of the frames before them, the true images (B, 3, H, W), frames ahead (B,), 0
    for encoded ones, and the noise added for the adversary to decoded and to true images (2, B, 3, H, W)."""

    latents: Tensor
    before: Tensor
    images: Tensor
    ahead: Tensor
    noise: Tensor


class DecoderObjective(Objective):
    """Pixel error, energy of details and adversary, on images decoded from imagined and from encoded latents.

    Every ``judge_s``, the averaged decoder is judged on held-back episodes and becomes one of ``points``, of which the stage
    keeps the best.
    """

    def __init__(self, model: WorldModel, averaged: WorldModel, episodes: Episodes, options: DecoderOptions,
                 held_back: Episodes, points: Points) -> None:
        """Raises ValueError if the frames ahead are not whole chunks."""
        self.model, self.averaged, self.episodes, self.options, self.points = model, averaged, episodes, options, points
        device = episodes.frames.device
        self.adversary = Adversary(options.adversary_width).to(device)
        if device.type == 'cuda':
            torch.backends.cudnn.benchmark = True  # shapes never change
        self.optimiser = torch.optim.AdamW(self.adversary.parameters(), options.adversary_rate, betas=(0.5, 0.99),
                                           fused=device.type == 'cuda')
        self._source = source(model, episodes, options)
        self.left = 0  # steps until new latents are imagined
        self._streams: Streams | None = None
        self.seen: tuple[Tensor, Tensor] | None = None  # the adversary's next batch: images decoded in this step, and true ones
        self.told = torch.zeros((), device=device)  # the adversary's loss at the step before: 2 if it cannot tell them apart
        self._judge = Judge(model, held_back, options)
        self._step, self._last = 0, time.monotonic()
        points.before = self._judge(model.vae)

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.vae.decoder.parameters())

    def draw(self, rng: np.random.Generator, generator: torch.Generator) -> Drawn:
        if not self.left:
            self._streams = self._source.draw(rng, generator)
            self.left = self.options.reuse
        self.left -= 1
        options, streams, device = self.options, self._streams, self._streams.frame.device
        stream = torch.from_numpy(rng.integers(len(streams.frame), size=options.batch)).to(device)
        step = torch.from_numpy(rng.integers(1, len(streams.ahead), size=options.batch)).to(device)
        kind = torch.from_numpy((rng.random(options.batch) < options.encoded_share).astype(np.int64)).to(device)
        images = self.episodes.images(streams.episode[stream, 0], streams.frame[stream, step])
        noise = torch.randn((2, *images.shape), device=device, generator=generator) / 127.5
        camera = options.camera_noise * torch.rand((options.batch, 1, 1, 1), device=device, generator=generator)
        noise = noise * torch.stack([(camera.square() + _BLUR_NOISE ** 2).sqrt(), torch.full_like(camera, _BLUR_NOISE)])
        return Drawn(streams.latents[kind, stream, step].float(), streams.latents[kind, stream, step - 1].float(), images,
                     torch.where(kind == 1, 0, streams.ahead[step]), noise)

    def loss(self, batch: Drawn) -> tuple[Tensor, dict[str, Tensor]]:
        options = self.options
        images = self.model.vae.decode_after(batch.latents, batch.before).float()
        apart, encoded = images - batch.images, batch.ahead == 0
        squares = apart.square().mean((1, 2, 3))
        near = 1.0 / (1.0 + self.model.preset.step_period * batch.ahead)
        details = near if options.details_fade else torch.ones_like(near)
        pixels = (near * (apart.abs().mean((1, 2, 3)) + squares)).mean()
        with torch.autocast(images.device.type, enabled=False):
            energy = energy_error(images, batch.images, torch.where(encoded, options.encoded_aim, options.aim))
        shown = images + batch.noise[0]
        believed = (self.adversary(shown).float().mean((1, 2, 3)) * details).mean()
        # Gradients with respect to the images: the adversary's can be weighted, and the decoder is back-propagated once.
        along, = torch.autograd.grad(pixels, images)
        towards, = torch.autograd.grad(-believed, images)
        weight = options.adversary_weight * min(1.0, self.done / 0.1) * along.norm() / towards.norm().clamp_min(1e-12)
        by_energy, = torch.autograd.grad(options.energy_weight * (details * energy).mean(), images)
        gradient = torch.where(torch.isfinite(by_energy), by_energy, 0.0) + along + weight * towards
        drawn = (images * gradient).sum()
        self.seen = shown.detach(), batch.images + batch.noise[1]
        pixels = pixels.detach()
        values = {'pixels': pixels, 'energy': energy.detach().mean(), 'believed': believed.detach(), 'told': self.told,
                  'encoded_db': _mean_db(squares.detach(), encoded), 'imagined_db': _mean_db(squares.detach(), ~encoded)}
        return pixels + drawn - drawn.detach(), values

    def after_update(self, step: int) -> None:
        """Train the adversary to tell the images of this step from true ones."""
        drawn, true = self.seen
        for group in self.optimiser.param_groups:
            group['lr'] = self.options.adversary_rate * (1.0 - 0.9 * min(1.0, self.done))
        with torch.enable_grad(), torch.autocast(drawn.device.type, torch.bfloat16, enabled=drawn.is_cuda):
            told = self.adversary(torch.cat([true, drawn])).float()
            loss = F.relu(1.0 - told[:len(true)]).mean() + F.relu(1.0 + told[len(true):]).mean()
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        self.told = loss.detach()
        self._step = step + 1
        if step == 0:
            self.points.clear()
        if time.monotonic() - self._last > self.options.judge_s:
            self._add_point()

    def finish(self) -> None:
        """Load the best point's decoder."""
        self._add_point()
        self.model.vae.decoder.load_state_dict(self.points.chosen[1])

    def _add_point(self) -> None:
        self.points.add({'step': self._step, **self._judge(self.averaged.vae)}, self.averaged.vae.decoder.state_dict())
        self._last = time.monotonic()

    def state(self) -> dict[str, Tensor]:
        state = {f'adversary.{name}': value for name, value in self.adversary.state_dict().items()}
        state |= {f'moments.{name}': value for name, value in moments_of(self.optimiser).items()}
        streams = vars(self._streams) if self.left else {}
        return state | self._source.state() | streams | {'left': torch.tensor(self.left)}

    def restore(self, state: dict[str, Tensor]) -> None:
        def part(prefix: str) -> dict[str, Tensor]:
            return {name[len(prefix):]: value for name, value in state.items() if name.startswith(prefix)}

        self.adversary.load_state_dict(part('adversary.'))
        restore_moments(self.optimiser, part('moments.'))
        self._source.restore(state)
        self.left = int(state['left'])
        if self.left:
            streams = self._streams = Streams(**{name: state[name] for name in ('latents', 'episode', 'frame', 'ahead')})
            # Episodes simulated during training arrive in another order.
            if not torch.equal(self.episodes.latents[streams.episode, streams.frame], streams.latents[1]):
                self.left = 0


class Judge:
    """Judges decoders on the same moments of held-back episodes: 1 s ahead, in two steps and in one, and encoded."""

    def __init__(self, model: WorldModel, episodes: Episodes, options: DecoderOptions) -> None:
        """Raises ValueError if no episode is long enough."""
        moments = source(model, episodes, options).moments(round(_AHEAD / model.preset.step_period))
        self._latents = {'two_step': moments.imagined[2], 'one_step': moments.imagined[1], 'encoded': moments.encoded}
        self._truth = moments.images
        self._sharpness = sharpness(self._truth)

    @torch.no_grad()
    def __call__(self, vae: VAE) -> dict[str, dict[str, float]]:
        """Return PSNR in dB, and mean and median sharpness relative to the true image, by kind of latents."""
        found = {}
        for name, latents in self._latents.items():
            frames = torch.cat([to_frames(vae.decode_after(part[:, 1], part[:, 0]).float()) for part in latents.split(64)])
            ratio = sharpness(frames) / self._sharpness.clamp_min(1e-6)
            mse = (frames.double() - self._truth.double()).square().mean((1, 2, 3)).clamp_min(1e-2)
            found[name] = {'psnr_db': round(float((10 * torch.log10(255.0 ** 2 / mse)).mean()), 3),
                           'sharpness': round(float(ratio.mean()), 4), 'median_sharpness': round(float(ratio.median()), 4)}
        return found


def _mean_db(squares: Tensor, chosen: Tensor) -> Tensor:
    """Mean PSNR [dB] of the chosen images, from squared errors of values in [-1, 1]; 0 without any."""
    return ((4.0 / squares.clamp_min(1e-8)).log10() * 10 * chosen).sum() / chosen.sum().clamp_min(1)
