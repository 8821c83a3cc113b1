"""Stage `vae`: the streaming autoencoder, on clips of three frames."""
from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..model.vae import VAE
from .data import Episodes
from .log import Log
from .optim import Trainer

KL_WEIGHT = 2e-5
# Gaussian noise on what the decoder reads, as a share of each channel's deviation: the decoder meets predicted latents,
# which are never exact.
LATENT_NOISE = 0.08


def clip_loss(vae: VAE, clip: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss on clips (B, T, 3, H, W) in [-1, 1], encoded and decoded as streams."""
    b, t = clip.shape[:2]
    features = vae.encoder.down(clip.flatten(0, 1)).unflatten(0, (b, t))
    before = torch.cat([features[:, :1], features[:, :-1]], 1)
    x = vae.encoder.mix(features.flatten(0, 1), before.flatten(0, 1))
    mean, logvar = vae.encoder.out(x).float().permute(0, 2, 3, 1).chunk(2, -1)
    logvar = logvar.clamp(-12.0, 4.0)
    deviation = (0.5 * logvar).exp() + LATENT_NOISE * mean.detach().std((0, 1, 2))
    latent = mean + deviation * torch.randn_like(mean)
    inner = vae.decoder.inp(latent.permute(0, 3, 1, 2)).unflatten(0, (b, t))
    before = torch.cat([inner[:, :1], inner[:, :-1]], 1)
    out = vae.decoder.up(vae.decoder.mix(inner.flatten(0, 1), before.flatten(0, 1))).float()
    target = clip.flatten(0, 1)
    mse = F.mse_loss(out, target)
    l1 = (out - target).abs().mean()
    kl = 0.5 * (mean.square() + logvar.exp() - 1.0 - logvar).mean()
    loss = mse + 0.1 * l1 + KL_WEIGHT * kl
    return loss, {'mse': mse, 'l1': l1, 'kl': kl, 'psnr_db': 10 * torch.log10(4.0 / mse.detach())}


def train_vae(vae: VAE, episodes: Episodes, seconds: float, log: Log, batch: int = 256, rate: float = 1.5e-3,
              compile_model: bool = True, limit: int | None = None, seed: int = 0) -> None:
    """Trains in place; ends with the averaged weights and with the statistics of the latents."""
    device = episodes.frames.device
    generator = torch.Generator(device).manual_seed(seed)
    trainer = Trainer(list(vae.parameters()), vae, seconds, rate)
    loss_of = torch.compile(clip_loss) if compile_model else clip_loss
    for step in trainer.steps(limit):
        episode, frame = episodes.clips(batch, 3, generator)
        with torch.autocast(device.type, torch.bfloat16):
            loss, values = loss_of(vae, episodes.images(episode, frame))
        trainer.update(loss)
        log.add(step, values)
    vae.load_state_dict(trainer.averaged.state_dict())
    with torch.no_grad():
        episode, frame = episodes.clips(512, 2, generator)
        images = episodes.images(episode, frame)
        mean = vae.encoder(images[:, 1], vae.encoder.down(images[:, 0]))[0]
        vae.latent_mean.copy_(mean.mean((0, 1, 2)))
        vae.latent_std.copy_(mean.std((0, 1, 2)).clamp_min(1e-3))
