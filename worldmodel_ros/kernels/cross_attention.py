"""Attention of all tokens to the few keys of a prompt, from queries that are not normalised yet: the definition, in PyTorch."""
from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from .rows import Rounded, quantise_rows


def cross_attention(q: Tensor, weight: Tensor, keys: Tensor, values: Tensor, bias: Tensor, eps: float,
                    static: Tensor | None = None, rms: Tensor | None = None) -> Tensor | Rounded:
    """RMSNorm of q (N, H * D) over all heads, by ``weight`` (H * D,); then attention to keys and values (H, S, D) under
    ``bias`` (S,), which is added to the logits. Returns (N, H * D) in q's type; with ``static``, float32 (), ``quantise_rows``
    of that by this scale: no result is larger than the largest of the values, which is known before. ``rms``, float32 (N,):
    what RMSNorm multiplies tokens by, where these are not all heads."""
    heads = len(keys)
    if rms is None:
        rows = F.rms_norm(q.float(), q.shape[-1:], weight.float(), eps).to(q.dtype)
    else:
        rows = (q.float() * rms[:, None] * weight.float()).to(q.dtype)
    rows = rows.unflatten(-1, (heads, -1)).transpose(0, 1)[None]
    out = F.scaled_dot_product_attention(rows, keys[None], values[None], attn_mask=bias.to(q.dtype).expand(len(q), -1))
    out = out[0].transpose(0, 1).flatten(1)
    return out if static is None else quantise_rows(out, static)
