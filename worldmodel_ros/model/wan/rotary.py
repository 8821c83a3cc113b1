"""Rotary phases of the Wan family: time, row and column, each with its own pairs, theta 10,000.

The published networks rotate neighbouring channels; this package rotates halves of a head, so query and key rows are reordered
when weights are loaded (``halves_order``), which changes no product of the two.
"""
from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ...kernels.flat_attention import to_device

THETA = 10000.0


def axis_pairs(head_dim: int) -> tuple[int, int, int]:
    """Return the numbers of channel pairs that time, row and column rotate."""
    space = head_dim // 6
    return head_dim // 2 - 2 * space, space, space


def halves_order(head_dim: int) -> Tensor:
    """Return where the channels of a head come from, int64 (head_dim,): the first of each pair, then the second ones."""
    return torch.arange(head_dim).view(-1, 2).t().reshape(-1)


def rotation(head_dim: int, frames: np.ndarray, grid: tuple[int, int], device: torch.device | str = 'cpu') -> Tensor:
    """Return cosines and sines, float32 (2, T * P, head_dim / 2), of frames (T,) at any distance, row by row of ``grid``.

    Phases are computed in float64. Only differences of frames reach the attention.
    """
    time = to_device(torch.from_numpy(_phases(np.asarray(frames, np.float64), axis_pairs(head_dim)[0])), torch.device(device))
    space = _space(head_dim, tuple(grid), str(device))
    shape = 2, len(frames), space.shape[1], -1
    return torch.cat([time[:, :, None].expand(shape), space[:, None].expand(shape)], -1).flatten(1, 2)


def time_shift(head_dim: int, frames: float, device: torch.device | str = 'cpu') -> Tensor:
    """Return cosines and sines, float32 (2, head_dim / 2), that move rotated keys by ``frames``."""
    pairs = axis_pairs(head_dim)
    phases = np.zeros((2, head_dim // 2), np.float32)
    phases[0] = 1.0
    phases[:, :pairs[0]] = _phases(np.array([float(frames)]), pairs[0])[:, 0]
    return torch.from_numpy(phases).to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (..., head_dim) by halves; cos and sin (..., head_dim / 2)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


@lru_cache(maxsize=8)
def _space(head_dim: int, grid: tuple[int, int], device: str) -> Tensor:
    _, rows, columns = axis_pairs(head_dim)
    row, column = (axis.ravel().astype(np.float64) for axis in np.indices(grid))
    return torch.from_numpy(np.concatenate([_phases(row, rows), _phases(column, columns)], -1)).to(device)


def _phases(positions: np.ndarray, pairs: int) -> np.ndarray:
    """Return cosines and sines, float32 (2, n, pairs)."""
    phase = positions[:, None] * THETA ** -(np.arange(pairs) / pairs)
    return np.stack([np.cos(phase), np.sin(phase)]).astype(np.float32)
