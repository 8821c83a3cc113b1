"""The attention kernels in Triton against their definitions in float64, in Triton's interpreter on the CPU.

The interpreter runs the integer arithmetic that stands in for e4m3 instructions; a GPU's own conversions, tensor cores
and speed are what benchmarks/kernel_correctness.py looks at.
"""
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_inputs import random_lists, random_pool, random_tensor, relative_error

from worldmodel_ros.kernels import reference
from worldmodel_ros.kernels.attention import paged_attention
from worldmodel_ros.kernels.pages import Precision, TileLists
from worldmodel_ros.kernels.temporal import temporal_attention

pytest.importorskip('triton', reason='Triton is not installed: pip install triton')

from worldmodel_ros.kernels.attention_triton import paged_attention_triton
from worldmodel_ros.kernels.temporal_triton import temporal_attention_triton

MIXTURES = [('fp32',), ('bf16',), ('fp8',), ('fp4',), ('bf16', 'fp8', 'fp4'), ('fp4', 'fp32')]
# Planes of 2 x 2 tiles in slabs: page = slab * 4 + tile. What each tile of the second slab of three visits.
PATTERNS = {
    'spatial': [[4, 5, 6, 7]] * 4,
    'temporal': [[tile, 4 + tile, 8 + tile] for tile in range(4)],
    'window': [[0, 1, 4, 5], [1, 5, 7], [4, 6, 8, 10, 11], [7, 3, 11]],
}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def pools_of(mixture, pages, heads, tokens, dim):
    return [random_pool(generator(i), Precision(p), pages, heads, tokens, dim) for i, p in enumerate(mixture)]


def poisoned(*shape):
    return torch.full(shape, float('nan'))


def attention_error(q, pools, lists, **options):
    out = poisoned(*q.shape).to(q.dtype)
    assert paged_attention_triton(q, pools, lists, out=out, **options) is out
    return relative_error(out, reference.paged_attention(q.double(), pools, lists, dtype=torch.float64, **options))


@pytest.mark.parametrize('mixture', MIXTURES, ids='+'.join)
def test_attention_is_exact_in_every_mixture_of_precisions(mixture):
    rng, tokens, heads, dim = np.random.default_rng(1), 64, 2, 32
    pools = pools_of(mixture, 5, heads, tokens, dim)
    lists = [random_lists(rng, [2, 0, 3], 5, tokens, 0.5) for _ in mixture]
    q = random_tensor(generator(9), 3 * tokens, heads, dim) * 2
    assert attention_error(q, pools, lists, scale=0.3) < 1e-6


@pytest.mark.parametrize('pattern', PATTERNS)
def test_attention_follows_the_patterns_of_the_cache(pattern):
    tokens, heads, dim = 16, 1, 64
    pools = pools_of(('bf16', 'fp8'), 12, heads, tokens, dim)
    # The first slab has grown old, the last one has not all of its frames yet.
    rows = [[[(page, tokens if page < 8 else 4) for page in row if (page < 4) == old] for row in PATTERNS[pattern]]
            for old in (False, True)]
    lists = [TileLists.from_rows(part, tokens) for part in rows]
    assert attention_error(random_tensor(generator(2), 4 * tokens, heads, dim), pools, lists) < 1e-6


@settings(max_examples=7, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), tokens=st.sampled_from([16, 32, 48]), dim=st.sampled_from([16, 32]),
       counts=st.lists(st.integers(0, 4), min_size=1, max_size=3), partial=st.floats(0.0, 1.0))
def test_attention_takes_any_lists(seed, tokens, dim, counts, partial):
    rng = np.random.default_rng(seed)
    pools = pools_of(('fp8', 'fp4'), 4, 1, tokens, dim)
    lists = [random_lists(rng, list(rng.permutation(counts)), 4, tokens, partial) for _ in pools]
    q = random_tensor(generator(seed), len(counts) * tokens, 1, dim) * 4
    assert attention_error(q, pools, lists) < 2e-6


def test_attention_to_nothing_is_zero_and_weighs_nothing():
    pools = pools_of(('bf16', 'fp4'), 1, 2, 16, 16)
    lists = [TileLists.from_rows([[]], 16)] * 2
    out, lse = poisoned(16, 2, 16), poisoned(2, 16)
    paged_attention_triton(random_tensor(generator(), 16, 2, 16), pools, lists, out=out, lse=lse)
    assert (out == 0.0).all() and (lse == -float('inf')).all()
    assert paged_attention_triton(torch.empty(0, 2, 16), pools, [TileLists.from_rows([], 16)] * 2).shape == (0, 2, 16)


def test_attention_writes_among_other_rows_and_to_no_other_place():
    pools, lists = pools_of(('fp8',), 4, 2, 32, 16), [random_lists(np.random.default_rng(3), [2, 1], 4, 32, 0.3)]
    q, among = random_tensor(generator(4), 64, 2, 16), torch.full((64, 5, 16), 7.0)
    found = paged_attention(q, pools, lists, out=among[:, 1:3])
    assert torch.equal(among[:, 1:3], paged_attention(q, pools, lists)) and torch.equal(found, among[:, 1:3])
    assert (among[:, [0, 3, 4]] == 7.0).all()
    with pytest.raises(ValueError, match='its rows contiguous'):
        paged_attention(q, pools, lists, out=torch.empty(64, 16, 2).mT)


def test_two_results_merge_by_their_weights_into_that_of_both():
    rng, tokens = np.random.default_rng(3), 32
    pools = pools_of(('bf16', 'fp8'), 4, 2, tokens, 16)
    lists = [random_lists(rng, counts, 4, tokens, 0.3) for counts in ([2, 0], [3, 1])]
    q = random_tensor(generator(4), 2 * tokens, 2, 16)
    parts = []
    for pool, table in zip(pools, lists):
        lse = poisoned(2, 2 * tokens)
        parts.append((paged_attention_triton(q, [pool], [table], lse=lse), lse))
    weights = torch.exp2(torch.stack([lse for _, lse in parts])).transpose(1, 2)[..., None]
    merged = sum(weight * part for weight, (part, _) in zip(weights / weights.sum(0), parts))
    assert relative_error(merged, paged_attention_triton(q, pools, lists)) < 1e-6


def test_attention_takes_queries_out_of_a_projection_in_bfloat16():
    pools = pools_of(('bf16',), 3, 2, 16, 32)
    lists = [random_lists(np.random.default_rng(5), [2, 3], 3, 16)]
    qkv = random_tensor(generator(6), 32, 3, 2, 32, dtype=torch.bfloat16)
    assert attention_error(qkv[:, 0], pools, lists) < 0.002  # the result's own rounding


@pytest.mark.parametrize('queries', [16, 48, 64])
def test_a_query_tile_may_have_fewer_or_more_tokens_than_a_page(queries):
    rng, tokens = np.random.default_rng(6), 32
    pools = pools_of(('bf16', 'fp8'), 5, 2, tokens, 16)
    lists = [random_lists(rng, counts, 5, tokens, 0.3) for counts in ([2, 0, 1], [3, 1, 0])]
    q = random_tensor(generator(7), 3 * queries, 2, 16)
    assert attention_error(q, pools, lists) < 1e-6
    one = reference.paged_attention(q[2 * queries:2 * queries + 7], pools,
                                    [TileLists(table.starts[2:4], table.pages, table.lengths, table.full[2:])
                                     for table in lists])
    assert relative_error(reference.paged_attention(q, pools, lists)[2 * queries:][:7], one) < 1e-6


def test_attention_refuses_what_does_not_fit():
    pools = pools_of(('fp32', 'bf16', 'fp8'), 2, 1, 16, 16)
    lists = [TileLists.from_rows([[(0, 16)]], 16)] * 3
    q = torch.zeros(16, 1, 16)
    for options, match in (
            ((q, pools[:2], lists[:2]), 'two pools for one loop'), ((q, pools[1:], lists[:1]), 'argument 2 is shorter'),
            ((torch.zeros(24, 1, 16), pools[2:], lists[:1]), 'does not fit 1 query tiles'),
            ((torch.zeros(16, 2, 16), pools[2:], lists[:1]), 'does not fit'),
            ((q.half(), pools[2:], lists[:1]), 'bfloat16 or float32')):
        with pytest.raises(ValueError, match=match):
            paged_attention_triton(*options)
    with pytest.raises(ValueError, match='out must be contiguous'):
        paged_attention_triton(q, pools[2:], lists[:1], out=q.bfloat16())
    with pytest.raises(ValueError, match='lse must be'):
        paged_attention_triton(q, pools[2:], lists[:1], lse=torch.zeros(16, 1))


@pytest.mark.parametrize('mixture', MIXTURES, ids='+'.join)
@pytest.mark.parametrize('causal', [False, True], ids=['all', 'causal'])
def test_temporal_attention_is_exact_in_every_mixture_of_precisions(mixture, causal):
    rng, frames, tokens, heads, dim, columns, slabs = np.random.default_rng(7), 4, 64, 2, 32, 2, 2
    pools = pools_of(mixture, 7, heads, tokens, dim)
    lists = [random_lists(rng, [5, 2], 7, tokens, 0.4) for _ in mixture]
    times = {'query_times': torch.tensor([12, 16], dtype=torch.int32), 'page_times': [
        torch.from_numpy(rng.integers(0, 6, len(table.pages)).astype(np.int32)) * frames for table in lists]}
    q = random_tensor(generator(8), slabs * columns * tokens, heads, dim) * 2
    times = times if causal else {}
    expected = temporal_attention(q.double(), pools, lists, frames, **times, dtype=torch.float64)
    assert relative_error(temporal_attention_triton(q, pools, lists, frames, **times), expected) < 1e-6


@pytest.mark.parametrize(('frames', 'tokens', 'slabs', 'positions'), [
    (1, 16, 1, None), (3, 48, 7, None), (4, 32, 2, None), (2, 32, 1, [16, 9, 12]), (4, 48, 2, [12, 1, 5])])
def test_temporal_attention_takes_any_tiles(frames, tokens, slabs, positions):
    rng, columns = np.random.default_rng(frames), 3
    pools = pools_of(('bf16', 'fp8', 'fp4'), 5, 1, tokens, 16)
    lists = [random_lists(rng, counts, 5, tokens, 0.4) for counts in ([3, 0, 2], [0, 0, 5], [4, 0, 0])]
    q = random_tensor(generator(frames), slabs * columns * tokens, 1, 16)
    positions = None if positions is None else torch.tensor(positions, dtype=torch.int32)
    expected = temporal_attention(q.double(), pools, lists, frames, positions, dtype=torch.float64)
    result = temporal_attention_triton(q, pools, lists, frames, positions)
    assert relative_error(result, expected) < 1e-6
    assert (result[expected == 0.0] == 0.0).all() and (expected == 0.0).any()


def test_temporal_attention_refuses_what_does_not_fit():
    pools, lists = pools_of(('bf16',), 2, 1, 32, 16), [TileLists.from_rows([[(0, 32)], []], 32)]
    q, time = torch.zeros(64, 1, 16), torch.zeros(1, dtype=torch.int32)
    for call, match in (
            (lambda: temporal_attention_triton(q[:32], pools, lists, 2), 'no slabs of'),
            (lambda: temporal_attention_triton(q, pools, lists, 3), 'give positions'),
            (lambda: temporal_attention_triton(q, pools, lists, 2, query_times=time), 'both or neither'),
            (lambda: temporal_attention_triton(q[:, :, :8], pools, lists, 2), 'does not fit'),
            (lambda: temporal_attention_triton(q, pools * 2, lists * 2, 2), 'two pools'),
            (lambda: temporal_attention_triton(q.repeat(33, 1, 1), pools, lists, 2), 'there can be 64 at once')):
        with pytest.raises(ValueError, match=match):
            call()
