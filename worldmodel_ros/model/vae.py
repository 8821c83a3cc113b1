"""Streaming video VAE: a convolutional autoencoder whose bottleneck also sees the previous frame.

Encoder and decoder each carry one feature map from frame to frame (a causal temporal convolution of length two), so a camera
can be encoded as its frames arrive, at a constant cost per frame. At the start of a stream the frame stands in for its own
past.
"""
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .presets import Preset


def to_frames(images: Tensor) -> Tensor:
    """Convert images (..., 3, H, W) in [-1, 1] to frames uint8 (..., H, W, 3)."""
    return ((images + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8).movedim(-3, -1)


class ResBlock(nn.Module):
    """Two 3x3 convolutions on a residual branch; no normalisation, so a frame never depends on its batch."""

    def __init__(self, width: int):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        nn.init.zeros_(self.conv2.weight)
        nn.init.zeros_(self.conv2.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.silu(self.conv1(F.silu(x))))


class TemporalMix(nn.Module):
    """Causal temporal convolution of length two at the bottleneck: over this frame's features and the previous one's."""

    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(2 * width, width, 1)

    def forward(self, x: Tensor, previous: Tensor) -> Tensor:
        return x + self.conv(F.silu(torch.cat([x, previous], 1)))


class Encoder(nn.Module):
    """Maps (B, 3, H, W) in [-1, 1] and the previous features (B, C, H/8, W/8) to latents (B, H/8, W/8, Z) and new features."""

    def __init__(self, preset: Preset):
        super().__init__()
        w = preset.vae_width
        self.down = nn.Sequential(
            nn.Conv2d(3, w, 4, stride=2, padding=1), ResBlock(w),
            nn.Conv2d(w, 2 * w, 4, stride=2, padding=1), ResBlock(2 * w),
            nn.Conv2d(2 * w, 4 * w, 4, stride=2, padding=1), ResBlock(4 * w))
        self.mix = TemporalMix(4 * w)
        self.out = nn.Sequential(ResBlock(4 * w), nn.SiLU(), nn.Conv2d(4 * w, 2 * preset.latent_channels, 1))

    def forward(self, image: Tensor, previous: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean and log-variance of the latent, (B, h, w, Z) each, and the features to carry on."""
        features = self.down(image)
        return *self.bottleneck(features, features if previous is None else previous), features

    def bottleneck(self, features: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log-variance (B, h, w, Z) from the features of a frame and of the previous one."""
        mean, logvar = self.out(self.mix(features, previous)).permute(0, 2, 3, 1).chunk(2, -1)
        return mean, logvar.clamp(-12.0, 4.0)

    def clip(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Encode clips (B, T, 3, H, W) as streams, all frames in one batch: mean and log-variance (B, T, h, w, Z)."""
        features = self.down(images.flatten(0, 1)).unflatten(0, images.shape[:2])
        before = torch.cat([features[:, :1], features[:, :-1]], 1)
        x = self.out(self.mix(features.flatten(0, 1), before.flatten(0, 1))).permute(0, 2, 3, 1)
        mean, logvar = x.unflatten(0, images.shape[:2]).chunk(2, -1)
        return mean, logvar.clamp(-12.0, 4.0)


class Decoder(nn.Module):
    """Maps latents (B, h, w, Z) and the previous features (B, C, h, w) to images (B, 3, H, W) in [-1, 1] and new features."""

    def __init__(self, preset: Preset):
        super().__init__()
        w = preset.vae_width
        self.inp = nn.Conv2d(preset.latent_channels, 4 * w, 3, padding=1)
        self.mix = TemporalMix(4 * w)
        self.up = nn.Sequential(
            ResBlock(4 * w), nn.Conv2d(4 * w, 8 * w, 3, padding=1), nn.PixelShuffle(2),
            ResBlock(2 * w), nn.Conv2d(2 * w, 4 * w, 3, padding=1), nn.PixelShuffle(2),
            ResBlock(w), nn.SiLU(), nn.Conv2d(w, 12, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, latent: Tensor, previous: Tensor | None = None) -> tuple[Tensor, Tensor]:
        features = self.inp(latent.permute(0, 3, 1, 2))
        x = self.mix(features, features if previous is None else previous)
        return self.up(x), features


class VAE(nn.Module):
    """Encoder and decoder with normalised latents, of unit variance per channel."""

    def __init__(self, preset: Preset):
        super().__init__()
        self.preset = preset
        self.encoder = Encoder(preset)
        self.decoder = Decoder(preset)
        self.register_buffer('latent_mean', torch.zeros(preset.latent_channels))
        self.register_buffer('latent_std', torch.ones(preset.latent_channels))

    def encode(self, image: Tensor, previous: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Encode images (B, 3, H, W) in [-1, 1] to normalised latents (B, h, w, Z) (the posterior's mean) and features."""
        mean, _, features = self.encoder(image, previous)
        return (mean - self.latent_mean) / self.latent_std, features

    def encode_next(self, image: Tensor, previous: Tensor, started: Tensor) -> tuple[Tensor, Tensor]:
        """``encode`` in one pass for streams of which some, where bool ``started`` (B,) is False, begin here."""
        features = self.encoder.down(image)
        past = torch.where(started[:, None, None, None], previous, features)
        mean, _ = self.encoder.bottleneck(features, past)
        return (mean - self.latent_mean) / self.latent_std, features

    def encode_clips(self, images: Tensor) -> Tensor:
        """Encode clips (B, T, 3, H, W), each from the start of a stream, to normalised latents (B, T, h, w, Z)."""
        return (self.encoder.clip(images)[0] - self.latent_mean) / self.latent_std

    def decode(self, latent: Tensor, previous: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Decode normalised latents (B, h, w, Z) to images (B, 3, H, W) in [-1, 1] and features."""
        return self.decoder(latent * self.latent_std + self.latent_mean, previous)

    def decode_clip(self, latents: Tensor, before: Tensor) -> Tensor:
        """Decode (T, h, w, Z) that follow the latent ``before`` (h, w, Z), all frames in one batch: (T, 3, H, W)."""
        return self.decode_after(latents, torch.cat([before[None], latents[:-1]]))

    def decode_after(self, latents: Tensor, past: Tensor) -> Tensor:
        """Decode (B, h, w, Z), each of which follows its own latent of ``past`` (B, h, w, Z), to (B, 3, H, W).

        The decoder's state depends on the last latent alone, so a known past makes the frames independent.
        """
        previous = self.decoder.inp((past * self.latent_std + self.latent_mean).permute(0, 3, 1, 2))
        return self.decode(latents, previous)[0]
