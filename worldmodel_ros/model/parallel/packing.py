"""Tensors of any types as bytes, so that one message carries all of them."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; every tensor begins at a multiple, so that its bytes can be read as numbers in place


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of tensors, one after the other, uint8 (n,)."""
    parts = []
    for tensor in tensors:
        part = tensor.contiguous().view(-1).view(torch.uint8)
        parts += [part, part.new_zeros(-len(part) % ALIGNMENT)]
    return torch.cat(parts)


def unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """What `pack` was given: views of its result, of the shapes and types of ``like``."""
    found, start = [], 0
    for tensor in like:
        found.append(packed[start:start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += tensor.nbytes + -tensor.nbytes % ALIGNMENT
    return found
