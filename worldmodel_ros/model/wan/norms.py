"""RMSNorm over all heads of a token, unlike in most other families, with the heads divided among processes."""
from __future__ import annotations

from torch import Tensor

from ..parallel.group import Group


def of_all_heads(rms: Tensor, eps: float, group: Group | None) -> Tensor:
    """Return RMSNorm's factors over the heads of all processes, from those over own heads (``rows.inverse_rms``)."""
    if group is None:
        return rms
    return (group.sum(rms.pow(-2) - eps) / group.count + eps).rsqrt()
