"""The DiT's passes of a preset without tiles, for one session, with its pages read in place.

Batched passes gather the pages of every window, layer by layer, and append the block's own keys and values: for one session
that costs a third as much as the attention itself. Here a layer writes its keys and values to pages of the pool, and the
attention reads the pages in a list. What a pass sees is passed as arrays of fixed shapes, so that one CUDA graph serves
both a window that is filling and a full one.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from worldmodel_ros.cache.torch_storage import TorchStorage
from worldmodel_ros.engine.memory import Window, page_layout, slabs_of
from worldmodel_ros.kernels.pages import Precision, TileLists
from worldmodel_ros.model.dit import DiT
from worldmodel_ros.model.presets import VideoPreset
from worldmodel_ros.model.rotary import space_rotation, time_rotation
from worldmodel_ros.model.sampling import FLOW
from worldmodel_ros.model.tile_attention import OwnPages, PagedFrames
from .cuda_graphs import Eager, Graphs

QUERY_BLOCK, HEAD_DIM = 128, 128  # of the attention kernel for Hopper
PROCESSORS = 132  # multiprocessors of an H100 and an H200
MOST_PARTS = 8


def serve(preset: VideoPreset, precision: Precision, device: torch.device) -> bool:
    """Return whether these passes are the faster ones: where the attention kernel for Hopper supports the preset's pages."""
    return (device.type == 'cuda' and torch.cuda.get_device_capability(device) == (9, 0) and preset.tile is None
            and precision is Precision.BF16 and preset.head_dim == HEAD_DIM and preset.tokens % QUERY_BLOCK == 0)


class FramePasses:
    """Commits and denoises as ``TorchBackend.run`` documents, with the graphs of ``launch``; the methods in ``_pass`` take and
    return only tensors, and are what is captured.

    While a chunk is denoised its keys and values are in scratch pages. Each ``launch`` needs its own, since passes of
    different ones may be in flight at the same time.
    """

    def __init__(self, dit: DiT, device: torch.device):
        self.dit, self.preset = dit, dit.preset
        self._window = slabs_of(self.preset.window_frames, page_layout(self.preset))
        self._space = torch.tensor(space_rotation(self.preset), device=device)

    def denoise(self, launch: Eager | Graphs, scratch: np.ndarray, z: np.ndarray | Tensor, tau: float, rate: float, row: int,
                actions: np.ndarray | Tensor, window: Window) -> tuple[Tensor, Tensor]:
        """``scratch``: a page for each frame of the chunk."""
        levels = np.float32(tau), np.float32(rate), np.int64(row)
        return self._launched(launch, 'denoise', self.denoise_pass, window, scratch, z, *levels, actions)

    def commit(self, launch: Eager | Graphs, latents: np.ndarray | Tensor, actions: np.ndarray | Tensor, window: Window,
               places: tuple[np.ndarray, np.ndarray]) -> Tensor:
        """Return features (T, P, D)."""
        return self._launched(launch, 'commit', self.commit_pass, window, places[0], latents, actions)[0]

    def denoise_pass(self, storage: TorchStorage, parts: int, side_stream: torch.cuda.Stream | None, z: Tensor, tau: Tensor,
                     rate: Tensor, row: Tensor, actions: Tensor, *pages: Tensor) -> tuple[Tensor, ...]:
        shape = z.shape[:2]
        clean, features = self.dit.over_tiles(z, tau[:, None].expand(shape), row[:, None].expand(shape), actions,
                                              self._attention(storage, parts, *pages), side_stream)
        clean, rate = clean.float(), rate[:, None, None, None, None]
        return torch.where(rate == 1.0, clean, z + (clean - z) * rate), features.float()

    def commit_pass(self, storage: TorchStorage, parts: int, side_stream: torch.cuda.Stream | None, latents: Tensor,
                    actions: Tensor, *pages: Tensor) -> tuple[Tensor, ...]:
        tau = latents.new_ones(latents.shape[:2])
        _, features = self.dit.over_tiles(latents, tau, torch.full_like(tau, FLOW, dtype=torch.long), actions,
                                          self._attention(storage, parts, *pages), side_stream)
        return (features.float(),)

    def _launched(self, launch: Eager | Graphs, network: str, run: Callable[..., tuple[Tensor, ...]], window: Window,
                  own: np.ndarray, *inputs: np.ndarray | Tensor) -> tuple[Tensor, ...]:
        count = len(window.times)
        together = count == 1 or not window.causal  # all queries see the same pages
        parts = parts_for(-(-count * self.preset.tokens // QUERY_BLOCK) * self.preset.heads, self._window + count)
        entries = [np.concatenate([window.pages[row], own[:count if together else frame + 1]])
                   for frame, row in enumerate(window.seen_pages())]
        arrays = time_rotation(self.preset, window.times), own.astype(np.int32), *listed(
            entries, parts, len(entries) * (self._window + count), window.tokens)
        outputs = launch((network, 'frames', window.storage), partial(run, window.storage, parts, launch.side_stream),
                         [[each] for each in (*inputs, *arrays)])
        return tuple(output[0] for output in outputs)

    def _attention(self, storage: TorchStorage, parts: int, time: Tensor, own: Tensor, *lists: Tensor) -> PagedFrames:
        """Build the attention from the arrays of ``_launched``."""
        preset, count = self.preset, time.shape[2]
        rotary = torch.cat([each.expand(2, count, preset.tokens, -1)
                            for each in (time[0, :, :, None], self._space[:, None])], -1).flatten(1, 2)
        own = OwnPages(0, own[0], torch.full_like(own[0], preset.tokens), None)
        pools = [storage.layer(layer) for layer in range(len(preset.cache_layers))]
        return PagedFrames(rotary, own, pools, TileLists(*(each[0] for each in lists)), parts)


def listed(entries: list[np.ndarray], parts: int, most: int, tokens: int) -> tuple[np.ndarray, ...]:
    """Return the arrays of TileLists for full pages, int (n,), of each query tile, split into ``parts``: all tiles' first
    parts, then the second ones. ``most``: how many pages there is room for; ``tokens``: per page."""
    rows = [pages[part::parts] for part in range(parts) for pages in entries]
    counts = np.array([len(row) for row in rows], np.int32)
    starts, pages = np.zeros(len(rows) + 1, np.int32), np.zeros(most, np.int32)
    np.cumsum(counts, out=starts[1:])
    pages[:starts[-1]] = np.concatenate(rows)
    return starts, pages, np.full(most, tokens, np.int32), counts


def parts_for(items: int, pages: int) -> int:
    """Return into how many parts to split the lists of ``pages`` pages for ``items`` equal pieces of work, to minimise the time
    until the last of the processors, each of which takes whole pieces, is done; on ties the fewest, as parts are merged."""
    return min(range(1, MOST_PARTS + 1), key=lambda parts: -(-items * parts // PROCESSORS) * -(-pages // parts))
