"""RMSNorm over all heads of a token, unlike in most other families, with the heads divided among processes."""
from __future__ import annotations

from torch import Tensor

from ...kernels.rows import row_kernels
from ..parallel.group import Group


def inverse_rms(x: Tensor, eps: float, group: Group | None) -> Tensor:
    """Return RMSNorm's factors of rows over the heads of all processes, float32 (parts, M), from those of own heads
    (M, parts, D)."""
    if group is None:
        return row_kernels(x).inverse_rms(x, eps)
    return group.sum(row_kernels(x).mean_squares(x, eps, group.count)).rsqrt_()
