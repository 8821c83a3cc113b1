"""The kernels of networks whose pages are flat against their definitions, in Triton's interpreter on the CPU."""
import copy

import pytest
import torch
from kernel_inputs import random_pool, random_tensor, relative_error
from torch.nn import functional as F

from worldmodel_ros.kernels import rows
from worldmodel_ros.kernels.cross_attention import cross_attention
from worldmodel_ros.kernels.flat_attention import Unmerged
from worldmodel_ros.kernels.flat_write import padded, write_flat
from worldmodel_ros.kernels.pages import Precision
from worldmodel_ros.kernels.quantise import read_pages
from worldmodel_ros.kernels.splits import merge, splits_for
from worldmodel_ros.model.wan.vae_layers import add_taps, doubled_frames, interleaved

pytest.importorskip('triton', reason='Triton is not installed: pip install triton')

from worldmodel_ros.kernels import rows_triton
from worldmodel_ros.kernels.cross_attention_triton import cross_attention_triton
from worldmodel_ros.kernels.flat_write_triton import write_flat_triton
from worldmodel_ros.kernels.norm_silu_triton import (
    add_taps_triton, add_triton, doubled_frames_triton, interleaved_triton, norm_silu_triton)
from worldmodel_ros.kernels.splits_triton import merge_triton

TOKENS, HEADS, DIM, SLABS = 2 * 21, 3, 32, 2  # a slab is a page of 16 tokens and one of 5


def generator(seed):
    return torch.Generator().manual_seed(seed)


def written(precision, quantise_q=False):
    """Pools, queries and scales by the definition and by the kernel."""
    pool = random_pool(generator(1), precision, 6, HEADS, 16, DIM)
    qkv = random_tensor(generator(2), TOKENS, 3, HEADS, DIM, dtype=torch.bfloat16) * 3
    rms = rows.inverse_rms(qkv.flatten(2)[:, :2])
    angle = torch.rand((TOKENS, DIM // 2), generator=generator(3)) * 6.3
    arguments = (torch.tensor([5, 0, 3, 1], dtype=torch.int32), SLABS, qkv, rms, torch.stack([angle.cos(), angle.sin()]),
                 *random_tensor(generator(4), 2, HEADS * DIM), quantise_q)
    pools = pool, copy.deepcopy(pool)
    return pools, [function(each, *arguments) for function, each in zip((write_flat, write_flat_triton), pools)], arguments


@pytest.mark.parametrize('precision', [Precision.BF16, Precision.FP8])
def test_written_pages_and_queries_are_the_definition_s(precision):
    pools, ((q, scale), (found, found_scale)), _ = written(precision, precision is Precision.FP8)
    assert q.shape == (padded(TOKENS), HEADS, DIM) and found.dtype == q.dtype and not found[TOKENS:].float().any()
    assert (found.float() != q.float()).double().mean() < 0.01 and relative_error(found.float(), q.float()) < 0.003
    if scale is not None:
        torch.testing.assert_close(found_scale, scale, rtol=1e-6, atol=0.0)
    for one, other in zip(*(read_pages(pool, torch.arange(6)) for pool in pools)):
        assert relative_error(other, one) < 0.003 and torch.equal(other[[2, 4]], one[[2, 4]])  # which nobody wrote
        assert not one[[0, 1], :, 5:].any() and not other[[0, 1], :, 5:].any()  # beyond the slabs' tokens


@pytest.mark.parametrize('precision', [Precision.BF16, Precision.FP8])
def test_values_are_written_before_factors_of_the_norm_are_waited_for(precision):
    pools, results, (pages, slabs, qkv, rms, *others) = written(precision, precision is Precision.FP8)
    for function, pool, (wanted, _) in zip((write_flat, write_flat_triton), pools, results):
        later, seen = copy.deepcopy(pool), []
        for tensor in later.tensors().values():
            tensor.view(torch.uint8).zero_()

        def waited():
            seen.append(read_pages(later, torch.arange(6))[1].any())
            return rms
        q, _ = function(later, pages, slabs, qkv, waited, *others)
        assert torch.equal(q.view(torch.uint8), wanted.view(torch.uint8)) and len(seen) == 1
        for one, other in zip(*(read_pages(each, pages.long()) for each in (pool, later))):
            assert torch.equal(one, other)
    assert seen == [True]  # by the kernels


def test_keys_are_normalised_over_all_heads_and_lie_in_their_slabs_places():
    (pool, _), _, (pages, _, qkv, _, rotary, _, weight, _) = written(Precision.FP32)
    normal = F.rms_norm(qkv[:, 1].float().flatten(1), (HEADS * DIM,), weight, 1e-6).unflatten(1, (HEADS, DIM))
    a, b = normal.chunk(2, -1)
    cos, sin = rotary[:, :, None]
    k, v = (x[pages.long()].transpose(1, 2).reshape(SLABS, 32, HEADS, DIM)[:, :21].flatten(0, 1)
            for x in read_pages(pool, torch.arange(6)))
    torch.testing.assert_close(k, torch.cat([a * cos - b * sin, a * sin + b * cos], -1))
    assert torch.equal(v, qkv[:, 2].float())


def test_writing_refuses_pages_that_do_not_hold_the_tokens():
    pools, _, arguments = written(Precision.BF16)
    for function in (write_flat, write_flat_triton):
        with pytest.raises(ValueError, match='do not fill 3 pages'):
            function(pools[0], arguments[0][:3], *arguments[1:])


@pytest.mark.parametrize('text', [5, 80])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_attention_to_a_prompt_is_the_definition_s(text, dtype):
    q = random_tensor(generator(5), 130, HEADS * DIM, dtype=dtype) * 2
    keys, values = (random_tensor(generator(seed), HEADS, text, DIM, dtype=dtype) for seed in (6, 7))
    bias = random_tensor(generator(8), text)
    bias[-2:] = -float('inf')
    arguments = q, keys, values, bias, 1e-6
    limit = 1e-5 if dtype is torch.float32 else 0.006
    assert relative_error(cross_attention_triton(*arguments).float(), cross_attention(*arguments).float()) < limit
    static = values.abs().amax().float() / 448.0
    (found, scales), (wanted, wanted_scales) = (f(*arguments, static) for f in (cross_attention_triton, cross_attention))
    assert torch.equal(scales, wanted_scales) and scales.shape == (130, 1)
    assert (found.float() != wanted.float()).double().mean() < 0.1  # what lies at the edge of two numbers
    assert relative_error(found.float() * scales, cross_attention(*arguments).float()) < 0.04


def test_parts_of_a_softmax_are_merged_to_the_whole():
    q, k, v = (random_tensor(generator(seed), count, HEADS, DIM).double() for seed, count in ((1, 32), (2, 50), (3, 50)))
    logits = torch.einsum('qhd,khd->hqk', q, k)
    whole = torch.einsum('hqk,khd->qhd', logits.softmax(-1), v)[:20].flatten(1)
    parts, lse = [], []
    for part in (slice(0, 7), slice(7, 31), slice(31, 50)):
        parts.append(torch.einsum('hqk,khd->qhd', logits[..., part].softmax(-1), v[part]))
        lse.append(logits[..., part].logsumexp(-1) / torch.tensor(2.0).log())
    arguments = torch.cat(parts).float(), torch.cat(lse, 1).float(), 3, 20
    for function in (merge, merge_triton):
        assert relative_error(function(*arguments), whole) < 1e-6
        out = torch.zeros(12, 2 * whole.shape[1])[:, 8:8 + whole.shape[1]]
        assert function(*arguments[:3], 12, first=5, out=out) is out and relative_error(out, whole[5:17]) < 1e-6
        rounded, scales = function(*arguments, True)
        assert rounded.dtype is torch.float8_e4m3fn and relative_error(rounded.float() * scales, whole) < 0.04
    broken = arguments[0].clone()
    broken[3] = float('nan')
    for function in (merge, merge_triton):
        assert function(broken, *arguments[1:], True)[1].isnan().flatten().tolist() == [row == 3 for row in range(20)]


def test_rows_of_no_query_are_not_merged():
    arguments = torch.zeros(12, HEADS, DIM), torch.zeros(HEADS, 12), 3
    for function in (merge, merge_triton):
        with pytest.raises(ValueError, match='4 queries, not 3 from 2 on'):
            function(*arguments, 3, first=2)
        for out in (torch.zeros(3, HEADS * DIM + 1), torch.zeros(3, HEADS * DIM, dtype=torch.bfloat16)):
            with pytest.raises(ValueError, match='must be torch.float32'):
                function(*arguments, 3, out=out)
        with pytest.raises(ValueError, match='rounded'):
            function(*arguments, 3, fp8=True, out=torch.zeros(3, HEADS * DIM))
    with pytest.raises(ValueError, match='rows of out must be contiguous'):
        merge_triton(*arguments, 3, out=torch.zeros(HEADS * DIM, 3).mT)


@pytest.mark.parametrize('splits', [1, 3])
@pytest.mark.parametrize('tokens, count', [(5, 4), (6, 4), (100, 3), (32, 2)])
def test_each_process_gets_its_rows_of_attention_in_parts(tokens, count, splits):
    rows, each = padded(tokens), -(-tokens // count)
    parts = Unmerged(random_tensor(generator(1), splits * rows, HEADS, DIM), random_tensor(generator(2), HEADS, splits * rows),
                     splits)
    whole = parts.parts[:tokens].flatten(1) if splits == 1 else merge(parts.parts, parts.lse, splits, tokens)
    place = torch.zeros(tokens, count, HEADS * DIM)
    for rank in range(count):
        first = min(rank * each, tokens)
        own = min(each, tokens - first)  # of the last one perhaps none
        torch.testing.assert_close(parts.rows(first, own), whole[first:first + own])
        parts.rows(first, own, out=place[first:first + own, rank])
        torch.testing.assert_close(place[first:first + own, rank], whole[first:first + own])


def test_keys_are_split_where_processors_would_idle():
    assert [splits_for(items, 132) for items in (444, 1480, 132, 264, 3072)] == [2, 4, 1, 1, 3]
    assert splits_for(133, 132) > 1


@pytest.mark.parametrize('film', [False, True])
@pytest.mark.parametrize('added', [False, True])
def test_rows_take_a_scale_and_shift_of_each_value_and_come_in_another_type(added, film):
    x, y, scale, shift = random_tensor(generator(1), 4, 10, 48)
    gate, *modulation = random_tensor(generator(2), 3, 1, 48)
    options = {'film': torch.cat([scale, shift], 1).bfloat16() if film else None, 'fp8': False, 'dtype': torch.bfloat16}
    results = [module.modulate_rows(x, *modulation, (y.bfloat16(), gate) if added else None, **options)
               for module in (rows_triton, rows)]
    torch.testing.assert_close(results[0][0], results[1][0])
    assert results[0][1].dtype is torch.bfloat16
    torch.testing.assert_close(results[0][1].float(), results[1][1].float(), rtol=2.0 ** -7, atol=1e-3)
    expected = x + gate * y.bfloat16().float() if added else x
    expected = (1.0 + scale.bfloat16().float()) * expected + shift.bfloat16().float() if film else expected
    torch.testing.assert_close(results[1][0], expected)
    parts = torch.stack([x, y], 1)
    torch.testing.assert_close(rows_triton.inverse_rms(parts), rows.inverse_rms(parts))
    torch.testing.assert_close(rows.inverse_rms(parts)[1], (y.square().mean(-1) + 1e-6).rsqrt())
    shares = [each.mean_squares(parts, count=2) for each in (rows_triton, rows)]
    torch.testing.assert_close(*shares)
    torch.testing.assert_close((2.0 * shares[1]).rsqrt(), rows.inverse_rms(parts))


@pytest.mark.parametrize('form', [torch.contiguous_format, torch.channels_last_3d])
def test_norm_and_silu_are_those_of_the_decoder_in_either_order_of_the_axes(form):
    x, weight = random_tensor(generator(1), 1, 12, 3, 5, 7).contiguous(memory_format=form) * 2, random_tensor(generator(2), 12)
    x[0, :, 1, 2, 3] = 0.0
    found = norm_silu_triton(x, weight)
    assert found.stride() == x.stride()
    torch.testing.assert_close(found, F.silu(F.normalize(x, dim=1) * 12 ** 0.5 * weight[:, None, None, None]))
    bias = random_tensor(generator(3), 12)
    found = norm_silu_triton(x, weight, bias, before=2 if form is torch.channels_last_3d else 0)
    y = x + bias[:, None, None, None]
    torch.testing.assert_close(found[:, :, -3:], F.silu(F.normalize(y, dim=1) * 12 ** 0.5 * weight[:, None, None, None]))
    with pytest.raises(ValueError, match='must be one video'):
        norm_silu_triton(x.transpose(2, 4), weight)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_features_are_put_where_an_upsampled_video_has_them(dtype):
    x, y = random_tensor(generator(1), 3, 24, 5, 7), random_tensor(generator(2), 3, 48, 6, 8)
    x, y = (part.to(dtype).contiguous(memory_format=torch.channels_last) for part in (x, y))
    bias = random_tensor(generator(3), 48).to(dtype)
    found, wanted = doubled_frames_triton(x, bias[:24], edge=1), doubled_frames(x.float(), bias[:24].float())
    assert found.shape == (6, 12, 7, 7) and found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found[:, :, 1:-1], wanted.to(dtype))
    torch.testing.assert_close(wanted[3], x[1, 12:].float() + bias[12:24, None, None].float())
    found, wanted = interleaved_triton(y, bias), interleaved(y.float(), bias.float())
    assert found.is_contiguous(memory_format=torch.channels_last) and torch.equal(found, wanted.to(dtype))
    even_row, odd_column = y[:, 12:24, :5, 1:].float() + bias[12:24, None, None].float(), wanted[:, :, ::2, 1::2]
    torch.testing.assert_close(odd_column, even_row)
    for kernel, part in ((doubled_frames_triton, x), (interleaved_triton, y)):
        with pytest.raises(ValueError, match='channels must come last'):
            kernel(part.contiguous(), bias)


def test_frames_are_left_free_and_residuals_are_added_where_channels_are_last():
    x, residual = random_tensor(generator(1), 2, 1, 12, 3, 5, 7)
    x, residual = (part.contiguous(memory_format=torch.channels_last_3d) for part in (x, residual))
    bias = random_tensor(generator(2), 12)
    assert norm_silu_triton(x, bias, before=2).shape == (1, 12, 5, 5, 7)
    framed = norm_silu_triton(x, bias, before=2, edge=1)
    assert framed.shape == (1, 12, 5, 7, 7)
    assert torch.equal(framed[:, :, 2:, 1:-1], norm_silu_triton(x, bias))
    torch.testing.assert_close(add_triton(x, bias, residual), x + bias[:, None, None, None] + residual)
    frame = x[:, :, :1].contiguous(memory_format=torch.channels_last_3d)
    other = frame.as_strided(frame.shape, (12, 1, 12, *frame.stride()[3:]))  # as a convolution gives one frame
    torch.testing.assert_close(add_triton(frame, bias, other), 2 * frame + bias[:, None, None, None])
    with pytest.raises(ValueError, match='channels are last'):
        norm_silu_triton(x.contiguous(), bias, before=2)
    with pytest.raises(ValueError, match='must be alike'):
        add_triton(x, bias, residual.contiguous())


def test_taps_are_added_where_they_belong():
    taps = torch.randn(1, 32, 2, 6, 9).contiguous(memory_format=torch.channels_last_3d)
    bias = torch.randn(3)
    found = add_taps_triton(taps, bias)
    torch.testing.assert_close(found, add_taps(taps, bias))
    assert found.shape == (1, 3, 2, 4, 7)
    for wrong in (taps.contiguous(), taps[:, :24].contiguous(memory_format=torch.channels_last_3d)):
        with pytest.raises(ValueError, match='27 channels'):
            add_taps_triton(wrong, bias)
