"""The Triton kernels that write pages against their definitions, in Triton's interpreter on the CPU."""
import copy

import pytest
import torch
from kernel_inputs import random_pool, random_tensor, relative_error

from worldmodel_ros.kernels.page_write import write_qkv
from worldmodel_ros.kernels.pages import Pool, Precision
from worldmodel_ros.kernels.quantise import read_pages, to_e4m3
from worldmodel_ros.kernels.requantise import requantise

pytest.importorskip('triton', reason='Triton is not installed: pip install triton')

from worldmodel_ros.kernels.page_write_triton import write_qkv_triton
from worldmodel_ros.kernels.query import quantise_queries
from worldmodel_ros.kernels.requantise_triton import requantise_triton


def generator(seed):
    return torch.Generator().manual_seed(seed)


def written(precision, tokens, dim, quantise_q, fault=None, rounded=False):
    """Pools and queries of the definition and of the kernel, for three tiles of which one is partial and one empty; their rows
    are every other part of a longer pass's rotary. ``rounded``: qkv is given in e4m3."""
    heads, count = 2, tokens - 5
    pool = random_pool(generator(1), precision, 5, heads, tokens, dim)
    pools = pool, copy.deepcopy(pool)
    qkv = random_tensor(generator(2), 3 * count, 3, heads, dim, dtype=torch.bfloat16) * 3
    counts = torch.tensor([count, count // 3, 0], dtype=torch.int32)
    there = (torch.arange(count) < counts[:, None]).flatten()
    qkv[~there] = float('nan')
    if fault is not None:
        qkv[2, :, 1, 3] = fault
    angle = torch.rand((3 * count, dim // 2), generator=generator(3)) * 6.3
    pages = torch.tensor([3, 0, 2], dtype=torch.int32)
    offsets = None if precision.quantised else torch.tensor([0, 3, tokens - 1], dtype=torch.int32)
    rotary = torch.stack([angle.cos(), angle.sin()])
    rotary = torch.cat([torch.full_like(rotary, float('nan')), rotary], 1).chunk(2, 1)[1]
    arguments = (pages, counts, qkv, rotary, random_tensor(generator(4), dim), random_tensor(generator(5), dim), offsets,
                 quantise_q)
    if not rounded:
        return pools, write_qkv(pools[0], *arguments), write_qkv_triton(pools[1], *arguments), there
    values, scale = to_e4m3(qkv.float()[..., None, :])
    more = {'scale': scale, 'dtype': torch.bfloat16}
    arguments = (*arguments[:2], values[..., 0, :], *arguments[3:])
    return pools, write_qkv(pools[0], *arguments, **more), write_qkv_triton(pools[1], *arguments, **more), there


@pytest.mark.parametrize(('quantise_q', 'rounded'), [(False, False), (True, False), (False, True)],
                         ids=['', 'fp8 queries', 'fp8 qkv'])
@pytest.mark.parametrize(('precision', 'tokens', 'dim'), [
    (Precision.FP32, 16, 64), (Precision.BF16, 48, 16), (Precision.FP8, 16, 64), (Precision.FP8, 48, 16),
    (Precision.FP4, 32, 32)])
def test_written_pages_and_queries_are_the_definition_s(precision, tokens, dim, quantise_q, rounded):
    pools, (q, q_scale), (result, result_scale), there = written(precision, tokens, dim, quantise_q, rounded=rounded)
    assert result.dtype == q.dtype == (torch.float8_e4m3fn if quantise_q else torch.bfloat16)
    # Sums in another order: now and then a value is rounded to its other neighbour.
    assert relative_error(result.float(), q.float()) < 0.003
    assert (result.float() != q.float()).double().mean() < 0.01
    assert (result.float()[~there] == 0.0).all()
    if quantise_q:
        torch.testing.assert_close(result_scale, q_scale, rtol=1e-6, atol=0.0)
    defined, found = (pool.tensors() for pool in pools)
    for name in defined:
        if name.startswith('v'):
            assert torch.equal(found[name].view(torch.uint8), defined[name].view(torch.uint8)), name
        elif name == 'k_scale':
            torch.testing.assert_close(found[name], defined[name], rtol=1e-6, atol=0.0)
        elif precision is not Precision.FP32:
            assert (found[name].view(torch.uint8) != defined[name].view(torch.uint8)).double().mean() < 0.01, name
    assert relative_error(read_pages(pools[1], torch.arange(5))[0], read_pages(pools[0], torch.arange(5))[0]) < 0.003


@pytest.mark.parametrize('function', [write_qkv, write_qkv_triton], ids=['definition', 'kernel'])
@pytest.mark.parametrize('precision', [Precision.BF16, Precision.FP8])
def test_tokens_that_come_frame_by_frame_are_written_as_tile_by_tile(function, precision):
    """Two groups of two frames of three tiles, eight tokens of each."""
    groups, frames, tiles, run, dim = 2, 2, 3, 8, 16
    qkv = random_tensor(generator(2), groups, tiles, frames, run, 3, 2, dim)
    angle = torch.rand((groups, tiles, frames, run, dim // 2), generator=generator(3)) * 6.3
    rotary = torch.stack([angle.cos(), angle.sin()])
    pages = torch.tensor([5, 0, 3, 1, 4, 2], dtype=torch.int32)
    counts = torch.tensor([16, 16, 16, 9, 16, 16], dtype=torch.int32)
    weights = random_tensor(generator(4), 2, dim)
    found = []
    for swap, by_frame in ((False, None), (True, (frames, tiles))):
        pool = random_pool(generator(1), precision, 6, 2, frames * run, dim)
        tokens, turned = (qkv.transpose(1, 2), rotary.transpose(2, 3)) if swap else (qkv, rotary)
        q, _ = function(pool, pages, counts, tokens.reshape(-1, 3, 2, dim), turned.reshape(2, -1, dim // 2), *weights,
                        by_frame=by_frame)
        found.append((q, *pool.tensors().values()))
    assert len(found[0]) == len(found[1]) and all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in zip(*found))


@pytest.mark.filterwarnings('ignore::RuntimeWarning')  # of numpy, which the interpreter computes with
@pytest.mark.parametrize('precision', list(Precision))
@pytest.mark.parametrize('fault', [float('inf'), float('nan')])
def test_a_fault_of_the_model_is_not_written_as_a_number(precision, fault):
    pools, _, (q, scale), _ = written(precision, 32, 16, True, fault)
    for read in read_pages(pools[1], torch.tensor([3])):
        assert not read[0, 1].isfinite().all() and read[0, 0].isfinite().all()
    assert not (q.float() * scale[..., None])[2, 1].isfinite().all()
    assert (q.float() * scale[..., None])[2, 0].isfinite().all()


@pytest.mark.parametrize('precision', [Precision.BF16, Precision.FP8])
def test_rounded_rows_are_written_as_the_numbers_that_they_stand_for(precision):
    rounded, exact = random_pool(generator(1), precision, 2, 2, 16, 32), random_pool(generator(1), precision, 2, 2, 16, 32)
    values, scale = to_e4m3(random_tensor(generator(2), 32, 3, 2, 1, 32))
    values = values[..., 0, :]
    angle = torch.rand((32, 16), generator=generator(3))
    arguments = torch.stack([angle.cos(), angle.sin()]), *random_tensor(generator(4), 2, 32)
    pages, counts = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([16, 11], dtype=torch.int32)
    q, _ = write_qkv(rounded, pages, counts, values, *arguments, scale=scale, dtype=torch.float32)
    expected, _ = write_qkv(exact, pages, counts, values.float() * scale[..., None], *arguments)
    assert torch.equal(q, expected) and (q[16:27] != 0.0).any()
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in
               zip(rounded.tensors().values(), exact.tensors().values(), strict=True))


def test_writing_refuses_what_the_kernel_cannot_address():
    pool = Pool.allocate(Precision.BF16, 1, 2, 16, 48)
    one = torch.ones(1, dtype=torch.int32)
    rounded = torch.zeros(16, 3, 2, 48).to(torch.float8_e4m3fn)
    for scale, dtype in ((None, torch.float32), (torch.ones(16, 6), torch.float32), (torch.ones(16, 3, 2), None)):
        with pytest.raises(ValueError, match='e4m3, and nothing else'):
            write_qkv_triton(pool, one, one, rounded, torch.zeros(2, 16, 24), *torch.ones(2, 48), scale=scale, dtype=dtype)
    pool = Pool.allocate(Precision.BF16, 1, 2, 16, 32)
    with pytest.raises(ValueError, match='half of rotary'):
        write_qkv_triton(pool, one, one, torch.zeros(16, 3, 2, 32), torch.zeros(2, 16, 32)[..., ::2], *torch.ones(2, 32))
    pool = Pool.allocate(Precision.BF16, 1, 2, 16, 48)
    with pytest.raises(ValueError, match='power of two'):
        write_qkv_triton(pool, one, one, torch.zeros(16, 3, 2, 48), torch.zeros(2, 16, 24), *torch.ones(2, 48))


@pytest.mark.parametrize(('old', 'new'), [('fp32', 'fp8'), ('bf16', 'fp8'), ('bf16', 'fp4'), ('fp8', 'fp4')])
def test_pages_that_grow_old_are_rounded_bit_for_bit_as_defined(old, new):
    source = random_pool(generator(6), Precision(old), 4, 2, 48, 32)
    source.k[2, 0] = torch.zeros(48, 32).to(source.k.dtype)
    targets = [random_pool(generator(7), Precision(new), 4, 2, 48, 32) for _ in range(2)]
    for function, target in zip((requantise, requantise_triton), targets):
        function(source, torch.tensor([2, 0]), target, torch.tensor([1, 3]))
    for name, tensor in targets[0].tensors().items():
        assert torch.equal(targets[1].tensors()[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_requantising_says_what_it_does_not_do():
    source, target = (Pool.allocate(Precision(p), 1, 1, 16, 16) for p in ('fp4', 'fp8'))
    with pytest.raises(ValueError, match='not from fp4 to fp8'):
        requantise_triton(source, torch.tensor([0]), target, torch.tensor([0]))


def test_queries_are_rounded_as_their_definition_says_bit_by_bit():
    q = random_tensor(generator(3), 13, 3, 32, dtype=torch.bfloat16) * 3  # 39 rows: the last block is not full
    q[5] = 0.0
    rounded, scales = quantise_queries(q)
    expected, expected_scales = to_e4m3(q[:, :, None])
    assert torch.equal(rounded.view(torch.uint8), expected[:, :, 0].view(torch.uint8))
    assert torch.equal(scales, expected_scales)


def test_a_query_that_is_not_finite_does_not_become_a_number():
    q = torch.ones(2, 1, 16, dtype=torch.bfloat16)
    q[1, 0, 3] = float('nan')
    rounded, scales = quantise_queries(q)
    assert (rounded[0].float() * scales[0]).isfinite().all() and scales[1].isnan().all()
