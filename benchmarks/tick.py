"""Ticks of models that fill GPUs: milliseconds of a denoised chunk, of a whole tick and of its parts.

    python benchmarks/tick.py --folder benchmarks/results                 # writes tick_<gpu>.json there
    python benchmarks/tick.py --folder ... --gpus 1 4 --cases robot_3b    # of the cases, those with these in their name

Random weights, as fast as trained ones. A tick is from a camera frame on the host to its checked plan on the host, over a
full window, back to back or at a camera's interval (--periods). Times of networks are device times:
``chunk_ms`` is all denoising steps of a chunk, ``commit_ms`` the pass that adds the observed frame to the cache.
The baseline, in the same run, is what one would write without this project: the same network in bf16 under
torch.compile, with a cache that is cloned (tick_baseline.py); ``ratio_compile_bf16`` is its chunk's time by this one's, and
``ratio_compile_bf16_masked`` that of the same without FlexAttention where a preset has tiles.
Every case has a process of its own, so that a failure leaves the others' rows, which are written as they come.
"""
from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from result_file import command, short_name, write_result

BACKENDS = {'fp32': 'torch', 'bf16': 'torch-bf16', 'bf16-compiled': 'torch-compiled', 'fp8': 'torch-fp8'}
BASELINE, MASKED = 'compile-bf16', 'compile-bf16-masked'  # of presets with tiles: FlexAttention; all tiles, masked
RATIOS = {BASELINE: 'ratio_compile_bf16', MASKED: 'ratio_compile_bf16_masked'}
NAME = 'tick'


@dataclass(frozen=True)
class Case:
    """``dtype``: one of BACKENDS, or of RATIOS. ``parallel``: how several GPUs share a model."""

    preset: str
    dtype: str
    gpus: int = 1
    parallel: str = 'single'

    def __str__(self) -> str:
        return f'{self.preset}/{self.dtype}/{self.gpus}' + ('' if self.gpus == 1 else f'/{self.parallel}')


def cases(gpus: int) -> list[Case]:
    """Return what is measured on ``gpus`` GPUs, by priority."""
    if gpus == 1:
        return [Case('base', 'bf16-compiled'), Case('robot_3b', 'fp8'), Case('robot_3b', BASELINE),
                Case('base', BASELINE), Case('base', 'fp8'), Case('robot_3b', 'bf16'), Case('base', 'bf16'),
                Case('robot_3b_4k', 'fp8'), Case('robot_3b', MASKED)]
    found = [Case(preset, 'fp8', gpus, 'sequence-fp8') for preset in ('robot_3b', 'robot_3b_4k')]
    return [*found, *(Case('robot_3b', 'fp8', gpus, parallel) for parallel in ('sequence', 'tensor')),
            Case('robot_3b', 'bf16', gpus, 'sequence')]


def main() -> int:
    options = parsed()
    if options.case:
        return run_case(Case(**json.loads(options.case)), options)
    started = time.monotonic()
    wanted = [case for count in options.gpus for case in cases(count)]
    if options.presets:
        wanted = [Case(preset, dtype, count, options.parallel if count > 1 else 'single') for preset in options.presets
                  for dtype in options.dtypes for count in options.gpus]
    wanted = [case for case in wanted if not options.cases or any(part in str(case) for part in options.cases)]
    result = {'command': command(), 'weights': 'random', 'rows': [],
              'failed': {}}
    for case in wanted:
        left = options.budget - (time.monotonic() - started)
        if left < 30.0:
            result['failed'][str(case)] = f'not begun: the budget of {options.budget:g} s was spent'
            continue
        found, error = run_apart(case, left)
        result.update(found['about'])
        result['rows'] += found['rows']
        if options.restart and not error and case.dtype not in RATIOS:
            again, error = run_apart(case, left, '--ticks', '0')
            result.setdefault('restarts', {})[str(case)] = again.get('start_up')
        if error:
            result['failed'][str(case)] = error
        compare(result['rows'])
        save(result, options.folder)
    print(json.dumps(result, indent=1))
    return 1 if result['failed'] else 0


def run_apart(case: Case, limit: float, *more: str) -> tuple[dict, str]:
    """Run a case in a process of its own; return its machine and rows, and why there are no more."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / 'rows.json'
        command = [sys.executable, __file__, *sys.argv[1:], *more, '--case', json.dumps(asdict(case)), '--out',
                   str(out)]
        print(f'{case} ...', file=sys.stderr, flush=True)
        try:
            code = subprocess.run(command, timeout=limit, stdout=sys.stderr).returncode
            error = f'exit status {code}; its last words are in the log' if code else ''
        except subprocess.TimeoutExpired:
            error = f'ended after {limit:.0f} s'
        return json.loads(out.read_text()) if out.is_file() else {'about': {}, 'rows': []}, error


def run_case(case: Case, options: argparse.Namespace) -> int:
    """Run one case, in this process."""
    import torch
    from tick_work import PEAK, cache_bytes_per_second, chunk_flops

    from worldmodel_ros.machine import machine, versions
    from worldmodel_ros.model.presets import PRESETS
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    preset, rows = PRESETS[case.preset], []
    measured = run_baseline if case.dtype in RATIOS else run_engine
    gpu = torch.cuda.get_device_name() if on_gpu else 'none'
    for steps, found in measured(case, options):
        if steps is None:  # start-up only
            options.out.write_text(json.dumps({'about': {}, 'rows': [], **found}))
            continue
        flops, chunk = chunk_flops(preset, steps), found['chunk_ms']['p50']
        rows.append({
            'gpu': gpu, 'gpus': case.gpus if on_gpu else 0, 'preset': case.preset,
            'tokens': preset.chunk_frames * preset.tokens, 'context_chunks': preset.window_frames / preset.chunk_frames,
            'steps': steps, 'dtype': case.dtype, 'parallel': case.parallel, **dict.fromkeys(RATIOS.values()),
            'chunk_tflop': {name: round(value / 1e12, 3) for name, value in flops.items()},
            'fp8_mfu': round(sum(flops.values()) / (chunk * 1e-3) / (PEAK['fp8'] * case.gpus), 4) if on_gpu else None,
            'cache_mib_per_second_formula': {name: round(cache_bytes_per_second(preset, size) / 2 ** 20, 3)
                                             for name, size in (('bf16', 2), ('fp8', 1))},
            **found})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        options.out.write_text(json.dumps({'about': {'machine': machine(), 'versions': versions()}, 'rows': rows}))
    return 0


def run_engine(case: Case, options: argparse.Namespace):
    """Yield the steps and measurements of this project's engine."""
    from tick_measure import measure, memory

    from worldmodel_ros.engine.loading import load_random
    start = time.perf_counter()
    engine = load_random(case.preset, BACKENDS[case.dtype], sessions=1,
                         **({'gpus': case.gpus, 'parallel': case.parallel} if case.gpus > 1 else {}))
    loaded = time.perf_counter()
    engine.warm_up(ticks=4)
    launch = engine.backend._launch  # its graphs, on one GPU
    start_up = {'load_s': round(loaded - start, 2), 'warm_up_s': round(time.perf_counter() - loaded, 2),
                'graphs': getattr(launch, 'captures', 0),
                'compile_and_capture_s': round(getattr(launch, 'capture_seconds', 0.0), 2)}
    try:
        if not options.ticks:
            yield None, {'start_up': start_up}
            return
        for steps, period in product(options.steps, options.periods):
            yield steps, {**measure(engine, steps, options.ticks, options.limit, period), 'period_ms': 1e3 * period,
                          'memory': memory(engine), 'start_up': start_up}
    finally:
        if case.gpus > 1:
            engine.close()


def run_baseline(case: Case, options: argparse.Namespace):
    from tick_baseline import measure_baseline

    from worldmodel_ros.model.presets import PRESETS
    for steps in options.steps:
        yield steps, measure_baseline(PRESETS[case.preset], steps, options.ticks, options.limit, flex=case.dtype == BASELINE)


def compare(rows: list[dict]) -> None:
    """Add to each row how many times faster it is than the baselines on one such GPU."""
    for dtype, ratio in RATIOS.items():
        times = {(row['gpu'], row['preset'], row['steps']): row['chunk_ms']['p50'] for row in rows
                 if row['dtype'] == dtype}
        for row in rows:
            reference = times.get((row['gpu'], row['preset'], row['steps']))
            row[ratio] = reference and round(reference / row['chunk_ms']['p50'], 2)


def save(result: dict, folder: Path | None) -> None:
    gpus = result.get('machine', {}).get('gpus') or []
    name = f'{NAME}_{short_name(gpus)}{f"x{len(gpus)}" if len(gpus) > 1 else ""}.json'
    write_result(result, folder and folder / name)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--gpus', type=int, nargs='*', default=[1], help='numbers of GPUs')
    parser.add_argument('--cases', nargs='*', help='parts of the names of cases; default: all')
    parser.add_argument('--presets', nargs='*', help='instead of the cases: these, by each of --dtypes')
    parser.add_argument('--dtypes', nargs='*', default=['fp32', BASELINE], choices=[*BACKENDS, *RATIOS])
    parser.add_argument('--parallel', default='sequence-fp8', help='of --presets on several GPUs')
    parser.add_argument('--steps', type=int, nargs='*', default=[2, 1])
    parser.add_argument('--periods', type=float, nargs='*', default=[0.0], help='s, from one tick to the next one; 0: one '
                        'right after the other, in which large models keep a GPU at its limit of power')
    parser.add_argument('--ticks', type=int, default=1000)
    parser.add_argument('--restart', action='store_true', help='start each engine again: what it compiled is kept')
    parser.add_argument('--limit', type=float, default=180.0, help='seconds of one row, at most')
    parser.add_argument('--budget', type=float, default=570.0, help='seconds of all cases')
    parser.add_argument('--folder', type=Path)
    parser.add_argument('--case', help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument('--out', type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == '__main__':
    raise SystemExit(main())
