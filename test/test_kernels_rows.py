"""The Triton kernels of an FP8 layer against their definitions, in Triton's interpreter on the CPU."""
from dataclasses import replace

import pytest
import torch
from kernel_inputs import random_tensor, relative_error

from worldmodel_ros.kernels import rows
from worldmodel_ros.kernels.linear import fp8_linear, fp8_linear_gelu, fp8_linear_reference, fp8_linear_rotate
from worldmodel_ros.kernels.page_write import write_qkv
from worldmodel_ros.kernels.pages import Pool, Precision
from worldmodel_ros.kernels.qk_norm import rotate_qk

pytest.importorskip('triton', reason='Triton is not installed: pip install triton')

from worldmodel_ros.kernels import rows_triton
from worldmodel_ros.kernels.linear_hopper import (
    Tiles, fp8_linear_gelu_hopper, fp8_linear_hopper, fp8_linear_rotate_hopper)
from worldmodel_ros.kernels.qk_norm_triton import rotate_qk_triton

# Of numpy, which the interpreter computes with, where numbers become infinite or nothing on purpose.
pytestmark = pytest.mark.filterwarnings('ignore::RuntimeWarning')

SMALL = Tiles(16, 32, 32)
STATIC = {'own scales': None, 'one scale': torch.tensor(0.013), 'given scales': torch.linspace(0.01, 0.03, 10)[:, None]}


def generator(seed):
    return torch.Generator().manual_seed(seed)


def check_rounded(found, defined):
    """Scales but for the order of sums; values but for some that another last bit rounds to their other neighbour."""
    torch.testing.assert_close(found[1], defined[1], rtol=1e-6, atol=0.0)
    assert found[0].dtype is torch.float8_e4m3fn and found[0].shape == defined[0].shape
    assert (found[0].float() != defined[0].float()).double().mean() < 0.01
    assert relative_error(found[0].float(), defined[0].float()) < 0.003


def layer_inputs(dtype, width):
    """Rows of two frames, what is added, and their modulation as a layer has it: one part of a wider tensor."""
    x, y = (random_tensor(generator(seed), 2 * 5, width, dtype=dtype) * 3 for seed in (1, 2))
    modulation = random_tensor(generator(3), 2, 6 * width, dtype=dtype)
    return x, y, modulation.chunk(6, -1)


@pytest.mark.parametrize('static', STATIC.values(), ids=STATIC)
@pytest.mark.parametrize('added', [False, True], ids=['', 'after an addition'])
@pytest.mark.parametrize('width', [64, 96])
def test_modulated_rows_are_the_definition_s(width, added, static):
    x, y, (gate, shift, scale, *_) = layer_inputs(torch.bfloat16, width)
    inputs = x, shift, scale, (y, gate) if added else None
    bound = torch.tensor([3.0, 0.5])
    (total, found, ahead), (defined_total, defined, defined_ahead) = (
        module.modulate_rows(*inputs, static=static, bound=bound) for module in (rows_triton, rows))
    assert torch.equal(total, defined_total) and (added or torch.equal(total, x))
    check_rounded(found, defined)
    torch.testing.assert_close(ahead, defined_ahead, rtol=1e-6, atol=0.0)


def test_rows_can_stay_as_precise_as_they_are():
    x, y, (gate, shift, scale, *_) = layer_inputs(torch.float32, 48)
    for name, inputs in (('modulate_rows', (x, shift, scale, (y, gate), False)), ('gelu_rows', (x, False))):
        found, defined = (getattr(module, name)(*inputs) for module in (rows_triton, rows))
        for a, b in zip(*(each[:2] if isinstance(each, tuple) else (each,) for each in (found, defined))):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize('static', STATIC.values(), ids=STATIC)
@pytest.mark.parametrize('name', ['gelu_rows', 'quantise_rows'])
def test_rows_are_rounded_as_defined(name, static):
    x = random_tensor(generator(4), 10, 96, dtype=torch.bfloat16) * 2
    x[1] = 0.0
    found, defined = (getattr(module, name)(x, static=static) for module in (rows_triton, rows))
    check_rounded(found, defined)


def test_a_row_rounded_by_its_own_scale_is_within_a_sixteenth_of_each_value():
    x = random_tensor(generator(5), 3, 64) * torch.tensor([[1e-6], [1.0], [1e6]])
    values, scales = rows.quantise_rows(x)
    error = (values.float() * scales - x).abs()
    assert (error <= x.abs() / 16 + scales * 2.0 ** -10).all()
    assert torch.equal(values.float().abs().amax(1), torch.full((3,), 448.0))


@pytest.mark.parametrize('static', STATIC.values(), ids=STATIC)
@pytest.mark.parametrize('fault', [float('inf'), float('nan')])
def test_a_row_that_is_not_finite_stays_so_through_a_product_and_no_other_does(fault, static):
    x = random_tensor(generator(6), 10, 32, dtype=torch.bfloat16)
    x[1, 7] = fault
    others = [0, *range(2, 10)]
    weight, weight_scale = rows.quantise_rows(random_tensor(generator(7), 32, 32))
    for module in (rows, rows_triton):
        for rounded in (module.quantise_rows(x, static), module.gelu_rows(x, static=static)):
            result = fp8_linear(rounded, weight, weight_scale.t())
            assert not result[1].isfinite().any() and result[others].isfinite().all()
            hidden = fp8_linear_gelu_hopper(rounded, weight, weight_scale.t(), None, torch.tensor(0.1), SMALL)
            again = fp8_linear(hidden, weight, weight_scale.t())
            assert not again[1].isfinite().any() and again[others].isfinite().all()


def test_rows_of_no_whole_number_of_frames_are_refused():
    with pytest.raises(ValueError, match='7 rows are not 2 frames'):
        rows.add_rows(torch.zeros(7, 4), torch.zeros(7, 4), torch.zeros(2, 4))


def test_what_a_kernel_would_misread_is_refused():
    with pytest.raises(ValueError, match='must be contiguous'):
        rows_triton.quantise_rows(torch.zeros(8, 4).t())
    with pytest.raises(ValueError, match='multiples of 16'):
        fp8_linear_hopper(rows.quantise_rows(torch.zeros(4, 24)), *rows.quantise_rows(torch.zeros(16, 24)))
    with pytest.raises(ValueError, match='must be contiguous'):  # of a part, sines would be other rows' cosines
        rotate_qk_triton(torch.zeros(4, 3, 2, 16), torch.zeros(2, 8, 8)[:, :4], torch.ones(16), torch.ones(16))


def product_inputs():
    x = rows.quantise_rows(random_tensor(generator(8), 37, 80) * 2)  # no whole number of tiles
    weight, scale = rows.quantise_rows(random_tensor(generator(9), 48, 80) * torch.rand(48, 1, generator=generator(0)))
    return x, weight, scale.t(), random_tensor(generator(10), 48, dtype=torch.bfloat16)


def test_a_product_in_fp8_is_that_of_the_rounded_numbers():
    x, weight, scale, bias = product_inputs()
    exact = (x[0].double() * x[1]) @ (weight.double() * scale.t()).t() + bias
    assert relative_error(fp8_linear_reference(x, weight, scale, bias), exact) < 1e-6
    assert fp8_linear(x, weight, scale, bias).dtype is torch.bfloat16


@pytest.mark.parametrize('with_bias', [True, False])
def test_the_hopper_product_is_the_definition_s(with_bias):
    x, weight, scale, bias = product_inputs()
    bias = bias if with_bias else None
    found = fp8_linear_hopper(x, weight, scale, bias, SMALL)
    assert relative_error(found, fp8_linear_reference(x, weight, scale, bias)) < 0.003
    assert torch.equal(fp8_linear_hopper(x, weight, scale, bias, replace(SMALL, specialised=True)), found)
    for static in (torch.tensor(0.05), torch.linspace(0.01, 0.1, len(x[0]))[:, None]):
        found = fp8_linear_gelu_hopper(x, weight, scale, bias, static, SMALL)
        check_rounded(found, fp8_linear_gelu(x, weight, scale, bias, static, torch.float32))


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32])
def test_queries_and_keys_are_rotated_in_place_as_page_writing_does(dtype):
    count, heads, dim = 19, 6, 16
    qkv = random_tensor(generator(11), count, 3, heads, dim, dtype=dtype) * 2
    angle = torch.rand((count, dim // 2), generator=generator(12)) * 6.3
    arguments = torch.stack([angle.cos(), angle.sin()]), *random_tensor(generator(13), 2, dim)
    pool = Pool.allocate(Precision.FP32, 1, heads, 32, dim)
    one = torch.tensor([count], dtype=torch.int32)
    q, _ = write_qkv(pool, torch.zeros(1, dtype=torch.int32), one, qkv.clone(), *arguments)
    for rotate in (rotate_qk, rotate_qk_triton):
        found = qkv.clone()
        rotate(found, *arguments)
        torch.testing.assert_close(found[:, 0], q)
        torch.testing.assert_close(found[:, 1], pool.k[0, :, :count].transpose(0, 1).to(dtype))
        assert torch.equal(found[:, 2], qkv[:, 2])


def test_a_product_that_normalises_and_rotates_is_the_product_then_rotated():
    count, heads, dim = 37, 4, 16  # no whole number of tiles
    x = rows.quantise_rows(random_tensor(generator(17), count, 80) * 2)
    weight, scale = rows.quantise_rows(random_tensor(generator(18), 3 * heads * dim, 80))
    bias = random_tensor(generator(19), 3 * heads * dim)
    angle = torch.rand(count, dim // 2, generator=generator(20)) * 6.3
    turn = torch.stack([angle.cos(), angle.sin()]), *random_tensor(generator(21), 2, dim)
    expected = fp8_linear_reference(x, weight, scale.t(), bias).view(count, 3, heads, dim)
    rotate_qk(expected, *turn)
    for found in (fp8_linear_rotate(x, weight, scale.t(), bias, *turn),
                  fp8_linear_rotate_hopper(x, weight, scale.t(), bias, *turn, tiles=SMALL)):
        assert found.dtype is torch.bfloat16
        torch.testing.assert_close(found.float(), expected, rtol=2.0 ** -8, atol=1e-3)
        assert (found == expected.bfloat16()).double().mean() > 0.99


def test_heads_that_are_not_half_a_tile_are_refused_by_the_kernel_that_rotates():
    x, (weight, scale) = rows.quantise_rows(torch.zeros(4, 32)), rows.quantise_rows(torch.zeros(96, 32))
    for dim in (8, 32):
        with pytest.raises(ValueError, match='must be 16 wide'):
            fp8_linear_rotate_hopper(x, weight, scale.t(), None, torch.zeros(2, 4, dim // 2), *torch.ones(2, dim),
                                     tiles=SMALL)
