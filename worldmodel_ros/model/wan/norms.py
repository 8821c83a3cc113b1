"""RMSNorm over all heads of a token, unlike in most other families, with the heads divided among processes."""
from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...kernels.rows import row_kernels
from ..parallel.group import Group


def inverse_rms(x: Tensor, eps: float, group: Group | None) -> Tensor:
    """Return RMSNorm's factors of rows over the heads of all processes, float32 (parts, M), from those of own heads
    (M, parts, D)."""
    found = inverse_rms_later(x, eps, group)
    return found() if callable(found) else found


def inverse_rms_later(x: Tensor, eps: float, group: Group | None) -> Tensor | Callable[[], Tensor]:
    """Return ``inverse_rms``, or if processes divide the heads, what waits for their sums and returns it; messages are on their
    way meanwhile."""
    if group is None:
        return row_kernels(x).inverse_rms(x, eps)
    total = group.sum_later(row_kernels(x).mean_squares(x, eps, group.count))
    return lambda: total().rsqrt_()
