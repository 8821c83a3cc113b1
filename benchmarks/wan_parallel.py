"""An open world model divided among several GPUs: a chunk of 14B with its images, random weights.

    python benchmarks/wan_parallel.py --gpus 2 --folder benchmarks/results          # FP8, then bf16
    python benchmarks/wan_parallel.py --tiny --gpus 2 --folder /tmp/wan              # tries the code on CPUs, measures nothing

Sizes as in wan.py, whose models these are. Each process has all weights, a run of a chunk's tokens, own heads of the pages, and
own rows of the images, which are decoded after the passes: ``chunk_ms`` is the time between chunks whose images are there. For
each type of layers the processes are new, so that one that fails leaves the other's rows, and these are written as they come
(``wan_<gpu>x<gpus>.jsonl``; all of a run in ``.json``):

* agreement: chunks of two layers of full width, divided, compared with those of one process.
* passes started by the host; then, if time is left, replayed as one CUDA graph, and for as many chunks if that is faster
  (``--graph``: as a graph alone, for GPUs that are done before the host has started all). A first row is of a few chunks.
  ``exchange_ms``: what the messages of a chunk take by themselves, one after the other.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import wan
import wan_kernels
from result_file import provenance, write_result
from torch import Tensor

from worldmodel_ros.model.parallel.group import SequenceParallel
from worldmodel_ros.model.parallel.link import Link
from worldmodel_ros.model.wan.graphs import GraphedSampler
from worldmodel_ros.model.wan.parallel import join
from worldmodel_ros.model.wan.sampler import Sampler
from worldmodel_ros.model.wan.sequence import PagedSequences, Window

LIMITS = {'fp8': 0.06, 'bf16': 0.01}
FIRST = 12  # chunks after which a first row is written
CHECKED = 3  # chunks that are compared with those of one process
ENVIRONMENT = {'NCCL_NVLS_ENABLE': '0', 'TORCH_SYMM_MEM_DISABLE_MULTICAST': '1', 'OMP_NUM_THREADS': '1'}


class Divided:
    """What one of the processes has of a model: ``wan.Model``, whose network works with the others'."""

    def __init__(self, run: wan.Run, group: SequenceParallel, fp8: bool, layers: int | None = None):
        self.run, self.group, name = run, group, wan.NAMES['large']
        if layers is not None:
            run = _with_layers(run, layers)
        torch.manual_seed(0)  # all draw the same inputs
        self.model = model = wan.Model(run, name, fp8)
        join(model.dit, group)

    def pages(self) -> PagedSequences:
        model, preset = self.model, self.model.preset
        precision = wan.Precision.FP8 if model.dtype == 'fp8' else wan.Precision.BF16
        window = Window(preset.window_frames, preset.sink_frames, wan.CHUNK)
        return PagedSequences(model.config, window, self.run.grid, precision, self.run.device, group=self.group)


def _with_layers(run: wan.Run, layers: int) -> wan.Run:
    """The same, whose models have so many layers."""
    other = object.__new__(type(run))
    other.__dict__.update(run.__dict__)

    def preset(name: str) -> wan.WanPreset:
        whole = run.preset(name)
        return replace(whole, config=replace(whole.config, layers=layers))
    other.preset = preset
    return other


@torch.inference_mode()
def agreement(run: wan.Run, group: SequenceParallel, fp8: bool) -> dict:
    """How far chunks of two layers are from those of one process, and whether all processes have the same bits."""
    divided = Divided(run, group, fp8, 2)
    torch.manual_seed(0)
    alone, found, wanted = wan.Model(_with_layers(run, 2), wan.NAMES['large'], fp8), [], []
    for model, pages, latents in ((divided.model, divided.pages(), found), (alone, alone.pages(), wanted)):
        sequence = pages.open()
        latents += [model.chunk(sequence) for _ in range(CHECKED)]
    difference = max(map(wan_kernels.error, found, wanted))
    bits = group.gather(torch.stack(found).view(torch.int32).sum(dtype=torch.int64)[None], 0)
    limit = LIMITS[divided.model.dtype]
    return {'part': 'agreement', 'dtype': divided.model.dtype, 'difference': difference, 'limit': limit,
            'same_bits': bool((bits == bits[0]).all()), 'passed': difference <= limit and bool((bits == bits[0]).all())}


@torch.inference_mode()
def decoded(run: wan.Run, chunk: Callable[[], Tensor], vae: object | None, state: object, count: int) -> tuple[list, object]:
    """ms between chunks whose images are there, the host being one chunk ahead; and the decoder's last state."""
    ahead, marks = deque(), []
    run.wait()
    for _ in range(count + 2):
        latents = chunk()
        if vae is not None:
            _, state = vae.decode(latents, state)
        ahead.append(None if run.tiny else torch.cuda.current_stream().record_event())
        if len(ahead) > 1:
            _wait(ahead.popleft())
            marks.append(time.perf_counter())
    return [1e3 * (b - a) for a, b in zip(marks, marks[1:])], state


def _wait(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()


@torch.inference_mode()
def exchange_ms(run: wan.Run, group: SequenceParallel, model: wan.Model) -> float:
    """Of the messages of a chunk, which the passes hide or not: products of queries, keys and values for the other processes,
    means of squares, and what was attended to."""
    c, count = model.config, group.count
    tokens = -(-wan.CHUNK * run.grid[0] * run.grid[1] // count)
    part = torch.zeros(tokens, 3 * c.width // count, dtype=torch.bfloat16, device=run.device)
    attended = torch.zeros(tokens * count, c.heads // count, c.head_dim, dtype=torch.bfloat16, device=run.device)
    squares = torch.zeros(2, tokens * count, device=run.device)
    calls = len(model.preset.schedule.timesteps) * c.layers

    def messages() -> None:
        for _ in range(10):
            group.exchange_products(lambda rank: part, c.head_dim)
            group.sum(squares)
            group.exchange(attended, 0, 1)
    messages()
    return round(min(run.ms(messages) for _ in range(3)) / 10 * calls, 2)


@torch.inference_mode()
def measure(run: wan.Run, group: SequenceParallel, fp8: bool, chunks: int, graph_alone: bool, row: Callable[..., None]) -> None:
    start, several = time.perf_counter(), group.count > 1
    divided = Divided(run, group, fp8)
    model, sequence = divided.model, divided.pages().open()
    vae, state = wan.decoder(run, group=group if several else None), None
    model.fill(sequence)
    if vae is not None:
        state = vae.decode(model.noise, vae.start())[1]
        for _ in range(2):
            state = vae.decode(model.noise, state)[1]
    run.wait()
    about = {'model': wan.NAMES['large'], 'dtype': model.dtype, 'parallel': 'sequence-fp8' if group.rounded else 'sequence',
             'parameters': model.config.parameters, 'passes': len(model.preset.schedule.timesteps),
             'tokens_a_frame': run.grid[0] * run.grid[1],
             'chunk_frames': wan.CHUNK, 'window_frames': model.preset.window_frames, 'tflop': model.tflop(),
             'vae': wan.vae_note(run, vae) + ('' if vae is None else ', each process some rows of each image'),
             'ready_s': round(time.perf_counter() - start, 1)}
    times: dict[bool, list[float]] = {False: [], True: []}

    def part(graph: bool, count: int) -> None:
        nonlocal state
        found, state = decoded(run, lambda: model.chunk(sequence), vae, state, count)
        times[graph] += found
        parts = {'dit_ms': wan.summary([run.ms(lambda: model.chunk(sequence)) for _ in range(3)]),
                 'vae_ms': None if vae is None else wan.summary([run.ms(lambda: vae.decode(model.noise, state))
                                                                 for _ in range(3)])}
        if not model.chunk(sequence).isfinite().all():
            raise RuntimeError('latents are not finite: the times mean nothing')
        row(**about, chunk_ms=wan.summary(times[graph]), chunks=len(times[graph]), graph=graph, **parts,
            allocated_gib=run.allocated_gib(), exchange_ms=exchange_ms(run, group, model))
    if not graph_alone:
        for count in (min(FIRST, chunks), chunks - FIRST):
            if count > 0:
                part(False, count)
        if not agreed(group, run.left() > 30.0 + (FIRST + 10) * 1e-3 * wan.summary(times[False])['p50']):
            return
    model.sampler = GraphedSampler(Sampler(model.dit, model.preset.schedule))
    model.chunk(sequence)  # which captures
    part(True, min(FIRST, chunks))
    second = 1e-3 * wan.summary(times[True])['p50']
    faster = graph_alone or second < 1e-3 * wan.summary(times[False])['p50']
    if chunks > FIRST and agreed(group, faster and run.left() > 10.0 + (chunks - FIRST + 10) * second):
        part(True, chunks - FIRST)


def agreed(group: SequenceParallel, own: bool) -> bool:
    """What rank 0 decides."""
    return bool(group.sum(torch.tensor([int(own and group.rank == 0)], device=group.link.device)))


def process(options: argparse.Namespace) -> None:
    """One of the processes: rank 0 writes rows to --rows."""
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    torch.set_num_threads(1)
    run = wan.Run(options)
    if not run.tiny:
        torch.cuda.set_device(options.rank)
        run.device = torch.device('cuda', options.rank)
    connect = Link.listen if options.rank == 0 else lambda count: Link.connect(options.port, count)
    store = connect(options.gpus)
    if options.rank == 0:
        print(store.port, flush=True)
    group = SequenceParallel(Link.join(run.device, options.rank, options.gpus, store), options.rounded)
    run.seconds, run._end = options.seconds, time.perf_counter() + options.seconds

    def row(**values: object) -> None:
        if options.rank == 0:
            with options.rows.open('a') as file:
                print(json.dumps({'gpu': run.gpu, 'gpus': options.gpus, 'weights': 'random', **values}), file=file)
    fp8 = options.dtypes == ['fp8']
    row(**agreement(run, group, fp8))
    if not run.tiny:
        torch.cuda.empty_cache()
    measure(run, group, fp8, options.large_chunks, options.graph, row)
    agreed(group, True)
    Link.leave().result()
    os._exit(0)  # graphs hold messages, which their destruction at the interpreter's end would look for


def run_dtype(options: argparse.Namespace, dtype: str, seconds: float) -> str:
    """All processes of one type of layers; why they failed, if they did."""
    rows = options.folder / f'wan_parallel_{dtype}.rows'
    rows.unlink(missing_ok=True)
    common = [sys.executable, __file__, '--folder', str(options.folder), '--gpus', str(options.gpus), '--dtypes', dtype,
              '--large-chunks', str(options.large_chunks), '--seconds', str(seconds), '--rows', str(rows),
              *(f'--{name}' for name in ('tiny', 'rounded', 'graph') if getattr(options, name))]
    environment = {**os.environ, **ENVIRONMENT}
    children = [subprocess.Popen([*common, '--rank', '0'], stdout=subprocess.PIPE, text=True, env=environment)]
    end, error = time.monotonic() + seconds, ''
    try:
        port = children[0].stdout.readline().strip()
        children += [subprocess.Popen([*common, '--rank', str(rank), '--port', port], env=environment)
                     for rank in range(1, options.gpus)]
        while any(child.poll() is None for child in children) and time.monotonic() < end \
                and not any(child.poll() for child in children):
            time.sleep(0.2)
        codes = [child.poll() for child in children]
        if any(code != 0 for code in codes):
            error = f'after {seconds:.0f} s or less: exit statuses {codes} (None: it was still running)'
    finally:
        for child in children:
            child.kill()
            child.wait()
    return error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--folder', type=Path, required=True)
    parser.add_argument('--gpus', type=int, default=2)
    parser.add_argument('--dtypes', nargs='+', choices=wan.DTYPES, default=wan.DTYPES)
    parser.add_argument('--large-chunks', type=int, default=50, help='timed, of each row')
    parser.add_argument('--seconds', type=float, default=300.0, help='of all; a type of layers has its share')
    parser.add_argument('--rounded', action='store_true', help='processes exchange e4m3 (``SequenceParallel.rounded``)')
    parser.add_argument('--graph', action='store_true', help='all passes of a chunk as one CUDA graph alone')
    parser.add_argument('--tiny', action='store_true')
    parser.add_argument('--rank', type=int, help=argparse.SUPPRESS)  # one of the processes
    parser.add_argument('--port', type=int, help=argparse.SUPPRESS)
    parser.add_argument('--rows', type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.tiny and torch.cuda.device_count() < options.gpus:
        raise SystemExit(f'{options.gpus} GPUs are needed, and there are {torch.cuda.device_count()}; --tiny tries it on CPUs')
    if options.rank is not None:
        options.chunks, options.long, options.eager = options.large_chunks, 0, True
        process(options)
    options.folder.mkdir(parents=True, exist_ok=True)
    start, result = time.monotonic(), {**provenance(('torch', 'triton', 'diffusers')), 'weights': 'random', 'failed': {},
                                       'rows': []}
    gpu = 'tiny' if options.tiny else torch.cuda.get_device_name().replace('NVIDIA ', '').replace(' ', '_').lower()
    for at, dtype in enumerate(options.dtypes):
        left = options.seconds - (time.monotonic() - start)
        error = run_dtype(options, dtype, left / (len(options.dtypes) - at))
        rows = options.folder / f'wan_parallel_{dtype}.rows'
        result['rows'] += [json.loads(line) for line in rows.read_text().splitlines()] if rows.is_file() else []
        rows.unlink(missing_ok=True)
        if error:
            result['failed'][dtype] = error
        write_result(result, options.folder / f'wan_{gpu}x{options.gpus}.json')
    print(json.dumps(result, indent=1))
    return 1 if result['failed'] else 0


if __name__ == '__main__':
    raise SystemExit(main())
