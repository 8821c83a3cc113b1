"""Stage ``vae``: the streaming autoencoder, on clips of three frames."""
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from worldmodel_ros.model.vae import VAE
from worldmodel_ros.train.data.episodes import Episodes
from worldmodel_ros.train.run.config import VaeOptions
from .objective import Objective

KL_WEIGHT = 2e-5
CLIP_FRAMES = 3
# Gaussian noise on the decoder's input, as a share of each channel's deviation: at run time it gets predicted latents, which
# are never exact.
LATENT_NOISE = 0.08


def clip_loss(vae: VAE, clip: Tensor, noise: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss on clips (B, T, 3, H, W) in [-1, 1], encoded and decoded as streams.

    noise: normal (B, T, h, w, Z), which the latents are drawn with; by default from torch's own generator.
    """
    mean, logvar = (part.float() for part in vae.encoder.clip(clip))
    noise = torch.randn_like(mean) if noise is None else noise
    deviation = (0.5 * logvar).exp() + LATENT_NOISE * mean.detach().std((0, 1, 2, 3))
    latent = mean + deviation * noise
    inner = vae.decoder.inp(latent.flatten(0, 1).permute(0, 3, 1, 2)).unflatten(0, clip.shape[:2])
    before = torch.cat([inner[:, :1], inner[:, :-1]], 1)
    out = vae.decoder.up(vae.decoder.mix(inner.flatten(0, 1), before.flatten(0, 1))).float()
    target = clip.flatten(0, 1)
    mse = F.mse_loss(out, target)
    l1 = (out - target).abs().mean()
    kl = 0.5 * (mean.square() + logvar.exp() - 1.0 - logvar).mean()
    loss = mse + 0.1 * l1 + KL_WEIGHT * kl
    return loss, {'mse': mse, 'l1': l1, 'kl': kl, 'psnr_db': 10 * torch.log10(4.0 / mse.detach())}


class ClipLoss(nn.Module):
    """The loss as a separate module: compiling it for the one shape of training leaves the autoencoder as it is."""

    def __init__(self, vae: VAE):
        super().__init__()
        self.vae = vae

    def forward(self, clip: Tensor, noise: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return clip_loss(self.vae, clip, noise)


class VaeObjective(Objective):
    """Reconstruction of drawn clips."""

    def __init__(self, vae: VAE, episodes: Episodes, options: VaeOptions):
        self.vae, self.episodes, self.options, self.clip_loss = vae, episodes, options, ClipLoss(vae)

    def parameters(self) -> list[nn.Parameter]:
        return list(self.vae.parameters())

    def networks(self) -> list[nn.Module]:
        return [self.clip_loss]

    def draw(self, rng: np.random.Generator, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw clips (B, 3, 3, H, W), and noise for their latents."""
        clip = self.episodes.images(*self.episodes.clips(self.options.batch, CLIP_FRAMES, generator))
        shape = (*clip.shape[:2], *self.vae.preset.latent_size, self.vae.preset.latent_channels)
        return clip, torch.randn(shape, device=clip.device, generator=generator)

    def loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return self.clip_loss(*batch)


@torch.no_grad()
def normalise(vae: VAE, episodes: Episodes, generator: torch.Generator, clips: int = 512) -> None:
    """Set the mean and standard deviation by which latents are normalised, from drawn clips."""
    episode, frame = episodes.clips(clips, CLIP_FRAMES, generator)
    mean = vae.encoder.clip(episodes.images(episode, frame))[0].float()
    vae.latent_mean.copy_(mean.mean((0, 1, 2, 3)))
    vae.latent_std.copy_(mean.std((0, 1, 2, 3)).clamp_min(1e-3))
