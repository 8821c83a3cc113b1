"""What a frame is told besides its latent: noise level, length of the step, action that leads to it."""
from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .presets import Preset


class Conditioning(nn.Module):
    """(B, T) noise levels in [0, 1] (1 is clean), (B, T) step rows and (B, T, A) actions to (B, T, D)."""

    def __init__(self, preset: Preset):
        super().__init__()
        d = preset.width
        half = 64
        self.register_buffer('frequency', torch.exp(torch.linspace(0.0, math.log(1000.0), half)), persistent=False)
        self.level = nn.Sequential(nn.Linear(2 * half, d), nn.SiLU(), nn.Linear(d, d))
        self.step = nn.Embedding(3, d)
        self.action = nn.Sequential(nn.Linear(preset.actions, d), nn.SiLU(), nn.Linear(d, d))
        low, high = torch.tensor(preset.action_low), torch.tensor(preset.action_high)
        self.register_buffer('action_scale', 1.0 / torch.maximum(low.abs(), high.abs()), persistent=False)

    def forward(self, tau: Tensor, step: Tensor, action: Tensor) -> Tensor:
        phase = tau[..., None] * self.frequency
        level = self.level(torch.cat([phase.cos(), phase.sin()], -1))
        return nn.functional.silu(level + self.step(step) + self.action(action * self.action_scale))
