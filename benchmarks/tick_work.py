"""The useful work of a chunk, counted from its preset, by which times are judged."""
from __future__ import annotations

import numpy as np

from worldmodel_ros.cache.layout import TileLayout
from worldmodel_ros.cache.patterns import Pattern, page_lists
from worldmodel_ros.cache.sequence import Table
from worldmodel_ros.engine.tile_window import patterns_of
from worldmodel_ros.model.presets import Preset

# Dense matrix products of one H100 or H200 (SXM5) by its data sheet, operations/s.
PEAK = {'fp8': 1979e12, 'bf16': 989e12}


def keys_per_query(preset: Preset) -> list[float]:
    """Return the keys that a token of a chunk attends to in each layer, with a full window; the mean over tokens."""
    if preset.tile is None:
        seen = (preset.window_frames + preset.chunk_frames) * preset.tokens
        return [seen if layer in preset.cache_layers else preset.tokens for layer in range(preset.depth)]
    layout, table, queries = full_window(preset)
    by_pattern = []
    for pattern in layer_patterns(preset):
        lists, = page_lists(table, layout, queries, pattern).values()
        by_pattern.append(float(lists.lengths.sum()) / (len(lists.starts) - 1))
    found = [float(preset.tokens)] * preset.depth
    for number, layer in enumerate(preset.cache_layers):
        found[layer] = by_pattern[number]
    return found


def full_window(preset: Preset) -> tuple[TileLayout, Table, tuple[int, ...]]:
    """Return a preset's tiles, a table of a full window followed by a chunk, in successive pages, and the chunk's slabs."""
    layout = TileLayout(preset.tile, preset.grid)
    past, own = preset.window_frames // layout.frames, preset.chunk_frames // layout.frames
    slabs = np.arange(past + own)
    head = np.stack([slabs, *[np.full(len(slabs), layout.frames)] * 2, np.zeros_like(slabs)], 1)
    pages = np.arange(len(slabs) * layout.tiles).reshape(len(slabs), -1)
    return layout, Table(np.concatenate([head, pages], 1)), tuple(slabs[past:].tolist())


def layer_patterns(preset: Preset) -> list[Pattern]:
    """Return the neighbourhood of each cache layer."""
    known = dict(zip(dict.fromkeys(preset.patterns), patterns_of(preset)))
    return [known[preset.patterns[number % len(preset.patterns)]] for number in range(len(preset.cache_layers))]


def chunk_flops(preset: Preset, steps: int) -> dict[str, float]:
    """Return the operations of denoising one chunk: the layers' linears, and both products of the attention."""
    tokens = preset.chunk_frames * preset.tokens
    linear = 2.0 * tokens * 12 * preset.width ** 2 * preset.depth
    attention = 4.0 * tokens * preset.width * sum(keys_per_query(preset))
    return {'linear': steps * linear, 'attention': steps * attention}


def cache_bytes_per_second(preset: Preset, bytes_per_number: float) -> float:
    """Return the bytes of keys and values that a session adds in a second."""
    return 2.0 * preset.tokens * preset.width * len(preset.cache_layers) * bytes_per_number / preset.step_period
