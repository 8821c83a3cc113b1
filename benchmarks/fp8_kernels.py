"""Checks and times the FP8 benchmark's kernels one by one."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from fp8_cases import DEVICE, GPU, Linear, normal, presets, relative, timed
from torch import Tensor
from torch.nn import functional as F

from worldmodel_ros.kernels import qk_norm, rows, rows_triton
from worldmodel_ros.kernels.linear import fp8_linear, fp8_linear_reference
from worldmodel_ros.kernels.linear_hopper import (
    DEFAULT, FEW, SPECIALISED, Tiles, fp8_linear_gelu_hopper, fp8_linear_hopper, fp8_linear_rotate_hopper)
from worldmodel_ros.kernels.qk_norm_triton import rotate_qk_triton

TRIED = (DEFAULT, FEW, Tiles(stages=4), Tiles(m=256, n=128), Tiles(n=128, stages=4), Tiles(n=128, warps=4))
# Another order of summation may round a value to its other neighbour: share of FP8 values that may differ; root
# mean square error of bfloat16, of products in FP8, which accumulate with 14 bits, and of GELU by the GPU's own tanh
# in FP8.
DIFFERENT, BF16, PRODUCT, GELU = 0.01, 0.003, 0.006, 0.02


def triton_products(layer: Linear, gelu: bool, tried: Sequence[Tiles] = TRIED) -> dict[str, Callable[[], object]]:
    """Return the persistent kernel with each tiling of the product that compiles on this GPU."""
    found = {}
    for tiles in tried if GPU else [replace(tiles, m=16, n=16, k=16) for tiles in tried[:1]]:
        def call(tiles: Tiles = tiles) -> object:
            if gelu:
                return fp8_linear_gelu_hopper(*layer.fp8, layer.static, tiles)
            return fp8_linear_hopper(*layer.fp8, tiles)
        name = f'triton {tiles.m}x{tiles.n}x{tiles.k}, {tiles.stages} stages, {tiles.warps} warps'
        name += ', specialised' * tiles.specialised + ', gelu' * gelu
        try:
            call()
        except Exception as error:  # for example too much shared memory
            print(f'{name}: {error!r}'[:200], file=sys.stderr)
        else:
            found[name] = call
    return found


def correct() -> Iterator[dict]:
    for name, (preset, counts) in presets().items():
        # Not a whole number of tiles of any product, and so few that tiles are smaller.
        for tokens in (counts[-1] + 8, 200, 104):
            for kernel, error, limit in _errors(preset.width, preset.heads, tokens):
                yield {'preset': name, 'tokens': tokens, 'kernel': kernel, 'error': error, 'limit': limit,
                       'kept': error <= limit}


def _errors(width: int, heads: int, tokens: int) -> Iterator[tuple[str, float, float]]:
    x, y, (shift, scale, gate) = normal(tokens, width), normal(tokens, width), normal(8, 6 * width).chunk(6, -1)[:3]
    for static in (None, torch.tensor(0.05, device=DEVICE)):
        for kernel, call in {'modulate': lambda m: m.modulate_rows(x, shift, scale, (y, gate), static=static)[1],
                             'gelu': lambda m: m.gelu_rows(x, static=static),
                             'quantise': lambda m: m.quantise_rows(x, static)}.items():
            (found, found_scale), (expected, expected_scale) = call(rows_triton), call(rows)
            kind = 'own scales' if static is None else 'one scale'
            if kernel == 'gelu':
                yield f'{kernel}, {kind}', relative(found, expected), GELU
            else:
                yield f'{kernel}, {kind}', float((found.float() != expected.float()).double().mean()), DIFFERENT
            yield f'{kernel}, {kind}, the scales', relative(found_scale, expected_scale), 1e-6
    qkv, rotary = normal(tokens, 3, heads, width // heads), torch.rand(2, tokens, width // heads // 2, device=DEVICE)
    norms, rotated = torch.rand(2, width // heads, device=DEVICE), qkv.clone()
    rotate_qk_triton(qkv, rotary, *norms)
    qk_norm.rotate_qk(rotated, rotary, *norms)
    yield 'normalise and rotate', relative(qkv, rotated), BF16
    for n, k in ((4 * width, width), (width, 4 * width)):
        yield from _product_errors(Linear(tokens, n, k), TRIED)
    layer, tiles = Linear(tokens, 3 * width, width), None if GPU else Tiles(m=16, n=2 * width // heads, k=16)
    found = fp8_linear_rotate_hopper(*layer.fp8, rotary, *norms, tiles=tiles)
    expected = fp8_linear_reference(*layer.fp8).view(found.shape)
    qk_norm.rotate_qk(expected, rotary, *norms)
    yield 'product, normalised and rotated', relative(found, expected), PRODUCT


def _product_errors(layer: Linear, tried: Sequence[Tiles]) -> Iterator[tuple[str, float, float]]:
    expected, (n, k) = fp8_linear_reference(*layer.fp8), layer.weight.shape
    for way, call in {'torch': lambda: fp8_linear(*layer.fp8), **triton_products(layer, False, tried)}.items():
        yield f'product {n} x {k}, {way}', relative(call(), expected), PRODUCT
    expected = rows.gelu_rows(expected, static=layer.static)[0]
    for way, call in triton_products(layer, True, tried).items():
        yield f'product {n} x {k}, {way}', relative(call()[0], expected), GELU


def products() -> Iterator[dict]:
    for name, (preset, counts) in presets().items():
        d = preset.width
        for linear, (n, k) in {'qkv': (3 * d, d), 'proj': (d, d), 'mlp.0': (4 * d, d), 'mlp.2': (d, 4 * d)}.items():
            for tokens in counts:
                yield from _speeds(name, linear, layer := Linear(tokens, n, k), _products(layer, linear == 'mlp.0'))


def _speeds(preset: str, linear: str, layer: Linear, ways: dict[str, Callable[[], object]]) -> Iterator[dict]:
    tokens, (n, k) = len(layer.x), layer.weight.shape
    for way, ms in timed(ways).items():
        yield {'preset': preset, 'linear': linear, 'tokens': tokens, 'n': n, 'k': k, 'way': way, 'ms': round(ms, 4),
               'tflops': round(2e-9 * tokens * n * k / ms, 1)}


def specialised() -> Iterator[dict]:
    """Check and time a form of the product that no interpreter can run, since the compiler specialises its warps.
    Separate from the others and last, because a mistake in it shows as a kernel that never ends."""
    for name, (preset, counts) in presets().items():
        d = preset.width
        for tokens in counts[:2]:
            layer = Linear(tokens, 4 * d, d)
            for kernel, error, limit in _product_errors(layer, (SPECIALISED,)):
                yield {'preset': name, 'tokens': tokens, 'kernel': kernel, 'error': error, 'kept': error <= limit}
            yield from _speeds(name, 'mlp.0', layer, {
                'torch': lambda: fp8_linear(*layer.fp8), **triton_products(layer, False, (SPECIALISED, DEFAULT)),
                **triton_products(layer, True, (SPECIALISED, DEFAULT))})


def _products(layer: Linear, before_gelu: bool) -> dict[str, Callable[[], object]]:
    ways = {'bf16': lambda: F.linear(layer.x, layer.weight, layer.bias), 'torch': lambda: fp8_linear(*layer.fp8),
            **triton_products(layer, gelu=False)}
    if GPU:
        one = torch.ones((), device=DEVICE)
        ways['torch, one scale for each matrix'] = lambda: torch._scaled_mm(
            layer.x8[0], layer.weight8.t(), scale_a=one, scale_b=one, bias=layer.bias, out_dtype=torch.bfloat16,
            use_fast_accum=True)
    if before_gelu:
        ways |= triton_products(layer, gelu=True)
        ways['torch, gelu'] = lambda: rows.row_kernels(layer.x).gelu_rows(fp8_linear(*layer.fp8), static=layer.static)
    return ways


def between() -> Iterator[dict]:
    for name, (preset, counts) in presets().items():
        for tokens in counts:
            cases = _between(preset.width, preset.heads, tokens, max(1, tokens // preset.tokens))
            for kernel, ms in timed({kernel: call for kernel, (call, _) in cases.items()}).items():
                yield {'preset': name, 'tokens': tokens, 'kernel': kernel, 'ms': round(ms, 4),
                       'gb_per_s': round(1e-6 * tokens * cases[kernel][1] / ms)}


def _between(d: int, heads: int, tokens: int, frames: int) -> dict[str, tuple[Callable[[], object], int]]:
    """Return calls, and how many bytes per token each has to read or write."""
    x, y, wide = normal(tokens, d), normal(tokens, d), normal(tokens, 4 * d)
    shift, scale, gate = normal(frames, 6 * d).chunk(6, -1)[:3]
    qkv, norms = normal(tokens, 3, heads, d // heads), torch.ones(2, d // heads, device=DEVICE)
    rotary = torch.rand(2, tokens, d // heads // 2, device=DEVICE)
    cases = {
        'modulate and quantise': (lambda: rows_triton.modulate_rows(x, shift, scale), 3 * d),
        'add, modulate and quantise': (lambda: rows_triton.modulate_rows(x, shift, scale, (y, gate)), 7 * d),
        'gelu and quantise': (lambda: rows_triton.gelu_rows(wide), 12 * d),
        'quantise': (lambda: rows_triton.quantise_rows(x), 3 * d),
        'normalise and rotate': (lambda: rotate_qk_triton(qkv, rotary, *norms), 8 * d + 4 * d // heads),
        'copy': (lambda: wide.clone(), 16 * d)}
    if GPU:
        modulate, gelu = (_compiled(function) for function in (rows.modulate_rows, rows.gelu_rows))
        cases |= {
            'add, modulate and quantise, compiled by torch': (lambda: modulate(x, shift, scale, (y, gate)), 7 * d),
            'gelu and quantise, compiled by torch': (lambda: gelu(wide), 12 * d)}
    return cases


def _compiled(function: Callable) -> Callable[..., tuple[Tensor, ...]]:
    return torch.compile(function, dynamic=False)
