"""
The passes of a scene forecast with fixed shapes, for graph capture and export: over a frame, and a second one over its
slots.

A window is a ring of frames: keys and values are in the odometry frame, so that attention does not depend on where in the
ring a frame is.
"""
from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from worldmodel_ros.model.scene_forecast import _UNIT, SCALE, Places, SceneForecast


class _Moves:
    """``Places`` for tokens of one frame, as products with matrices (d, d) that all layers share: an eighth of the operators,
    whose calls take longer than their work."""

    def __init__(self, pose: Tensor, turn: Tensor, head_dim: int) -> None:
        """``pose`` (3,), m and rad, of the frame; ``turn`` (2, pairs), cosine and sine of the rotation by its time."""
        x, y, yaw = (pose[k].expand(1, head_dim) for k in range(3))
        places = Places(yaw.cos(), yaw.sin(), x / _UNIT, y / _UNIT, turn[:, None, None].expand(-1, 1, head_dim, -1))
        units = torch.eye(head_dim, device=pose.device)[None, None]
        self._query = places.query(units) / math.sqrt(head_dim)  # the scale of the attention, once for all layers
        self._to_odom, self._to_base = places.to_odom(units), places.to_base(units)

    def query(self, x: Tensor) -> Tensor:
        return x @ self._query

    def to_odom(self, x: Tensor) -> Tensor:
        return x @ self._to_odom

    def to_base(self, x: Tensor) -> Tensor:
        return x @ self._to_base


def attend_in_parts(queries: Tensor, own: tuple[Tensor, Tensor], window: list[tuple[Tensor, Tensor]], bias: Tensor) -> Tensor:
    """Compute a layer's ``attend`` for scaled queries and a window in parts, without concatenating keys and values."""
    parts = [*window, own]
    scores = torch.cat([queries @ keys.transpose(2, 3) for keys, _ in parts], -1)
    shares = (scores + bias).softmax(-1).split([keys.shape[2] for keys, _ in parts], -1)
    return sum(share @ values for share, (_, values) in zip(shares, parts, strict=True))


class See(nn.Module):
    """The pass over a frame and its window."""

    def __init__(self, net: SceneForecast) -> None:
        super().__init__()
        self.net = net

    def forward(self, image: Tensor, previous: Tensor, started: Tensor, executed: Tensor, measured: Tensor, pose: Tensor,
                turn: Tensor, bias: Tensor, keys: list[Tensor], values: list[Tensor]) -> tuple[Tensor, ...]:
        """image (1, 3, H, W) in [-1, 1]; previous, the encoder's last features, if ``started`` (1,); executed and measured
        (1, 1, 2); pose (3,) and turn (2, pairs) of the frame; bias (N, W * N + N), additive, between the N tokens of a frame
        and those of the window and the frame; keys and values of each layer (1, H, W * N, d).

        Returns presence, current places and walls from the image alone; presence, places (1 + J, SLOTS, 2) and walls from the
        slots; the encoder's features; the features of the frame's slots (1, QUERIES, D); and its own keys and values, of each
        layer, (1, H, N, d)."""
        net, tokens = self.net, self.net.preset.tokens
        features = net.encoder.down(image)
        mixed = net.encoder.mix(features, torch.where(started[:, None, None, None], previous, features))
        looks = net.detail(F.silu(mixed)).flatten(2).transpose(1, 2) + net.at
        moves = _Moves(pose, turn, net.preset.head_dim)
        x, added = net.through(net.enter(looks[:, None], executed, measured)[:, 0], moves, bias,
                               [[pair] for pair in zip(keys, values, strict=True)])
        image_alone, slots = net.read_present(x[0, :tokens]), net.read_slots(x[0, tokens:])
        places = torch.cat([slots.now[None], slots.paths])[..., :2] * SCALE
        return (image_alone.presence.sigmoid(), image_alone.now[..., :2] * SCALE, image_alone.walls,
                slots.presence.sigmoid(), places, slots.walls, features, x[:, tokens:],
                *(own for part in zip(*added, strict=True) for own in part))


class Again(nn.Module):
    """A second pass over the slots of a frame, conditioned on the first pass's forecasts."""

    def __init__(self, net: SceneForecast) -> None:
        super().__init__()
        self.net = net

    def forward(self, slots: Tensor, pose: Tensor, turn: Tensor, bias: Tensor, own_keys: list[Tensor],
                own_values: list[Tensor], keys: list[Tensor], values: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """slots, features (1, QUERIES, D); bias (QUERIES, W * N + N + QUERIES); own keys and values, of the frame in each
        layer; the others as of ``See``. Returns presence, places and walls."""
        net = self.net
        tokens, said = net.doubt(slots)
        window = [[(k, v), own] for k, v, *own in zip(keys, values, own_keys, own_values, strict=True)]
        x, _ = net.through(tokens, _Moves(pose, turn, net.preset.head_dim), bias, window)
        found = net.read_again(x[0], said[0])
        return found.presence.sigmoid(), torch.cat([found.now[None], found.paths])[..., :2] * SCALE, found.walls
