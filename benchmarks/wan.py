"""Open world models of the Wan family: a chunk of video on one GPU, random weights, compared with what a user would take instead.

    python benchmarks/wan.py --folder benchmarks/results              # everything
    python benchmarks/wan.py --folder benchmarks/results --parts small branches long
    python benchmarks/wan.py --tiny --folder /tmp/wan                 # tries the code on a CPU, measures nothing

480x832 (30x52 tokens a latent frame), chunks of 3 latent frames (12 images), a window of 18 frames that is full, five passes.
One row for each model and precision, written as it is measured (`wan_<gpu>.jsonl`), and all of a run (`wan_<gpu>.json`).

Compared with it, with the same weights, in the same run:

* reference: the published loop, its linear layers compiled: keys and values in one tensor that is moved by a clone, PyTorch's
  attention, the prompt's padding attended to, camera layers computed in each pass;
* diffusers: `WanTransformer3DModel`, compiled as it offers, bf16. It has no cache, so a pass is over all frames of the window;
  of the chunk alone is told, too. Where diffusers is not installed these are absent, and so are VAE and `vae_ms`.

`chunk_ms` is of DiT and VAE, one after the other, the camera's layers once a chunk in it; `dit_ms` without VAE.
"""
from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from worldmodel_ros.kernels.pages import Precision
from worldmodel_ros.machine import machine, versions
from worldmodel_ros.model.wan.checkpoint import build
from worldmodel_ros.model.wan.config import PATCH, PRESETS, WanConfig, WanPreset
from worldmodel_ros.model.wan.dit import Prompt, normalise_and_rotate
from worldmodel_ros.model.wan.precision import to_fp8
from worldmodel_ros.model.wan.rotary import rotation
from worldmodel_ros.model.wan.sampler import Sampler
from worldmodel_ros.model.wan.sequence import PagedSequences, Window
from worldmodel_ros.model.weights import RandomWeights

PARTS = ('small', 'branches', 'large', 'long')
CHUNK, WINDOW = 3, 18
BRANCHES = 4
TEXT_ROWS = 120  # of a prompt
ATTENTIONS = ('native', '_native_cudnn')  # diffusers' names


class Run:
    """What all measurements share: device, sizes, where rows go."""

    def __init__(self, options: argparse.Namespace):
        self.tiny, self.compiled = options.tiny, not options.eager
        self.device = torch.device('cpu' if options.tiny else 'cuda')
        self.grid = (5, 7) if options.tiny else (30, 52)
        self.chunks = 2 if options.tiny else options.chunks
        self.long = 6 if options.tiny else options.long
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
            config = WanConfig(256, 2, 2, 512, preset.config.in_channels, camera_width=preset.config.camera_width,
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
    def part(self, name: str) -> Iterator[None]:
        """A part that fails leaves the others'."""
        try:
            yield
        except Exception as error:
            self.failed[name] = f'{type(error).__name__}: {error}'[:500]
            print(name, self.failed[name], file=sys.stderr, flush=True)
        gc.collect()
        if not self.tiny:
            torch.cuda.empty_cache()

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
    """A network with a prompt, and inputs for its chunks, all of them drawn."""

    def __init__(self, run: Run, name: str, fp8: bool):
        torch.compiler.reset()
        self.run, self.preset = run, run.preset(name)
        self.config = self.preset.config
        self.dtype = 'fp8' if fp8 else 'bf16'
        self.dit = build(self.config, RandomWeights(0, run.device), run.device, torch.bfloat16)
        if fp8:
            to_fp8(self.dit)
        if run.compiled:
            self.dit.compile()
        self.sampler = Sampler(self.dit, self.preset.schedule)
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
                              self.run.device, sequences, branches, compiled=self.run.compiled)

    @torch.inference_mode()
    def chunk(self, sequence: object) -> Tensor:
        return self.sampler.chunk(sequence, self.prompt, lambda step: self.noise, self.condition,
                                  self.dit.camera_control(self.rays))

    def fill(self, sequence: object) -> None:
        """A full window, after which nothing compiles any more."""
        for _ in range(self.preset.window_frames // CHUNK + 1):
            self.chunk(sequence)

    def tflop(self) -> dict[str, float]:
        """What a chunk must compute, as this package does; multiplications and additions, in 10^12."""
        c, passes = self.config, len(self.preset.schedule.timesteps)
        tokens = CHUNK * math.prod(self.run.grid)
        parts = {'linear': passes * 2 * tokens * c.layers * (6 * c.width ** 2 + 2 * c.width * c.ffn),
                 'attention': passes * 4 * tokens * c.layers * c.width * self.preset.window_frames * math.prod(self.run.grid),
                 'cross': passes * 4 * tokens * c.layers * c.width * self.prompt.bias.numel(),
                 'camera': 2 * tokens * (c.layers * 4 * c.width ** 2 + 2 * c.width ** 2 + c.width * c.camera_width)}
        return {name: round(value / 1e12, 3) for name, value in parts.items()}


class MovedWindow:
    """The published loop's cache: one tensor a layer, whose frames behind the sinks are moved by a clone."""

    def __init__(self, model: Model):
        self.model, run, config = model, model.run, model.config
        tokens = math.prod(run.grid)
        self.frame, self.sinks, self.own = 0, model.preset.sink_frames * tokens, CHUNK * tokens
        shape = 1, model.preset.window_frames * tokens, config.heads, config.head_dim
        self.k, self.v = ([torch.zeros(shape, dtype=torch.bfloat16, device=run.device) for _ in range(config.layers)]
                          for _ in range(2))
        self._prepare = torch.compile(normalise_and_rotate, dynamic=False) if run.compiled else normalise_and_rotate

    @contextmanager
    def chunk(self, frames: int, observed: bool = False) -> Iterator[MovedWindow]:
        self._rotary = rotation(self.model.config.head_dim, self.frame + np.arange(frames), self.model.run.grid,
                                self.model.run.device)
        end = self.frame * math.prod(self.model.run.grid) + self.own
        self._end, full = min(end, self.k[0].shape[1]), end > self.k[0].shape[1]
        self._moves = set(range(self.model.config.layers)) if full else set()  # in the first pass of a chunk alone
        yield self
        self.frame += frames

    def attend(self, layer: int, qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> Tensor:
        q, k, v = (x.to(torch.bfloat16) for x in self._prepare(qkv, self._rotary, q_weight, k_weight, self.model.config.eps))
        for cache, new in ((self.k[layer], k), (self.v[layer], v)):
            if layer in self._moves:
                cache[:, self.sinks:-self.own] = cache[:, self.sinks + self.own:].clone()
            cache[:, self._end - self.own:self._end] = new
        self._moves.discard(layer)
        seen = (cache[layer][:, :self._end] for cache in (self.k, self.v))
        out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q[None], *seen)))
        return out[0].transpose(0, 1).flatten(1)


@torch.inference_mode()
def reference_ms(model: Model) -> dict[str, float]:
    """A chunk of the published loop."""
    sequence, sampler = MovedWindow(model), Sampler(WithCamera(model), model.preset.schedule)

    def chunk() -> None:
        sampler.chunk(sequence, model.padded, lambda step: model.noise, model.condition)
    for _ in range(model.preset.window_frames // CHUNK + 1):
        chunk()
    return summary([model.run.ms(chunk) for _ in range(max(2, model.run.chunks // 5))])


class WithCamera:
    """A network that computes its camera layers in each pass."""

    def __init__(self, model: Model):
        self.model, self.dit = model, model.dit

    def modulation(self, timestep: float) -> object:
        return self.dit.modulation(timestep)

    def __call__(self, latents: Tensor, modulation: object, prompt: Prompt, camera: None, attention: MovedWindow) -> Tensor:
        return self.dit(latents, modulation, prompt, self.dit.camera_control(self.model.rays), attention)


@torch.inference_mode()
def diffusers_ms(model: Model) -> dict[str, object] | None:
    """A pass of diffusers' transformer over the chunk alone and over the whole window, by its faster attention."""
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
                ms = summary([run.ms(call) for _ in range(3 if run.tiny else 10)])
                if name not in found or ms['p50'] < found[name]['p50']:
                    found[name] = ms
    return found


def decoder(run: Run) -> object | None:
    """The VAE with random weights, or None where diffusers is not installed."""
    if find_spec('diffusers') is None:
        return None
    from diffusers import AutoencoderKLWan

    from worldmodel_ros.model.wan.vae import WanVae
    with run.device:
        return WanVae((AutoencoderKLWan(base_dim=8) if run.tiny else AutoencoderKLWan()).to(torch.bfloat16))


def measure_model(run: Run, name: str, fp8: bool, peers: dict[str, dict]) -> None:
    """A row of one model; ``peers`` keeps, by name, what the bf16 run has measured next to it."""
    start = time.perf_counter()
    model = Model(run, name, fp8)
    own = chunks_ms(model, start)
    tflop, row = model.tflop(), {}
    if not fp8:
        with run.part(f'{name} reference'):
            peers.setdefault(name, {})['reference'] = reference_ms(model)
        model.dit.to('meta')  # diffusers' network needs the room
        with run.part(f'{name} diffusers'):
            peers.setdefault(name, {})['diffusers'] = diffusers_ms(model)
    beside, p50 = peers.get(name, {}), own['dit_ms']['p50']
    if 'reference' in beside:
        row |= {'reference_ms': beside['reference'], 'ratio_reference': round(beside['reference']['p50'] / p50, 3)}
    other = beside.get('diffusers')
    if other and 'window_pass_ms' in other:
        passes = len(model.preset.schedule.timesteps)
        row |= {'diffusers': other, 'ratio_diffusers': round(passes * other['window_pass_ms']['p50'] / p50, 3)}
    run.row(model=name, dtype=model.dtype, parameters=model.config.parameters, **own, chunks=run.chunks,
            passes=len(model.preset.schedule.timesteps), tokens_a_frame=math.prod(run.grid), chunk_frames=CHUNK,
            window_frames=model.preset.window_frames, tflop=tflop, tflop_per_s=round(1e3 * sum(tflop.values()) / p50, 1), **row)


def chunks_ms(model: Model, start: float) -> dict[str, object]:
    """Chunks of a sequence whose window is full, each decoded; what began at ``start`` is told as start-up."""
    run, sequence, vae, state = model.run, model.pages().open(), decoder(model.run), None
    model.fill(sequence)
    if vae is not None:
        state = vae.decode(model.noise, vae.decode(model.noise, vae.start())[1])[1]
    ready, dit, decoded, latents, states = time.perf_counter() - start, [], [], [model.noise], [state]
    for _ in range(run.chunks):
        dit.append(run.ms(lambda: latents.append(model.chunk(sequence))))
        if vae is not None:
            decoded.append(run.ms(lambda: states.append(vae.decode(latents[-1], states[-1])[1])))
        del latents[:-1], states[:-1]
    if not latents[-1].isfinite().all():
        raise RuntimeError('latents are not finite: the times mean nothing')
    return {'chunk_ms': summary([sum(times) for times in zip(dit, decoded)] or dit), 'dit_ms': summary(dit),
            'vae_ms': summary(decoded) if decoded else None, 'vae': vae_note(vae), 'ready_s': round(ready, 1),
            'allocated_gib': run.allocated_gib()}


def vae_note(vae: object | None) -> str:
    return 'absent: no diffusers' if vae is None else 'random weights, bf16'


def measure_branches(run: Run) -> None:
    """A chunk of four futures from one moment, one after the other."""
    model = Model(run, 'lingbot_world_v2_1.3b', True)
    owner, vae = model.pages(branches=BRANCHES), decoder(run)
    root = owner.open()
    model.fill(root)
    state = None if vae is None else vae.decode(model.noise, vae.start())[1]
    used, forked = owner.pool.allocator.usage().used, []

    def futures() -> None:
        forks = [root.fork() for _ in range(BRANCHES)]
        forked.append(owner.pool.allocator.usage().used)
        for fork in forks:
            latents = model.chunk(fork)
            if vae is not None:
                vae.decode(latents, state)
            fork.close()
    futures()
    ms = [run.ms(futures) for _ in range(run.chunks)]
    run.row(model='lingbot_world_v2_1.3b', dtype='fp8', branches=BRANCHES, branches_ms=summary(ms), chunks=len(ms),
            vae=vae_note(vae),
            pages_copied_at_fork=max(forked) - used, page_bytes=owner.pool.storage.page_bytes,
            vae_state_gib=None if state is None else round(state.nbytes / 2 ** 30, 3),
            vae_state='shared by the forks; each has its own after its chunk', allocated_gib=run.allocated_gib())


def measure_long(run: Run) -> None:
    """A run of ten minutes of video: time and memory at its end and beginning; sinks are moved from frame 1,024 on."""
    model = Model(run, 'lingbot_world_v2_1.3b', True)
    sequence, ms, gib = model.pages().open(), [], []
    model.fill(sequence)
    for _ in range(run.long):
        ms.append(run.ms(lambda: model.chunk(sequence)))
        gib.append(run.allocated_gib())
    part = max(1, min(50, run.long // 4))
    first, last = (summary(times) for times in (ms[:part], ms[-part:]))
    run.row(model='lingbot_world_v2_1.3b', dtype='fp8', long_chunks=run.long, frames=sequence.frame, vae='not in it',
            dit_ms=summary(ms), first_ms=first, last_ms=last, ratio_last_first=round(last['p50'] / first['p50'], 4),
            allocated_gib={'first': gib[0], 'last': gib[-1]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--folder', type=Path, required=True)
    parser.add_argument('--parts', nargs='+', choices=PARTS, default=PARTS)
    parser.add_argument('--chunks', type=int, default=50, help='timed, of each row')
    parser.add_argument('--long', type=int, default=800, help='chunks of the long run')
    parser.add_argument('--eager', action='store_true', help='compile nothing')
    parser.add_argument('--tiny', action='store_true')
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        raise SystemExit('wan.py measures a GPU, and there is none; --tiny tries the code on a CPU')
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    run, peers = Run(options), {}
    for part, name in (('small', 'lingbot_world_v2_1.3b'), ('large', 'lingbot_world_fast')):
        for fp8 in (False, True) if part in options.parts else ():
            with run.part(f'{name} {"fp8" if fp8 else "bf16"}'):
                measure_model(run, name, fp8, peers)
    for part, measure in (('branches', measure_branches), ('long', measure_long)):
        if part in options.parts:
            with run.part(part):
                measure(run)
    result = {'command': 'python benchmarks/wan.py ' + ' '.join(sys.argv[1:]), 'weights': 'random', 'machine': machine(),
              'versions': versions(('torch', 'triton', 'diffusers')), 'failed': run.failed, 'rows': run.rows}
    run.file.write_text(json.dumps(result, indent=1) + '\n')
    return 1 if run.failed else 0


if __name__ == '__main__':
    raise SystemExit(main())
