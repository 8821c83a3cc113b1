"""Tiles: every token has a place of its own, neighbours lie together, the first frames fill a prefix of each page."""
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from worldmodel_ros.cache.layout import TileLayout

SIZES = st.integers(1, 5)


@settings(deadline=None, max_examples=60)
@given(st.tuples(SIZES, SIZES, SIZES), st.tuples(st.integers(1, 11), st.integers(1, 11)))
def test_every_token_of_a_slab_has_a_place_of_its_own_in_the_tile_that_it_lies_in(tile, grid):
    layout = TileLayout(tile, grid)
    places = layout.token_index
    assert places.shape == (tile[0], grid[0] * grid[1]) and len(np.unique(places)) == places.size
    frame, token = np.indices(places.shape)
    number, place = np.divmod(places, layout.page_tokens)
    expected = np.stack(np.divmod(token, grid[1]), -1) // tile[1:]
    np.testing.assert_array_equal(layout.positions[number], expected)
    np.testing.assert_array_equal(layout.frame_index[number, place], frame)
    assert (layout.frame_index < tile[0]).sum() == places.size


@settings(deadline=None, max_examples=60)
@given(st.tuples(SIZES, SIZES, SIZES), st.tuples(st.integers(1, 11), st.integers(1, 11)))
def test_the_first_frames_of_a_slab_fill_a_prefix_of_each_page(tile, grid):
    layout = TileLayout(tile, grid)
    for frames in range(tile[0] + 1):
        number, place = np.divmod(layout.token_index[:frames].ravel(), layout.page_tokens)
        for page, valid in enumerate(layout.valid(frames)):
            np.testing.assert_array_equal(np.sort(place[number == page]), np.arange(valid))


def test_tiles_are_numbered_along_the_z_curve():
    layout = TileLayout((4, 8, 8), (32, 32))
    assert (layout.tiles, layout.page_tokens) == (16, 256)
    np.testing.assert_array_equal(layout.numbers, [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]])
    # Any aligned square of two by two tiles is one run of memory; in rows, it would be two.
    for square in layout.numbers.reshape(2, 2, 2, 2).swapaxes(1, 2).reshape(4, 4):
        assert np.ptp(square) == 3


def test_ragged_borders_of_the_plane_make_smaller_tiles():
    layout = TileLayout((2, 4, 4), (6, 9))
    assert layout.plane == (2, 3)
    np.testing.assert_array_equal(layout.tokens_per_frame[layout.numbers], [[16, 16, 4], [8, 8, 2]])
    assert layout.valid(2).sum() == 2 * 6 * 9


def test_one_tile_a_frame_keeps_the_order_of_the_picture():
    np.testing.assert_array_equal(TileLayout((1, 4, 4), (4, 4)).token_index, [np.arange(16)])


@pytest.mark.parametrize('tile, grid', [((0, 4, 4), (4, 4)), ((1, 4, 4), (4, 0)), ((4, 4), (4, 4))])
def test_a_layout_without_tokens_is_refused(tile, grid):
    with pytest.raises(ValueError, match='at least 1'):
        TileLayout(tile, grid)
