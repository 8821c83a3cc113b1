"""The networks through PyTorch, on a CPU or a GPU; the definition that other back ends are tested against.

Calls of many sessions are stacked into one forward: each has its own window in the pool's pages, its own frame numbers
and its own noise level, so that different denoising steps share a pass. What one network makes for another stays on
the device; only plans, outcomes and pictures come to the host.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..cache.layout import TileLayout
from ..cache.torch_storage import TorchStorage
from ..kernels.pages import Precision
from ..model.rotary import space_rotation, time_rotation
from ..model.steps import FLOW
from ..model.world_model import WorldModel
from .launching import BUCKETS, Eager, Graphs
from .memory import BLOCKED, Window


class TorchBackend:
    """``precision`` BF16 puts the DiT and its pages in bfloat16, and is for GPUs; noise levels, the VAE and the heads
    keep float32. ``graphs`` False runs eagerly on a GPU, too."""

    def __init__(self, model: WorldModel, threads: int = 1, precision: Precision = Precision.FP32, graphs: bool = True):
        self.device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
        on_gpu = self.device.type == 'cuda'
        self.name = f'torch-{self.device}' + ('-bf16' if precision is Precision.BF16 else '')
        if not on_gpu:
            torch.set_num_threads(threads)
        self.model = model.to(self.device).eval().requires_grad_(False)
        self.preset = model.preset
        self.precision = precision
        if precision is Precision.BF16:
            for part in (model.dit.embed, model.dit.blocks, model.dit.modulation, model.dit.out):
                part.to(torch.bfloat16)
        self.sizes = BUCKETS if on_gpu else (1,)
        self.asynchronous = on_gpu
        self._launch = Graphs(self.device) if on_gpu and graphs else Eager(self.device)
        self._space = torch.tensor(space_rotation(self.preset), device=self.device)

    def storage(self, layout: TileLayout, pages: int) -> TorchStorage:
        """What the passes of the DiT read the pages of sessions from."""
        preset = self.preset
        return TorchStorage(layout, preset.depth, preset.heads, preset.head_dim, pages, self.precision, self.device)

    @torch.inference_mode()
    def run(self, network: str, batch: Sequence[tuple]) -> list:
        """Outputs of a network for each of ``batch``, inputs whose shapes are equal. Arrays are float32 unless noted;
        those that come from another network may be tensors on the device, and those marked * are.

        encode: frame uint8 (H, W, 3) and the last encode's state, or None, to latent (h, w, Z)* and state.
        commit: clean latents (T, h, w, Z), actions (T, A), Window, and (ids, places) of Stage.places, where their keys
        and values are written, to features (T, P, D)*.
        denoise: z (T, h, w, Z), its noise level, the part of the way to the clean latents that it is moved, row of the
        step embedding, actions (T, A), Window, to z moved*, and features (T, P, D)*.
        policy: features (P, D) of a frame, noise (goals, K, A), prefix (K, A), int64 number of actions that the prefix
        gives, to plans (goals, K, A).
        outcomes: features (T, P, D) to contact logits (T,) and progress (T, goals) in m.
        decode: latents (T, h, w, Z) and (h, w, Z) before them to frames uint8 (T, H, W, 3).
        """
        return getattr(self, f'_{network}')(list(zip(*batch, strict=True)))

    def host(self, array: np.ndarray | Tensor) -> np.ndarray:
        """An output as numpy."""
        return array.cpu().numpy() if isinstance(array, Tensor) else array

    def settle(self) -> None:
        """Waits until all that `run` began is done."""
        if self.device.type == 'cuda':
            torch.cuda.current_stream().synchronize()

    def _encode(self, columns: list[tuple]) -> list:
        frames, states = columns

        def encode(frames: Tensor, previous: Tensor) -> tuple[Tensor, ...]:
            return self.model.vae.encode(self._images(frames), previous[:, 0])
        # At the start of a stream the frame stands in for its own past.
        states = [self.model.vae.encoder.down(self._images(torch.as_tensor(frame, device=self.device)[None]))
                  if state is None else torch.as_tensor(state, device=self.device)
                  for frame, state in zip(frames, states)]
        latents, features = self._launch('encode', encode, [frames, states])
        return [(latent, features[index:index + 1]) for index, latent in enumerate(latents)]

    def _images(self, frames: Tensor) -> Tensor:
        return frames.permute(0, 3, 1, 2).contiguous().float() / 127.5 - 1.0

    def _commit(self, columns: list[tuple]) -> list:
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

    def _window(self, windows: Sequence[Window]) -> list[list[np.ndarray]]:
        """What `_block` makes rotations, index and mask of, for each session; nothing for a mask that masks nothing."""
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
        """Window.bias of each session, one row where all ``count`` frames see the same window, and so each other."""
        batch, rows, _ = seen.shape
        own = torch.ones(rows, count, dtype=torch.bool, device=self.device).tril(count - 1 if rows < count else 0)
        own = own.repeat_interleave(self.preset.tokens, 1).expand(batch, -1, -1)
        hidden, dtype = ~torch.cat([seen, own], 2), self.model.dit.embed.weight.dtype
        return torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill(hidden, float(BLOCKED))

    def _policy(self, columns: list[tuple]) -> list:
        plans, = self._launch('policy', lambda *inputs: (self.model.action_head(*inputs),), columns)
        return list(plans.cpu().numpy())

    def _outcomes(self, columns: list[tuple]) -> list:
        outcomes = self._launch('outcomes', self.model.outcome_head, columns)
        return list(zip(*(part.cpu().numpy() for part in outcomes)))

    def _decode(self, columns: list[tuple]) -> list:
        def decode(latents: Tensor, before: Tensor) -> tuple[Tensor]:
            past = torch.cat([before[:, None], latents[:, :-1]], 1)
            images = self.model.vae.decode_after(latents.flatten(0, 1), past.flatten(0, 1))
            frames = ((images + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
            return (frames.unflatten(0, latents.shape[:2]),)
        frames, = self._launch('decode', decode, columns)
        return list(frames.cpu().numpy())
