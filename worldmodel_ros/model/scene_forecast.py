"""
Forecast of the scene: where things are and will be, whatever the robot does, from the newest frame in one causal pass.

What moves by itself is forecast once for all candidate actions, so that nothing about it can be read off the robot's own
actions; what the robot does is added by its motion (`evaluate.control.motion`). The pass is fused: the newest frame is
committed to the window together with query tokens for HORIZONS, which attend to the window, the frame and one another. A
second pass takes the features of the first as its queries. A head on the newest frame alone gives the same forecast
without queries, which is the rung without imagination.

The encoder and the DiT are those of `WorldModel`, whose weights are a good start; the frame's condition has measured
wheel velocities as well. Experimental: no weights are shipped.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from .checkpoint_description import ModelError, read_description, weight_files
from .dit import DiT, frame_bias_to_tokens
from .presets import Preset
from .rotary import rotary_angles
from .vae import Encoder
from .world_model import WorldModel

HORIZONS = (2, 4, 8, 16, 32)  # frames ahead
SLOTS = 12  # things: the four goal objects, balls by colour (3), and other movers (5), the nearest first
SCALE = 2.0  # m, of the numbers that the heads give
UNSEEN = -1e4  # additive mask
_WALLS = 6  # cosine and sine of four times the first wall's direction, and metres to each wall

Window = Sequence[tuple[Tensor, Tensor]]  # each layer's keys and values, (B, H, frames * P, d)


@dataclass
class Present:
    """What the newest frame tells. `presence` (..., SLOTS): logits of being there and seen lately. `now` (..., SLOTS, 3) and
    `paths` (..., J, SLOTS, 3): x and y in base_link in units of SCALE, and the logarithm of the error's scale in m.
    `walls` (..., 6)."""

    presence: Tensor
    now: Tensor
    paths: Tensor
    walls: Tensor


class _Slots(nn.Module):
    """A frame's features (..., P, D) to numbers about all slots."""

    def __init__(self, preset: Preset, out: int, hidden: int) -> None:
        super().__init__()
        squeezed = preset.head_features or preset.width
        self.squeeze = nn.Linear(preset.width, squeezed)
        self.net = nn.Sequential(nn.Linear(preset.tokens * squeezed, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(),
                                 nn.Linear(hidden, out))

    def forward(self, features: Tensor) -> Tensor:
        return self.net(self.squeeze(features).flatten(-2))


class SceneForecast(nn.Module):
    """Encoder, DiT and the forecast's queries and heads; for presets without tiles."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        d, count = preset.width, len(HORIZONS)
        self.preset = preset
        self.encoder, self.dit = Encoder(preset), DiT(preset)
        self.register_buffer('latent_mean', torch.zeros(preset.latent_channels))
        self.register_buffer('latent_std', torch.ones(preset.latent_channels))
        self.odometry = nn.Sequential(nn.Linear(2, d), nn.SiLU(), nn.Linear(d, d))
        self.query = nn.Parameter(torch.randn(count, preset.tokens, d) * 0.02)
        self.pass_condition = nn.Parameter(torch.zeros(2, count, d))
        self.again = nn.Linear(d, d)
        nn.init.normal_(self.again.weight, std=0.01)
        self.present = _Slots(preset, SLOTS * (4 + 3 * count) + _WALLS, 512)
        self.ahead = _Slots(preset, SLOTS * 3, 384)
        self.horizon = nn.Parameter(torch.zeros(count, preset.tokens, d))

    @classmethod
    def from_world_model(cls, model: WorldModel) -> SceneForecast:
        """A forecast that begins with a trained model's encoder and DiT, which are copied."""
        forecast = cls(model.preset)
        forecast.encoder.load_state_dict(model.vae.encoder.state_dict())
        forecast.dit.load_state_dict(model.dit.state_dict())
        forecast.latent_mean.copy_(model.vae.latent_mean)
        forecast.latent_std.copy_(model.vae.latent_std)
        return forecast.to(next(model.parameters()).device)

    @classmethod
    def load(cls, folder: Path, device: torch.device | str = 'cpu') -> SceneForecast:
        """Read what `checkpoint.save` wrote of a forecast. Raises ModelError where that does not fit."""
        forecast, state = cls(read_description(folder).preset), {}
        for file in weight_files(folder):
            state |= load_file(file)
        try:
            forecast.load_state_dict(state)
        except RuntimeError as error:
            raise ModelError(f'the weights in {folder} are of no scene forecast: {error}') from error
        return forecast.eval().to(device)

    def encode(self, image: Tensor, previous: Tensor | None) -> tuple[Tensor, Tensor]:
        """Images (B, 3, H, W) in [-1, 1] and the encoder's last features to latents (B, h, w, Z) and new features."""
        mean, _, features = self.encoder(image, previous)
        return (mean - self.latent_mean) / self.latent_std, features

    def enter(self, latents: Tensor, executed: Tensor, measured: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (B, T, P, D) and condition (B, T, D) of observed frames: latents (B, T, h, w, Z); `executed` (B, T, A), the
        commands over the period before each, and `measured` (B, T, 2) by the wheels, m/s and rad/s."""
        clean = torch.ones(latents.shape[:2], device=latents.device)
        condition, tokens = self.dit.enter(latents, clean, torch.zeros_like(clean, dtype=torch.long), executed)
        return tokens, condition + self.odometry(measured)

    def layers(self, x: Tensor, condition: Tensor, rotary: Tensor, bias: Tensor, window: Window | None = None
               ) -> tuple[Tensor, Window]:
        """x (B, T, P, D) through the DiT: rotary (2, T, P, d / 2), bias (T, window's frames + T) between frames. Returns
        features (B, T, P, D), and the keys and values of x."""
        rotary, added = rotary.flatten(1, 2)[:, None, None], []
        bias = frame_bias_to_tokens(bias, self.preset.tokens).to(x.dtype)
        for number, block in enumerate(self.dit.blocks):
            x, keys, values = block(x, condition, rotary, bias, None if window is None else window[number])
            added.append((keys, values))
        return self.dit.features(x, condition), added

    def read_present(self, features: Tensor) -> Present:
        """What the newest frame's features (..., P, D) tell."""
        walls, things = self.present(features).split([_WALLS, SLOTS * (4 + 3 * len(HORIZONS))], -1)
        things = things.unflatten(-1, (SLOTS, -1))
        paths = things[..., 4:].unflatten(-1, (len(HORIZONS), 3)).movedim(-2, -3)
        return Present(things[..., 0], things[..., 1:4], paths, walls)

    def read_ahead(self, features: Tensor) -> Tensor:
        """Features of the queries (..., J, P, D) to paths (..., J, SLOTS, 3), as in Present."""
        return self.ahead(features + self.horizon).unflatten(-1, (SLOTS, 3))

    def forward(self, images: Tensor, executed: Tensor, measured: Tensor, anchors: Sequence[int], rotary: Tensor,
                bias: Tensor) -> tuple[Present, Tensor, Tensor]:
        """Training: clips (B, T, 3, H, W), with forecasts from each of A anchors, frames of them. rotary and bias are those
        of `layout`. Returns what the anchors tell, (B, A, ...), and paths (B, A, J, SLOTS, 3) of one pass and of two."""
        mean, _ = self.encoder.clip(images)
        x, condition = self.enter((mean - self.latent_mean) / self.latent_std, executed, measured)
        b, t, p, d = x.shape
        a, count = len(anchors), len(HORIZONS)
        query = self.query.expand(b, a, count, p, d).flatten(1, 2)
        first, second = (each.expand(b, a, count, d).flatten(1, 2).to(condition.dtype) for each in self.pass_condition)
        features, added = self.layers(torch.cat([x, query.to(x.dtype)], 1), torch.cat([condition, first], 1), rotary, bias)
        window = [(keys[:, :, :t * p], values[:, :, :t * p]) for keys, values in added]
        ahead = features[:, t:]
        again, _ = self.layers((query + self.again(ahead)).to(x.dtype), second, rotary[:, t:], bias[t:], window)
        return (self.read_present(features[:, list(anchors)]),
                *(self.read_ahead(each.unflatten(1, (a, count))) for each in (ahead, again)))


def layout(preset: Preset, frames: int, anchors: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Rotary angles and mask between frames of a clip of `frames` followed by the queries of each anchor: a frame sees
    itself and the window before it, a query what its anchor sees and the queries of the same anchor."""
    count = len(HORIZONS)
    times = np.concatenate([np.arange(frames), *(np.array(HORIZONS) + anchor for anchor in anchors)])
    sees = np.zeros((len(times), len(times)), bool)
    for frame in range(frames):
        sees[frame, max(0, frame - preset.window_frames):frame + 1] = True
    for number, anchor in enumerate(anchors):
        rows = slice(frames + number * count, frames + (number + 1) * count)
        sees[rows, :frames] = sees[anchor, :frames]
        sees[rows, rows] = True
    return torch.from_numpy(rotary_angles(preset, times)), torch.where(torch.from_numpy(sees), 0.0, UNSEEN)


class ForecastStream:
    """One robot's forecasts, frame by frame, on a CPU: the window is kept as keys and values. Not thread-safe."""

    def __init__(self, forecast: SceneForecast, passes: int) -> None:
        """`passes`: 0 (the head on the newest frame), 1 or 2."""
        self._forecast, self._passes = forecast, passes
        self._window: Window | None = None
        self._features: Tensor | None = None
        self._time = 0

    @torch.inference_mode()
    def observe(self, image: np.ndarray, executed: np.ndarray, measured: np.ndarray
                ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Take a frame uint8 (H, W, 3) and give the probability that each thing is there, (SLOTS,), where it is at times
        0 and HORIZONS, (1 + J, SLOTS, 2) in m in base_link of this moment, and the walls, (6,)."""
        net, p, count = self._forecast, self._forecast.preset.tokens, len(HORIZONS)
        picture = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None].float() / 127.5 - 1.0
        latent, self._features = net.encode(picture, self._features)
        x, condition = net.enter(latent[None], *(torch.as_tensor(np.asarray(values), dtype=torch.float32)[None, None]
                                                 for values in (executed, measured)))
        seen = 0 if self._window is None else self._window[0][0].shape[2] // p
        queries = count if self._passes else 0
        times = np.concatenate([[self._time], self._time + np.array(HORIZONS[:queries], int)])
        rotary = torch.from_numpy(rotary_angles(net.preset, times))
        bias = torch.zeros(1 + queries, seen + 1 + queries)
        bias[0, seen + 1:] = UNSEEN
        if queries:
            x = torch.cat([x, net.query[None]], 1)
            condition = torch.cat([condition, net.pass_condition[:1]], 1)
        features, added = net.layers(x, condition, rotary, bias, self._window)
        present = net.read_present(features[0, 0])
        window = [(keys[:, :, :p], values[:, :, :p]) for keys, values in added]
        if self._window is not None:
            window = [tuple(torch.cat(pair, 2) for pair in zip(old, new, strict=True))
                      for old, new in zip(self._window, window, strict=True)]
        paths = present.paths
        if queries:
            ahead = features[:, 1:]
            if self._passes == 2:
                ahead, _ = net.layers(net.query[None] + net.again(ahead), net.pass_condition[1:], rotary[:, 1:],
                                      torch.zeros(count, seen + 1 + count), window)
            paths = net.read_ahead(ahead[0])
        keep = net.preset.window_frames * p
        self._window = [(keys[:, :, -keep:], values[:, :, -keep:]) for keys, values in window]
        self._time += 1
        places = torch.cat([present.now[None], paths])[..., :2] * SCALE
        return present.presence.sigmoid().numpy(), places.numpy(), present.walls.numpy()
