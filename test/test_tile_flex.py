"""Blocks of FlexAttention's mask, by which a GPU skips what is not seen, are those of the mask between tokens."""
import pytest
import torch
from torch.nn import functional as F

from worldmodel_ros.model.tile_flex import BLOCK, FlexMask


def listed(count, index):
    """Which blocks are listed, bool (rows, columns)."""
    blocks = torch.zeros(index.shape[2:], dtype=torch.bool)
    for row in range(len(blocks)):
        blocks[row, index[0, 0, row, :count[0, 0, row]].long()] = True
    return blocks


@pytest.mark.parametrize('shape', [(3, 3), (5, 7), (8, 16)])
@pytest.mark.parametrize('unit', [16, 36, 48, 64, 96, 128, 144, 192, 256])
def test_blocks_that_are_computed_or_left_out_are_those_of_the_mask_between_tokens(unit, shape):
    units = torch.rand(shape, generator=torch.Generator().manual_seed(unit)) < 0.6
    tokens = units.repeat_interleave(unit, 0).repeat_interleave(unit, 1)
    rows, columns = (-(-length // BLOCK) for length in tokens.shape)
    tokens = F.pad(tokens, (0, columns * BLOCK - tokens.shape[1], 0, rows * BLOCK - tokens.shape[0]))
    blocks = tokens.view(rows, BLOCK, columns, BLOCK)
    seen, whole = blocks.any(3).any(1), blocks.all(3).all(1)
    mask = FlexMask(units, unit).mask
    torch.testing.assert_close(listed(mask.full_kv_num_blocks, mask.full_kv_indices), whole)
    torch.testing.assert_close(listed(mask.kv_num_blocks, mask.kv_indices), seen & ~whole)
    q, kv = torch.meshgrid(*(torch.arange(length) for length in tokens.shape), indexing='ij')
    torch.testing.assert_close(mask.mask_mod(None, None, q, kv), tokens)
