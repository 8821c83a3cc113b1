"""Keys and values of one sequence of latent frames, in flat pages: window, sinks, positions, forks.

The window is that of the published models: the chunk being denoised is part of it, the first frames (sinks) stay in it, and
what does not fit is evicted, oldest first. Their reference rotates by a table of 1,024 frames and ends there; here phases are
exact at any distance, and sinks, the only keys from which a chunk moves away, follow it in steps (``Window.limit``).
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...cache import snapshot
from ...cache.layout import FlatLayout
from ...cache.pool import PagePool
from ...cache.sequence import OBSERVED, PAGES, SequenceCache, Table
from ...cache.torch_storage import TorchStorage
from ...kernels.flat_attention import FlatPlan, flat_attention, to_device, write_flat
from ...kernels.pages import Pool, Precision
from ...kernels.quantise import page_form
from ..parallel.group import Group, SequenceParallel
from ..parallel.pages import HEADS, HeadsOfPages
from .config import WanConfig, WanPreset
from .dit import Attended
from .norms import inverse_rms_later
from .rotary import rotate, rotation, time_shift


@dataclass(frozen=True)
class Window:
    """Which frames a chunk sees, and at which positions.

    ``frames`` of a window, including the chunk's own, ``sinks`` of them the first of the sequence; all are multiples of
    ``slab``, the frames that are evicted together. A chunk is never ``limit`` frames or more behind the first sink: before
    that, sinks are moved after it by a multiple of ``step`` frames, as if they had been seen that much later.
    """

    frames: int
    sinks: int
    slab: int
    limit: int = 1024
    step: int = 64

    def __post_init__(self):
        if self.slab < 1 or self.frames % self.slab or self.sinks % self.slab or not 0 <= self.sinks < self.frames:
            raise ValueError(f'a window of {self.frames} frames with {self.sinks} sinks must be slabs of {self.slab}')
        if not 0 < self.step <= self.limit - self.frames:
            raise ValueError(f'positions up to {self.limit} with a window of {self.frames} leave no room for steps of '
                             f'{self.step}')

    @classmethod
    def of(cls, preset: WanPreset) -> Window:
        return cls(preset.window_frames, preset.sink_frames, preset.slab_frames)

    def oldest(self, end: int) -> int:
        """Return the first frame, not counting sinks, that is seen by a chunk which ends before the frame ``end``."""
        return max(0, end - (self.frames - self.sinks))

    def shift(self, end: int, before: int) -> int:
        """Return how far sinks are moved for a chunk which ends before ``end``; ``before`` is how far they were moved
        already."""
        beyond = end - before - self.limit if self.sinks else 0
        return before + max(0, -(-beyond // self.step)) * self.step

    def check(self, first: int, count: int) -> None:
        """Raise ValueError for a chunk that is not whole slabs, or larger than the sinks leave room for."""
        if count < 1 or count % self.slab or first % self.slab or count > self.frames - self.sinks:
            raise ValueError(f'{count} frames from {first} on: a chunk is slabs of {self.slab} frames, at most '
                             f'{self.frames - self.sinks} frames')


class PagedSequences:
    """Pages for ``sequences`` sequences, each with a guaranteed window, and for ``branches`` of a chunk besides.

    ``grid``: rows and columns of tokens in a frame. ``group``: this process holds its share of the network's heads; all unless
    given. Saved and restored data have all heads, so every process takes part. FP32 and BF16 pages hold keys and values as they
    are, FP8 pages with a scale for each page and head.
    """

    def __init__(self, config: WanConfig, window: Window, grid: tuple[int, int], precision: Precision = Precision.BF16,
                 device: torch.device | str = 'cpu', sequences: int = 1, branches: int = 0, page_tokens: int = 128,
                 group: Group | None = None):
        if precision is Precision.FP4:
            raise ValueError('keys and values of these models are held in FP32, BF16 or FP8')
        self.config, self.window, self.grid, self.device = config, window, grid, torch.device(device)
        self.group = group
        self.layout = FlatLayout(window.slab, grid[0] * grid[1], page_tokens)
        # While sinks are moved, both copies are held.
        self._slabs = (window.frames + window.sinks) // window.slab
        branch = (window.frames - window.sinks) // window.slab + window.sinks // window.slab
        pages = (sequences * self._slabs + branches * branch) * self.layout.tiles
        heads = config.heads if group is None else config.heads // group.count
        kind = TorchStorage if group is None else HeadsOfPages
        storage = kind(self.layout, config.layers, heads, config.head_dim, pages, precision, device)
        if group is not None:
            storage.group = group
        self.pool = PagePool.of('pages', storage)

    def open(self) -> PagedSequence:
        """Open a new sequence. Raises OutOfPages if no window can be guaranteed any more."""
        cache = SequenceCache(self.layout, [self.pool], self._slabs, self.window.sinks // self.window.slab)
        return PagedSequence(self, cache)


class PagedSequence:
    """One sequence; ``frame`` is the number of the next frame. Not thread-safe."""

    def __init__(self, owner: PagedSequences, cache: SequenceCache, frame: int = 0, shift: int = 0,
                 first_keys: _SinkKeys | None = None):
        self._owner, self._cache, self.frame = owner, cache, frame
        self._shift, self._first_keys = shift, first_keys

    def fork(self) -> PagedSequence:
        """Return a branch of this sequence. No key and no value is copied: both share the same pages, and never write to
        them."""
        return PagedSequence(self._owner, self._cache.fork(), self.frame, self._shift, self._first_keys)

    def close(self) -> None:
        """Release all pages."""
        self._cache.close()

    def save(self) -> dict[str, Tensor]:
        """Return what the sequence holds, on the host, for a file."""
        with closing(self._cache.fork()) as fork:  # whose pages are no longer written
            found = {name: torch.from_numpy(array) for name, array in snapshot.save(fork).items()}
        found['position'] = torch.tensor([self.frame, self._shift])
        return found | ({} if self._first_keys is None else self._first_keys.tensors(self._owner.group))

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Replace what the sequence holds by what ``save`` returned. Raises ValueError, and changes nothing, for what does
        not fit its pages; OutOfPages for a fork whose pool is full."""
        rest = dict(tensors)
        owner, position = self._owner, rest.pop('position', None)
        first_keys = _SinkKeys.of_tensors(rest, owner.pool.storage, owner.group)
        if position is None or position.shape != (2,) or position.dtype != torch.int64 or int(position.min()) < 0:
            raise ValueError('the position of the sequence is missing or damaged')
        frame, shift = map(int, position)
        window, arrays = self._owner.window, {name: tensor.numpy() for name, tensor in rest.items()}
        slabs = snapshot.check_slabs(self._cache, arrays.get('slabs'), [0])[:, 0] * window.slab
        seen = [*range(0, min(frame, window.sinks), window.slab), *range(max(window.sinks, frame - window.frames), frame,
                                                                         window.slab)]
        # A sequence keeps what its last chunk saw, which may be less than a window, but always its newest frames.
        if frame % window.slab or not {*slabs.tolist()} <= {*seen} or (frame and frame - window.slab not in slabs) \
                or shift != window.shift(frame, shift) or (shift > 0) != (first_keys is not None):
            raise ValueError(f'frame {frame}, sinks moved by {shift}: not a valid sequence for this window')
        snapshot.require_finite(self._cache.pools, arrays)
        snapshot.restore(self._cache, arrays)
        self.frame, self._shift, self._first_keys = frame, shift, first_keys

    @contextmanager
    def chunk(self, frames: int, observed: bool = False) -> Iterator[PagedAttention]:
        """Yield the attention for all passes over the next frames. What the last pass keeps becomes part of the sequence
        when the context ends, and nothing does if it ends with an exception. Raises ValueError and OutOfPages."""
        owner, end = self._owner, self.frame + frames
        owner.window.check(self.frame, frames)
        self._cache.evict(owner.window.oldest(end))
        self._move_sinks(owner.window.shift(end, self._shift))
        with self._cache.stage() as stage:
            own = np.stack(stage.claim(self.frame, frames, observed))
            rotary = rotation(owner.config.head_dim, self.frame + np.arange(frames), owner.grid, owner.device)
            yield PagedAttention(owner, self._cache.table, own, rotary)
        self.frame = end

    def _move_sinks(self, shift: int) -> None:
        """Write the sinks again, moved by ``shift`` frames, always from the keys as first written, so that rounding errors
        do not add up."""
        if shift == self._shift:
            return
        storage, sinks = self._owner.pool.storage, len(self._cache.table.select(self._sink_rows()))
        rows = self._cache.table.rows[:sinks]
        if self._first_keys is None:
            self._first_keys = _SinkKeys.of(storage, rows[:, PAGES:].ravel())
        with self._cache.stage() as stage:
            frames = self._owner.layout.frames
            new = [stage.claim(int(row[0]) * frames, frames, bool(row[OBSERVED]))[0] for row in rows]
            ids = np.concatenate(new)
            storage.copy(ids, storage, rows[:, PAGES:].ravel())
            self._first_keys.write(storage, ids, time_shift(self._owner.config.head_dim, shift, self._owner.device))
        self._shift = shift

    def _sink_rows(self) -> np.ndarray:
        return self._cache.table.slabs < self._owner.window.sinks // self._owner.window.slab


class PagedAttention:
    """``dit.SelfAttention`` over pages, of one chunk's passes."""

    def __init__(self, owner: PagedSequences, seen: Table, own: np.ndarray, rotary: Tensor):
        layout, self._storage, self._eps, self._tokens = owner.layout, owner.pool.storage, owner.config.eps, rotary.shape[1]
        self._slabs, self._rotary, self._group = len(own), rotary, owner.group
        self._most_pages = owner.window.frames // owner.window.slab * layout.tiles
        rows = zip(seen.pages, [layout.valid(valid) for valid in seen.valid])
        whole = layout.valid(layout.frames)
        entries = [(int(page), int(count)) for pages, counts in (*rows, *((pages, whole) for pages in own))
                   for page, count in zip(pages, counts) if count]
        self._plan = FlatPlan.of(self._storage.layer(0), rotary.shape[1])
        self._lists = self._plan.lists(entries, layout.page_tokens, owner.device)
        self._own = to_device(torch.from_numpy(own.ravel().astype(np.int32)), owner.device)

    def inputs(self) -> dict[str, Tensor]:
        """Return what is read on the device: page lists, whose last entries may be padding, places, and rotations."""
        lists = {name: getattr(self._lists, name) for name in ('starts', 'pages', 'lengths', 'full')}
        return {**lists, 'own': self._own, 'rotary': self._rotary}

    def reading(self, inputs: dict[str, Tensor]) -> PagedAttention:
        """Return the same attention, reading these inputs instead."""
        other = copy(self)
        lists = {name: inputs[name] for name in ('starts', 'pages', 'lengths', 'full')}
        other._lists, other._own, other._rotary = replace(self._lists, **lists), inputs['own'], inputs['rotary']
        return other

    @property
    def most_pages(self) -> int:
        """The most pages that a chunk may ever see."""
        return self._most_pages

    @property
    def form(self) -> tuple:
        """What passes over another chunk must share to be the same work on other data."""
        return id(self._storage), self._slabs, self._plan

    def attend(self, layer: int, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, fp8: bool = False) -> Attended:
        pool = self._storage.layer(layer)
        q, scale = self._write(pool, qkv, q_weight, k_weight)
        attention = partial(flat_attention, q, scale, pool, self._lists, self._plan)
        if not isinstance(self._group, SequenceParallel):
            return attention().rows(0, self._tokens, fp8)
        each, attended = -(-self._tokens // self._group.count), cache(attention)

        def share(rank: int, out: Tensor | None = None) -> Tensor:
            first = min(rank * each, self._tokens)
            count = min(each, self._tokens - first)  # not all processes have as many tokens
            if count == each:
                return attended().rows(first, count, out=out)
            return F.pad(attended().rows(first, count), (0, 0, 0, each - count))
        like = qkv.new_empty(each, pool.heads * pool.head_dim, device='meta')
        if not fp8 and not self._group.rounded:
            return self._group.send_products(share, like, pool.head_dim)
        return self._group.exchange_products(share, like, pool.head_dim, joined=True).flatten(1)

    def keep(self, layer: int, qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> None:
        self._write(self._storage.layer(layer), qkv, q_weight, k_weight)

    def _write(self, pool: Pool, qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, Tensor | None]:
        qkv = qkv[:self._tokens]  # runs of processes are padded
        rms = inverse_rms_later(qkv.flatten(2)[:, :2], self._eps, self._group)
        if isinstance(self._group, SequenceParallel):
            q_weight, k_weight = (self._group.own(weight, 0) for weight in (q_weight, k_weight))
        return write_flat(pool, self._own, self._slabs, qkv, rms, self._rotary, q_weight, k_weight, self._plan.quantise_q)


class _Places:
    """Pages to be written, as runs of neighbours where possible."""

    def __init__(self, ids: np.ndarray, device: torch.device):
        edges = [0, *(np.flatnonzero(np.diff(ids) != 1) + 1).tolist(), len(ids)]
        self._runs = [(slice(begin, end), slice(int(ids[begin]), int(ids[begin]) + end - begin))
                      for begin, end in zip(edges, edges[1:])]

    def write(self, pool: Pool, parts: dict[str, Tensor]) -> None:
        tensors = pool.tensors()
        for name, values in parts.items():
            for of, to in self._runs:
                tensors[name][to].copy_(values[of])


@dataclass(frozen=True)
class _SinkKeys:
    """Keys of sinks as first written, in the pool's format: (layers, n, H, T, d), and scales (layers, n, H)."""

    k: Tensor
    scale: Tensor | None

    @classmethod
    def of(cls, storage: TorchStorage, ids: np.ndarray) -> _SinkKeys:
        index, pool = torch.from_numpy(ids).to(storage.device), storage.pool
        if pool.k_scale is None:
            return cls(pool.k[:, index], None)
        return cls(pool.k.view(torch.uint8)[:, index].view(pool.k.dtype), pool.k_scale[:, index])

    def tensors(self, group: Group | None) -> dict[str, Tensor]:
        """Return tensors for a file, with the heads of all processes of a group; ``of_tensors`` is the inverse."""
        found = {'first.k': self.k} | ({} if self.scale is None else {'first.k_scale': self.scale})
        if group is not None:
            found = {name: group.gather(tensor, HEADS) for name, tensor in found.items()}
        return {name: tensor.cpu() for name, tensor in found.items()}

    @classmethod
    def of_tensors(cls, tensors: dict[str, Tensor], storage: TorchStorage, group: Group | None) -> _SinkKeys | None:
        """Take them out of ``tensors``; None if there are none. Raises ValueError for those of another pool."""
        k, scale, pool = tensors.pop('first.k', None), tensors.pop('first.k_scale', None), storage.pool
        if k is None and scale is None:
            return None
        if group is not None:
            k, scale = (part if part is None or part.dim() <= HEADS else group.own(part, HEADS) for part in (k, scale))
        wanted = [(part.shape[0], part.shape[2:], part.dtype) for part in (pool.k, pool.k_scale) if part is not None]
        given = [(part.shape[0], part.shape[2:], part.dtype) for part in (k, scale) if part is not None and part.dim() > 2]
        if given != wanted:
            raise ValueError('the keys of the sinks belong to other pages')
        return cls(k.to(storage.device), None if scale is None else scale.to(storage.device))

    def write(self, storage: TorchStorage, ids: np.ndarray, rotary: Tensor) -> None:
        """Write them to pages, rotated by rotary (2, d / 2)."""
        places = _Places(ids, storage.device)
        for layer in range(len(self.k)):
            k = self.k[layer].float()
            k = k if self.scale is None else k * self.scale[layer][..., None, None]
            form = page_form(storage.precision, rotate(k, *rotary), k)
            places.write(storage.layer(layer), {name: form[name] for name in form if name.startswith('k')})
