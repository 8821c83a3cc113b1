"""An open world model divided among several GPUs: a chunk of 14B with its images, random weights.

    python benchmarks/wan_parallel.py --gpus 2 --folder benchmarks/results          # FP8, then bf16
    python benchmarks/wan_parallel.py --tiny --gpus 2 --folder /tmp/wan              # tries the code on CPUs, measures nothing

Sizes as in wan.py, whose models these are. Each process has all weights, a range of a chunk's tokens, its own heads of the
pages, and its own rows of the images, which are decoded after the passes, or with ``--overlap`` on a stream of lower priority
while the passes of the next chunk run. Each type of layers has new processes, so that a failure leaves the other's rows, which
are written as they come (``wan_<gpu>x<gpus>.jsonl``; all of a run in ``.json``):

* agreement: chunks of two layers of full width, divided, compared with those of one process.
* passes started by the host; then, if time is left, replayed as one CUDA graph, and for as many chunks if that is faster
  (``--graph``: as a graph only, for GPUs that finish before the host has launched all). The first row covers a few chunks.
  ``exchange_ms``: the messages of a chunk by themselves, one after the other.
* ``--overlap``: rows with ``overlap`` true follow those of the same passes without. ``images_difference``: the largest
  difference between images decoded next to the following passes and decoded alone (they are from -1 to 1).

For a stream of chunks, with the host one ahead, each row has:

* ``chunk_ms``, the throughput: the time between one chunk's images and the next one's. A chunk of 12 images at 16 a second is
  shown for 750 ms.
* ``latency_ms``: from when a chunk's work begins on the GPU, by when its poses must be known, to its images. With ``--overlap``
  that is longer than ``chunk_ms``, since the next chunk's passes precede the decoder.
* ``queued_ms``: from when the host queued the chunk to its images; it need not queue so early.
* ``alone_ms``: the host's call for one chunk and its images, with no other chunk in flight.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
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
CHECKED = 3  # chunks compared with those of one process
ENVIRONMENT = {'NCCL_NVLS_ENABLE': '0', 'TORCH_SYMM_MEM_DISABLE_MULTICAST': '1', 'OMP_NUM_THREADS': '1'}


class Divided:
    """A process's share of a model: ``wan.Model``, whose network works with the others'."""

    def __init__(self, run: wan.Run, group: SequenceParallel, fp8: bool, layers: int | None = None):
        self.run, self.group, name = run, group, wan.NAMES['large']
        if layers is not None:
            run = _with_layers(run, layers)
        torch.manual_seed(0)  # the same inputs in all processes
        self.model = model = wan.Model(run, name, fp8)
        join(model.dit, group)

    def pages(self) -> PagedSequences:
        model, preset = self.model, self.model.preset
        precision = wan.Precision.FP8 if model.dtype == 'fp8' else wan.Precision.BF16
        window = Window(preset.window_frames, preset.sink_frames, wan.CHUNK)
        return PagedSequences(model.config, window, self.run.grid, precision, self.run.device, group=self.group)


def _with_layers(run: wan.Run, layers: int) -> wan.Run:
    """Return the same, whose models have ``layers`` layers."""
    other = object.__new__(type(run))
    other.__dict__.update(run.__dict__)

    def preset(name: str) -> wan.WanPreset:
        whole = run.preset(name)
        return replace(whole, config=replace(whole.config, layers=layers))
    other.preset = preset
    return other


@torch.inference_mode()
def agreement(run: wan.Run, group: SequenceParallel, fp8: bool) -> dict:
    """Compare chunks of two layers with those of one process, and check that all processes have the same bits."""
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


class Decoder:
    """Decodes one stream of chunks on a CUDA stream of its own, with later passes waiting for it or not."""

    def __init__(self, run: wan.Run, vae: object | None):
        self._run, self._stream = run, None if vae is None else wan.decode_stream(vae, None)

    def after(self, latents: Tensor) -> Moment:
        """Decode before whatever follows; return the moment when the images are ready."""
        if self._stream is not None:
            self._stream.decode(latents).images()
        return Moment(self._run)

    def overlapping(self, latents: Tensor) -> Moment:
        """Decode next to whatever follows; return the same."""
        self._stream.decode(latents)
        return Moment(self._run, self._stream.stream)

    def difference(self, chunk: Callable[[], Tensor]) -> float:
        """Return how much a chunk's images, decoded next to the following passes, differ from those decoded alone."""
        latents, before = chunk(), self._stream.state
        found = self._stream.decode(latents)
        chunk()
        self._run.wait()
        self._stream.state = before
        return float((found.images() - self._stream.decode(latents).images()).abs().max())


class Moment:
    """The completion of a stream's work so far; on a CPU, that is now."""

    def __init__(self, run: wan.Run, stream: torch.cuda.Stream | None = None):
        self._event, self._time = None if run.tiny else torch.cuda.Event(enable_timing=True), time.perf_counter()
        if self._event is not None:
            self._event.record(torch.cuda.current_stream() if stream is None else stream)

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def ms_to(self, later: Moment) -> float:
        """Return the ms to a later moment; both must have passed."""
        return 1e3 * (later._time - self._time) if self._event is None else self._event.elapsed_time(later._event)


@torch.inference_mode()
def streamed(run: wan.Run, chunk: Callable[[], Tensor], decode: Callable[[Tensor], Moment], count: int
             ) -> dict[str, list[float]]:
    """Return ``chunk_ms``, ``latency_ms`` and ``queued_ms`` of ``count`` chunks, with the host one ahead."""
    ahead, there = deque(), []
    found: dict[str, list[float]] = {'chunk_ms': [], 'latency_ms': [], 'queued_ms': []}
    run.wait()
    for _ in range(count + 2):
        queued, begin = time.perf_counter(), Moment(run)
        ahead.append((queued, begin, decode(chunk())))
        if len(ahead) > 1:
            queued, begin, images = ahead.popleft()
            images.wait()
            there.append(time.perf_counter())
            if len(there) > 1:  # the first one was queued with nothing before it
                found['chunk_ms'].append(1e3 * (there[-1] - there[-2]))
                found['latency_ms'].append(begin.ms_to(images))
                found['queued_ms'].append(1e3 * (there[-1] - queued))
    return found


@torch.inference_mode()
def exchange_ms(run: wan.Run, group: SequenceParallel, model: wan.Model) -> float:
    """Time the messages of a chunk, whether or not the passes hide them: products of queries, keys and values for the other
    processes, means of squares, and attention outputs."""
    c, count = model.config, group.count
    tokens = -(-wan.CHUNK * run.grid[0] * run.grid[1] // count)
    part = torch.zeros(tokens, 3 * c.width // count, dtype=torch.bfloat16, device=run.device)
    attended = torch.zeros(tokens, c.width // count, dtype=torch.bfloat16, device=run.device)
    squares = torch.zeros(2, tokens * count, device=run.device)
    calls = len(model.preset.schedule.timesteps) * c.layers

    def messages() -> None:
        for _ in range(10):
            group.exchange_products(lambda rank, out: part if out is None else out, part, c.head_dim)
            group.sum(squares)
            group.exchange_products(lambda rank, out: attended if out is None else out, attended, c.head_dim, joined=True)
    messages()
    return round(min(run.ms(messages) for _ in range(3)) / 10 * calls, 2)


@torch.inference_mode()
def measure(run: wan.Run, group: SequenceParallel, fp8: bool, chunks: int, graph_alone: bool, overlap: bool,
            row: Callable[..., None]) -> None:
    start, several = time.perf_counter(), group.count > 1
    divided = Divided(run, group, fp8)
    model, sequence = divided.model, divided.pages().open()
    decoders = None
    if several:  # all decode with the same messages, one stream after the other
        decoders = SequenceParallel(group.link.background()) if overlap else group
    vae = wan.decoder(run, group=decoders)
    decoder = Decoder(run, vae)
    overlap = overlap and vae is not None
    model.fill(sequence)
    say(run, group, 'the window is full')
    for _ in range(3):
        decoder.after(model.noise)
    run.wait()
    say(run, group, 'the decoder is ready')
    about = {'model': wan.NAMES['large'], 'dtype': model.dtype, 'parallel': 'sequence-fp8' if group.rounded else 'sequence',
             'parameters': model.config.parameters, 'passes': len(model.preset.schedule.timesteps),
             'tokens_a_frame': run.grid[0] * run.grid[1],
             'chunk_frames': wan.CHUNK, 'window_frames': model.preset.window_frames, 'tflop': model.tflop(),
             'vae': wan.vae_note(run, vae) + ('' if vae is None else ', each process some rows of each image'),
             'ready_s': round(time.perf_counter() - start, 1)}
    times: dict[tuple[bool, bool], dict[str, list[float]]] = {}

    def chunk() -> Tensor:
        return model.chunk(sequence)

    def part(graph: bool, count: int, overlapping: bool = False) -> float:
        """Write a row of ``count`` more chunks; return their median time, s."""
        decode = decoder.overlapping if overlapping else decoder.after
        all_of = times.setdefault((graph, overlapping), {})
        for name, found in streamed(run, chunk, decode, count).items():
            all_of.setdefault(name, []).extend(found)
        parts: dict[str, object] = {'alone_ms': wan.summary([run.ms(lambda: decode(chunk())) for _ in range(3)])}
        if overlapping:
            parts['images_difference'] = decoder.difference(chunk)
        else:
            parts |= {'dit_ms': wan.summary([run.ms(chunk) for _ in range(3)]),
                      'vae_ms': None if vae is None else wan.summary([run.ms(lambda: decoder.after(model.noise))
                                                                      for _ in range(3)]),
                      'exchange_ms': exchange_ms(run, group, model)}
        if not chunk().isfinite().all():
            raise RuntimeError('latents are not finite: the times mean nothing')
        row(**about, graph=graph, overlap=overlapping, **{name: wan.summary(found) for name, found in all_of.items()},
            chunks=len(all_of['chunk_ms']), **parts, allocated_gib=run.allocated_gib())
        return 1e-3 * wan.summary(all_of['chunk_ms'])['p50']

    def more(graph: bool, seconds: float, overlapping: bool = False) -> None:
        """Run as many as were asked for, if time is left for them."""
        if chunks > FIRST and agreed(group, run.left() > 10.0 + (chunks - FIRST + 10) * seconds):
            part(graph, chunks - FIRST, overlapping)
    first, by_host = min(FIRST, chunks), math.inf
    if not graph_alone:
        by_host = part(False, first)
        if chunks > FIRST:
            by_host = part(False, chunks - FIRST)
        if not agreed(group, run.left() > 30.0 + (FIRST + 10) * by_host):
            return
    model.sampler = GraphedSampler(Sampler(model.dit, model.preset.schedule))
    chunk()  # captures the graph
    run.wait()
    say(run, group, 'the graph is captured')
    by_graph = part(True, first)
    if overlap:
        more(True, part(True, first, True), True)
    elif agreed(group, by_graph < by_host):
        more(True, by_graph)


def say(run: wan.Run, group: SequenceParallel, text: str) -> None:
    """Report progress, on rank 0."""
    if group.rank == 0:
        print(f'{time.perf_counter() - run.start:.1f} s: {text}', file=sys.stderr, flush=True)


def agreed(group: SequenceParallel, own: bool) -> bool:
    """Return rank 0's decision."""
    return bool(group.sum(torch.tensor([int(own and group.rank == 0)], device=group.link.device)))


def process(options: argparse.Namespace) -> None:
    """Run one of the processes: rank 0 writes rows to --rows."""
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
    say(run, group, 'all have joined')
    # Passes have priority over background decoding.
    with nullcontext() if run.tiny else torch.cuda.stream(torch.cuda.Stream(priority=-1)):
        row(**agreement(run, group, fp8))
        if not run.tiny:
            torch.cuda.empty_cache()
        say(run, group, 'agreement is measured')
        measure(run, group, fp8, options.large_chunks, options.graph, options.overlap, row)
        agreed(group, True)
    Link.leave().result()
    os._exit(0)  # destroying the graphs at exit would access their messages


def run_dtype(options: argparse.Namespace, dtype: str, seconds: float) -> str:
    """Run all processes of one type of layers; return why they failed, if they did."""
    rows = options.folder / f'wan_parallel_{dtype}.rows'
    rows.unlink(missing_ok=True)
    common = [sys.executable, __file__, '--folder', str(options.folder), '--gpus', str(options.gpus), '--dtypes', dtype,
              '--large-chunks', str(options.large_chunks), '--seconds', str(seconds), '--rows', str(rows),
              *(f'--{name}' for name in ('tiny', 'rounded', 'graph', 'overlap') if getattr(options, name))]
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
    parser.add_argument('--overlap', action='store_true', help='decode while the passes of the next chunk run')
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
