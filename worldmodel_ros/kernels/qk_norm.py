"""QK-norm and rotary embedding for layers that keep no pages: the definition, in plain PyTorch."""
from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rotate_qk(qkv: Tensor, rotary: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float = 1e-6) -> None:
    """Normalise and rotate queries and keys in place, as ``page_write.write_qkv`` does.

    qkv (N, 3, H, D); rotary (2, N, D / 2) float32; q_weight and k_weight (D,), of the RMSNorm over D. In float32, rounded once,
    to qkv's type.
    """
    check(qkv, rotary)
    cos, sin = rotary[:, :, None]
    for part, weight in enumerate((q_weight, k_weight)):
        a, b = F.rms_norm(qkv[:, part].float(), qkv.shape[-1:], weight.float(), eps).chunk(2, -1)
        qkv[:, part] = torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(qkv.dtype)


def check(qkv: Tensor, rotary: Tensor) -> None:
    """Raise ValueError for shapes that do not fit one another."""
    if qkv.dim() != 4 or qkv.shape[1] != 3 or rotary.shape != (2, len(qkv), qkv.shape[3] // 2):
        raise ValueError(f'qkv {tuple(qkv.shape)} must be (N, 3, H, D), and rotary {tuple(rotary.shape)} (2, N, D / 2)')
