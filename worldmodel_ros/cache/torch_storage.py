"""Pages in tensors, on a GPU or in (pinned) host memory, in any precision that the kernels read."""
from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..kernels.attention import requantise
from ..kernels.pages import Pool, Precision, TileLists
from ..kernels.quantise import read_pages, write_pages
from .layout import TileLayout
from .patterns import PageLists
from .pool import LAYERS, Storage, with_layers

# Type of numbers -> integers of the same size, signed and unsigned, and the bits of infinity; of NaN where there is none.
_BITS = {torch.float32: (np.int32, np.uint32, 0x7f800000), torch.bfloat16: (np.int16, np.uint16, 0x7f80),
         torch.float8_e4m3fn: (np.int8, np.uint8, 0x7f)}


class TorchStorage:
    """A ``Storage`` whose pages are a ``kernels.pages.Pool`` for each layer.

    FP8 and FP4 pages have scales that span the page, so a slab is written to them as a whole. ``pinned`` pages are in host
    memory that a GPU copies from and to while it computes. As in ``NumpyStorage``, there is a ``null_page`` of zeros.
    ``scratch`` additional pages, with the ids ``scratch``, belong to no sequence: a pass that commits nothing writes there.
    """

    def __init__(self, layout: TileLayout, layers: int, heads: int, head_dim: int, pages: int, precision: Precision,
                 device: torch.device | str = 'cpu', pinned: bool = False, scratch: int = 0):
        self.pages, self.null_page = pages, pages
        self.scratch = pages + 1 + np.arange(scratch)
        self._there = there = pages + 1 + scratch
        self.precision, self.device = precision, torch.device(device)
        self._layout, self._layers = layout, layers
        if precision is Precision.FP32:
            # Readers gather these pages, and do not need the shapes of tensor cores.
            shape = (2, layers, there, heads, layout.page_tokens, head_dim)
            self.pool = Pool(precision, *torch.zeros(shape, device=device))
        else:
            self.pool = Pool.allocate(precision, there, heads, layout.page_tokens, head_dim, device, layers)
        if pinned:
            self.pool = Pool(precision, **{name: t.pin_memory() for name, t in self.pool.tensors().items()})
        self.page_bytes = self.pool.nbytes // there
        self.on_host = self.device.type == 'cpu' and not pinned
        # Two streams, so that copies that a tick waits for do not queue behind an arriving session.
        self._side, self._coming = (torch.cuda.Stream(self.device) if self.device.type == 'cuda' else None for _ in range(2))

    def layer(self, index: int) -> Pool:
        """Return views of one layer's pages, for the attention."""
        return self.pool.layer(index)

    def rows(self) -> tuple[Tensor, Tensor]:
        """See NumpyStorage.rows; unquantised pages only."""
        return self.pool.k.flatten(0, 2), self.pool.v.flatten(0, 2)

    def row_index(self, ids: np.ndarray) -> np.ndarray:
        """Return the rows of pages, int64 (layers, heads, n)."""
        heads = self.pool.heads
        first = np.arange(self._layers)[:, None, None] * self._there + ids
        return first * heads + np.arange(heads)[:, None]

    def device_rows(self, pages: Tensor) -> Tensor:
        """Return the rows of pages (B, n) on the device, int64 (layers, B, heads, n)."""
        heads = torch.arange(self.pool.heads, device=self.device)[:, None]
        first = torch.arange(self._layers, device=self.device)[:, None, None, None] * self._there
        return (first + pages[:, None]) * self.pool.heads + heads

    def tokens(self, ids: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return page and offset in it, int64 (n,) each, of ``places`` (see Stage.places), which may be in many slabs."""
        tile, offset = np.divmod(places, self._layout.page_tokens)
        return ids[tile], offset

    def put(self, page: Tensor, offset: Tensor, k: Tensor, v: Tensor) -> None:
        """Write keys and values (layers, heads, n, head_dim) of n tokens; unquantised pages only."""
        for pool, values in ((self.pool.k, k), (self.pool.v, v)):
            pool[:, page, :, offset] = values.permute(2, 0, 1, 3).to(pool.dtype)

    def write(self, ids: np.ndarray, places: np.ndarray, k: np.ndarray | Tensor, v: np.ndarray | Tensor) -> None:
        k, v = (torch.as_tensor(part, device=self.device) for part in (k, v))
        if not self.precision.quantised:
            self.put(*map(self._index, self.tokens(ids, places)), k, v)
            return
        tile, offset = np.divmod(places, self._layout.page_tokens)
        if len(places) != self._layout.frames * self._layout.tokens:
            raise ValueError(f'{self.precision.value} pages have scales that span them: write whole slabs of '
                             f'{self._layout.frames} frames')
        whole = k.new_zeros(2, self._layers, self._layout.tiles, k.shape[1], self._layout.page_tokens, k.shape[3])
        whole[:, :, self._index(tile), :, self._index(offset)] = torch.stack([k, v]).permute(3, 0, 1, 2, 4)
        for layer in range(self._layers):
            write_pages(self.layer(layer), self._index(ids), *whole[:, layer])

    def clear(self, ids: np.ndarray) -> None:
        for tensor in self.pool.tensors().values():
            _words(tensor)[:, self._index(ids)] = 0

    def copy(self, ids: np.ndarray, source: Storage, source_ids: np.ndarray) -> None:
        if isinstance(source, TorchStorage) and source.precision is self.precision:
            self._copy_bytes(ids, source, source_ids)
            return
        to = self._index(ids)
        if isinstance(source, TorchStorage):
            of = source._index(source_ids)
            for layer in range(self._layers):
                if source.device == self.device:
                    requantise(source.layer(layer), of, self.layer(layer), to)
                else:
                    parts = read_pages(source.layer(layer), of)
                    write_pages(self.layer(layer), to, *(part.to(self.device) for part in parts))
            return
        k, v = (torch.from_numpy(part).to(self.device) for part in source.read(source_ids))
        for layer in range(self._layers):
            write_pages(self.layer(layer), to, k[:, layer], v[:, layer])

    def copy_later(self, ids: np.ndarray, source: Storage, source_ids: np.ndarray) -> Callable[[], None]:
        if self._side is None:
            self.copy(ids, source, source_ids)
            return lambda: None
        # After all queued work, which may still read the pages for their previous owner.
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            self.copy(ids, source, source_ids)
            done = self._side.record_event()
        return lambda: torch.cuda.current_stream(self.device).wait_event(done)

    def read(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self._settle()
        layers = [read_pages(self.layer(layer), self._index(ids)) for layer in range(self._layers)]
        return tuple(torch.stack(part, 1).cpu().numpy() for part in zip(*layers))

    def dump(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        if self.precision is Precision.FP32:
            return dict(zip('kv', self.read(ids)))  # as NumpyStorage does, so that a file serves both
        self._settle()
        return {name: _on_host(_words(tensor)[:, self._index(ids)].transpose(0, 1).contiguous().view(torch.uint8)).numpy()
                for name, tensor in self.pool.tensors().items()}

    def forms(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        def form(tensor: Tensor) -> tuple[tuple[int, ...], np.dtype]:
            layers, _, *page = tensor.shape
            if self.precision is Precision.FP32:
                return (layers, *page), np.dtype(np.float32)
            *front, last = page
            return (layers, *front, last * tensor.element_size()), np.dtype(np.uint8)
        return {name: form(tensor) for name, tensor in self.pool.tensors().items()}

    def finite(self, name: str, array: np.ndarray) -> bool:
        dtype = self.pool.tensors()[name].dtype
        if not dtype.is_floating_point or not array.size:
            return True
        # Infinity and NaN have the largest bits of their sign: as signed integers among the positive numbers, as unsigned ones
        # among the negative. By numpy, since PyTorch would start a team of threads for each thread that calls this.
        signed, unsigned, infinity = _BITS[dtype]
        bits = array.reshape(-1).view(unsigned)
        sign = 1 << 8 * bits.itemsize - 1
        return bool(bits.view(signed).max() < infinity and bits.max() < sign | infinity)

    def load(self, ids: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        self._load(ids, [arrays], later=False)

    def _load(self, ids: np.ndarray, groups: Sequence[dict[str, np.ndarray]], later: bool) -> None:
        index = self._index(ids)
        for name, tensor in self.pool.tensors().items():
            words = _words(tensor)
            for layers, arrays in with_layers(groups):
                values = _tensor(arrays[name]).view(words.dtype).to(self.device, non_blocking=later)
                words[layers, index] = values.transpose(0, LAYERS)

    def staged(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if self.device.type != 'cuda':
            return arrays
        return {name: _pinned(array) for name, array in arrays.items()}

    def load_later(self, ids: np.ndarray, groups: Sequence[dict[str, np.ndarray]]) -> Callable[[], Callable[[], None]]:
        # After all queued work, which may still read the pages for their previous owner.
        queued = torch.cuda.current_stream(self.device).record_event() if self._coming else None

        def start() -> Callable[[], None]:
            if queued is None:
                self._load(ids, groups, later=False)
                return lambda: None
            with torch.cuda.stream(self._coming):
                self._coming.wait_event(queued)
                self._load(ids, groups, later=True)
                return self._coming.record_event(torch.cuda.Event(blocking=True)).synchronize
        return start

    def _copy_bytes(self, ids: np.ndarray, source: TorchStorage, source_ids: np.ndarray) -> None:
        ours, theirs = self.pool.tensors(), source.pool.tensors()
        if source.device == self.device:
            for name, tensor in ours.items():
                _words(tensor)[:, self._index(ids)] = _words(theirs[name])[:, self._index(source_ids)]
            return
        # Between host and device only contiguous blocks are copied directly: runs of pages, layer by layer.
        for begin, end in _runs(ids, source_ids):
            to, of = slice(ids[begin], ids[end - 1] + 1), slice(source_ids[begin], source_ids[end - 1] + 1)
            for name, tensor in ours.items():
                for layer in range(self._layers):
                    tensor[layer, to].copy_(theirs[name][layer, of], non_blocking=True)

    def _index(self, ids: np.ndarray) -> Tensor:
        index = torch.from_numpy(np.ascontiguousarray(ids, np.int64))
        # From pinned memory, so that the host does not wait for the device's queued work.
        return index.pin_memory().to(self.device, non_blocking=True) if self.device.type == 'cuda' else index

    def _settle(self) -> None:
        """Wait for copies to the host that are in flight."""
        if self.device.type == 'cpu' and torch.cuda.is_available():
            torch.cuda.synchronize()


def kernel_lists(lists: PageLists, device: torch.device | str) -> TileLists:
    """Convert lists of pages to the kernels' format."""
    def tensor(array: np.ndarray) -> Tensor:
        # Never empty, as a kernel needs a valid address even where it reads nothing.
        return torch.from_numpy(array if array.size else np.zeros(1, np.int32)).to(device, non_blocking=True)
    return TileLists(*map(tensor, (lists.starts, lists.pages, lists.lengths, lists.full)))


def _on_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to host memory and wait for it; to pinned memory, if there is any, which is several times as fast as
    ordinary memory."""
    if not tensor.is_cuda:
        return tensor
    try:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    except RuntimeError:  # the driver has none left
        return tensor.cpu()
    copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return copy


def _pinned(array: np.ndarray) -> np.ndarray:
    """Return an array in pinned memory; unchanged if it is there already or the driver has none left."""
    tensor = _tensor(array)
    try:
        if tensor.is_pinned():
            return array
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).numpy()
    except RuntimeError:
        return array
    np.copyto(pinned, array)  # PyTorch would start a team of threads for each thread that calls this
    return pinned


def _tensor(array: np.ndarray) -> Tensor:
    """Return an array as a tensor, which must only be read: a store's arrays are read-only."""
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Unprotected(array)))


class _Unprotected:
    """The memory of an array, for users that do not write to it."""

    def __init__(self, array: np.ndarray):
        address, _ = array.__array_interface__['data']
        self.__array_interface__ = {**array.__array_interface__, 'data': (address, False)}
        self._array = array  # keeps the memory alive


def _words(tensor: Tensor) -> Tensor:
    """View a tensor's bytes as integers as wide as its last dimension allows, since indexing copies them one by one."""
    nbytes = tensor.shape[-1] * tensor.element_size()
    return tensor.view(next(dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)
                            if nbytes % dtype.itemsize == 0))


def _runs(ids: np.ndarray, source_ids: np.ndarray) -> list[tuple[int, int]]:
    """Return the positions, from and to, between which both sides are successive pages."""
    breaks = np.flatnonzero((np.diff(ids) != 1) | (np.diff(source_ids) != 1)) + 1
    edges = [0, *breaks.tolist(), len(ids)]
    return list(zip(edges, edges[1:]))
