"""Checks the kernels of a Wan network's pass at full size against their definitions in PyTorch, and times them."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from worldmodel_ros.kernels import cross_attention as cross, flat_attention as flat, flat_write, rows, splits
from worldmodel_ros.kernels.linear import fp8_linear, fp8_linear_gelu
from worldmodel_ros.kernels.pages import Pool, Precision
from worldmodel_ros.kernels.quantise import page_form, read_pages
from worldmodel_ros.model import precision as fp8_layers
from worldmodel_ros.model.wan import dit as network, sequence as pages
from worldmodel_ros.model.wan.config import WanConfig
from worldmodel_ros.model.wan.rotary import rotation

CHUNK, WINDOW = 3, 18
# Attention to a prompt: queries of a program, keys of a step, warps, stages. The first is the package's.
CROSS_WAYS = ((128, 32, 8, 2), (128, 32, 8, 1), (128, 64, 8, 2), (128, 64, 8, 1), (64, 64, 4, 1), (64, 32, 4, 1),
              (64, 32, 4, 2))
WIDTHS = {'14b': (5120, 40, 13824), '1.3b': (1536, 12, 8960)}


def error(found: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference, relative; infinite if something is not finite."""
    if not found.isfinite().all():
        return float('inf')
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@contextmanager
def definitions() -> Iterator[None]:
    """Let networks use the definitions in PyTorch for everything between products, on any device."""
    with ExitStack() as stack:
        for module in (network, pages, fp8_layers):
            stack.enter_context(patch.object(module, 'row_kernels', lambda x: rows))
        stack.enter_context(patch.object(network, 'cross_attention', cross.cross_attention))
        yield


def layer_inputs(width: int, heads: int, grid: tuple[int, int], precision: Precision, device: torch.device) -> tuple:
    """Return a pool with a full window, its list's entries, the pages of a chunk, and products of a layer."""
    tokens, dim = CHUNK * grid[0] * grid[1], width // heads
    each, slabs = -(-tokens // 128), WINDOW // CHUNK
    pool = Pool.allocate(precision, slabs * each, heads, 128, dim, device)
    held = pool.tensors()
    for slab in range(slabs):
        k, v = torch.randn(2, each, heads, 128, dim, device=device)
        for name, values in page_form(precision, k, v).items():
            held[name][slab * each:(slab + 1) * each].copy_(values)
    counts = [128] * (each - 1) + [tokens - 128 * (each - 1)]
    entries = [(slab * each + page, count) for slab in range(slabs) for page, count in enumerate(counts)]
    own = torch.arange((slabs - 1) * each, slabs * each, dtype=torch.int32, device=device)
    qkv = torch.randn(tokens, 3, heads, dim, device=device).to(torch.bfloat16)
    rotary = rotation(dim, np.arange(CHUNK), grid, device)
    return pool, entries, own, qkv, rotary, *(1.0 + 0.1 * torch.randn(2, width, device=device))


def checks(grid: tuple[int, int], device: torch.device) -> Iterator[tuple[str, float, float]]:
    """Yield for each kernel: name, difference from its definition, and its limit."""
    for size, (width, heads, _) in WIDTHS.items():
        for precision in (Precision.BF16, Precision.FP8):
            name = f'{size}, {precision.value}'
            pool, entries, own, qkv, rotary, *weights = layer_inputs(width, heads, grid, precision, device)
            plan = flat.FlatPlan.of(pool, len(qkv))
            rms = rows.row_kernels(qkv).inverse_rms(qkv.flatten(2)[:, :2])
            yield f'inverse_rms {name}', error(rms, rows.inverse_rms(qkv.flatten(2)[:, :2])), 1e-6
            arguments = own, 1, qkv, rms, rotary, *weights
            defined = Pool(precision, **{n: t.clone() for n, t in pool.tensors().items()})
            q, scale = flat.write_flat(pool, *arguments, plan.quantise_q)
            wanted, wanted_scale = flat_write.write_flat(defined, *arguments, plan.quantise_q)
            found_q = q.float() if scale is None else q.float() * scale[..., None]
            wanted_q = wanted.float() if scale is None else wanted.float() * wanted_scale[..., None]
            yield f'queries {name}', error(found_q, wanted_q), 0.003
            for part, one, other in zip('kv', read_pages(pool, own.long()), read_pages(defined, own.long())):
                yield f'pages of {part} {name}', error(one, other), 0.003
            keys, values = (torch.cat([page[:, :count] for page, (_, count) in zip(part, entries)], 1)
                            for part in read_pages(pool, torch.tensor([page for page, _ in entries], device=device)))
            exact = F.scaled_dot_product_attention(found_q[:len(qkv)].transpose(0, 1)[None], keys[None], values[None])
            exact = exact[0].transpose(0, 1).flatten(1)
            for count in sorted({1, 2, 3, plan.splits}) if plan.hopper else [1]:
                each = flat.FlatPlan(plan.hopper, count, plan.quantise_q)
                out = flat.flat_attention(q, scale, pool, each.lists(entries, 128, device), each).rows(0, len(qkv))
                yield f'attention in {count} parts {name}', error(out, exact), 0.01 if scale is None else 0.05
            del keys, values, exact
        x, y, factor, addend = (torch.randn(CHUNK * grid[0] * grid[1], width, device=device) for _ in range(4))
        gate, shift, scale = 0.3 * torch.randn(3, 1, width, device=device)
        y, film = y.to(torch.bfloat16), 0.3 * torch.cat([factor, addend], 1).to(torch.bfloat16)
        for fp8 in (False, True):
            options = {'fp8': fp8, 'film': film, 'dtype': torch.bfloat16}
            found, wanted = (module.modulate_rows(x, shift, scale, (y, gate), **options)
                             for module in (rows.row_kernels(x), rows))
            yield f'stream {size}, fp8 {fp8}', error(found[0], wanted[0]), 1e-6
            one, other = (part[1][0].float() * part[1][1] if fp8 else part[1] for part in (found, wanted))
            yield f'rows {size}, fp8 {fp8}', error(one, other), 0.003
        text = 128
        prompt = torch.randn(2, heads, text, width // heads, device=device).to(torch.bfloat16)
        bias = torch.randn(text, device=device)
        arguments = y, *prompt, bias, 1e-6
        yield f'cross-attention {size}', error(flat.cross_attention(*arguments), cross.cross_attention(
            *(part.float() for part in arguments[:-1]), 1e-6)), 0.01
        parts, lse = torch.randn(3 * 256, heads, width // heads, device=device).to(torch.bfloat16), \
            torch.randn(heads, 3 * 256, device=device)
        if device.type == 'cuda':
            from worldmodel_ros.kernels.splits_triton import merge_triton
            yield f'merge {size}', error(merge_triton(parts, lse, 3, 250), splits.merge(parts, lse, 3, 250)), 0.003


def network_differences(grid: tuple[int, int], chunks: int, device: torch.device, width: int, heads: int, ffn: int
                        ) -> Iterator[tuple[str, float, float]]:
    """Compare chunks of a network of two layers, with rolling window and sinks, by kernels and pages in bf16 and FP8, with
    the definitions and a dense window in float32: the largest difference of latents."""
    from worldmodel_ros.model.wan.checkpoint import build
    from worldmodel_ros.model.wan.dense import DenseSequence
    from worldmodel_ros.model.wan.precision import to_fp8
    from worldmodel_ros.model.wan.sampler import Sampler
    from worldmodel_ros.model.wan.schedule import Schedule, Step
    from worldmodel_ros.model.wan.sequence import PagedSequences, Window
    from worldmodel_ros.model.weights import RandomWeights
    config = WanConfig(width, 2, heads, ffn, 36, camera_width=1536, text_width=64)
    window, schedule = Window(WINDOW, 9, CHUNK), Schedule((Step(999.0, 0.999, 1.0), Step(800.0, 0.8, 0.8)))
    generator = torch.Generator(device).manual_seed(5)
    text = torch.randn(120, 64, device=device, generator=generator)
    shape = CHUNK, 2 * grid[0], 2 * grid[1]
    inputs = [(torch.randn(2, 16, *shape, device=device, generator=generator), torch.randn(20, *shape, device=device,
               generator=generator), torch.randn(CHUNK * grid[0] * grid[1], 1536, device=device, generator=generator))
              for _ in range(chunks)]

    def run(layers: torch.dtype, fp8: bool, open_sequence: Callable) -> list[Tensor]:
        dit = build(config, RandomWeights(1, device), device, layers)
        if fp8:
            to_fp8(dit)
        sampler, sequence = Sampler(dit, schedule), open_sequence()
        with torch.inference_mode():
            prompt = dit.prompt(text)
            return [sampler.chunk(sequence, prompt, lambda step: noise[step], condition, rays)
                    for noise, condition, rays in inputs]
    with definitions():
        exact = run(torch.float32, False, lambda: DenseSequence(config, window, grid))
    for name, fp8, precision, limit in (('bf16', False, Precision.BF16, 0.01), ('fp8', True, Precision.FP8, 0.06)):
        found = run(torch.bfloat16, fp8, lambda: PagedSequences(config, window, grid, precision, device).open())
        yield f'{chunks} chunks of two layers of width {width}, {name}', max(map(error, found, exact)), limit


def median_ms(call: Callable[[], object], repeats: int = 10) -> float:
    for _ in range(3):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for mark in marks[:-1]:
        mark.record()
        call()
    marks[-1].record()
    torch.cuda.synchronize()
    return round(float(np.median([a.elapsed_time(b) for a, b in zip(marks, marks[1:])])), 4)


@torch.inference_mode()
def timings(grid: tuple[int, int], device: torch.device) -> Iterator[dict]:
    """Yield rows of ms: products, attention by parts, and what lies between them."""
    for size, (width, heads, ffn) in WIDTHS.items():
        tokens = CHUNK * grid[0] * grid[1]
        for name, n, k in (('qkv', 3 * width, width), ('proj', width, width), ('ffn.0', ffn, width), ('ffn.2', width, ffn)):
            weight, bias = torch.randn(n, k, device=device).to(torch.bfloat16), torch.randn(n, device=device).to(torch.bfloat16)
            packed, scale = rows.quantise_rows(weight)
            scale = scale.t().contiguous()
            for m in (tokens, flat.padded(tokens)):
                x = torch.randn(m, k, device=device).to(torch.bfloat16)
                rounded, tera = rows.quantise_rows(x), 2e-9 * tokens * n * k
                ways = {'bf16': lambda: F.linear(x, weight, bias), 'fp8': lambda: fp8_linear(rounded, packed, scale, bias),
                        'fp8, library': lambda: torch._scaled_mm(
                            rounded[0], packed.t(), scale_a=rounded[1], scale_b=scale, bias=bias, out_dtype=torch.bfloat16,
                            use_fast_accum=True)}
                if name == 'ffn.0':
                    static = torch.full((m, 1), 0.1, device=device)
                    ways |= {'bf16, then gelu': lambda: F.gelu(F.linear(x, weight, bias), approximate='tanh'),
                             'bf16 with gelu': lambda: torch._addmm_activation(bias, x, weight.t(), use_gelu=True),
                             'fp8 with gelu': lambda: fp8_linear_gelu(rounded, packed, scale, bias, static)}
                for way, call in ways.items():
                    ms = median_ms(call)
                    yield {'kernel': name, 'size': size, 'rows': m, 'way': way, 'ms': ms, 'tflops': round(tera / ms, 1)}
        for precision in (Precision.BF16, Precision.FP8):
            pool, entries, own, qkv, rotary, *weights = layer_inputs(width, heads, grid, precision, device)
            plan = flat.FlatPlan.of(pool, tokens)
            common = {'size': size, 'way': precision.value}
            rms = rows.row_kernels(qkv).inverse_rms(qkv.flatten(2)[:, :2])
            yield {'kernel': 'inverse_rms', **common,
                   'ms': median_ms(lambda: rows.row_kernels(qkv).inverse_rms(qkv.flatten(2)[:, :2]))}
            yield {'kernel': 'write_flat', **common, 'ms': median_ms(
                lambda: flat.write_flat(pool, own, 1, qkv, rms, rotary, *weights, plan.quantise_q))}
            q, scale = flat.write_flat(pool, own, 1, qkv, rms, rotary, *weights, plan.quantise_q)
            wanted = None
            for count in range(1, 9):
                each = flat.FlatPlan(plan.hopper, count, plan.quantise_q)
                lists = each.lists(entries, 128, device)

                def attend() -> Tensor:
                    return flat.flat_attention(q, scale, pool, lists, each).rows(0, tokens)
                found = attend()
                wanted = found if wanted is None else wanted
                ms = median_ms(attend)
                yield {'kernel': 'attention', **common, 'parts': count, 'chosen': count == plan.splits, 'ms': ms,
                       'tflops': round(4e-9 * tokens * WINDOW * tokens / CHUNK * width / ms, 1),
                       'difference': round(error(found, wanted), 5)}
        x, y = torch.randn(tokens, width, device=device), torch.randn(tokens, width, device=device).to(torch.bfloat16)
        film, table = y.repeat(1, 2), torch.randn(3, 1, width, device=device)
        kernels = rows.row_kernels(x)
        for fp8 in (False, True):
            for name, extra in (('rows', None), ('rows with camera', film)):
                ms = median_ms(lambda: kernels.modulate_rows(x, table[0], table[1], (y, table[2]), fp8, film=extra,
                                                             dtype=torch.bfloat16))
                moved = x.nbytes * 2 + y.nbytes * (1 if extra is None else 3) + (y.nbytes // 2 if fp8 else y.nbytes)
                yield {'kernel': name, 'size': size, 'way': 'fp8' if fp8 else 'bf16', 'ms': ms,
                       'tb_per_s': round(moved / ms * 1e-9, 2)}
        yield {'kernel': 'round', 'size': size, 'way': 'fp8', 'ms': median_ms(lambda: kernels.quantise_rows(y))}
        prompt = torch.randn(2, heads, 128, width // heads, device=device).to(torch.bfloat16)
        bias = torch.zeros(128, device=device)
        static, wanted = torch.tensor(0.02, device=device), None
        for block_m, block_n, warps, stages in CROSS_WAYS:
            from worldmodel_ros.kernels import cross_attention_triton as kernel
            with patch.multiple(kernel, BLOCK_M=block_m, BLOCK_N=block_n, WARPS=warps, STAGES=stages):
                def attend() -> tuple[Tensor, Tensor]:
                    return flat.cross_attention(y, *prompt, bias, 1e-6, static)
                found = attend()[0].float()
                wanted = found if wanted is None else wanted
                yield {'kernel': 'cross-attention', 'size': size, 'way': 'fp8', 'block': [block_m, block_n], 'warps': warps,
                       'stages': stages, 'ms': median_ms(attend), 'difference': round(error(found, wanted), 5)}
