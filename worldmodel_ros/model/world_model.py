"""The networks of one model, trained and stored together."""
from __future__ import annotations

from torch import nn

from .action_head import OutcomeHead, action_head
from .dit import DiT
from .presets import Preset
from .vae import VAE


class WorldModel(nn.Module):
    """VAE, DiT and heads of one preset; ``empty_layers`` as in DiT."""

    def __init__(self, preset: Preset, empty_layers: bool = False):
        super().__init__()
        self.preset = preset
        self.vae = VAE(preset)
        self.dit = DiT(preset, empty_layers)
        self.action_head = action_head(preset)
        self.outcome_head = OutcomeHead(preset)
