"""How a chunk is sampled: the step lengths that the network knows, and the latent statistics that are matched afterwards.

Without torch: sessions on a CPU sample through ONNX Runtime.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

Array = TypeVar('Array', np.ndarray, 'Tensor')

# Rows of the step-size embedding. FLOW is the instantaneous velocity (teacher, and clean frames); the others are the
# step lengths that the few-step student was trained for (shortcut models, Frans et al. 2024).
FLOW, HALF, WHOLE = 0, 1, 2
ROWS = {1: WHOLE, 2: HALF}  # by number of steps; FLOW for all others

_AXES = (-4, -3, -2)  # frames, rows, columns
_MIN_STD = 1e-6  # divisor


@dataclass(frozen=True)
class Steps:
    """How a chunk is denoised: in ``count`` equal steps, each with the same row of the step embedding."""

    row: int
    count: int

    @classmethod
    def of(cls, count: int) -> Steps:
        """Return the steps of a session: the student's for one or two, the teacher's flow for more."""
        return cls(ROWS.get(count, FLOW), count)


TEACHER, TWO_STEP, ONE_STEP = Steps(FLOW, 32), Steps(HALF, 2), Steps(WHOLE, 1)
# The teacher's flow in fewer steps than it was trained for.
TRUNCATED, TRUNCATED_ONE = Steps(FLOW, 2), Steps(FLOW, 1)


def adain(latents: Array, like: Array, share: float) -> Array:
    """
    Return latents (..., T, h, w, Z) whose per-channel mean and standard deviation are moved by ``share`` towards those of
    ``like`` (..., T', h, w, Z): 0 changes nothing, 1 is adaptive instance normalisation (Huang and Belongie 2017).
    """
    mean, std = _moments(latents)
    target_mean, target_std = _moments(like)
    scale = 1.0 + share * (target_std / std.clip(_MIN_STD) - 1.0)
    return (latents - mean) * scale + mean + share * (target_mean - mean)


def _moments(latents: Array) -> tuple[Array, Array]:
    mean = latents.mean(_AXES, keepdims=True)
    return mean, ((latents - mean) ** 2).mean(_AXES, keepdims=True) ** 0.5
