"""The DiT's passes of a preset with tiles, for one session at a time, as one chunk fills the device.

What a pass sees is passed as arrays of fixed shapes, so that one CUDA graph serves every moment of a session.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from worldmodel_ros.cache.torch_storage import TorchStorage
from worldmodel_ros.engine.memory import page_layout, slabs_of
from worldmodel_ros.engine.tile_window import PassPages, TileWindow, chunk_tier, patterns_of
from worldmodel_ros.kernels.pages import TileLists
from worldmodel_ros.model.dit import DiT, Modulated
from worldmodel_ros.model.rotary import heading_after, heading_rotation, space_rotation, time_rotation
from worldmodel_ros.model.sampling import FLOW
from worldmodel_ros.model.tile_attention import OwnPages, PagedTiles
from .cuda_graphs import Eager, Graphs

Storages = tuple[TorchStorage, ...]  # by tier


class TilePasses:
    """Commits and denoises as ``TorchBackend.run`` documents; the methods in ``_pass`` take and return only tensors, and are
    what is captured.

    ``prepare``: a step that is not the last one computes the next one's modulations as well, since the time of both is that of
    reading their weights. A last step then goes on from what is on the device. With more than two steps, most are computed in
    vain. By default on GPUs.
    """

    def __init__(self, dit: DiT, device: torch.device, launch: Eager | Graphs, prepare: bool | None = None):
        self.dit, self.preset, self._launch = dit, dit.preset, launch
        self._prepare = device.type == 'cuda' if prepare is None else prepare
        self._prepared: tuple | None = None  # the step that was prepared: z, actions and window; row and level of noise
        # Its condition (1, T, D), modulations (layers, 1, T, 6 * D) and z.
        self._ahead: tuple[Tensor, Tensor, Tensor] | None = None
        self._given: dict[Storages, tuple[Tensor, Sequence[Tensor]]] = {}  # actions and pages that steps read, by storages
        self._layout = page_layout(self.preset)
        self._run = self._layout.page_tokens // self._layout.frames
        self._space = torch.tensor(space_rotation(self.preset), device=device)
        self._harmonics = torch.arange(1.0, self.preset.heading_pairs + 1, device=device)

    def denoise(self, z: np.ndarray | Tensor, tau: float, rate: float, row: int, actions: np.ndarray, window: TileWindow
                ) -> tuple[Tensor, Tensor | None]:
        """Return moved z, and features in the layers' type, or None before the last step, as only that step's are used."""
        last, storages = rate == 1.0, window.storages
        prepared, self._prepared = self._prepared, None
        if last and prepared and all(one is other for one, other in zip(prepared, (z, actions, window))) \
                and prepared[3:] == (row, np.float32(tau)):  # no other chunk came between
            moved, features = self._queue('finish', storages)
            return moved[0], features[0]
        network = 'denoise' if last else 'prepare' if self._prepare else 'approach'
        moved, *features = self._queue(network, storages, z, np.float32(tau), np.float32(rate), np.int64(row), actions,
                                       *self._arrays(window.of_chunk, window.heading))
        moved = moved[0]
        if network == 'prepare':
            self._prepared = moved, actions, window, row, np.float32(tau + rate * (1.0 - tau))
        return moved, features[0][0] if last else None

    def forget(self) -> None:
        """Prepare the next step again: what was prepared may be lost."""
        self._prepared = None
        self._given.clear()

    def commit(self, latents: np.ndarray | Tensor, actions: np.ndarray, window: TileWindow,
               places: tuple[np.ndarray, np.ndarray]) -> Tensor:
        """Return features (T, P, D), float32. A block over several slabs is passed slab by slab."""
        features, heading = [], window.heading
        for part, pages in window.of_commit(places[0]):
            found, = self._queue('commit', window.storages, latents[part], actions[part], *self._arrays(pages, heading))
            features.append(found[0])
            if self.preset.heading_pairs:
                heading = heading_after(self.preset, heading, actions[part])
        return features[0] if len(features) == 1 else torch.cat(features)

    def _queue(self, network: str, storages: Storages, *inputs: np.ndarray | Tensor) -> tuple[Tensor, ...]:
        """Launch a pass of one session; return its results, a batch of one each."""
        run = partial(getattr(self, f'{network}_pass'), storages)
        return self._launch((network, storages), run, [[each] for each in inputs])

    def denoise_pass(self, storages: Storages, z: Tensor, tau: Tensor, rate: Tensor, row: Tensor, actions: Tensor,
                     *pages: Tensor) -> tuple[Tensor, ...]:
        """Run the last step."""
        modulated, = self.modulated(self._conditions([tau], row, actions))
        return self.finished(*self._clean(storages, z, actions, pages, modulated))

    def approach_pass(self, storages: Storages, z: Tensor, tau: Tensor, rate: Tensor, row: Tensor, actions: Tensor,
                      *pages: Tensor) -> tuple[Tensor]:
        """Run a step that is not the last one."""
        modulated, = self.modulated(self._conditions([tau], row, actions))
        return (self._moved(storages, z, rate, actions, pages, modulated),)

    def prepare_pass(self, storages: Storages, z: Tensor, tau: Tensor, rate: Tensor, row: Tensor, actions: Tensor,
                     *pages: Tensor) -> tuple[Tensor]:
        """Run a step that is not the last one, and leave on the device what ``finish_pass`` reads."""
        modulated, following = self.modulated(self._conditions([tau, tau + rate * (1.0 - tau)], row, actions))
        moved = self._moved(storages, z, rate, actions, pages, modulated)
        if self._ahead is None:  # in a call before the one that is captured
            self._ahead = torch.empty_like(following.cond), torch.stack(list(following.layers)), torch.empty_like(z)
        self._ahead[0].copy_(following.cond)
        torch.stack(list(following.layers), out=self._ahead[1])
        self._ahead[2].copy_(moved)
        self._given[storages] = actions, pages
        return (moved,)

    def finish_pass(self, storages: Storages) -> tuple[Tensor, ...]:
        """Run the last step from what the step before has left on the device."""
        cond, layers, z = self._ahead
        return self.finished(*self._clean(storages, z, *self._given[storages], Modulated(cond, layers.unbind())))

    def commit_pass(self, storages: Storages, latents: Tensor, actions: Tensor, *pages: Tensor) -> tuple[Tensor, ...]:
        time, own, offsets, *lists = (each[0] for each in pages)
        attention = self._attention(storages, 0, self._turned(time, actions[0]), own, offsets, lists)
        clean = latents.new_ones(1)
        modulated, = self.modulated(self._conditions([clean], torch.full_like(clean, FLOW, dtype=torch.long), actions))
        _, features = self.over_tiles(latents, modulated, attention)
        return (features.float(),)

    def modulated(self, conditions: Sequence[Tensor]) -> list[Modulated]:
        """Return each layer's modulation for the conditions (1, T, D) of several passes."""
        return self.dit.modulated(conditions)

    def over_tiles(self, latents: Tensor, modulated: Modulated, attention: PagedTiles) -> tuple[Tensor, Tensor]:
        """``DiT.over_modulated_tiles``."""
        return self.dit.over_modulated_tiles(latents, modulated, attention)

    def finished(self, moved: Tensor, features: Tensor) -> tuple[Tensor, ...]:
        """Return the last step's results."""
        return moved, features

    def _conditions(self, levels: Sequence[Tensor], row: Tensor, actions: Tensor) -> Sequence[Tensor]:
        """Return the condition (1, T, D) for each level of noise (1,), that of all frames, under actions (1, T, A)."""
        shape = len(levels), actions.shape[1]
        return self.dit.condition(torch.cat(levels)[:, None].expand(shape), row[:, None].expand(shape), actions).split(1)

    def _moved(self, storages: Storages, z: Tensor, rate: Tensor, actions: Tensor, pages: Sequence[Tensor],
               modulated: Modulated) -> Tensor:
        """Return z moved by the share ``rate`` of its way to the clean latents."""
        clean, _ = self._clean(storages, z, actions, pages, modulated)
        return z + (clean - z) * rate[:, None, None, None, None]

    def _clean(self, storages: Storages, z: Tensor, actions: Tensor, pages: Sequence[Tensor], modulated: Modulated
               ) -> tuple[Tensor, Tensor]:
        """Return the clean latents that a step predicts, float32, and features."""
        time, own, _, *lists = (each[0] for each in pages)
        # Its scratch pages are not shared, and it fills them.
        attention = self._attention(storages, chunk_tier(storages), self._turned(time, actions[0]), own, None, lists)
        clean, features = self.over_tiles(z, modulated, attention)
        return clean.float(), features

    def _turned(self, rotation: Tensor, actions: Tensor) -> Tensor:
        """Turn the heading pairs of frames' rotation (2, T, pairs), given for the heading before the block, by actions (T, A).
        Runs on the device, since a plan may never have been on the host."""
        pairs = self.preset.heading_pairs
        if not pairs:
            return rotation
        angle = (actions[:, self.preset.turn] * self.preset.step_period).cumsum(0)[:, None] * self._harmonics
        cos, sin = rotation[..., -pairs:]
        turned = torch.stack([cos * angle.cos() - sin * angle.sin(), sin * angle.cos() + cos * angle.sin()])
        return torch.cat([rotation[..., :-pairs], turned], -1)

    def _arrays(self, pages: PassPages, heading: float) -> list[np.ndarray]:
        """Return what ``_attention`` is built from; shapes depend on the numbers of frames and groups, not on the window."""
        run, tiles = self._run, self._layout.tiles
        rotation = time_rotation(self.preset, pages.times)
        if self.preset.heading_pairs:
            before = heading_rotation(self.preset, heading)
            rotation = np.concatenate([rotation, before.repeat(len(pages.times), 1)], -1)
        arrays = [rotation, pages.own,
                  np.full(len(pages.own), pages.offset * run, np.int32)]
        most_slabs = slabs_of(self.preset.window_frames, self._layout) + self.preset.staying_slabs + pages.groups
        for pattern, tiers in zip(patterns_of(self.preset), pages.lists):
            plane = np.minimum(pattern.plane, self._layout.plane)
            most = pages.groups * tiles * (pattern.slabs or most_slabs) * int(np.prod(plane))
            for each in tiers:
                arrays += [each.starts, *(_padded(part, most) for part in (each.pages, each.lengths)), each.full]
        return arrays

    def _attention(self, storages: Storages, tier: int, time: Tensor, own: Tensor, offsets: Tensor | None,
                   lists: Sequence[Tensor]) -> PagedTiles:
        """Build the attention of a pass whose own pages are in ``tier`` from ``_arrays``."""
        groups, count = len(own) // self._layout.tiles, time.shape[1]
        rotary = torch.cat([each.expand(2, count, self.preset.tokens, -1)
                            for each in (time[:, :, None], self._space[:, None])], -1).flatten(1, 2)
        counts = torch.full_like(own, count // groups * self._run)
        tables = iter([TileLists(*lists[first:first + 4]) for first in range(0, len(lists), 4)])
        by_pattern = {pattern: [next(tables) for _ in storages] for pattern in dict.fromkeys(self.preset.patterns)}
        layers = range(len(self.preset.cache_layers))
        return PagedTiles(
            (groups, count // groups, self._layout.tiles, self._run), rotary, OwnPages(tier, own, counts, offsets),
            [[storage.layer(layer) for storage in storages] for layer in layers],
            [by_pattern[self.preset.patterns[layer % len(self.preset.patterns)]] for layer in layers])


def _padded(array: np.ndarray, size: int) -> np.ndarray:
    padded = np.zeros(size, np.int32)
    padded[:len(array)] = array
    return padded
