"""Memory layout of a frame's tokens: space-time tiles in Z-order, one page for each; or one token after the other."""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class TileLayout:
    """A slab is ``tile[0]`` frames, cut into tiles of ``tile`` = (frames, rows, columns) tokens.

    ``grid`` is (rows, columns) of the tokens of one frame. The tiles of a slab are numbered in Z-order (Morton 1966),
    so that neighbours in space are neighbours in memory. Within a page, tokens are stored frame by frame and, within a
    frame, row by row: the first frames of a slab fill a prefix of each page. Where the grid is not a multiple of the tile,
    a border tile has fewer tokens per frame, packed as densely.
    """

    tile: tuple[int, int, int]
    grid: tuple[int, int]

    def __post_init__(self):
        if len(self.tile) != 3 or len(self.grid) != 2 or min(*self.tile, *self.grid) < 1:
            raise ValueError(f'tile {self.tile} and grid {self.grid} must be (frames, rows, columns) and '
                             f'(rows, columns), each at least 1')

    @cached_property
    def frames(self) -> int:
        """Frames per slab."""
        return self.tile[0]

    @cached_property
    def tokens(self) -> int:
        """Tokens per frame."""
        return self.grid[0] * self.grid[1]

    @cached_property
    def page_tokens(self) -> int:
        """Token capacity of a page."""
        return self.tile[0] * self.tile[1] * self.tile[2]

    @cached_property
    def tiles(self) -> int:
        """Tiles, and so pages, per slab."""
        return len(self.positions)

    @cached_property
    def plane(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        return -(-self.grid[0] // self.tile[1]), -(-self.grid[1] // self.tile[2])

    @cached_property
    def positions(self) -> np.ndarray:
        """Row and column of each tile in the plane of tiles, int64 (tiles, 2), in Z-order."""
        rows, columns = (axis.ravel() for axis in np.indices(self.plane))
        order = np.argsort(_spread(rows) << 1 | _spread(columns), kind='stable')
        return np.stack([rows[order], columns[order]], 1)

    @cached_property
    def numbers(self) -> np.ndarray:
        """Number of the tile at each place of the plane, int64, shape ``plane``: the inverse of ``positions``."""
        numbers = np.empty(self.plane, np.int64)
        numbers[self.positions[:, 0], self.positions[:, 1]] = np.arange(self.tiles)
        return numbers

    @cached_property
    def tokens_per_frame(self) -> np.ndarray:
        """Tokens that one frame has in each tile, int64 (tiles,)."""
        size = [np.minimum(self.tile[1 + axis], self.grid[axis] - self.positions[:, axis] * self.tile[1 + axis])
                for axis in (0, 1)]
        return size[0] * size[1]

    @cached_property
    def token_index(self) -> np.ndarray:
        """Place of each token of a slab, int64 (frames, tokens): its tile * page_tokens + its place in the page."""
        row, column = np.divmod(np.arange(self.tokens), self.grid[1])
        tile_row, tile_column = row // self.tile[1], column // self.tile[2]
        tile = self.numbers[tile_row, tile_column]
        width = np.minimum(self.tile[2], self.grid[1] - tile_column * self.tile[2])
        within = row % self.tile[1] * width + column % self.tile[2]
        frame = np.arange(self.frames)[:, None]
        return tile * self.page_tokens + frame * self.tokens_per_frame[tile] + within

    @cached_property
    def frame_order(self) -> np.ndarray:
        """Tokens of a frame, numbered row by row, in the order of the pages: tile by tile, int64 (tokens,)."""
        return np.argsort(self.token_index[0])

    @cached_property
    def frame_index(self) -> np.ndarray:
        """Frame of the slab at each place, int64 (tiles, page_tokens); ``frames`` where a border tile has no token."""
        frame = np.full(self.tiles * self.page_tokens, self.frames)
        frame[self.token_index] = np.arange(self.frames)[:, None]
        return frame.reshape(self.tiles, self.page_tokens)

    def valid(self, frames: int) -> np.ndarray:
        """Return the tokens in each page, int64 (tiles,), when the first ``frames`` frames of the slab are written."""
        return self.tokens_per_frame * frames


@dataclass(frozen=True)
class FlatLayout:
    """A slab is ``frames`` frames of ``tokens`` tokens, one after the other in pages of ``page_tokens``, for models whose
    tokens all attend to each other: only the last page of a slab has unused places. Names are those of ``TileLayout``; a
    page counts as a tile.
    """

    frames: int
    tokens: int
    page_tokens: int = 128

    def __post_init__(self):
        if min(self.frames, self.tokens, self.page_tokens) < 1:
            raise ValueError(f'{self}: each must be at least 1')

    @cached_property
    def tiles(self) -> int:
        """Pages per slab."""
        return -(-self.frames * self.tokens // self.page_tokens)

    @cached_property
    def token_index(self) -> np.ndarray:
        """As ``TileLayout.token_index``."""
        return np.arange(self.frames * self.tokens).reshape(self.frames, self.tokens)

    @cached_property
    def frame_index(self) -> np.ndarray:
        """As ``TileLayout.frame_index``."""
        frame = np.arange(self.tiles * self.page_tokens) // self.tokens
        return np.minimum(frame, self.frames).reshape(self.tiles, self.page_tokens)

    def valid(self, frames: int) -> np.ndarray:
        """As ``TileLayout.valid``."""
        return np.clip(frames * self.tokens - np.arange(self.tiles) * self.page_tokens, 0, self.page_tokens)


def _spread(values: np.ndarray) -> np.ndarray:
    """Put a zero bit before each of the 16 low bits."""
    for shift, mask in ((8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        values = (values | values << shift) & mask
    return values
