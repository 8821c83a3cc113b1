"""
Scene forecast from camera and wheel odometry: where things are and will be, whatever the robot does.

A causal transformer over a window of frames. Each frame is 16 image tokens and a *slot token* for each possible thing, which
attends to the images and to the slots before it; heads read from a slot whether the thing is there, where it is and where it
will be at HORIZONS. What moves by itself is forecast once for all candidate actions, so that nothing about it can be inferred
from the robot's own actions; the effect of these is added from the robot's motion (``motion``).

The attention itself removes the robot's own motion from the scene: part of each head's queries, keys and values are points of
the plane, transformed from the base_link of their frame to that of the querying frame by wheel odometry (geometric transform
attention, Miyato et al. 2024, for SE(2)); the rest is rotated by the time between the two frames in the same way. Keys and
values are kept in the odometry frame, so a window never has to be recomputed.

Three variants: ``passes`` 0 reads places off the image tokens alone, without any future; 1 adds the slots, in the same pass
over the network; 2 lets a second pass see the first one's forecast and correct it.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from worldmodel_ros.motion import along_arc
from .checkpoint_description import ModelError, read_description, weight_files
from .presets import Preset
from .vae import Encoder
from .weights import read_tensors
from .world_model import WorldModel

HORIZONS = (2, 4, 8, 16, 32)  # frames ahead
SLOTS = 12  # things: the four goal objects, balls by colour (3), and other movers (5), in any order
SCALE = 2.0  # m, unit of the heads' outputs
QUERIES = SLOTS + 1  # tokens per frame besides the image's: the slots, and one for the walls
WALLS = 6  # cosine and sine of four times the first wall's direction, and metres to each wall
_UNIT = 2.0  # m, unit of the points
_SLOWEST = 96.0  # frames per radian, of the slowest rotation by time


@dataclass
class Present:
    """What the image alone tells of the current frame.

    ``presence`` (..., SLOTS): logits of being there and seen lately; ``now`` (..., SLOTS, 4): x and y in base_link in units of
    SCALE, and the log scales of the error in m along and across the line of sight; ``walls`` (..., 6).
    """

    presence: Tensor
    now: Tensor
    walls: Tensor


@dataclass
class Ahead(Present):
    """What the slots tell; adds ``paths`` (..., J, SLOTS, 4) at HORIZONS, in the current base_link, like ``now``."""

    paths: Tensor


@dataclass
class Places:
    """Poses and times of tokens, for the attention.

    ``cos``, ``sin``, ``x`` and ``y`` (..., N): pose of each token's frame in the odometry frame, in units of the points;
    ``turn`` (2, ..., N, pairs): cosine and sine of the rotation by time.
    """

    cos: Tensor
    sin: Tensor
    x: Tensor
    y: Tensor
    turn: Tensor

    @classmethod
    def of(cls, poses: Tensor, times: Tensor, pairs: int) -> Places:
        """Return those of poses (..., N, 3), m and rad, and times (..., N) in frames; ``pairs`` of a head's channels encode
        time."""
        angle = times.double()[..., None] * _rates(pairs).to(times.device)
        return cls(poses[..., 2].cos(), poses[..., 2].sin(), poses[..., 0] / _UNIT, poses[..., 1] / _UNIT,
                   torch.stack([angle.cos(), angle.sin()]).float())

    def at(self, index: Tensor) -> Places:
        """Return those of the tokens at index (M,)."""
        return Places(*(part.index_select(-1, index) for part in (self.cos, self.sin, self.x, self.y)),
                      self.turn.index_select(-2, index))

    def to_odom(self, x: Tensor) -> Tensor:
        """Transform points and times of keys or values (B, H, N, d) from their own frames to the odometry frame."""
        a, b, c, rest = _split(x)
        cos, sin, tx, ty = self._parts()
        return self._join(cos * a - sin * b + tx * c, sin * a + cos * b + ty * c, c, rest)

    def to_base(self, x: Tensor) -> Tensor:
        """Transform attention outputs (B, H, N, d) from the odometry frame to each token's; the inverse of ``to_odom``."""
        a, b, c, rest = _split(x)
        cos, sin, tx, ty = self._parts()
        a, b = a - tx * c, b - ty * c
        return self._join(cos * a + sin * b, cos * b - sin * a, c, rest, back=True)

    def query(self, x: Tensor) -> Tensor:
        """Transform queries (B, H, N, d) so that their product with keys of ``to_odom`` is that of both in the query's
        frame."""
        a, b, c, rest = _split(x)
        cos, sin, tx, ty = self._parts()
        a, b = cos * a - sin * b, sin * a + cos * b
        return self._join(a, b, c - tx * a - ty * b, rest)

    def _parts(self) -> tuple[Tensor, ...]:
        return tuple(part[..., None, :, None] for part in (self.cos, self.sin, self.x, self.y))

    def _join(self, a: Tensor, b: Tensor, c: Tensor, rest: Tensor, back: bool = False) -> Tensor:
        cos, sin = (part[..., None, :, :] for part in self.turn)
        sin = -sin if back else sin
        first, second = rest.chunk(2, -1)
        return torch.cat([a, b, c, first * cos - second * sin, first * sin + second * cos], -1)


def _rates(pairs: int) -> Tensor:
    return torch.logspace(0.0, -math.log10(_SLOWEST), pairs, dtype=torch.float64)


def _points(head_dim: int) -> int:
    """Return how many triples of a head's channels are points of the plane (x, y, 1); the others are rotated by time."""
    return 2 * (3 * head_dim // 32)


def _split(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    points = _points(x.shape[-1])
    return x.split([points, points, points, x.shape[-1] - 3 * points], -1)


class _Layer(nn.Module):
    """Attention between tokens with poses, then an MLP, each pre-norm and residual."""

    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.q_norm, self.k_norm = nn.RMSNorm(self.head_dim, eps=1e-6), nn.RMSNorm(self.head_dim, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate='tanh'), nn.Linear(4 * width, width))
        for layer in (self.proj, self.mlp[2]):
            nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * depth))
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, places: Places, sees: Tensor | None, window: tuple[Tensor, Tensor] | None
                ) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, N, D); sees: bool (N, S + N), or None if everything is visible; window: keys and values (B, H, S, d) in the
        odometry frame. Return x, and its own keys and values."""
        q, k, v = (part.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
                   for part in self.qkv(self.norm1(x)).chunk(3, -1))
        q, k = places.query(self.q_norm(q)).to(v.dtype), places.to_odom(self.k_norm(k)).to(v.dtype)
        v = places.to_odom(v).to(v.dtype)
        out = places.to_base(self.attend(q, (k, v), window, sees)).to(x.dtype)
        x = x + self.proj(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x)), k, v

    def attend(self, queries: Tensor, own: tuple[Tensor, Tensor], window: tuple[Tensor, Tensor] | None, sees: Tensor | None
               ) -> Tensor:
        """Attend from queries (B, H, N, d) to the window's keys and values and to their own, which come last in ``sees``."""
        if window is not None:
            own = torch.cat([window[0], own[0]], 2), torch.cat([window[1], own[1]], 2)
        return F.scaled_dot_product_attention(queries, *own, attn_mask=sees)


class _Head(nn.Sequential):
    """Maps features (..., D) to ``out`` numbers."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(nn.RMSNorm(width, eps=1e-6), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, out))
        nn.init.normal_(self[3].weight, std=0.01)
        nn.init.zeros_(self[3].bias)


Window = list[tuple[Tensor, Tensor]]  # each layer's keys and values, (B, H, frames * (P + QUERIES), d)


class SceneForecast(nn.Module):
    """Encoder, transformer and heads; image size, width, depth, heads and window come from a preset without tiles."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        d, channels = preset.width, 4 * preset.vae_width
        self.preset, self.per_frame = preset, preset.tokens + QUERIES
        self.pairs = (preset.head_dim - 3 * _points(preset.head_dim)) // 2
        self.encoder = Encoder(preset)
        del self.encoder.out  # used for latents only
        self.detail = nn.Conv2d(channels, d, preset.patch, stride=preset.patch)
        self.at = nn.Parameter(torch.randn(preset.tokens, d) * 0.02)
        self.motion = nn.Sequential(nn.Linear(4, d), nn.SiLU(), nn.Linear(d, d))
        self.query = nn.Parameter(torch.randn(QUERIES, d) * 0.02)
        self.again = nn.Parameter(torch.randn(QUERIES, d) * 0.02)
        self.layers = nn.ModuleList(_Layer(d, preset.heads, preset.depth) for _ in range(preset.depth))
        self.squeeze = nn.Linear(d, preset.head_features or d)
        self.present = _Head(preset.tokens * self.squeeze.out_features, 5 * SLOTS + WALLS)
        self.slot = _Head(d, 5 + 4 * len(HORIZONS))
        self.wall = _Head(d, WALLS)
        self.believed = nn.Linear(5 + 4 * len(HORIZONS), d)
        self.corrected = _Head(d, 5 + 4 * len(HORIZONS))

    @classmethod
    def from_world_model(cls, model: WorldModel) -> SceneForecast:
        """Return a forecast that starts from a copy of a trained model's encoder."""
        forecast = cls(model.preset)
        state = {name: value for name, value in model.vae.encoder.state_dict().items() if not name.startswith('out.')}
        forecast.encoder.load_state_dict(state)
        return forecast.to(next(model.parameters()).device)

    @classmethod
    def load(cls, folder: Path, device: torch.device | str = 'cpu') -> SceneForecast:
        """Load a forecast that ``checkpoint.save`` wrote, in float32. Raises ModelError if it does not fit."""
        preset, state = read_description(folder).preset, {}
        for file in weight_files(folder):
            state |= read_tensors(file)
        try:
            with torch.device('meta'):  # without memory: a damaged description may ask for any size of network
                forecast = cls(preset)
            forecast.load_state_dict({name: tensor.to(torch.float32, copy=True) for name, tensor in state.items()}, assign=True)
        except (RuntimeError, ValueError) as error:
            raise ModelError(f'the weights in {folder} are of no scene forecast: {error}') from error
        return forecast.eval().to(device)

    def look(self, images: Tensor, previous: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return image tokens (B, P, D) and features of images (B, 3, H, W) in [-1, 1], given the previous frame's features."""
        features = self.encoder.down(images)
        mixed = self.encoder.mix(features, features if previous is None else previous)
        return self.detail(F.silu(mixed)).flatten(2).transpose(1, 2) + self.at, features

    def enter(self, looks: Tensor, executed: Tensor, measured: Tensor) -> Tensor:
        """Return the tokens (B, T, P + QUERIES, D) of frames: ``looks`` (B, T, P, D) from ``look``; ``executed`` (B, T, 2),
        the commands over the period before each, and ``measured`` (B, T, 2), the wheels' twists, m/s and rad/s."""
        motion = self.motion(torch.cat([executed, measured], -1))[:, :, None]
        query = self.query.to(looks.dtype).expand(*looks.shape[:2], -1, -1)
        return torch.cat([looks, query], 2) + motion

    def through(self, x: Tensor, places: Places, sees: Tensor | None, window: Window | None = None
                ) -> tuple[Tensor, Window]:
        """Return the features of x (B, N, D) after all layers, and its keys and values. ``sees`` and ``window`` as in a
        layer."""
        added = []
        for number, layer in enumerate(self.layers):
            x, keys, values = layer(x, places, sees, None if window is None else window[number])
            added.append((keys, values))
        return x, added

    def read_present(self, images: Tensor) -> Present:
        """Read the features of a frame's image tokens (..., P, D)."""
        walls, things = self.present(self.squeeze(images).flatten(-2)).split([WALLS, 5 * SLOTS], -1)
        things = things.unflatten(-1, (SLOTS, 5))
        return Present(things[..., 0], things[..., 1:], walls)

    def read_slots(self, features: Tensor) -> Ahead:
        """Read the features of a frame's slots and walls (..., QUERIES, D)."""
        return _ahead(self.slot(features[..., :SLOTS, :]), self.wall(features[..., SLOTS, :]))

    def doubt(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the second pass's tokens (..., QUERIES, D) from the first's features, and the first's outputs
        (..., SLOTS, F)."""
        said = self.slot(features[..., :SLOTS, :]).detach()
        tokens = features + self.again
        return torch.cat([tokens[..., :SLOTS, :] + self.believed(said), tokens[..., SLOTS:, :]], -2), said

    def read_again(self, features: Tensor, said: Tensor) -> Ahead:
        """Read the second pass's features: corrections of what the first ``said``."""
        return _ahead(said + self.corrected(features[..., :SLOTS, :]), self.wall(features[..., SLOTS, :]))

    def forward(self, images: Tensor, executed: Tensor, measured: Tensor, anchors: Tensor) -> tuple[Present, Ahead, Ahead]:
        """Run training clips (B, T, 3, H, W). Return what each frame tells without and with a pass, (B, T, ...), and what
        two passes tell of the frames ``anchors`` (A,), (B, A, ...)."""
        (b, t), own = images.shape[:2], self.per_frame
        tokens, queries = self.preset.tokens, torch.arange(QUERIES, device=images.device)
        features = self.encoder.down(images.flatten(0, 1)).unflatten(0, (b, t))
        before = torch.cat([features[:, :1], features[:, :-1]], 1)
        looks = self.detail(F.silu(self.encoder.mix(features.flatten(0, 1), before.flatten(0, 1))))
        looks = looks.flatten(2).transpose(1, 2).unflatten(0, (b, t)) + self.at
        frame = torch.arange(t, device=images.device).repeat_interleave(own)
        poses = odometry(measured, self.preset.step_period)
        poses = torch.cat([poses[..., :2] - poses[:, -1:, :2], poses[..., 2:]], -1)  # small numbers, for bfloat16
        places = Places.of(poses[:, frame], frame.expand(b, -1), self.pairs)
        slot = (torch.arange(t * own, device=images.device) % own) >= tokens
        sees = self.sees(frame, frame) & (slot[:, None] | ~slot)
        x, window = self.through(self.enter(looks, executed, measured).flatten(1, 2), places, sees)
        x = x.unflatten(1, (t, own))
        again, said = self.doubt(x[:, anchors, tokens:])
        of = (anchors[:, None] * own + tokens + queries).flatten()
        later = torch.cat([self.sees(frame[of], frame), frame[of][:, None] == frame[of]], 1)
        corrected, _ = self.through(again.flatten(1, 2), places.at(of), later, window)
        return (self.read_present(x[:, :, :tokens]), self.read_slots(x[:, :, tokens:]),
                self.read_again(corrected.unflatten(1, (len(anchors), QUERIES)), said))

    def sees(self, looking: Tensor, seen: Tensor) -> Tensor:
        """Return whether tokens of frames ``looking`` (N,) may attend to those of frames ``seen`` (M,): bool (N, M)."""
        back = looking[:, None] - seen
        return (back >= 0) & (back <= self.preset.window_frames)


def _ahead(numbers: Tensor, walls: Tensor) -> Ahead:
    now, steps = numbers[..., 1:5], numbers[..., 5:].unflatten(-1, (len(HORIZONS), 4)).movedim(-2, -3)
    # Paths are predicted relative to the present position, so that a thing at rest stays by default.
    paths = torch.cat([steps[..., :2] + now[..., None, :, :2], steps[..., 2:]], -1)
    return Ahead(numbers[..., 0], now, walls, paths)


def odometry(measured: Tensor, period: float = 0.1) -> Tensor:
    """Integrate wheel twists (B, T, 2), each measured over the period before a frame, to poses (B, T, 3), m and rad; along
    arcs, from the robot's pose one period before the first frame."""
    turn = measured[..., 1] * period
    yaw = turn.cumsum(-1)
    heading = yaw - turn / 2
    way = measured[..., 0] * period * torch.sinc(turn / (2.0 * math.pi))
    return torch.stack([(way * heading.cos()).cumsum(-1), (way * heading.sin()).cumsum(-1), yaw], -1)


class ForecastStream:
    """One robot's forecasts, frame by frame, on a CPU, with the window cached as keys and values. Not thread-safe."""

    def __init__(self, forecast: SceneForecast, passes: int = 1) -> None:
        """``passes``: default for ``observe``; 0 (the image alone, nothing moves), 1 or 2."""
        self._forecast, self._passes = forecast, passes
        self._window: Window | None = None
        self._features: Tensor | None = None
        self._time, self._pose = 0, torch.zeros(3, dtype=torch.float64)
        self.features = torch.zeros(QUERIES, forecast.preset.width)  # of the newest frame's slots

    @torch.inference_mode()
    def observe(self, image: np.ndarray, executed: np.ndarray, measured: np.ndarray, passes: int | None = None
                ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Take a frame uint8 (H, W, 3), and the command and the wheels' twist (2,) over the period before it. Return the
        probability that each thing is there, (SLOTS,), its position at times 0 and HORIZONS, (1 + J, SLOTS, 2) in m in the
        current base_link, and the walls, (6,)."""
        net, tokens, own = self._forecast, self._forecast.preset.tokens, self._forecast.per_frame
        passes = self._passes if passes is None else passes
        picture = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None].float() / 127.5 - 1.0
        looks, self._features = net.look(picture, self._features)
        commands = [torch.as_tensor(np.asarray(values), dtype=torch.float32)[None, None] for values in (executed, measured)]
        twist = commands[1][0].double().numpy()
        self._pose = torch.from_numpy(along_arc(self._pose.numpy()[None], twist, net.preset.step_period)[0])
        frames = net.preset.window_frames
        pose, time = self._pose.float().expand(1, own, 3), torch.full((1, own), self._time, dtype=torch.float64)
        places = Places.of(pose, time, net.pairs)
        slot = torch.arange(own) >= tokens
        before = torch.zeros(0, dtype=torch.bool) if self._window is None else slot.repeat(self._window[0][0].shape[2] // own)
        sees = slot[:, None] | ~torch.cat([before, slot])
        x, added = net.through(net.enter(looks[:, None], *commands)[:, 0], places, sees, self._window)
        whole = added if self._window is None else [
            tuple(torch.cat(pair, 2) for pair in zip(old, new, strict=True))
            for old, new in zip(self._window, added, strict=True)]
        self._window = [(keys[:, :, -frames * own:], values[:, :, -frames * own:]) for keys, values in whole]
        self._time += 1
        self.features = x[0, tokens:]
        if not passes:
            present = net.read_present(x[0, :tokens])
            paths = present.now.expand(len(HORIZONS), -1, -1)
        else:
            present = net.read_slots(x[0, tokens:])
            if passes == 2:
                again, said = net.doubt(x[:, tokens:])
                corrected, _ = net.through(again, places.at(torch.arange(tokens, own)), None, whole)
                present = net.read_again(corrected[0], said[0])
            paths = present.paths
        where = torch.cat([present.now[None], paths])[..., :2] * SCALE
        return present.presence.sigmoid().numpy(), where.numpy(), present.walls.numpy()
