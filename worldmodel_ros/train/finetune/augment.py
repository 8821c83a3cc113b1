"""Augmentation of recordings: mirroring and changes of light."""
from __future__ import annotations

import torch
from torch import Tensor

from ...model.presets import Preset

# Components whose sign flips when left and right are swapped (REP-103: x ahead, y to the left, z up).
_LATERAL = {'linear.y', 'angular.x', 'angular.z'}
_AXES = {f'{kind}.{axis}' for kind in ('linear', 'angular') for axis in 'xyz'}

# Standard deviations of the light, natural logarithms: brightness exponent, contrast, exposure, and each colour.
GAMMA, CONTRAST, EXPOSURE, COLOUR = 0.15, 0.12, 0.10, 0.04


def mirror_signs(preset: Preset) -> Tensor | None:
    """Return the factors (A,) for the actions of a mirrored recording, or None if the actions' names do not tell them."""
    if not set(preset.action_names) <= _AXES:
        return None
    return torch.tensor([-1.0 if name in _LATERAL else 1.0 for name in preset.action_names])


class Light:
    """``count`` random changes of light, each constant over a clip; the first ``unchanged`` change nothing."""

    def __init__(self, count: int, generator: torch.Generator, unchanged: int = 0) -> None:
        deviations = torch.tensor([GAMMA, CONTRAST, EXPOSURE, *[COLOUR] * 3], device=generator.device)
        drawn = torch.randn((count, 6), device=generator.device, generator=generator) * deviations
        drawn[:unchanged] = 0.0
        self._gamma, self._contrast = drawn[:, 0].exp(), drawn[:, 1].exp()
        self._gain = (drawn[:, 2:3] + drawn[:, 3:]).exp()

    def __call__(self, images: Tensor) -> Tensor:
        """Change images (count, ..., 3, H, W) in [-1, 1]."""
        def each(values: Tensor) -> Tensor:
            return values.reshape(len(values), *[1] * (images.dim() - 4), -1, 1, 1)
        bright = (images * 0.5 + 0.5).clamp(0.0, 1.0) ** each(self._gamma) * each(self._gain)
        middle = bright.mean((-3, -2, -1), keepdim=True)
        return (middle + (bright - middle) * each(self._contrast)).clamp(0.0, 1.0) * 2.0 - 1.0


def mirrored(images: Tensor, which: Tensor) -> Tensor:
    """Mirror the images (B, ..., W) that ``which`` (B,) selects."""
    return torch.where(which.reshape(-1, *[1] * (images.dim() - 1)), images.flip(-1), images)
