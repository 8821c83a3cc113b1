"""A model small enough for unit tests: the same code as ``tiny``, with random weights."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.presets import NO_SINKS, TINY, Preset
from worldmodel_ros.model.world_model import WorldModel

SMALL = replace(TINY, name='small-test', image_size=(32, 32), vae_width=8, width=32, depth=2, heads=2, window_frames=6,
                **NO_SINKS)


def small_model(seed: int = 0, preset: Preset = SMALL) -> WorldModel:
    torch.manual_seed(seed)
    model = WorldModel(preset)
    for parameter in model.parameters():
        # Zero-initialised layers would hide wrong wiring behind an identity.
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05)
    return model.eval().requires_grad_(False)


def small_checkpoint(folder: Path, seed: int = 0) -> Path:
    checkpoint.save(small_model(seed), folder / 'small', {'trained': False}, dtype=torch.float32)
    return folder / 'small'
