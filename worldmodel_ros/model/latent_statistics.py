"""Mean and deviation of latents, channel by channel: what they look like, apart from where what is."""
from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:  # a robot without a GPU runs without torch
    from torch import Tensor

Array = TypeVar('Array', np.ndarray, 'Tensor')

_PLACES = (-4, -3, -2)  # frames, rows, columns
_LEAST = 1e-6  # the least deviation that is divided by


def drawn_to(latents: Array, like: Array, share: float) -> Array:
    """Latents (..., T, h, w, Z) with that ``share`` of the mean and deviation of ``like`` (..., T', h, w, Z) in the place
    of their own, for each channel: 0 changes nothing, 1 is adaptive instance normalisation (Huang & Belongie 2017)."""
    mean, deviation = _moments(latents)
    wanted, wanted_deviation = _moments(like)
    scale = 1.0 + share * (wanted_deviation / deviation.clip(_LEAST) - 1.0)
    return (latents - mean) * scale + mean + share * (wanted - mean)


def _moments(latents: Array) -> tuple[Array, Array]:
    mean = latents.mean(_PLACES, keepdims=True)
    return mean, ((latents - mean) ** 2).mean(_PLACES, keepdims=True) ** 0.5
