"""The kernels' definitions against what the model does, and against attention without pages."""
import copy

import numpy as np
import pytest
import torch
from kernel_inputs import random_lists, random_pool, random_tensor, relative_error
from torch.nn import functional as F

from worldmodel_ros.kernels import reference
from worldmodel_ros.kernels.attention import paged_attention, split_attention
from worldmodel_ros.kernels.page_write import write_qkv
from worldmodel_ros.kernels.pages import Pool, Precision, TileLists
from worldmodel_ros.kernels.quantise import read_pages
from worldmodel_ros.kernels.requantise import requantise
from worldmodel_ros.kernels.temporal import temporal_attention
from worldmodel_ros.model.dit import rotate
from worldmodel_ros.model.dit import Block
from worldmodel_ros.model.presets import TINY


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_paged_attention_is_attention_to_the_listed_tokens():
    rng, tokens, heads, dim = np.random.default_rng(1), 32, 2, 16
    pools = [random_pool(generator(i), Precision(p), 6, heads, tokens, dim) for i, p in enumerate(('fp32', 'fp8'))]
    lists = [random_lists(rng, counts, 6, tokens, 0.5) for counts in ([3, 0, 2], [1, 0, 4])]
    q = random_tensor(generator(2), 3 * tokens, heads, dim)
    result = reference.paged_attention(q, pools, lists, scale=0.3).unflatten(0, (3, tokens))
    assert (result[1] == 0.0).all()
    for tile in (0, 2):
        keys, values = [], []
        for pool, table in zip(pools, lists):
            for entry in range(int(table.starts[tile]), int(table.starts[tile + 1])):
                k, v = read_pages(pool, table.pages[entry:entry + 1].long())
                keys.append(k[0, :, :table.lengths[entry]])
                values.append(v[0, :, :table.lengths[entry]])
        expected = F.scaled_dot_product_attention(q.unflatten(0, (3, tokens))[tile].transpose(0, 1), torch.cat(keys, 1),
                                                  torch.cat(values, 1), scale=0.3)
        torch.testing.assert_close(result[tile], expected.transpose(0, 1), rtol=1e-5, atol=1e-6)


def test_attention_in_parts_is_that_to_all_pages():
    """Two query tiles in three parts, one of which has nothing for the second tile."""
    tokens, heads, dim = 32, 2, 16
    pool = random_pool(generator(1), Precision.BF16, 6, heads, tokens, dim)
    q = random_tensor(generator(2), 2 * tokens, heads, dim)
    pages = [[0, 3, 5, 2], [4, 1]]
    parts = TileLists.from_rows([[(page, tokens) for page in row[part::3]] for part in range(3) for row in pages], tokens)
    whole = TileLists.from_rows([[(page, tokens) for page in row] for row in pages], tokens)
    expected = paged_attention(q, [pool], [whole])
    torch.testing.assert_close(split_attention(q, pool, parts, 3), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(split_attention(q, pool, whole, 1), expected, rtol=0.0, atol=0.0)
    with pytest.raises(ValueError, match='6 lists are no 4 parts'):
        split_attention(q, pool, parts, 4)


@pytest.mark.parametrize('causal', [False, True])
def test_temporal_attention_is_attention_under_a_mask_of_positions(causal):
    """All pages as one dense sequence, every pair masked but those of one position and of a frame not later."""
    rng, frames, positions, heads, dim, columns, slabs = np.random.default_rng(2), 2, 16, 2, 16, 2, 3
    tokens = frames * positions
    pools = [random_pool(generator(i), Precision(p), 6, heads, tokens, dim) for i, p in enumerate(('bf16', 'fp4'))]
    lists = [random_lists(rng, counts, 6, tokens, 0.5) for counts in ([3, 2], [4, 1])]
    page_times = [torch.from_numpy(rng.integers(0, 6, len(table.pages)).astype(np.int32)) * frames for table in lists]
    query_times = torch.tensor([4, 6, 8], dtype=torch.int32)
    q = random_tensor(generator(3), slabs * columns * tokens, heads, dim)
    times = {'query_times': query_times, 'page_times': page_times} if causal else {}
    result = temporal_attention(q, pools, lists, frames, **times).unflatten(0, (slabs, columns, tokens))
    place = torch.arange(tokens) % positions
    frame = torch.arange(tokens) // positions
    for column in range(columns):
        keys, values, masks = [], [], []
        for pool, table, starts in zip(pools, lists, page_times):
            for entry in range(int(table.starts[column]), int(table.starts[column + 1])):
                k, v = read_pages(pool, table.pages[entry:entry + 1].long())
                keys.append(k[0])
                values.append(v[0])
                mask = (place[:, None] == place) & (torch.arange(tokens) < table.lengths[entry])
                late = (starts[entry] + frame) > (query_times[:, None] + frame)[..., None]   # (slabs, tokens, tokens)
                masks.append(mask & ~late if causal else mask.expand(slabs, -1, -1))
        mask = torch.cat(masks, -1)
        x = q.unflatten(0, (slabs, columns, tokens))[:, column].transpose(1, 2)
        expected = F.scaled_dot_product_attention(x, torch.cat(keys, 1).expand(slabs, -1, -1, -1),
                                                  torch.cat(values, 1).expand(slabs, -1, -1, -1), mask[:, None])
        expected = torch.where(mask.any(-1)[:, None, :, None], expected, 0.0).transpose(1, 2)
        torch.testing.assert_close(result[:, column], expected, rtol=1e-4, atol=1e-6)


def test_temporal_attention_of_border_tiles_packs_their_fewer_positions():
    """A column of 5 positions gives what the same tokens give spread over pages of 8."""
    tokens, frames, dim = 16, 2, 16
    pool = random_pool(generator(4), Precision.FP32, 2, 1, tokens, dim)
    spread = Pool.allocate(Precision.FP32, 2, 1, tokens, dim)
    packed = torch.cat([torch.arange(5), 5 + torch.arange(5)])
    wide = torch.cat([torch.arange(5), 8 + torch.arange(5)])
    spread.k[:, :, wide], spread.v[:, :, wide] = pool.k[:, :, packed], pool.v[:, :, packed]
    q = random_tensor(generator(5), tokens, 1, dim)
    wide_q = torch.zeros_like(q)
    wide_q[wide] = q[packed]
    lists = [TileLists.from_rows([[(0, 10), (1, 10)]], tokens)]
    full = [TileLists.from_rows([[(0, 16), (1, 16)]], tokens)]
    result = temporal_attention(q, [pool], lists, frames, torch.tensor([5], dtype=torch.int32))
    torch.testing.assert_close(result[packed], temporal_attention(wide_q, [spread], full, frames)[wide])
    assert (result[10:] == 0.0).all()


def test_new_queries_and_keys_are_those_of_the_model():
    torch.manual_seed(6)
    block = Block(TINY)
    for norm in (block.q_norm, block.k_norm):
        torch.nn.init.normal_(norm.weight)
    tiles, tokens = 2, 16
    qkv = torch.randn(tiles * tokens, 3, TINY.heads, TINY.head_dim)
    angle = torch.rand(tiles * tokens, TINY.head_dim // 2) * 6.3
    rotary = torch.stack([angle.cos(), angle.sin()])
    pool = Pool.allocate(Precision.FP32, tiles, TINY.heads, tokens, TINY.head_dim)
    with torch.no_grad():
        q, k, v = qkv.permute(1, 2, 0, 3)[:, None]
        expected_q, expected_k = rotate(block.q_norm(q), rotary)[0], rotate(block.k_norm(k), rotary)[0]
        q, scale = write_qkv(pool, torch.tensor([1, 0]), torch.tensor([tokens, tokens]), qkv, rotary,
                             block.q_norm.weight, block.k_norm.weight)
    assert scale is None
    torch.testing.assert_close(q, expected_q.transpose(0, 1))
    for written, expected in ((pool.k, expected_k), (pool.v, v[0])):
        torch.testing.assert_close(written.flip(0), expected.unflatten(1, (tiles, tokens)).transpose(0, 1))


@pytest.mark.parametrize('precision', [Precision.FP32, Precision.BF16])
def test_tokens_are_put_behind_those_that_a_page_has_and_the_rest_becomes_zero(precision):
    pool = random_pool(generator(7), precision, 3, 2, 32, 16)
    before = copy.deepcopy(pool)
    qkv = random_tensor(generator(8), 2 * 8, 3, 2, 16)
    qkv[8 + 5:] = float('nan')  # no tokens
    write_qkv(pool, torch.tensor([2, 0]), torch.tensor([8, 5]), qkv, torch.ones(2, 16, 8), *torch.ones(2, 16),
              offsets=torch.tensor([0, 16]))
    assert torch.equal(pool.v[2, :, :8], qkv[:8, 2].transpose(0, 1).to(pool.v.dtype))
    assert torch.equal(pool.v[0, :, 16:21], qkv[8:13, 2].transpose(0, 1).to(pool.v.dtype))
    for new, old in ((pool.k, before.k), (pool.v, before.v)):
        assert torch.equal(new[0, :, :16], old[0, :, :16]) and torch.equal(new[1], old[1])
        assert (new[2, :, 8:] == 0.0).all() and (new[0, :, 21:] == 0.0).all()


def test_writing_refuses_what_does_not_fit():
    pool = Pool.allocate(Precision.FP8, 2, 2, 16, 32)
    one, ones = torch.ones(1, dtype=torch.int32), torch.ones(32)
    with pytest.raises(ValueError, match='its scale spans it'):
        write_qkv(pool, one, one, torch.ones(16, 3, 2, 32), torch.ones(2, 16, 16), ones, ones, offsets=one)
    with pytest.raises(ValueError, match='qkv .* must be'):
        write_qkv(pool, one, one, torch.ones(17, 3, 2, 32), torch.ones(2, 17, 16), ones, ones)
    with pytest.raises(ValueError, match='rotary .* must be'):
        write_qkv(pool, one, one, torch.ones(16, 3, 2, 32), torch.ones(2, 16, 32), ones, ones)


@pytest.mark.parametrize(('old', 'new', 'bound'), [('fp32', 'fp8', 0.03), ('bf16', 'fp4', 0.12), ('fp8', 'fp4', 0.12)])
def test_pages_that_grow_old_keep_their_numbers_within_their_new_precision(old, new, bound):
    source = random_pool(generator(9), Precision(old), 4, 2, 32, 32)
    target = random_pool(generator(10), Precision(new), 5, 2, 32, 32)
    before = read_pages(target, torch.tensor([0, 2, 4]))
    requantise(source, torch.tensor([3, 0]), target, torch.tensor([1, 3]))
    for was, now in zip(read_pages(source, torch.tensor([3, 0])), read_pages(target, torch.tensor([1, 3]))):
        assert 0.0 < relative_error(now, was) < bound
    for was, now in zip(before, read_pages(target, torch.tensor([0, 2, 4]))):
        assert torch.equal(now, was)
    with pytest.raises(ValueError, match='do not fit'):
        requantise(source, torch.tensor([0]), Pool.allocate(Precision.FP8, 1, 2, 16, 32), torch.tensor([0]))
