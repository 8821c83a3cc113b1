"""Heads that read the DiT's features: the policy's command chunk, and what an imagined chunk would lead to."""
from __future__ import annotations

import torch
from torch import Tensor, nn

from .presets import Preset


class ActionHead(nn.Module):
    """Command chunk for every goal from the features of the newest observed frame.

    One learned query per goal attends to the frame's tokens; the frame's own action conditioning is already in the
    features, so the head knows how fast the robot moves.
    """

    def __init__(self, preset: Preset):
        super().__init__()
        d = preset.width
        self.preset = preset
        self.goals = nn.Parameter(torch.randn(len(preset.goals), d) * 0.02)
        self.read = nn.MultiheadAttention(d, preset.heads, batch_first=True)
        self.tokens = nn.Linear(preset.tokens * d, d)
        self.mlp = nn.Sequential(nn.Linear(2 * d, 2 * d), nn.SiLU(), nn.Linear(2 * d, 2 * d), nn.SiLU(),
                                 nn.Linear(2 * d, preset.chunk_frames * preset.actions))
        low, high = torch.tensor(preset.action_low), torch.tensor(preset.action_high)
        self.register_buffer('centre', (high + low) / 2, persistent=False)
        self.register_buffer('half_range', (high - low) / 2, persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """features (B, P, D) to actions in SI units (B, goals, chunk_frames, A), inside the action's range."""
        b, p, d = features.shape
        query = self.goals.expand(b, -1, -1)
        read = self.read(query, features, features, need_weights=False)[0] + query
        # Where a thing is in the picture matters as much as what it is: the flattened tokens keep the places.
        places = self.tokens(features.reshape(b, p * d))[:, None].expand(-1, query.shape[1], -1)
        out = self.mlp(torch.cat([read, places], -1))
        out = out.reshape(b, query.shape[1], self.preset.chunk_frames, self.preset.actions)
        return self.centre + self.half_range * torch.tanh(out)


class OutcomeHead(nn.Module):
    """Per frame of an imagined chunk: logit of a contact within its step, and progress (m) towards every goal."""

    def __init__(self, preset: Preset):
        super().__init__()
        d = preset.width
        self.net = nn.Sequential(nn.Linear(preset.tokens * d, d), nn.SiLU(), nn.Linear(d, 1 + len(preset.goals)))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """features (B, T, P, D) to contact logits (B, T) and progress since the observation (B, T, goals)."""
        out = self.net(features.flatten(2))
        return out[..., 0], out[..., 1:]
