"""The same networks without this project: bf16, torch.compile, and a cache that is cloned to grow.

Keys and values of the window are one tensor per layer, to which each pass concatenates its own before it attends; those
of a new frame are appended, and the oldest dropped. Attention is cuDNN's where the whole window is attended to;
elsewhere FlexAttention, which skips the other tiles, or torch's own under a mask (cuDNN's if it takes one), which computes
them all. Without masks of the past and heads, and from the latents on.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import torch
from tick_measure import WARM, summary
from tick_work import full_window, layer_patterns
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from worldmodel_ros.cache.patterns import PageLists, page_lists
from worldmodel_ros.engine.backends.networks import random_model
from worldmodel_ros.model.dit import rotate
from worldmodel_ros.model.dit import Block, DiT
from worldmodel_ros.model.presets import Preset
from worldmodel_ros.model.rotary import rotary_angles, space_rotation, time_rotation
from worldmodel_ros.model.sampling import FLOW, HALF, WHOLE

ROTATIONS = 4096  # frames whose phases are kept on the device
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Dense:
    """A network whose cache layers attend to the whole window; its passes are ``dense``."""

    def __init__(self, dit: DiT, preset: Preset, device: torch.device):
        self.dit, self.preset, self.device = dit, preset, device
        self.dtype = dit.embed.weight.dtype
        shape = preset.depth, 1, preset.heads, preset.window_frames * preset.tokens, preset.head_dim
        self.k, self.v = (torch.randn(shape, dtype=self.dtype, device=device) for _ in range(2))
        self.newest = preset.window_frames - 1
        times = np.arange(ROTATIONS + preset.chunk_frames)
        self._time, self._space = (torch.tensor(part, device=device)
                                   for part in (time_rotation(preset, times), space_rotation(preset)))
        self._graphs = False

    def compile(self, mode: str | None) -> None:
        self._graphs = mode == 'reduce-overhead'
        self.step = torch.compile(self.step, dynamic=False, mode=mode)
        self.commit_pass = torch.compile(self.commit_pass, dynamic=False, mode=mode)

    def commit(self, latents: Tensor, actions: Tensor) -> None:
        """Run the clean pass of one frame, (1, 1, h, w, Z), which becomes the newest of the window."""
        self.newest += 1
        torch.compiler.cudagraph_mark_step_begin()
        window = self.commit_pass(latents, actions, self._rotary(self.newest, 1), self.k, self.v)
        # A graph returns its own memory, which the next replay overwrites.
        self.k, self.v = (part.clone() for part in window) if self._graphs else window

    def commit_pass(self, latents: Tensor, actions: Tensor, rotary: Tensor, k: Tensor, v: Tensor
                    ) -> tuple[Tensor, Tensor]:
        tau = latents.new_ones(1, 1)
        _, keys, values = dense(self.dit, latents, tau, tau.long() * FLOW, actions, rotary, k, v)
        return tuple(torch.cat([old[:, :, :, self.preset.tokens:], new], 3) for old, new in ((k, keys), (v, values)))

    def chunk(self, noise: Tensor, actions: Tensor, steps: int) -> Tensor:
        """Return the denoised chunk after the newest frame."""
        z, rotary = noise, self._rotary(self.newest + 1, self.preset.chunk_frames)
        row = torch.full(z.shape[:2], {1: WHOLE, 2: HALF}.get(steps, FLOW), device=self.device)
        for step in range(steps):
            tau = torch.full(z.shape[:2], step / steps, device=self.device)
            rate = torch.full((), 1.0 / (steps - step), device=self.device)
            z = self.step(z, tau, rate, row, actions, rotary, self.k, self.v)
        return z

    def step(self, z: Tensor, tau: Tensor, rate: Tensor, row: Tensor, actions: Tensor, rotary: Tensor, k: Tensor,
             v: Tensor) -> Tensor:
        clean, _, _ = dense(self.dit, z, tau, row, actions, rotary, k, v)
        return z + (clean - z) * rate

    def _rotary(self, first: int, count: int) -> Tensor:
        """Return (2, 1, 1, T * P, d / 2), float32."""
        first %= ROTATIONS  # wrapping does not change the time
        parts = self._time[:, first:first + count, None], self._space[:, None]
        shape = 2, count, self.preset.tokens, -1
        return torch.cat([part.expand(shape) for part in parts], -1).flatten(1, 2)[:, None, None]


def dense(dit: DiT, latents: Tensor, tau: Tensor, step: Tensor, actions: Tensor, rotary: Tensor, k: Tensor, v: Tensor
          ) -> tuple[Tensor, Tensor, Tensor]:
    """Run a pass in which all tokens see the window (L, 1, H, W * P, d) and each other: clean latents, own keys, values."""
    cond, x = dit.enter(latents, tau, step, actions)
    own = []
    for layer, block in enumerate(dit.blocks):
        x, *kv = block(x, cond, rotary, None, (k[layer], v[layer]))
        own.append(kv)
    return dit.finish(x, cond)[0].float(), *(torch.stack(part) for part in zip(*own))


class Tiled:
    """A network with tiles. A cache layer's window lies page after page, so that FlexAttention sees whole blocks."""

    def __init__(self, dit: DiT, preset: Preset, device: torch.device, flex: bool = True):
        self.dit, self.preset, self.device = dit, preset, device
        dtype = dit.embed.weight.dtype
        layout, table, queries = full_window(preset)
        slab = layout.tiles * layout.page_tokens
        keys = len(table) * slab
        # Plain numbers, since torch.compile would trace the layout into NumPy.
        self.frames, self.tiles, self.run = layout.frames, layout.tiles, layout.page_tokens // layout.frames
        shape = 1, preset.heads, keys - len(queries) * slab, preset.head_dim
        self.window = [torch.randn(2, *shape, dtype=dtype, device=device) for _ in preset.cache_layers]
        attends = {}
        for pattern in set(layer_patterns(preset)):
            lists, = page_lists(table, layout, queries, pattern).values()
            attends[pattern] = (attention_by_tiles(lists, keys, device) if flex and device.type == 'cuda' else
                                attention_by_mask(lists, keys, layout.page_tokens, dtype, device))
        self.attends = [attends[pattern] for pattern in layer_patterns(preset)]
        angles = rotary_angles(preset, preset.window_frames + np.arange(preset.chunk_frames))
        self.rotary = torch.from_numpy(angles).to(device)

    def compile(self, mode: str | None) -> None:
        self.step = torch.compile(self.step, dynamic=False, mode=mode)

    def chunk(self, noise: Tensor, actions: Tensor, steps: int) -> Tensor:
        z = noise
        row = torch.full(z.shape[:2], {1: WHOLE, 2: HALF}.get(steps, FLOW), device=self.device)
        for step in range(steps):
            tau = torch.full(z.shape[:2], step / steps, device=self.device)
            z = self.step(z, tau, torch.full((), 1.0 / (steps - step), device=self.device), row, actions, *self.window)
        return z

    def step(self, z: Tensor, tau: Tensor, rate: Tensor, row: Tensor, actions: Tensor, *window: Tensor) -> Tensor:
        cond, x = self.dit.enter(z, tau, row, actions)
        caches = iter(range(len(window)))
        for block, is_cache in zip(self.dit.blocks, self.dit.kinds):
            qkv, state = block.enter(x, cond)
            layer = next(caches) if is_cache else None
            attended = self._within_frames(block, qkv) if layer is None else self._over_tiles(layer, block, qkv, window)
            x = block.leave(x, attended, state)
        clean = self.dit.finish(x, cond)[0].float()
        return z + (clean - z) * rate

    def _qkv(self, block: Block, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (T, H, P, d), normalised and rotated."""
        q, k, v = qkv[0].permute(2, 0, 3, 1, 4).unbind(0)
        rotary = self.rotary[:, :, None]
        return *(rotate(part, rotary).to(v.dtype) for part in (block.q_norm(q), block.k_norm(k))), v

    def _within_frames(self, block: Block, qkv: Tensor) -> Tensor:
        q, k, v = self._qkv(block, qkv)
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)[None]

    def _over_tiles(self, layer: int, block: Block, qkv: Tensor, window: tuple[Tensor, ...]) -> Tensor:
        q, k, v = (self._by_page(part) for part in self._qkv(block, qkv))
        k, v = torch.cat([window[layer][0], k], 2), torch.cat([window[layer][1], v], 2)
        out = self.attends[layer](q, k, v)
        out = out[0].unflatten(1, (-1, self.tiles, self.frames, self.run))
        return out.permute(1, 3, 2, 4, 0, 5).reshape(1, self.preset.chunk_frames, self.preset.tokens, -1)

    def _by_page(self, x: Tensor) -> Tensor:
        """Return (T, H, P, d) as (1, H, T * P, d), page after page."""
        x = x.unflatten(0, (-1, self.frames)).unflatten(3, (self.tiles, -1))  # slab, frame, H, tile, token, d
        return x.permute(2, 0, 3, 1, 4, 5).flatten(1, 4)[None]


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention_by_tiles(lists: PageLists, keys: int, device: torch.device) -> Attention:
    """Return FlexAttention of query tiles to the listed tiles, skipping the others. On GPUs only."""
    from attention_cases import flex_mask
    from torch.nn.attention.flex_attention import flex_attention

    from worldmodel_ros.cache.torch_storage import kernel_lists
    mask = flex_mask(kernel_lists(lists, device), keys)
    return lambda q, k, v: flex_attention(q, k, v, block_mask=mask)


def attention_by_mask(lists: PageLists, keys: int, page_tokens: int, dtype: torch.dtype, device: torch.device
                      ) -> Attention:
    """Return attention to all tiles with an additive mask (1, 1, queries, keys), in which unlisted ones have no weight."""
    # Finite, since a blockwise kernel meets fully masked blocks, where the difference of infinities is NaN.
    tiles = torch.full((len(lists.starts) - 1, keys // page_tokens), torch.finfo(dtype).min / 2, dtype=dtype)
    for tile, (begin, end) in enumerate(zip(lists.starts, lists.starts[1:])):
        tiles[tile, lists.pages[begin:end].tolist()] = 0.0
    mask = tiles.to(device).repeat_interleave(page_tokens, 0).repeat_interleave(page_tokens, 1)[None, None]
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask)


def build(preset: Preset, device: torch.device, flex: bool = True) -> Dense | Tiled:
    """Build a network as one would write it; ``flex``: on a GPU, a preset with tiles attends to them by FlexAttention."""
    layers = torch.bfloat16 if device.type == 'cuda' else torch.float32
    dit = random_model(preset.name, 0, device, layers).dit.to(device).eval().requires_grad_(False)
    for part in (dit.embed, dit.blocks, dit.modulation, dit.out):  # as in the engine
        part.to(layers)
    return Tiled(dit, preset, device, flex) if preset.tile else Dense(dit, preset, device)


@torch.inference_mode()
def measure_baseline(preset: Preset, steps: int, ticks: int, seconds: float, compiled: bool = True, flex: bool = True
                     ) -> dict:
    """Return the faster of the modes of torch.compile that the cache permits; ms of a chunk and of a frame's commit."""
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    # Graphs need static inputs: the window is copied to them, which is prohibitive for a large one.
    modes = ['default'] if preset.tile else ['default', 'reduce-overhead']
    found = []
    for mode in modes if compiled else [None]:
        network = build(preset, device, flex)
        if mode:
            network.compile(mode)
        start = time.perf_counter()
        with sdpa_kernel(BACKENDS, set_priority=True) if device.type == 'cuda' else nullcontext():
            times = chunks(network, steps, ticks, seconds / len(modes), device)
        found.append({'mode': mode, 'ticks': len(times['chunk']), 'chunk_ms': summary(times['chunk']),
                      'commit_ms': summary(times['commit'])['p50'] if times['commit'] else None,
                      'whole_s': round(time.perf_counter() - start, 1)})
    best = min(found, key=lambda each: each['chunk_ms']['p50'])
    return {**best, 'modes': {each['mode']: each['chunk_ms']['p50'] for each in found}}


def chunks(network: Dense | Tiled, steps: int, ticks: int, seconds: float, device: torch.device
           ) -> dict[str, list[float]]:
    """Return milliseconds of each chunk and, for a dense network, of each frame's commit."""
    spec = network.preset
    size = spec.chunk_frames, *spec.latent_size, spec.latent_channels
    noise, latent = torch.randn(1, *size, device=device), torch.randn(1, 1, *size[1:], device=device)
    actions = torch.full((1, spec.chunk_frames, spec.actions), 0.1, device=device)
    clock = Clock(device)
    times: dict[str, list[float]] = {'chunk': [], 'commit': []}
    end = None
    for tick in range(WARM + ticks):
        if isinstance(network, Dense):
            commit = clock.ms(lambda: network.commit(latent, actions[:, :1]))
            times['commit'].append(commit)
        times['chunk'].append(clock.ms(lambda: network.chunk(noise, actions, steps)))
        if tick == WARM:  # everything before was compilation
            end = time.perf_counter() + seconds
        if end and time.perf_counter() > end:
            break
    return {name: values[WARM:] for name, values in times.items()}


class Clock:
    """Times a function on the device, launch from the host included."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == 'cuda'

    def ms(self, function: Callable[[], object]) -> float:
        if not self._on_gpu:
            start = time.perf_counter()
            function()
            return (time.perf_counter() - start) * 1e3
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)
