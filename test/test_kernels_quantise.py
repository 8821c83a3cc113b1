"""What FP8 and FP4 pages hold, by their definitions in PyTorch."""
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_inputs import random_pool, random_tensor, relative_error

from worldmodel_ros.kernels.pages import Pool, Precision, TileLists
from worldmodel_ros.kernels.quantise import (
    E2M1, EXPONENT_BIAS, EXPONENT_MAX, EXPONENT_MIN, from_e2m1, read_pages, to_e2m1, to_e4m3, token_order, write_pages)

QUANTISED = (Precision.FP8, Precision.FP4)


def pages_of(precision, k, v=None):
    """A pool that k and v (n, H, T, D) were written to, read back."""
    pool = Pool.allocate(precision, len(k), *k.shape[1:])
    write_pages(pool, torch.arange(len(k)), k, k if v is None else v)
    return read_pages(pool, torch.arange(len(k)))


@pytest.mark.parametrize(('precision', 'bound'), [
    (Precision.FP32, 0.0), (Precision.BF16, 0.0018), (Precision.FP8, 0.027), (Precision.FP4, 0.115)])
def test_normally_distributed_values_keep_the_stated_accuracy(precision, bound):
    generator = torch.Generator().manual_seed(1)
    k, v = (random_tensor(generator, 4, 2, 64, 128) for _ in range(2))
    read_k, read_v = pages_of(precision, k, v)
    for read, written in ((read_k, k), (read_v, v)):
        assert bound * 0.8 <= relative_error(read, written) <= bound


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2 ** 32 - 1), st.floats(0.0, 6.0), st.floats(-30.0, 30.0))
def test_fp8_is_within_half_a_step_of_each_value(seed, spread, size):
    generator = torch.Generator().manual_seed(seed)
    x = random_tensor(generator, 1, 1, 16, 16)
    x = x.sign() * x.abs() ** (1.0 + spread) * 2.0 ** size
    code, scale = to_e4m3(x)
    error = (code.float() * scale - x).abs()
    # Normal numbers have three bits after the first; below 2^-6 the step is 2^-9.
    assert (error <= torch.maximum(x.abs() * 2.0 ** -4, scale * 2.0 ** -10) * (1 + 1e-5)).all()
    assert code.float().abs().max() == 448.0


def test_every_fp4_value_is_an_fp8_value():
    code = torch.arange(16, dtype=torch.uint8).repeat(EXPONENT_MAX - EXPONENT_MIN + 1, 1)
    exponent = torch.arange(EXPONENT_MIN, EXPONENT_MAX + 1, dtype=torch.uint8)[:, None]
    value = from_e2m1(code[:, 0::2] | code[:, 1::2] << 4, exponent)
    assert (value.to(torch.float8_e4m3fn).float() == value).all()
    magnitudes = torch.tensor(E2M1) * torch.exp2(exponent.float() - EXPONENT_BIAS)
    for negative in (False, True):
        assert all(set(row[row.signbit() == negative].abs().tolist()) <= set(expected.tolist())
                   for row, expected in zip(value, magnitudes))
    assert value.abs().unique().numel() == magnitudes.unique().numel()


def test_fp4_values_that_exist_are_kept():
    generator = torch.Generator().manual_seed(2)
    code = torch.randint(0, 8, (1, 1, 16, 64), generator=generator)
    x = torch.tensor(E2M1)[code] * torch.where(torch.rand(code.shape, generator=generator) < 0.5, -1.0, 1.0)
    exponent = torch.randint(EXPONENT_MIN, EXPONENT_MAX + 1, (1, 1, 16, 4), generator=generator)
    exponent[0, 0, 0, 0], x[0, 0, 0, 0] = EXPONENT_MAX, 6.0
    x = x * torch.exp2(exponent - EXPONENT_BIAS).repeat_interleave(16, -1)
    packed, found, scale = to_e2m1(x)
    assert scale.item() == 1.0
    assert (from_e2m1(packed, found) == x).all()


def test_fp4_rounds_to_nearest_and_ties_to_the_even_code():
    value = torch.tensor([6.0, 0.2499, 0.25, 0.2501, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.001,
                          -0.25, -0.75, -2.5, -3.5, -5.0])
    nearest = [6.0, 0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -0.0, -1.0, -2.0, -4.0, -4.0]
    x = torch.zeros(1, 1, 16, 32)
    x[..., 0, :16] = value
    x[..., 0, 16] = 384.0  # so that the page's scale is 1
    packed, exponent, scale = to_e2m1(x)
    assert scale.item() == 1.0
    assert from_e2m1(packed, exponent)[0, 0, 0, :16].tolist() == nearest


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2 ** 32 - 1), st.floats(0.0, 5.0))
def test_fp4_blocks_take_the_best_of_all_exponents(seed, spread):
    x = random_tensor(torch.Generator().manual_seed(seed), 1, 1, 16, 64)
    x = x.sign() * x.abs() ** (1.0 + spread)
    packed, exponent, scale = to_e2m1(x)
    scaled = (x / scale).unflatten(-1, (-1, 16))
    error = (from_e2m1(packed, exponent).unflatten(-1, (-1, 16)) - scaled).square().sum(-1)
    for k in range(EXPONENT_MIN, EXPONENT_MAX + 1):
        values = torch.tensor(E2M1) * 2.0 ** (k - EXPONENT_BIAS)
        other = (scaled.abs()[..., None] - values).abs().amin(-1).square().sum(-1)
        assert (error <= other * (1 + 1e-5)).all()


@pytest.mark.parametrize('precision', QUANTISED)
@pytest.mark.parametrize('size', [1e-30, 1e-3, 1.0, 1e4, 1e30])
def test_the_accuracy_does_not_depend_on_the_magnitude(precision, size):
    x = random_tensor(torch.Generator().manual_seed(3), 1, 1, 16, 32)
    assert relative_error(pages_of(precision, x * size)[0] / size, x) < 0.13


@pytest.mark.parametrize('precision', list(Precision))
def test_zeros_stay_zero_beside_whatever_other_heads_hold(precision):
    x = random_tensor(torch.Generator().manual_seed(4), 2, 3, 16, 32)
    x[:, 1] = 0.0
    for read in pages_of(precision, x):
        assert (read[:, 1] == 0.0).all()
        assert (read[:, 0] != 0.0).any()


@pytest.mark.parametrize('precision', list(Precision))
@pytest.mark.parametrize('fault', [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_shows_in_its_page_and_head_only(precision, fault):
    x = random_tensor(torch.Generator().manual_seed(5), 2, 2, 16, 32)
    x[1, 0, 3, 7] = fault
    for read in pages_of(precision, x):
        assert not read[1, 0, 3, 7].isfinite()
        assert read[0].isfinite().all() and read[1, 1].isfinite().all()


def test_the_order_of_tokens_permutes_each_group_of_sixteen():
    order = token_order(64).view(4, 16)
    assert (order.sort(-1).values == torch.arange(64).view(4, 16)).all()
    # A thread's accumulator columns, four by four.
    assert order[0].tolist() == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]


@pytest.mark.parametrize('precision', list(Precision))
def test_pages_are_written_one_by_one_and_leave_others_alone(precision):
    generator = torch.Generator().manual_seed(6)
    pool = random_pool(generator, precision, 5, 2, 32, 16)
    before = read_pages(pool, torch.arange(5))
    k, v = (random_tensor(generator, 2, 2, 32, 16) for _ in range(2))
    write_pages(pool, torch.tensor([3, 1]), k, v)
    expected = pages_of(precision, k, v)
    for old, new, exact in zip(before, read_pages(pool, torch.arange(5)), expected):
        assert torch.equal(new[[3, 1]], exact)
        assert torch.equal(new[[0, 2, 4]], old[[0, 2, 4]])


def test_a_pool_of_several_layers_gives_views_of_each():
    pool = Pool.allocate(Precision.FP4, 3, 2, 16, 32, layers=4)
    write_pages(pool.layer(2), torch.tensor([1]), *(torch.ones(1, 2, 16, 32) for _ in range(2)))
    assert read_pages(pool.layer(2), torch.arange(3))[0].sum() == 2 * 16 * 32
    assert read_pages(pool.layer(1), torch.arange(3))[0].sum() == 0
    assert (pool.layer(2).heads, pool.layer(2).page_tokens, pool.layer(2).head_dim) == (2, 16, 32)
    assert pool.nbytes == 4 * pool.layer(0).nbytes == 4 * 3 * 2 * 2 * (16 * 32 // 2 + 16 * 32 // 16 + 4)


def test_pages_that_fp4_blocks_do_not_divide_are_refused():
    with pytest.raises(ValueError, match='multiples of 16'):
        Pool.allocate(Precision.BF16, 1, 1, 24, 32)


def test_lists_have_full_pages_first_and_refuse_lengths_that_no_page_has():
    lists = TileLists.from_rows([[(4, 3), (2, 16)], [], [(1, 16), (0, 16), (3, 1)]], 16)
    assert lists.starts.tolist() == [0, 2, 2, 5]
    assert lists.pages.tolist() == [2, 4, 1, 0, 3]
    assert lists.lengths.tolist() == [16, 3, 16, 16, 1]
    assert lists.full.tolist() == [1, 0, 2]
    for length in (0, 17):
        with pytest.raises(ValueError, match='1 to 16 valid tokens'):
            TileLists.from_rows([[(0, length)]], 16)
