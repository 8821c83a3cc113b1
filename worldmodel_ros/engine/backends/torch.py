"""Runs the networks with PyTorch, on a CPU or a GPU; the reference that other back ends are tested against.

Calls of many sessions are stacked into one forward pass: each has its own window in the pool's pages, its own frame numbers
and its own noise level, so that different denoising steps share a pass. What one network makes for another stays on
the device; only plans, outcomes and images come to the host.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import numpy as np
import torch
from torch import Tensor

from worldmodel_ros.cache.layout import TileLayout
from worldmodel_ros.cache.torch_storage import TorchStorage
from worldmodel_ros.engine.memory import BLOCKED, Window
from worldmodel_ros.kernels.pages import Precision
from worldmodel_ros.model.checkpoint_description import ModelError
from worldmodel_ros.model.dit import DiT
from worldmodel_ros.model.rotary import space_rotation, time_rotation
from worldmodel_ros.model.sampling import FLOW
from worldmodel_ros.model.vae import to_frames
from worldmodel_ros.model.world_model import WorldModel
from . import frame_passes
from .background_stream import TICKS, BackgroundStream
from .cuda_graphs import BUCKETS, Eager, Graphs
from .frame_passes import FramePasses
from .pinned_inputs import Fetched
from .protocol import Backend
from .tile_passes import TilePasses


LAYER_PARTS = ('forward', 'enter', 'leave', 'leave_and_enter')  # methods of a layer that are compiled
MAX_SHAPES = 64  # for which one of them may be compiled; beyond, torch.compile runs it eagerly


class TorchBackend(Backend):
    """``precision`` BF16 puts the DiT and its pages in bfloat16, and is for GPUs; noise levels, the VAE and the heads
    keep float32. FP8, for presets with tiles, puts the layers in bfloat16, too, and all pages but the newest in FP8; FP4
    also puts those older than a quarter of the window in FP4.
    ``graphs`` False runs eagerly on a GPU, too. ``compiled``: layers are compiled for calls of one session, whose small
    kernels torch.compile fuses; batches of several sessions run eagerly. ``device``: by default a GPU, if there is one.
    ``in_place``: passes of one session read its pages in place (``frame_passes``); by default where that is faster."""

    storage_type = TorchStorage

    def __init__(self, model: WorldModel, threads: int = 1, precision: Precision = Precision.FP32, graphs: bool = True,
                 compiled: bool = False, device: torch.device | str | None = None, in_place: bool | None = None):
        self.device = torch.device(device or ('cuda' if torch.cuda.is_available() else 'cpu'))
        on_gpu = self.device.type == 'cuda'
        self.name = f'torch-{self.device}' + ('' if precision is Precision.FP32 else f'-{precision.value}')
        if not on_gpu:
            torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark = on_gpu  # shapes never change: searching for the fastest convolutions pays off
        self.model = model.to(self.device).eval().requires_grad_(False)
        if on_gpu:  # the layout of tensor cores: else cuDNN would convert before each convolution, and back
            self.model.vae.to(memory_format=torch.channels_last)
        self.preset = model.preset
        self.heads = self.preset.heads  # whose pages are here
        self.precision = precision
        if precision is not Precision.FP32:
            for part in (model.dit.embed, model.dit.blocks, model.dit.modulation, model.dit.out):
                part.to(torch.bfloat16)
            if on_gpu and torch.cuda.get_device_capability(self.device) == (9, 0):
                for block in model.dit.blocks:
                    block.gelu_in_product = True
        if precision.quantised and self.preset.tile is None:
            raise ValueError(f'preset {self.preset.name!r} commits frame by frame to pages of one frame, and has them in '
                             f'fp32 or bf16, not in {precision.value}')
        self._compiled = compiled
        if compiled:
            compile_layers(model.dit)
            compile_heads(model)
        self.sizes = BUCKETS if on_gpu and not self.preset.tile else (1,)
        self.asynchronous = on_gpu
        self._launch = Graphs(self.device, TICKS) if on_gpu and graphs else Eager(self.device)
        # A chunk of tiles is denoised in scratch pages, of which there is one set.
        self._background = BackgroundStream(self.device) if on_gpu and graphs and not self.preset.tile else None
        self._tiles = TilePasses(model.dit, self.device, self._launch) if self.preset.tile else None
        in_place = graphs and frame_passes.serve(self.preset, precision, self.device) if in_place is None else in_place
        self._frames = FramePasses(model.dit, self.device) if in_place and self.preset.tile is None else None
        self._space = torch.tensor(space_rotation(self.preset), device=self.device)
        # Stands for the previous frame's features at the start of a stream.
        self._no_state = torch.zeros(1, 4 * self.preset.vae_width, *self.preset.latent_size, device=self.device)

    def storage(self, layout: TileLayout, pages: int) -> TorchStorage:
        return self._storage(layout, pages, Precision.BF16 if self.precision.quantised else self.precision)

    @property
    def older(self) -> Callable[[TileLayout, int], TorchStorage] | None:
        return partial(self._storage, precision=Precision.FP8) if self.precision.quantised else None

    @property
    def distant(self) -> Callable[[TileLayout, int], TorchStorage] | None:
        return partial(self._storage, precision=Precision.FP4) if self.precision is Precision.FP4 else None

    def _storage(self, layout: TileLayout, pages: int, precision: Precision) -> TorchStorage:
        preset, scratch = self.preset, 0
        of_chunk = Precision.FP8 if self.precision.quantised else self.precision
        if preset.tile and precision is of_chunk:  # for a chunk's keys and values while it is denoised
            scratch = preset.chunk_frames // layout.frames * layout.tiles
        elif self._frames:  # the second set is for background work
            scratch = 2 * preset.chunk_frames
        try:
            return self.storage_type(layout, len(preset.cache_layers), self.heads, preset.head_dim, pages, precision,
                                     self.device, scratch=scratch)
        except torch.OutOfMemoryError as error:
            raise ModelError(f'{pages} pages for the sessions of preset {preset.name!r} in {precision.value} do not fit '
                             f'into the memory of {self.device} ({error}): allow fewer sessions, or keep pages in FP8 '
                             f'(back end torch-fp8)') from error

    @torch.inference_mode()
    def launch(self, network: str, batch: Sequence[tuple]) -> list:
        with not_compiled() if self._compiled and len(batch) > 1 else nullcontext():
            return getattr(self, f'_{network}')(list(zip(*batch, strict=True)))

    def run(self, network: str, batch: Sequence[tuple]) -> list:
        """Return a network's outputs for each element of ``batch``, inputs of equal shapes. Arrays are float32 unless noted;
        those that come from another network may be tensors on the device, and those marked * are.

        encode: frame uint8 (H, W, 3) and the last encode's state, or None, to latent (h, w, Z)* and state.
        commit: clean latents (T, h, w, Z), actions (T, A), Window, and (ids, places) of Stage.places, where their keys
        and values are written, to features (T, P, D)*.
        denoise: z (T, h, w, Z), its noise level, the fraction of the way to the clean latents to move it, row of the step
        embedding, actions (T, A), Window, to moved z* and features (T, P, D)*, which are None for presets with tiles
        before the last step.
        policy: features (P, D) of a frame, noise (goals, K, A), prefix (K, A), int64 number of actions in the prefix, to
        plans (goals, K, A).
        outcomes: features (T, P, D) to contact logits (T,) and progress (T, goals) in m.
        decode: latents (T, h, w, Z) and (h, w, Z) before them to frames uint8 (T, H, W, 3).
        """
        outputs = self.launch(network, batch)
        if network == 'outcomes':
            return list(zip(*(_on_host(part) for part in zip(*outputs))))
        return _on_host(outputs) if network in ('policy', 'decode') else outputs

    def host(self, array: np.ndarray | Tensor) -> np.ndarray:
        return array.cpu().numpy() if isinstance(array, Tensor) else array

    @torch.inference_mode()
    def stack(self, arrays: Sequence[np.ndarray | Tensor]) -> Tensor:
        return torch.stack([torch.as_tensor(array, device=self.device) for array in arrays])

    def settle(self) -> None:
        if self.device.type == 'cuda':
            torch.cuda.current_stream().synchronize()

    def fetch(self, array: Tensor) -> Fetched:
        return Fetched(array)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def urgent(self) -> Iterator[None]:
        if self.device.type != 'cuda':
            yield
            return
        stream = torch.cuda.Stream(self.device, priority=TICKS)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield

    @property
    def overlaps(self) -> bool:
        return self._background is not None

    @contextmanager
    def in_background(self) -> Iterator[BackgroundStream]:
        self._background.wait()
        ours, self._launch = self._launch, self._background.launch
        try:
            with self._background.queueing():
                yield self._background
        finally:
            self._launch = ours

    @property
    def busy(self) -> bool:
        return self._background is not None and self._background.busy

    def settle_background(self) -> None:
        self._background.wait()

    def before_writing(self) -> None:
        if self._background is None:
            return
        if self._launch is self._background.launch:
            self._background.will_write()
        else:
            self._background.before_writing()

    def _encode(self, columns: list[tuple]) -> list:
        frames, states = columns

        def encode(frames: Tensor, previous: Tensor, started: Tensor) -> tuple[Tensor, ...]:
            latents, features = self.model.vae.encode_next(self._images(frames), previous[:, 0], started)
            return latents, features.contiguous()
        started = [np.bool_(state is not None) for state in states]
        states = [self._no_state if state is None else state for state in states]
        latents, features = self._launch('encode', encode, [frames, states, started])
        return [(latent, features[index:index + 1]) for index, latent in enumerate(latents)]

    def _images(self, frames: Tensor) -> Tensor:
        images = frames.permute(0, 3, 1, 2)
        return (images if images.is_cuda else images.contiguous()).float() / 127.5 - 1.0

    def _commit(self, columns: list[tuple]) -> list:
        if self._tiles:
            return [self._tiles.commit(*inputs) for inputs in zip(*columns)]
        if self._frames and len(columns[0]) == 1:
            return [self._frames.commit(self._launch, *(column[0] for column in columns))]
        latents, actions, windows, places = columns
        storage = windows[0].storage
        targets, offsets = zip(*(storage.tokens(*place) for place in places))

        def commit(latents: Tensor, actions: Tensor, targets: Tensor, offsets: Tensor, *window: Tensor
                   ) -> tuple[Tensor, ...]:
            tau = latents.new_ones(latents.shape[:2])
            step = torch.full_like(tau, FLOW, dtype=torch.long)
            _, features, k, v = self._block(storage, latents, tau, step, actions, *window)
            storage.put(targets.flatten(), offsets.flatten(), *(part.transpose(1, 2).flatten(2, 3) for part in (k, v)))
            return (features,)
        features, = self._launch(('commit', storage), commit,
                                 [latents, actions, targets, offsets, *self._window(windows)])
        return list(features)

    def _denoise(self, columns: list[tuple]) -> list:
        if self._tiles:
            return [self._tiles.denoise(*inputs) for inputs in zip(*columns)]
        if self._frames and len(columns[0]) == 1:
            inputs = [column[0] for column in columns]
            return [self._frames.denoise(self._launch, self._scratch(inputs[-1].storage), *inputs)]
        z, tau, rate, row, actions, windows = columns
        storage = windows[0].storage

        def denoise(z: Tensor, tau: Tensor, rate: Tensor, row: Tensor, actions: Tensor, *window: Tensor
                    ) -> tuple[Tensor, ...]:
            shape = z.shape[:2]
            clean, features, _, _ = self._block(storage, z, tau[:, None].expand(shape), row[:, None].expand(shape),
                                                actions, *window)
            rate = rate[:, None, None, None, None]
            return torch.where(rate == 1.0, clean, z + (clean - z) * rate), features
        levels = [[np.float32(level) for level in column] for column in (tau, rate)]
        moved, features = self._launch(('denoise', storage), denoise, [
            z, *levels, [np.int64(each) for each in row], actions, *self._window(windows)])
        return list(zip(moved, features))

    def _scratch(self, storage: TorchStorage) -> np.ndarray:
        """Return a page for each frame of a chunk, not used by any other pass in flight."""
        half = self.preset.chunk_frames
        behind = self._background is not None and self._launch is self._background.launch
        return storage.scratch[half:] if behind else storage.scratch[:half]

    def _window(self, windows: Sequence[Window]) -> list[list[np.ndarray]]:
        """Return what ``_block`` makes rotations, index and mask from, per session; no mask where everything is visible."""
        columns = [[time_rotation(self.preset, window.times) for window in windows],
                   [window.pages for window in windows]]
        seen = [window.seen() for window in windows]
        all_is_seen = not (windows[0].causal and len(windows[0].times) > 1) and all(each.all() for each in seen)
        return columns if all_is_seen else [*columns, seen]

    def _block(self, storage: TorchStorage, latents: Tensor, tau: Tensor, step: Tensor, actions: Tensor, time: Tensor,
               pages: Tensor, seen: Tensor | None = None) -> tuple[Tensor, ...]:
        """DiT.over_pages; time (B, 2, T, pairs), pages (B, n), seen bool (B, T or 1, n * page_tokens)."""
        preset, (batch, count) = self.preset, latents.shape[:2]
        shape = 2, batch, count, preset.tokens, -1
        rotary = torch.cat([time.transpose(0, 1)[:, :, :, None].expand(shape),
                            self._space[:, None, None].expand(shape)], -1)
        bias = None if seen is None else self._bias(seen, count)
        clean, features, k, v = self.model.dit.over_pages(latents, tau, step, actions, rotary, bias, *storage.rows(),
                                                          storage.device_rows(pages))
        return clean.float(), features.float(), k, v

    def _bias(self, seen: Tensor, count: int) -> Tensor:
        """Return Window.bias of each session, one row where all ``count`` frames see the same window, and so each other."""
        batch, rows, _ = seen.shape
        own = torch.ones(rows, count, dtype=torch.bool, device=self.device).tril(count - 1 if rows < count else 0)
        own = own.repeat_interleave(self.preset.tokens, 1).expand(batch, -1, -1)
        hidden, dtype = ~torch.cat([seen, own], 2), self.model.dit.embed.weight.dtype
        return torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill(hidden, float(BLOCKED))

    def _policy(self, columns: list[tuple]) -> list:
        plans, = self._launch('policy', lambda *inputs: (self.model.action_head(*inputs),), columns)
        return list(plans)

    def _outcomes(self, columns: list[tuple]) -> list:
        def outcomes(features: Tensor) -> tuple[Tensor, Tensor]:
            return self.model.outcome_head(features.float())
        return list(zip(*self._launch('outcomes', outcomes, columns)))

    def _decode(self, columns: list[tuple]) -> list:
        def decode(latents: Tensor, before: Tensor) -> tuple[Tensor]:
            past = torch.cat([before[:, None], latents[:, :-1]], 1)
            images = self.model.vae.decode_after(latents.flatten(0, 1), past.flatten(0, 1))
            return (to_frames(images).unflatten(0, latents.shape[:2]),)
        frames, = self._launch('decode', decode, columns)
        return list(frames)


def _on_host(rows: Sequence[Tensor]) -> list[np.ndarray]:
    """Return a batch's outputs as numpy, in one copy."""
    return list(torch.stack(list(rows)).cpu().numpy())


def compile_layers(dit: DiT) -> None:
    """Compile every layer on its first call with a shape; all layers share the compiled code, as they differ only in their
    weights."""
    torch._dynamo.config.recompile_limit = max(MAX_SHAPES, torch._dynamo.config.recompile_limit)
    for block in dit.blocks:
        for part in LAYER_PARTS:
            setattr(block, part, torch.compile(getattr(block, part), dynamic=False))


def compile_heads(model: WorldModel) -> None:
    """Also compile the parts with many small operations on few numbers: the encoder around its convolutions, the conditioning
    of frames, their tokens, what follows the last layer, and the policy."""
    parts = ((model.vae, 'encode_next'), *((model.dit, part) for part in ('condition', 'tokens', 'finish')),
             (model.action_head, 'forward'))
    for module, part in parts:
        setattr(module, part, torch.compile(getattr(module, part), dynamic=False))


def not_compiled() -> AbstractContextManager:
    """Return a context in which layers run eagerly, for batches of several sessions: compiling again for each size would take
    longer than a service may take to start."""
    return torch.compiler.set_stance('force_eager')
