"""Checks every kernel on this machine's GPU against its definition in float64, at the shapes of the large preset.

    python benchmarks/kernel_correctness.py --json benchmarks/results/kernel_correctness_<gpu>.json

Prints, for each case, the error (root mean square, relative; of written pages, the share of elements that differ from
the definition's), its limit, and the kernel's time as a by-product: median of a few runs, nothing tuned. Exits
with 1 if a limit is exceeded. Output memory is filled with NaN beforehand.
"""
from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import gelu, linear

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'test'))

from kernel_inputs import random_lists, random_pool, random_tensor, relative_error
from result_file import command, write_result

from worldmodel_ros.kernels import reference
from worldmodel_ros.kernels.attention import paged_attention, split_attention
from worldmodel_ros.kernels.attention_triton import paged_attention_triton
from worldmodel_ros.kernels.page_write import write_qkv
from worldmodel_ros.kernels.page_write_triton import write_qkv_triton
from worldmodel_ros.kernels.pages import Pool, Precision, TileLists
from worldmodel_ros.kernels.quantise import read_pages
from worldmodel_ros.kernels.requantise import requantise
from worldmodel_ros.kernels.requantise_triton import requantise_triton
from worldmodel_ros.kernels.temporal import temporal_attention
from worldmodel_ros.kernels.temporal_triton import temporal_attention_triton
from worldmodel_ros.machine import machine, versions

HEADS, FRAMES, TOKENS, DIM, PAGES = 24, 4, 256, 128, 96
REPEATS = 50  # of a kernel that is too short to be timed alone
# Error allowed for rounding queries and probabilities to the input type of the matrix products. e4m3 has an error of 2.6 %;
# that of the queries is scaled by the spread of the logits, here with a standard deviation of about 2.5.
BF16_LIMIT, FP8_LIMIT = 0.006, 0.07
# Share of elements that may differ where another order of summation rounds a value to its other neighbour, and where two
# exponents of a block are equally good; more often where an FP8 page, which has few values, is rounded again.
REORDERED, EQUALLY_GOOD = 0.002, 2e-4
# Error of pages read back: in FP4, a neighbour may be a third off.
READ_BACK = 0.01
MIXTURES = (('bf16',), ('fp8',), ('fp4',), ('fp8', 'fp4'), ('bf16', 'fp8', 'fp4'))
LISTS = {'one page': [1] * 16, '16 pages': [16] * 16, 'odd': [0, 1, 3, 7, 2, 0, 13, 5], 'nothing': [0, 0]}


@dataclass(frozen=True)
class Check:
    kernel: str
    case: str
    error: float
    limit: float
    ms: float

    @property
    def kept(self) -> bool:
        return self.error <= self.limit


def milliseconds(call: Callable[[], object], runs: int = 5) -> float:
    """Return the median of a few runs, after the one that compiled."""
    times = []
    for _ in range(runs):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def fresh(call: Callable[[], object]) -> object:
    """Return the call's result; the memory that it allocates is full of NaN."""
    torch.cuda.empty_cache()
    block = torch.full((2 ** 29,), float('nan'), device='cuda')
    del block
    return call()


def attention(generator: torch.Generator, rng: np.random.Generator) -> Iterator[Check]:
    pools = {p: random_pool(generator, Precision(p), PAGES, HEADS, TOKENS, DIM) for p in ('bf16', 'fp8', 'fp4')}
    for mixture in MIXTURES:
        for (name, counts), partial in ((item, share) for item in LISTS.items() for share in (0.0, 0.4)):
            lists = [random_lists(rng, list(rng.permutation(counts)), PAGES, TOKENS, partial, 'cuda') for _ in mixture]
            q = random_tensor(generator, len(counts) * TOKENS, HEADS, DIM, dtype=torch.bfloat16) * 2
            used = [pools[p] for p in mixture]
            expected = reference.paged_attention(q.double(), used, lists, dtype=torch.float64)
            for kernel in (paged_attention_triton, paged_attention):
                def call():
                    return kernel(q, used, lists)
                limit = BF16_LIMIT if kernel is paged_attention_triton or mixture == ('bf16',) else FP8_LIMIT
                error = relative_error(fresh(call), expected)
                yield Check(kernel.__name__, f'{"+".join(mixture)}, {name}, {partial:.0%} partial', error, limit,
                            milliseconds(call))


def by_frame(generator: torch.Generator, rng: np.random.Generator) -> Iterator[Check]:
    """Check inputs and outputs laid out frame by frame instead of tile by tile, and outputs among other rows: bit for bit the
    same."""
    tiles, order = 16, (FRAMES, 16)
    pools = [random_pool(generator, Precision(p), PAGES, HEADS, TOKENS, DIM) for p in ('bf16', 'fp8')]

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (-1, tiles, FRAMES, TOKENS // FRAMES)).transpose(1, 2).flatten(0, 3).contiguous()
    q = random_tensor(generator, 4 * tiles * TOKENS, HEADS, DIM, dtype=torch.bfloat16) * 2
    for used in (pools[:1], pools[1:], pools):
        lists = [random_lists(rng, list(rng.integers(0, 30, 4 * tiles)), PAGES, TOKENS, 0.1, 'cuda') for _ in used]

        def call():
            return paged_attention(q, used, lists, by_frame=order)
        expected = turned(paged_attention(q, used, lists))
        among = torch.empty((len(q), 2 * HEADS, DIM), dtype=q.dtype, device='cuda')[:, HEADS:]
        error = max(different(fresh(call), expected),
                    different(paged_attention(q, used, lists, by_frame=order, out=among), expected))
        yield Check('paged_attention, by frame', '+'.join(pool.precision.value for pool in used), error, 0.0,
                    milliseconds(call))
    qkv = random_tensor(generator, 4 * tiles * TOKENS, 3, HEADS, DIM, dtype=torch.bfloat16)
    rotary = torch.rand((len(qkv), DIM), generator=generator, device='cuda')
    weights = [random_tensor(generator, DIM, dtype=torch.bfloat16) for _ in range(2)]
    pages = torch.randperm(PAGES, generator=generator, device='cuda')[:4 * tiles].int()
    counts = torch.full_like(pages, TOKENS)
    for pool in pools:
        written = copy.deepcopy(pool)

        def call():
            return write_qkv_triton(written, pages, counts, turned(qkv), _angles(turned(rotary)), *weights,
                                    by_frame=order)[0]
        found = [fresh(call), *written.tensors().values()]
        expected = [write_qkv_triton(pool, pages, counts, qkv, _angles(rotary), *weights)[0], *pool.tensors().values()]
        yield Check('write_qkv, by frame', pool.precision.value, max(map(different, found, expected)), 0.0,
                    milliseconds(call))


def in_parts(generator: torch.Generator, rng: np.random.Generator) -> Iterator[Check]:
    """Check few queries over pages in bf16, whose lists are split; at the shapes of ``base``, for a chunk, for one frame, and
    for frames that are committed together while the window fills."""
    heads = 8
    pool = random_pool(generator, Precision.BF16, PAGES, heads, TOKENS, DIM)
    for name, queries, counts, parts in (('a chunk', 4 * TOKENS, [20], 2), ('a frame', TOKENS, [17], 6),
                                         ('frames', TOKENS, [3, 4, 5, 6], 5)):
        rows = [[(int(page), TOKENS) for page in rng.choice(PAGES, count, replace=False)] for count in counts]
        lists = TileLists.from_rows([row[part::parts] for part in range(parts) for row in rows], TOKENS, 'cuda')
        whole = TileLists.from_rows(rows, TOKENS, 'cuda')
        q = random_tensor(generator, queries * len(counts), heads, DIM, dtype=torch.bfloat16)
        expected = reference.paged_attention(q, [pool], [whole], dtype=torch.float64)

        def call():
            return split_attention(q, pool, lists, parts)
        yield Check('split_attention', f'{name} in {parts} parts', relative_error(fresh(call), expected), BF16_LIMIT,
                    milliseconds(call))


def gelu_in_product(generator: torch.Generator, rng: np.random.Generator) -> Iterator[Check]:
    """Check products with fused GELU, for the chunk of ``base`` and fewer rows, and time the same in two kernels."""
    width = 1024
    weight = random_tensor(generator, 4 * width, width, dtype=torch.bfloat16) / width ** 0.5
    bias = random_tensor(generator, 4 * width, dtype=torch.bfloat16)

    def fused(x: torch.Tensor) -> torch.Tensor:
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)

    def apart(x: torch.Tensor) -> torch.Tensor:
        return gelu(linear(x, weight, bias), approximate='tanh')
    for rows in (256, 512, 1024):
        x = random_tensor(generator, rows, width, dtype=torch.bfloat16)
        expected = gelu(linear(x.double(), weight.double(), bias.double()), approximate='tanh')
        for name, call in (('in one kernel', fused), ('in two', apart)):
            graph = captured(lambda: call(x))
            yield Check('gelu_in_product', f'{rows} rows {name}', relative_error(call(x), expected), BF16_LIMIT,
                        milliseconds(graph.replay) / REPEATS)


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Return a graph of REPEATS calls, so that their time is the device's."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            call()
    return graph


def _angles(rotary: torch.Tensor) -> torch.Tensor:
    return torch.stack(rotary.chunk(2, 1))


def page_writing(generator: torch.Generator, rng: np.random.Generator) -> Iterator[Check]:
    tiles = 64
    qkv = random_tensor(generator, tiles * TOKENS, 3, HEADS, DIM, dtype=torch.bfloat16) * 3
    rotary = torch.rand((tiles * TOKENS, DIM // 2), generator=generator, device='cuda') * 6.3
    rotary = torch.stack([rotary.cos(), rotary.sin()])
    weights = [random_tensor(generator, DIM, dtype=torch.bfloat16) for _ in range(2)]
    pages = torch.from_numpy(rng.permutation(PAGES)[:tiles].astype(np.int32)).cuda()
    counts = torch.from_numpy(np.where(rng.random(tiles) < 0.3, rng.integers(0, TOKENS, tiles), TOKENS
                                       ).astype(np.int32)).cuda()
    for precision in (Precision.BF16, Precision.FP8, Precision.FP4):
        for quantise_q in (False, True):
            pool = random_pool(generator, precision, PAGES, HEADS, TOKENS, DIM)
            defined = copy.deepcopy(pool)

            def call():
                return write_qkv_triton(pool, pages, counts, qkv, rotary, *weights, quantise_q=quantise_q)
            q, q_scale = fresh(call)
            expected, expected_scale = write_qkv(defined, pages, counts, qkv, rotary, *weights, quantise_q=quantise_q)
            ms = milliseconds(call)
            case = f'{precision.value}, queries {q.dtype}'.replace('torch.', '')
            yield Check('write_qkv, queries', case, different(q, expected), REORDERED, ms)
            if quantise_q:
                yield Check('write_qkv, query scales', case, relative_error(q_scale, expected_scale), 1e-6, ms)
            for name, tensor in pool.tensors().items():
                if name.endswith('scale'):
                    yield Check(f'write_qkv, {name}', case, relative_error(tensor, defined.tensors()[name]), 1e-6, ms)
                else:
                    limit = REORDERED if name.startswith('k') else EQUALLY_GOOD * (precision is Precision.FP4)
                    yield Check(f'write_qkv, {name}', case, different(tensor, defined.tensors()[name]), limit, ms)
            ids = torch.arange(PAGES, device='cuda')
            for name, new, old in zip('kv', read_pages(pool, ids), read_pages(defined, ids)):
                yield Check(f'write_qkv, {name} read back', case, relative_error(new, old), READ_BACK, ms)


def different(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the share of elements whose bits differ."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return float((a.view(bits) != b.view(bits)).double().mean())


def temporal(generator: torch.Generator, rng: np.random.Generator) -> Iterator[Check]:
    columns, slabs = 16, 4
    pools = {p: random_pool(generator, Precision(p), PAGES, HEADS, TOKENS, DIM) for p in ('bf16', 'fp8', 'fp4')}
    ragged = torch.from_numpy(rng.integers(1, TOKENS // FRAMES + 1, columns).astype(np.int32)).cuda()
    q = random_tensor(generator, slabs * columns * TOKENS, HEADS, DIM, dtype=torch.bfloat16) * 2
    query_times = torch.arange(20, 20 + slabs, dtype=torch.int32, device='cuda') * FRAMES
    for mixture in MIXTURES:
        used = [pools[p] for p in mixture]
        for name, counts, partial, positions in (('40 pages', [40] * columns, 0.0, None),
                                                 ('odd', list(rng.integers(0, 9, columns)), 0.4, None),
                                                 ('ragged', list(rng.integers(0, 9, columns)), 0.4, ragged)):
            lists = [random_lists(rng, counts, PAGES, TOKENS, partial, 'cuda') for _ in mixture]
            times = [torch.from_numpy(rng.integers(0, 25, len(table.pages)).astype(np.int32)).cuda() * FRAMES
                     for table in lists]
            for causal in (False, True):
                extra = {'positions': positions} | ({'query_times': query_times, 'page_times': times} if causal else {})

                def call():
                    return temporal_attention_triton(q, used, lists, FRAMES, **extra)
                expected = temporal_attention(q.double(), used, lists, FRAMES, dtype=torch.float64, **extra)
                case = f'{"+".join(mixture)}, {name}{", causal" * causal}'
                yield Check('temporal_attention', case, relative_error(fresh(call), expected), BF16_LIMIT,
                            milliseconds(call))


def requantising(generator: torch.Generator, rng: np.random.Generator) -> Iterator[Check]:
    ids, targets = (torch.from_numpy(rng.permutation(PAGES)[:64].astype(np.int32)).cuda() for _ in range(2))
    for old, new in (('bf16', 'fp8'), ('bf16', 'fp4'), ('fp8', 'fp4')):
        source = random_pool(generator, Precision(old), PAGES, HEADS, TOKENS, DIM)
        target = Pool.allocate(Precision(new), PAGES, HEADS, TOKENS, DIM, 'cuda')
        defined = copy.deepcopy(target)
        requantise_triton(source, ids, target, targets)
        requantise(source, ids, defined, targets)
        ms = milliseconds(lambda: requantise_triton(source, ids, target, targets))
        for name, tensor in target.tensors().items():
            yield Check(f'requantise, {name}', f'{old} to {new}', different(tensor, defined.tensors()[name]),
                        EQUALLY_GOOD * (new == 'fp4'), ms)


PARTS = {part.__name__: part for part in (attention, by_frame, in_parts, gelu_in_product, page_writing, temporal,
                                          requantising)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--parts', nargs='*', choices=PARTS, default=list(PARTS))
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    checks = []
    with torch.inference_mode():
        for name in options.parts:
            for check in PARTS[name](torch.Generator('cuda').manual_seed(options.seed), np.random.default_rng(options.seed)):
                checks.append(check)
                print(f'{"ok    " if check.kept else "BROKEN"} {check.kernel:26} {check.case:44} {check.error:.2e} of '
                      f'{check.limit:.0e} {check.ms:9.3f} ms', flush=True)
    broken = sum(not check.kept for check in checks)
    print(f'{len(checks)} checks, {broken} broken')
    write_result({'command': command(), 'gpu': torch.cuda.get_device_name(), **machine(),
                  'versions': versions(('torch', 'triton')), 'seed': options.seed,
                  'checks': [asdict(check) for check in checks]}, options.json)
    return int(broken > 0)


if __name__ == '__main__':
    sys.exit(main())
