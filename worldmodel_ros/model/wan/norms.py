"""RMSNorm over all heads of a token, in which the Wan family differs from most, where processes have some heads each."""
from __future__ import annotations

from torch import Tensor

from ..parallel.group import Group


def of_all_heads(rms: Tensor, eps: float, group: Group | None) -> Tensor:
    """What RMSNorm multiplies tokens by, over the heads of all processes, from that over one's own (``rows.inverse_rms``)."""
    if group is None:
        return rms
    return (group.sum(rms.pow(-2) - eps) / group.count + eps).rsqrt()
