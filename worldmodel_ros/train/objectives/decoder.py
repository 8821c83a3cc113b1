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
from worldmodel_ros.motion import MOVING_V, MOVING_W
from worldmodel_ros.train.data.episodes import Episodes
from worldmodel_ros.train.run.options import DecoderOptions
from worldmodel_ros.train.run.points import Points
from worldmodel_ros.train.run.progress import moments_of, restore_moments
from .detail import energy_error, sharpness
from .objective import Objective
from .sampler import roll_out

_RAISED = 4.0  # scales details, the difference from the mean of 3 x 3 pixels, to about the range of the images
_BLUR_NOISE = 1.0  # of 255, on all that the adversary sees: true images are integers, decoded ones are not
_AHEAD = 1.0  # s, how far ahead images are judged
_JUDGED = 256  # moments


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
        if options.ahead % model.preset.chunk_frames:
            raise ValueError(f'ahead is {options.ahead}: it must be whole chunks of {model.preset.chunk_frames} frames')
        self.model, self.averaged, self.episodes, self.options, self.points = model, averaged, episodes, options, points
        device = episodes.frames.device
        self.adversary = Adversary(options.adversary_width).to(device)
        if device.type == 'cuda':
            torch.backends.cudnn.benchmark = True  # shapes never change
        self.optimiser = torch.optim.AdamW(self.adversary.parameters(), options.adversary_rate, betas=(0.5, 0.99),
                                           fused=device.type == 'cuda')
        self.left = 0  # steps until new latents are imagined
        self.seen: tuple[Tensor, Tensor] | None = None  # the adversary's next batch: images decoded in this step, and true ones
        self.told = torch.zeros((), device=device)  # the adversary's loss at the step before: 2 if it cannot tell them apart
        self._judge = Judge(model, held_back)
        self._step, self._last = 0, time.monotonic()
        points.before = self._judge(model.vae)

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.vae.decoder.parameters())

    def draw(self, rng: np.random.Generator, generator: torch.Generator) -> Drawn:
        if not self.left:
            self._imagine(rng, generator)
            self.left = self.options.reuse
        self.left -= 1
        options, device = self.options, self.latents.device
        stream = torch.from_numpy(rng.integers(len(self.frame), size=options.batch)).to(device)
        step = torch.from_numpy(rng.integers(1, options.ahead + 1, size=options.batch)).to(device)
        kind = torch.from_numpy((rng.random(options.batch) < options.encoded_share).astype(np.int64)).to(device)
        images = self.episodes.images(self.episode[stream, 0], self.frame[stream, step])
        noise = torch.randn((2, *images.shape), device=device, generator=generator) / 127.5
        camera = options.camera_noise * torch.rand((options.batch, 1, 1, 1), device=device, generator=generator)
        noise = noise * torch.stack([(camera.square() + _BLUR_NOISE ** 2).sqrt(), torch.full_like(camera, _BLUR_NOISE)])
        return Drawn(self.latents[kind, stream, step].float(), self.latents[kind, stream, step - 1].float(), images,
                     torch.where(kind == 1, 0, step), noise)

    @torch.no_grad()
    def _imagine(self, rng: np.random.Generator, generator: torch.Generator) -> None:
        """Imagine the futures of new streams."""
        options, window = self.options, self.model.preset.window_frames
        episode, frame = self.episodes.clips(options.streams, window + options.ahead, generator)
        clip, device = self.episodes.latents[episode, frame], frame.device
        noise = torch.randn((len(clip), options.ahead, *clip.shape[2:]), device=device, generator=generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == 'cuda'):
            imagined = roll_out(self.model.dit, clip[:, :window].float(), self.episodes.actions[episode, frame], noise,
                                1 if rng.random() < options.one_step_share else 2).to(clip.dtype)
        observed = clip[:, window - 1:window]
        self.latents = torch.stack([torch.cat([observed, imagined], 1), clip[:, window - 1:]])  # imagined, encoded
        self.episode, self.frame = episode, frame[:, window - 1:]

    def loss(self, batch: Drawn) -> tuple[Tensor, dict[str, Tensor]]:
        options = self.options
        images = self.model.vae.decode_after(batch.latents, batch.before).float()
        apart, encoded = images - batch.images, batch.ahead == 0
        squares = apart.square().mean((1, 2, 3))
        near = 1.0 / (1.0 + self.model.preset.step_period * batch.ahead)
        pixels = (near * (apart.abs().mean((1, 2, 3)) + squares)).mean()
        with torch.autocast(images.device.type, enabled=False):
            energy = energy_error(images, batch.images, torch.where(encoded, options.encoded_aim, options.aim))
        shown = images + batch.noise[0]
        believed = self.adversary(shown).float().mean()
        # Gradients with respect to the images: the adversary's can be weighted, and the decoder is back-propagated once.
        along, = torch.autograd.grad(pixels, images)
        towards, = torch.autograd.grad(-believed, images)
        weight = options.adversary_weight * min(1.0, self.done / 0.1) * along.norm() / towards.norm().clamp_min(1e-12)
        by_energy, = torch.autograd.grad(options.energy_weight * energy.mean(), images)
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
        streams = {name: getattr(self, name) for name in ('latents', 'episode', 'frame')} if self.left else {}
        return state | streams | {'left': torch.tensor(self.left)}

    def restore(self, state: dict[str, Tensor]) -> None:
        def part(prefix: str) -> dict[str, Tensor]:
            return {name[len(prefix):]: value for name, value in state.items() if name.startswith(prefix)}

        self.adversary.load_state_dict(part('adversary.'))
        restore_moments(self.optimiser, part('moments.'))
        self.left = int(state['left'])
        if self.left:
            self.latents, self.episode, self.frame = (state[name] for name in ('latents', 'episode', 'frame'))


class Judge:
    """Judges decoders on the same moments of held-back episodes: 1 s ahead, in two steps and in one, and encoded."""

    @torch.no_grad()
    def __init__(self, model: WorldModel, episodes: Episodes) -> None:
        """Raises ValueError if no episode is long enough."""
        preset = model.preset
        window, ahead = preset.window_frames, round(_AHEAD / preset.step_period)
        frames, device = window + ahead, episodes.frames.device
        episode, frame = episodes.clips(_JUDGED, frames, torch.Generator(device).manual_seed(0))
        limits = torch.tensor((MOVING_V, MOVING_W), device=device)
        moving = (episodes.actions[episode, frame[:, window:]].abs() > limits).any(2).float()
        chosen = moving.mean(1) > 0.5
        episode, frame = (episode[chosen], frame[chosen]) if chosen.any() else (episode, frame)
        clip = episodes.latents[episode, frame].float()
        whole = -(-ahead // preset.chunk_frames) * preset.chunk_frames
        actions = torch.cat([episodes.actions[episode, frame], episodes.actions[episode, frame[:, -1:]].expand(
            -1, whole - ahead, -1)], 1)
        noise = torch.randn((len(clip), whole, *clip.shape[2:]), device=device,
                            generator=torch.Generator(device).manual_seed(1))
        rolled = {name: roll_out(model.dit, clip[:, :window], actions, noise, steps)[:, ahead - 2:ahead]
                  for name, steps in (('two_step', 2), ('one_step', 1))}
        self._latents = {**rolled, 'encoded': clip[:, -2:]}
        self._truth = episodes.frames[episode[:, 0], frame[:, -1]]
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
