"""Conversion of old pages from one precision to another: the definition, in plain PyTorch."""
from __future__ import annotations

from torch import Tensor

from .pages import Pool
from .quantise import read_pages, write_pages


def requantise(source: Pool, source_pages: Tensor, target: Pool, target_pages: Tensor) -> None:
    """Write pages (n,) of one layer's pool into pages (n,) of another of the same shape, rounded to its precision."""
    check(source, source_pages, target, target_pages)
    write_pages(target, target_pages.long(), *read_pages(source, source_pages.long()))


def check(source: Pool, source_pages: Tensor, target: Pool, target_pages: Tensor) -> None:
    """Raise ValueError for shapes that do not fit one another."""
    shapes = [(pool.heads, pool.page_tokens, pool.head_dim) for pool in (source, target)]
    if shapes[0] != shapes[1] or source_pages.shape != target_pages.shape or source_pages.ndim != 1:
        raise ValueError(f'{tuple(source_pages.shape)} pages of (heads, tokens, width) {shapes[0]} do not fit '
                         f'{tuple(target_pages.shape)} of {shapes[1]}')
