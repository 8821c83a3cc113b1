"""Inputs of the attention: pools of pages by precision, and for every query tile the list of pages that it visits."""
from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum

import numpy as np
import torch
from torch import Tensor

FP4_BLOCK = 16  # values that share a power-of-two exponent


class Precision(str, Enum):
    """How a page holds its keys and values."""

    FP32 = 'fp32'
    BF16 = 'bf16'
    FP8 = 'fp8'
    FP4 = 'fp4'

    @property
    def quantised(self) -> bool:
        return self in (Precision.FP8, Precision.FP4)


@dataclass
class Pool:
    """Pages of one precision and one layer; a page is one tile: ``tokens`` T of all heads H, head width D.

    FP32 and BF16: k and v (pages, H, T, D).

    FP8: k (pages, H, T, D) and v (pages, H, D, T) are float8_e4m3fn; a value is the stored one times its page's and
    head's scale, float32 (pages, H). v is transposed and its tokens are permuted by ``quantise.token_order``, as
    Hopper's tensor cores read it.

    FP4: k (pages, H, T, D / 2) and v (pages, H, D, T / 2), uint8, hold two e2m1 values per byte, the first in the low
    nibble, in the order of FP8, except their signs, see ``quantise.to_e2m1``; k_exponent (pages, H, T, D / 16) and
    v_exponent (pages, H, D, T / 16), uint8, are the powers of two of blocks of 16 values.
    """

    precision: Precision
    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    k_exponent: Tensor | None = None
    v_exponent: Tensor | None = None

    @classmethod
    def allocate(cls, precision: Precision, pages: int, heads: int, tokens: int, dim: int,
                 device: torch.device | str = 'cpu', layers: int | None = None) -> Pool:
        """Allocate zeros: the tail of a page that was never written is multiplied by zero, so it must be finite. With
        ``layers``, every tensor gets that many in front; ``layer`` takes one."""
        if dim % FP4_BLOCK or tokens % FP4_BLOCK:
            raise ValueError(f'a page of {tokens} tokens of width {dim}: both must be multiples of {FP4_BLOCK}')
        front = (pages, heads) if layers is None else (layers, pages, heads)

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((*front, *shape), dtype=dtype, device=device)
        if not precision.quantised:
            dtype = torch.float32 if precision is Precision.FP32 else torch.bfloat16
            return cls(precision, zeros(dtype, tokens, dim), zeros(dtype, tokens, dim))
        scales = zeros(torch.float32), zeros(torch.float32)
        if precision is Precision.FP8:
            dtype = torch.float8_e4m3fn
            return cls(precision, zeros(dtype, tokens, dim), zeros(dtype, dim, tokens), *scales)
        return cls(precision, zeros(torch.uint8, tokens, dim // 2), zeros(torch.uint8, dim, tokens // 2), *scales,
                   zeros(torch.uint8, tokens, dim // FP4_BLOCK), zeros(torch.uint8, dim, tokens // FP4_BLOCK))

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: value for f in fields(self)
                if isinstance(value := getattr(self, f.name), Tensor)}

    def layer(self, index: int) -> Pool:
        """Return one layer of a pool with layers in front, as views."""
        return Pool(self.precision, **{name: tensor[index] for name, tensor in self.tensors().items()})

    @property
    def heads(self) -> int:
        return self.k.shape[-3]

    @property
    def page_tokens(self) -> int:
        return self.k.shape[-2]

    @property
    def head_dim(self) -> int:
        return self.k.shape[-1] * (2 if self.precision is Precision.FP4 else 1)

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())


@dataclass
class TileLists:
    """The pages of one pool that each query tile visits, as compressed sparse rows.

    starts (query tiles + 1,), pages (n,), lengths (n,): valid tokens of each listed page, 1 to T; full (query tiles,): number
    of full pages of a tile. In each row the full pages come first. All int32, on the pool's device.
    """

    starts: Tensor
    pages: Tensor
    lengths: Tensor
    full: Tensor

    @classmethod
    def from_rows(cls, rows: list[list[tuple[int, int]]], page_tokens: int,
                  device: torch.device | str = 'cpu') -> TileLists:
        """Build from (page, valid tokens) pairs for each query tile."""
        ordered = [sorted(row, key=lambda entry: entry[1] < page_tokens) for row in rows]
        flat = np.array([entry for row in ordered for entry in row], np.int32).reshape(-1, 2)
        if flat.size and not (1 <= flat[:, 1].min() and flat[:, 1].max() <= page_tokens):
            raise ValueError(f'a listed page has 1 to {page_tokens} valid tokens, not '
                             f'{flat[:, 1].min()} to {flat[:, 1].max()}')
        starts = np.cumsum([0] + [len(row) for row in rows]).astype(np.int32)
        full = np.array([sum(length == page_tokens for _, length in row) for row in rows], np.int32)

        def tensor(array: np.ndarray) -> Tensor:
            # Never empty: a kernel is given a valid address even where it reads nothing.
            return torch.from_numpy(array if array.size else np.zeros(1, np.int32)).to(device)
        return cls(tensor(starts), tensor(np.ascontiguousarray(flat[:, 0])),
                   tensor(np.ascontiguousarray(flat[:, 1])), tensor(full))

    @property
    def query_tiles(self) -> int:
        return self.starts.numel() - 1

    def of_tiles(self, begin: int, end: int) -> TileLists:
        """Those of some successive query tiles; nothing is copied."""
        return replace(self, starts=self.starts[begin:end + 1], full=self.full[begin:end])
