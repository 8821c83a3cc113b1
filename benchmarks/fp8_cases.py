"""Shapes, random data and timing shared by the parts of the FP8 benchmark."""
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from attention_cases import interleaved
from torch import Tensor

from worldmodel_ros.kernels.rows import Rounded, quantise_rows
from worldmodel_ros.model.presets import PRESETS, Preset

GPU = torch.cuda.is_available()
DEVICE = 'cuda' if GPU else 'cpu'
# Tokens of a pass of each preset: a whole chunk, a quarter of it, and a single frame, as in a commit.
TOKENS = {'robot_3b': (16_384, 4_096, 1_024), 'base': (1_024, 256)}


def presets() -> dict[str, tuple[Preset, tuple[int, ...]]]:
    """Return presets and numbers of tokens; without a GPU, one small enough for the interpreter."""
    if GPU:
        return {name: (PRESETS[name], tokens) for name, tokens in TOKENS.items()}
    return {'small': (replace(PRESETS['tiny'], width=64, heads=2, depth=1), (64,))}


def timed(functions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median milliseconds of each, measured in turns."""
    if GPU:
        return {name: found.p50 for name, found in interleaved(functions, rounds=3, ms=60).items()}
    times = {}
    for name, function in functions.items():
        start = time.perf_counter()
        function()
        times[name] = 1e3 * (time.perf_counter() - start)
    return times


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(torch.bfloat16)


def relative(result: Tensor, expected: Tensor) -> float:
    """Return the RMS of the difference, relative to the RMS of the expected result."""
    return float((result.float() - expected.float()).norm() / expected.float().norm())


class Linear:
    """A random linear layer (n, k) and its input of ``tokens`` tokens, in bfloat16 and in FP8."""

    def __init__(self, tokens: int, n: int, k: int):
        self.x, self.weight, self.bias = normal(tokens, k), normal(n, k, scale=k ** -0.5), normal(n)
        self.x8: Rounded = quantise_rows(self.x)
        self.weight8, scale = quantise_rows(self.weight)
        self.weight_scale = scale.t().contiguous()
        self.static = torch.tensor(0.02, device=DEVICE)  # scale of GELU's output

    @property
    def fp8(self) -> tuple[Rounded, Tensor, Tensor, Tensor]:
        """Return arguments of ``linear.fp8_linear``."""
        return self.x8, self.weight8, self.weight_scale, self.bias
