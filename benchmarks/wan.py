"""Open world models of the Wan family: a chunk of video on one GPU, random weights, compared with the alternatives.

    python benchmarks/wan.py --folder benchmarks/results              # everything
    python benchmarks/wan.py --folder benchmarks/results --parts small branches long
    python benchmarks/wan.py --tiny --folder /tmp/wan                 # tries the code on a CPU, measures nothing

480x832 (30x52 tokens a latent frame), chunks of 3 latent frames (12 images), a full window of 18 frames, five passes.
Every line is written as it is measured (``wan_<gpu>.jsonl``), and all of a run at its end (``wan_<gpu>.json``). A part that
exceeds its share of ``--seconds`` is cut short, and reports how many chunks its numbers cover.

* correct: the kernels, and a network of two layers at the full width, compared with their definitions in PyTorch.
* vae: the decoder as diffusers has it and with the layers of ``vae_layers``; the models' rows use the fastest.
* kernels: products, attention in parts and what lies between, each by itself.
* small, large: V2 1.3B, whose passes are replayed as a CUDA graph, and LingBot-World-Fast 14B, FP8 and bf16, which uses the
  faster way (``by_host_ms``, ``by_graph_ms``: passes of some chunks). ``chunk_ms``: time between chunks whose images
  are ready, each decoded while the passes of the next one run. ``dit_ms``, ``vae_ms``: one after the other. ``submit_ms``:
  host time for passes.
* branches: four futures of a moment. long: a run of many chunks.
* peers_small, peers_large: with the same weights, the published loop, compiled (``wan_published.py``), and diffusers'
  ``WanTransformer3DModel``, compiled as it offers, bf16. It has no cache, so a pass covers all frames of the window; the
  chunk alone is reported, too. Without diffusers, VAE and this peer are absent.
"""
from __future__ import annotations

import argparse
import gc
import json
import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import wan_kernels
from torch import Tensor
from wan_published import MovedWindow, PublishedPass

from worldmodel_ros.kernels.pages import Precision
from worldmodel_ros.machine import machine, versions
from worldmodel_ros.model.wan.checkpoint import build
from worldmodel_ros.model.wan.config import PATCH, PRESETS, WanConfig, WanPreset
from worldmodel_ros.model.wan.graphs import GraphedSampler
from worldmodel_ros.model.wan.precision import to_fp8
from worldmodel_ros.model.wan.sampler import Sampler
from worldmodel_ros.model.wan.sequence import PagedSequences, Window
from worldmodel_ros.model.weights import RandomWeights

# Each with its share of the seconds.
PARTS = {'correct': 45, 'vae': 50, 'small': 75, 'large': 185, 'kernels': 30, 'branches': 35, 'peers_small': 45,
         'peers_large': 75, 'long': 250}
NAMES = {'small': 'lingbot_world_v2_1.3b', 'large': 'lingbot_world_fast'}
HANGS = 40.0  # s past its end after which a part is given up
CHUNK, WINDOW = wan_kernels.CHUNK, wan_kernels.WINDOW
BRANCHES = 4
WAYS_CHUNKS = 4  # for each way to start passes
DTYPES = ['fp8', 'bf16']
TEXT_ROWS = 120  # of a prompt
ATTENTIONS = ('native', '_native_cudnn')  # diffusers' names
# Variants of the decoder: fused layers, channels last, residual blocks of our own, all frames of a chunk at once.
VAES = {'diffusers, frame by frame': (False, False, False, False), 'fused': (True, False, False, True),
        'fused, channels last': (True, True, False, True),
        'fused, channels last, residual blocks': (True, True, True, True)}

VAE_LIMIT = 0.03  # of a decoder in bf16, compared with float32


class TooLong(Exception):
    """A part has exceeded its time."""


class Run:
    """The state that all measurements share: device, sizes, output of rows."""

    def __init__(self, options: argparse.Namespace):
        self.tiny, self.compiled = options.tiny, not options.eager
        self.seconds, self.start, self._end = options.seconds, time.perf_counter(), math.inf
        self.device = torch.device('cpu' if options.tiny else 'cuda')
        self.grid = (6, 7) if options.tiny else (30, 52)
        self.chunks = {'small': 2, 'large': 2} if options.tiny else {'small': options.chunks, 'large': options.large_chunks}
        self.folder, self.vae_form = options.folder, 'fused, channels last, residual blocks'
        self.long, self.dtypes = 6 if options.tiny else options.long, options.dtypes
        self.gpu = 'none' if options.tiny else torch.cuda.get_device_name()
        self.rows: list[dict] = []
        self.failed: dict[str, str] = {}
        name = 'tiny' if options.tiny else self.gpu.replace('NVIDIA ', '').replace(' ', '_').lower()
        self.file = options.folder / f'wan_{name}.json'
        options.folder.mkdir(parents=True, exist_ok=True)
        self.lines = self.file.with_suffix('.jsonl').open('a')

    def preset(self, name: str) -> WanPreset:
        preset = replace(PRESETS[name], chunk_frames=CHUNK, window_frames=WINDOW)
        if self.tiny:
            config = WanConfig(512, 2, 4, 512, preset.config.in_channels, camera_width=preset.config.camera_width,
                               text_width=32)
            preset = replace(preset, config=config, window_frames=9, sink_frames=3)
        return preset

    @property
    def latent(self) -> tuple[int, int]:
        return self.grid[0] * PATCH, self.grid[1] * PATCH

    def row(self, **values: object) -> None:
        row = {'gpu': self.gpu, 'gpus': int(not self.tiny), 'weights': 'random', **values}
        self.rows.append(row)
        for stream in (self.lines, sys.stderr):
            print(json.dumps(row), file=stream, flush=True)

    @contextmanager
    def part(self, name: str, seconds: float | None = None) -> Iterator[None]:
        """Contain the failure or timeout of a part; with ``seconds``, it ends after them, or at the overall limit."""
        begin, outer = time.perf_counter(), self._end
        if seconds is not None:
            self._end = min(begin + seconds, self.start + self.seconds)
            signal.setitimer(signal.ITIMER_REAL, max(0.1, self._end - begin))
        try:
            yield
        except Exception as error:
            self.failed[name] = f'{type(error).__name__}: {error}'.splitlines()[0][:500]
            print(name, self.failed[name], file=sys.stderr, flush=True)
            if isinstance(error, TooLong) and seconds is None:
                raise  # the time of the enclosing part is over
        if seconds is not None:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            self._end = outer
            print(f'{name}: {time.perf_counter() - begin:.1f} s', file=sys.stderr, flush=True)
        gc.collect()
        if self.healthy() and not self.tiny:
            torch.cuda.empty_cache()

    def healthy(self) -> bool:
        """Return whether the GPU still answers; after some faults, all of a process's calls to it fail."""
        try:
            self.wait()
        except RuntimeError:
            return False
        return True

    def left(self) -> float:
        """Return the seconds left of the part."""
        return self._end - time.perf_counter()

    def wait(self) -> None:
        if not self.tiny:
            torch.cuda.synchronize()

    def ms(self, call: Callable[[], object]) -> float:
        self.wait()
        start = time.perf_counter()
        call()
        self.wait()
        return 1e3 * (time.perf_counter() - start)

    def allocated_gib(self) -> float | None:
        return None if self.tiny else round(torch.cuda.memory_allocated() / 2 ** 30, 2)


def summary(ms: list[float]) -> dict[str, float]:
    return {'p50': round(float(np.percentile(ms, 50)), 3), 'p99': round(float(np.percentile(ms, 99)), 3)}


class Model:
    """A network with a prompt, and random inputs for its chunks."""

    def __init__(self, run: Run, name: str, fp8: bool):
        self.run, self.preset = run, run.preset(name)
        self.config = self.preset.config
        self.dtype = 'fp8' if fp8 else 'bf16'
        self.dit = build(self.config, RandomWeights(0, run.device), run.device, torch.bfloat16)
        if fp8:
            to_fp8(self.dit)
        self.sampler = Sampler(self.dit, self.preset.schedule)
        if name == NAMES['small']:  # its kernels are so short that launching them would dominate
            self.sampler = GraphedSampler(self.sampler)
        text = torch.randn(TEXT_ROWS, self.config.text_width, device=run.device)
        with torch.inference_mode():
            self.prompt = self.dit.prompt(text)
            self.padded = self.dit.prompt(torch.cat([text, text.new_zeros(self.config.text_tokens - TEXT_ROWS, text.shape[1])]))
        shape = CHUNK, *run.latent
        self.noise = torch.randn(16, *shape, device=run.device)
        self.condition = torch.randn(self.config.condition_channels, *shape, device=run.device)
        self.rays = torch.randn(CHUNK * math.prod(run.grid), self.config.camera_width, device=run.device)

    def pages(self, sequences: int = 1, branches: int = 0) -> PagedSequences:
        window = Window(self.preset.window_frames, self.preset.sink_frames, CHUNK)
        return PagedSequences(self.config, window, self.run.grid, Precision.FP8 if self.dtype == 'fp8' else Precision.BF16,
                              self.run.device, sequences, branches)

    @torch.inference_mode()
    def chunk(self, sequence: object) -> Tensor:
        return self.sampler.chunk(sequence, self.prompt, lambda step: self.noise, self.condition, self.rays)

    def fill(self, sequence: object) -> None:
        """Fill the window, after which nothing compiles any more."""
        for _ in range(self.preset.window_frames // CHUNK + 1):
            self.chunk(sequence)

    def tflop(self) -> dict[str, float]:
        """Return the operations of a chunk, multiplications and additions, in 10^12: all passes but the last completely, and
        that up to the last layer's keys and values."""
        c, passes = self.config, len(self.preset.schedule.timesteps)
        tokens, layers = CHUNK * math.prod(self.run.grid), passes * c.layers - 1
        parts = {'linear': 2 * tokens * (layers * (6 * c.width ** 2 + 2 * c.width * c.ffn) + 3 * c.width ** 2),
                 'attention': 4 * tokens * layers * c.width * self.preset.window_frames * math.prod(self.run.grid),
                 'cross': 4 * tokens * layers * c.width * self.prompt.bias.numel(),
                 'camera': 2 * tokens * (c.layers * 4 * c.width ** 2 + 2 * c.width ** 2 + c.width * c.camera_width)}
        return {name: round(value / 1e12, 3) for name, value in parts.items()}


def moved_window(model: Model) -> MovedWindow:
    return MovedWindow(model.dit, model.run.grid, CHUNK, model.preset.window_frames, model.preset.sink_frames,
                       model.run.compiled)


@torch.inference_mode()
def reference_ms(model: Model) -> dict[str, float]:
    """Time a chunk of the published loop."""
    torch.compiler.reset()
    run, sequence = model.run, moved_window(model)
    sampler = Sampler(PublishedPass(model.dit, model.rays, run.compiled), model.preset.schedule)

    def chunk() -> None:
        sampler.chunk(sequence, model.padded, lambda step: model.noise, model.condition)
    for _ in range(model.preset.window_frames // CHUNK + 1):
        chunk()
    return summary(repeated(run, chunk, 10, 0.5))


def repeated(run: Run, call: Callable[[], object], most: int, share: float = 1.0) -> list[float]:
    """Return times, ms, of at least three calls, at most ``most``, as many as fit into a share of the part's remaining time."""
    found, end = [], time.perf_counter() + share * run.left()
    while len(found) < most and (len(found) < 3 or time.perf_counter() + found[-1] * 1e-3 < end):
        found.append(run.ms(call))
    return found


@torch.inference_mode()
def diffusers_ms(model: Model) -> dict[str, object] | None:
    """Time a pass of diffusers' transformer over the chunk alone and over the whole window, with its faster attention."""
    if find_spec('diffusers') is None:
        return None
    from diffusers import WanTransformer3DModel
    run, config = model.run, model.config
    with run.device:
        peer = WanTransformer3DModel(
            num_attention_heads=config.heads, attention_head_dim=config.head_dim, num_layers=config.layers, ffn_dim=config.ffn,
            in_channels=config.in_channels, out_channels=16, text_dim=config.text_width).eval().requires_grad_(False)
    for name, parameter in peer.named_parameters():
        if not any(part in name.split('.') for part in peer._keep_in_fp32_modules):
            parameter.data = parameter.data.to(torch.bfloat16)
    found: dict[str, object] = {'parameters': sum(p.numel() for p in peer.parameters())}
    inputs = {'timestep': torch.tensor([825], device=run.device), 'encoder_hidden_states': torch.randn(
        1, config.text_tokens, config.text_width, dtype=torch.bfloat16, device=run.device)}
    for attention in ATTENTIONS[:1] if run.tiny else ATTENTIONS:
        with run.part(f'diffusers {attention}'):
            torch.compiler.reset()
            peer.set_attention_backend(attention)
            if run.compiled:
                peer.compile_repeated_blocks(fullgraph=True)
            for name, frames in (('chunk_pass_ms', CHUNK), ('window_pass_ms', model.preset.window_frames)):
                x = torch.randn(1, config.in_channels, frames, *run.latent, dtype=torch.bfloat16, device=run.device)

                def call(x: Tensor = x) -> object:
                    return peer(x, **inputs, return_dict=False)
                for _ in range(2):
                    call()
                ms = summary(repeated(run, call, 3 if run.tiny else 10, 0.4))
                if name not in found or ms['p50'] < found[name]['p50']:
                    found[name] = ms
    return found


def decoder(run: Run, form: str | None = None, group: object | None = None) -> object | None:
    """Return the VAE with random weights, or None if diffusers is not installed; ``group``: as of ``WanVae``."""
    if find_spec('diffusers') is None:
        return None
    from diffusers import AutoencoderKLWan

    from worldmodel_ros.model.wan.vae import WanVae
    torch.manual_seed(1)
    with run.device:
        model = AutoencoderKLWan(base_dim=8) if run.tiny else AutoencoderKLWan().to(torch.bfloat16)
    model.encoder = None
    *how, _ = VAES[form or run.vae_form]
    return WanVae(model, *how, group)


def decode(vae: object, latents: Tensor, state: object, at_once: bool = True) -> tuple[Tensor, object]:
    if at_once:
        return vae.decode(latents, state)
    images = []
    for frame in latents.split(1, 1):
        one, state = vae.decode(frame, state)
        images.append(one)
    return torch.cat(images, 1), state


def measure_vae(run: Run) -> None:
    """Time the decoder of a chunk in several forms, and compare each with the first in float32."""
    noise, times = torch.randn(16, CHUNK, *run.latent, device=run.device), {}
    exact = decoder(run, next(iter(VAES)))
    if exact is None:
        raise RuntimeError('diffusers is not installed')
    exact.model.float()
    exact.dtype = torch.float32
    with torch.backends.cudnn.flags(allow_tf32=False, benchmark=False):
        wanted, _ = decode(exact, noise, decode(exact, noise, exact.start())[1])
    del exact
    for form, (*_, at_once) in VAES.items():
        with run.part(f'vae {form}'):
            vae = decoder(run, form)
            start = time.perf_counter()
            states = [decode(vae, noise, vae.start(), at_once)[1]]
            images, state = decode(vae, noise, states[0], at_once)
            states.append(state)

            def call(vae: object = vae, states: list = states, at_once: bool = at_once) -> None:
                states[:] = [decode(vae, noise, states[-1], at_once)[1]]
            call()
            run.wait()
            ready = time.perf_counter() - start
            ms = repeated(run, call, 3 if run.tiny else 15, 0.3)
            difference = wan_kernels.error(images, wanted)
            if difference <= VAE_LIMIT:
                times[form] = summary(ms)['p50']
            run.row(part='vae', form=form, vae_ms=summary(ms), difference=difference, passed=difference <= VAE_LIMIT,
                    state_gib=round(states[-1].nbytes / 2 ** 30, 3), ready_s=round(ready, 1))
    run.vae_form = min(times, key=times.get)


def measure_correctness(run: Run) -> None:
    def row(name: str, found: float, limit: float) -> None:
        run.row(part='correct', check=name, difference=found, limit=limit, passed=found <= limit)
        if not found <= limit:
            run.failed[f'correct: {name}'] = f'{found} > {limit}'
    with run.part('correct: networks'):
        sizes = ((256, 2, 512),) if run.tiny else ((1536, 12, 8960), (5120, 40, 13824))
        for size in sizes:
            for found in wan_kernels.network_differences(run.grid, 3 if run.tiny else 8, run.device, *size):
                row(*found)
    with run.part('correct: kernels'), torch.inference_mode():
        if not run.tiny:
            for found in wan_kernels.checks(run.grid, run.device):
                row(*found)


def measure_kernels(run: Run) -> None:
    for values in wan_kernels.timings(run.grid, run.device):
        run.row(part='kernels', **values)


def measure_model(run: Run, part: str, fp8: bool) -> None:
    """Write a row of one model, and its profile."""
    start, name = time.perf_counter(), NAMES[part]
    model = Model(run, name, fp8)
    sequence = model.pages().open()
    model.fill(sequence)
    tried = {} if part == 'small' else faster_way(model, sequence)
    own = tried | chunks_ms(model, sequence, start, run.chunks[part])
    tflop, p50 = model.tflop(), own['dit_ms']['p50']
    run.row(model=name, dtype=model.dtype, parameters=model.config.parameters, **own,
            graph=isinstance(model.sampler, GraphedSampler), passes=len(model.preset.schedule.timesteps),
            tokens_a_frame=math.prod(run.grid), chunk_frames=CHUNK,
            window_frames=model.preset.window_frames, tflop=tflop, tflop_per_s=round(1e3 * sum(tflop.values()) / p50, 1))
    with run.part(f'profile of {name} {model.dtype}'):
        profile(model, sequence)


@torch.inference_mode()
def faster_way(model: Model, sequence: object) -> dict[str, float]:
    """Give a model the sampler whose passes are faster: a CUDA graph, whose inputs have to be copied, or launches by the
    host."""
    run, found = model.run, {}
    by_host = model.sampler

    def timed() -> float:
        return summary([run.ms(lambda: model.chunk(sequence)) for _ in range(WAYS_CHUNKS)])['p50']
    found['by_host_ms'] = timed()
    with run.part(f'graph of {model.preset.name} {model.dtype}'):
        model.sampler = GraphedSampler(by_host)
        model.chunk(sequence)  # captures the graph
        found['by_graph_ms'] = timed()
    if not found.get('by_graph_ms', math.inf) < found['by_host_ms']:
        model.sampler = by_host
    return found


@torch.inference_mode()
def chunks_ms(model: Model, sequence: object, start: float, chunks: int) -> dict[str, object]:
    """Time chunks of a sequence whose window is full; time since ``start`` counts as start-up."""
    run, vae = model.run, decoder(model.run)
    state = None
    if vae is not None:
        state = vae.decode(model.noise, vae.decode(model.noise, vae.start())[1])[1]
        state = vae.decode(model.noise, state)[1]
    run.wait()
    ready = time.perf_counter() - start
    paced, latents = paced_ms(model, sequence, vae, state, chunks)
    dit, submitted, decoded = [], [], []

    def chunk() -> None:
        begin = time.perf_counter()
        model.chunk(sequence)
        submitted.append(1e3 * (time.perf_counter() - begin))
    dit = repeated(run, chunk, max(3, chunks // 4), 0.5)
    if vae is not None:
        decoded = repeated(run, lambda: vae.decode(latents, state), max(3, chunks // 4), 0.5)
    if not latents.isfinite().all():
        raise RuntimeError('latents are not finite: the times mean nothing')
    found = {'chunk_ms': summary(paced), 'chunks': len(paced), 'dit_ms': summary(dit), 'dit_chunks': len(dit),
             'submit_ms': summary(submitted), 'vae_ms': summary(decoded) if decoded else None, 'vae': vae_note(run, vae),
             'ready_s': round(ready, 1), 'allocated_gib': run.allocated_gib()}
    if not run.tiny:
        found['peak_gib'] = round(torch.cuda.max_memory_allocated() / 2 ** 30, 2)
    return found


def paced_ms(model: Model, sequence: object, vae: object | None, state: object, chunks: int) -> tuple[list[float], Tensor]:
    """Return ms between chunks, each decoded while the passes of the next one run; and the last one's latents."""
    run = model.run
    if vae is None:
        return repeated(run, lambda: model.chunk(sequence), chunks, 0.6), model.chunk(sequence)
    from worldmodel_ros.model.wan.vae import DecodeStream
    ahead, marks, end = deque(), [], time.perf_counter() + 0.75 * run.left()
    decoding = DecodeStream(vae, state)
    run.wait()
    with nullcontext() if run.tiny else torch.cuda.stream(torch.cuda.Stream(priority=-1)):
        while len(marks) <= chunks and (len(marks) < 4 or time.perf_counter() < end):
            latents = model.chunk(sequence)
            ahead.append(decoding.decode(latents))
            if len(ahead) > 1:  # the host is one chunk ahead, no more
                ahead.popleft().wait()
                marks.append(time.perf_counter())
        while ahead:
            ahead.popleft().wait()
            marks.append(time.perf_counter())
    return [1e3 * (b - a) for a, b in zip(marks, marks[1:-1])], latents


def vae_note(run: Run, vae: object | None) -> str:
    return 'absent: no diffusers' if vae is None else f'{run.vae_form}, random weights, bf16'


@torch.inference_mode()
def profile(model: Model, sequence: object) -> None:
    """Write the kernels of a chunk, by their time on the device."""
    from torch.profiler import ProfilerActivity, profile as profiler
    model.run.wait()
    kinds = [ProfilerActivity.CPU] if model.run.tiny else [ProfilerActivity.CUDA]
    with profiler(activities=kinds) as seen:
        model.chunk(sequence)
        model.run.wait()
    events = sorted(seen.key_averages(), key=lambda event: -event.self_device_time_total)
    rows = [[event.key[:100], event.count, round(event.self_device_time_total * 1e-3, 3)] for event in events[:25]]
    model.run.row(part='profile', model=model.preset.name, dtype=model.dtype, kernels=rows,
                  device_ms=round(sum(event.self_device_time_total for event in events) * 1e-3, 2))
    (model.run.folder / f'profile_wan_{model.preset.name}_{model.dtype}.txt').write_text(
        seen.key_averages().table(sort_by='self_cpu_time_total' if model.run.tiny else 'self_cuda_time_total', row_limit=40,
                                  max_name_column_width=100))


def measure_peers(run: Run, part: str) -> None:
    """Time the alternatives, with the weights of our bf16 row."""
    name = NAMES[part]
    model, row = Model(run, name, False), {}
    with run.part(f'{name} reference'):
        row['reference_ms'] = reference_ms(model)
    passes = len(model.preset.schedule.timesteps)
    model.dit.to('meta')  # makes room for diffusers' network
    with run.part(f'{name} diffusers'):
        row['diffusers'] = diffusers_ms(model)
    ratios = {}
    for own in run.rows:
        if own.get('model') == name and 'dit_ms' in own and 'chunk_ms' in own:
            p50, ratio = own['dit_ms']['p50'], {}
            if 'reference_ms' in row:
                ratio['ratio_reference'] = round(row['reference_ms']['p50'] / p50, 3)
            if 'window_pass_ms' in (row.get('diffusers') or {}):
                ratio['ratio_diffusers'] = round(passes * row['diffusers']['window_pass_ms']['p50'] / p50, 3)
            own |= ratio
            ratios[own['dtype']] = ratio
    run.row(part='peers', model=name, **row, ratios=ratios)


def measure_branches(run: Run) -> None:
    """Time a chunk of four futures from one moment, in turn; images are decoded while the next one's passes run."""
    model = Model(run, NAMES['small'], True)
    owner, vae = model.pages(branches=BRANCHES), decoder(run)
    root = owner.open()
    model.fill(root)
    state = None if vae is None else vae.decode(model.noise, vae.decode(model.noise, vae.start())[1])[1]
    used, forked = owner.pool.allocator.usage().used, []

    @torch.inference_mode()
    def futures() -> None:
        forks = [root.fork() for _ in range(BRANCHES)]
        forked.append(owner.pool.allocator.usage().used)
        streams = [None if vae is None else decode_stream(vae, state) for _ in forks]
        decoded = []
        for fork, stream in zip(forks, streams):
            latents = model.chunk(fork)
            if stream is not None:
                decoded.append(stream.decode(latents))
            fork.close()
        for images in decoded:
            images.wait()
    with nullcontext() if run.tiny else torch.cuda.stream(torch.cuda.Stream(priority=-1)):
        futures()
        ms = repeated(run, futures, run.chunks['small'])
    run.row(model=NAMES['small'], dtype='fp8', branches=BRANCHES, branches_ms=summary(ms), chunks=len(ms),
            vae=vae_note(run, vae), pages_copied_at_fork=max(forked) - used, page_bytes=owner.pool.storage.page_bytes,
            vae_state_gib=None if state is None else round(state.nbytes / 2 ** 30, 3),
            vae_state='shared by the forks; each has its own after its chunk', allocated_gib=run.allocated_gib())


def decode_stream(vae: object, state: object) -> object:
    from worldmodel_ros.model.wan.vae import DecodeStream
    return DecodeStream(vae, state)


def measure_long(run: Run) -> None:
    """Time ten minutes of video: time and memory at its end and beginning; sinks are moved from frame 1,024 on."""
    model = Model(run, NAMES['small'], True)
    sequence, ms, gib = model.pages().open(), [], []
    model.fill(sequence)
    while len(ms) < run.long and run.left() > 2.0:
        ms.append(run.ms(lambda: model.chunk(sequence)))
        gib.append(run.allocated_gib())
    part = max(1, min(50, len(ms) // 4))
    first, last = (summary(times) for times in (ms[:part], ms[-part:]))
    run.row(model=NAMES['small'], dtype='fp8', long_chunks=len(ms), frames=sequence.frame, vae='not in it',
            dit_ms=summary(ms), first_ms=first, last_ms=last, ratio_last_first=round(last['p50'] / first['p50'], 4),
            allocated_gib={'first': gib[0], 'middle': gib[len(gib) // 2], 'last': gib[-1]})


def measure(run: Run, part: str) -> None:
    if part in NAMES:
        for at, dtype in enumerate(run.dtypes):
            with run.part(f'{part} {dtype}', run.left() * (1.0 if at + 1 == len(run.dtypes) else 0.65)):
                measure_model(run, part, dtype == 'fp8')
    elif part.startswith('peers'):
        measure_peers(run, part.removeprefix('peers_'))
    else:
        {'correct': measure_correctness, 'vae': measure_vae, 'kernels': measure_kernels, 'branches': measure_branches,
         'long': measure_long}[part](run)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--folder', type=Path, required=True)
    parser.add_argument('--parts', nargs='+', choices=PARTS, default=list(PARTS))
    parser.add_argument('--chunks', type=int, default=50, help='timed, of the small model')
    parser.add_argument('--large-chunks', type=int, default=50, help='timed, of the large model')
    parser.add_argument('--dtypes', nargs='+', choices=DTYPES, default=DTYPES, help='of small and large')
    parser.add_argument('--long', type=int, default=800, help='chunks of the long run')
    parser.add_argument('--seconds', type=float, default=3600.0, help='after which nothing new begins')
    parser.add_argument('--stretch', type=float, default=1.0, help="each part's share of the time, times this")
    parser.add_argument('--eager', action='store_true', help='compile nothing')
    parser.add_argument('--tiny', action='store_true')
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        raise SystemExit('wan.py measures a GPU, and there is none; --tiny tries the code on a CPU')
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    signal.signal(signal.SIGALRM, _too_long)
    run = Run(options)
    if find_spec('diffusers') is not None:
        with run.part('diffusers'):  # its slow imports count in no part's time
            for name in ('AutoencoderKLWan', 'WanTransformer3DModel'):
                getattr(import_module('diffusers'), name)
    for at, part in enumerate(options.parts):
        if part == 'kernels' and run.tiny:
            continue
        watchdog = threading.Timer(PARTS[part] * options.stretch + HANGS, restart, (run, options.parts[at:]))
        watchdog.daemon = True
        watchdog.start()
        with run.part(part, PARTS[part] * options.stretch):
            if run.left() < 5.0:
                raise TooLong('no time was left for it')
            measure(run, part)
        watchdog.cancel()
        if not run.healthy():
            restart(run, options.parts[at:])
    result = {'command': 'python benchmarks/wan.py ' + ' '.join(sys.argv[1:]), 'weights': 'random', 'machine': machine(),
              'versions': versions(('torch', 'triton', 'diffusers')), 'failed': run.failed, 'rows': run.rows}
    run.file.write_text(json.dumps(result, indent=1) + '\n')
    return 1 if run.failed else 0


def restart(run: Run, parts: list[str]) -> None:
    """Continue with the parts after the first in a new process: this one's GPU hangs, or returns only errors."""
    run.row(part=parts[0], failed=run.failed, note='the process was restarted after this part')
    kept = [word for word in sys.argv if word not in PARTS and word != '--parts']
    left = run.seconds - (time.perf_counter() - run.start)
    if len(parts) == 1:
        os._exit(1)
    os.execv(sys.executable, [sys.executable, *kept, '--seconds', str(left), '--parts', *parts[1:]])


def _too_long(signum: int, frame: object) -> None:
    raise TooLong('its time is up')


if __name__ == '__main__':
    raise SystemExit(main())
