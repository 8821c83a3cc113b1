"""Attention of all tokens to the few keys of a prompt, from queries not yet normalised: the definition, in PyTorch."""
from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from .rows import Rounded, quantise_rows


def cross_attention(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, eps: float,
                    static: Tensor | None = None, rms: Tensor | None = None) -> Tensor | Rounded:
    """Normalise q (N, H * D) by RMSNorm over all heads, its weights being folded into the keys; then attend to keys and
    values (H, S, D) under ``bias`` (S,), which is added to the logits. Returns (N, H * D) in q's type; with ``static``,
    float32 (), ``quantise_rows`` of that by this scale: no result exceeds the largest of the values, which is known in
    advance. ``rms``, float32 (N,): RMSNorm's factors, if these are not all heads."""
    heads = len(keys)
    rows = F.rms_norm(q.float(), q.shape[-1:], None, eps) if rms is None else q.float() * rms[:, None]
    rows = rows.unflatten(-1, (heads, -1)).transpose(0, 1)[None]  # in float32: they need not be rounded once more
    out = F.scaled_dot_product_attention(rows, keys[None].float(), values[None].float(), attn_mask=bias.expand(len(q), -1))
    out = out[0].transpose(0, 1).flatten(1).to(q.dtype)
    return out if static is None else quantise_rows(out, static)
