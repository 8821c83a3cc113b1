"""Random pages and lists for the kernels, and a measure of error; used by the tests and by benchmarks/."""
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from worldmodel_ros.kernels.pages import Pool, Precision, TileLists
from worldmodel_ros.kernels.quantise import write_pages


def random_tensor(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).to(dtype)


def random_pool(generator: torch.Generator, precision: Precision, pages: int, heads: int, tokens: int, dim: int
                ) -> Pool:
    """Return a pool with all pages written, each with its own magnitude, so that mixing up two scales would show."""
    pool = Pool.allocate(precision, pages, heads, tokens, dim, generator.device)
    for first in range(0, pages, 32):  # the definition of FP4 takes much memory
        ids = torch.arange(first, min(first + 32, pages), device=generator.device)
        shape = (len(ids), heads, tokens, dim)
        size = torch.rand((len(ids), heads, 1, 1), generator=generator, device=generator.device) * 1.5 + 0.5
        write_pages(pool, ids, random_tensor(generator, *shape) * size, random_tensor(generator, *shape) * size)
    return pool


def random_lists(rng: np.random.Generator, counts: list[int], pages: int, tokens: int, partial: float = 0.0,
                 device: torch.device | str = 'cpu') -> TileLists:
    """Return one row of ``counts[i]`` different pages for each query tile; a share of them is partly valid."""
    return TileLists.from_rows(
        [[(int(page), int(rng.integers(1, tokens)) if rng.random() < partial else tokens)
          for page in rng.choice(pages, count, replace=False)] for count in counts], tokens, device)


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Return the RMS of the difference, relative to that of the expected result; infinite if something is not finite."""
    if not torch.isfinite(result).all():
        return float('inf')
    difference = (result.double() - expected.double()).square().mean().sqrt()
    return float(difference / expected.double().square().mean().sqrt().clamp_min(1e-300))
