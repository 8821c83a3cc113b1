"""Network calls through PyTorch, on a CPU or a GPU; the definition that other back ends are tested against."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ..cache.layout import TileLayout
from ..cache.storage import NumpyStorage
from ..cache.torch_storage import TorchStorage, storage_on
from ..model import checkpoint


class TorchBackend:
    """Arrays in and out are numpy, without a batch dimension; floating-point ones are float32."""

    def __init__(self, folder: Path, threads: int):
        self.device = 'cuda' if torch.cuda.is_available() else 'cpu'
        self.name = f'torch-{self.device}'
        if self.device == 'cpu':
            torch.set_num_threads(threads)
        self.model = checkpoint.load(folder, self.device)
        self.preset = self.model.preset

    def storage(self, layout: TileLayout, pages: int) -> NumpyStorage | TorchStorage:
        """What `block` can read the pages of a session from."""
        return storage_on(self.device, layout, self.preset.depth, self.preset.heads, self.preset.head_dim, pages)

    def _in(self, array: np.ndarray | torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(array, device=self.device)

    @torch.inference_mode()
    def encode(self, image: np.ndarray, previous: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Image (3, H, W) in [-1, 1] and the last features to a latent (h, w, Z) and features (1, C, h, w)."""
        state = None if previous is None else self._in(previous)
        latent, features = self.model.vae.encode(self._in(image)[None], state)
        return latent[0].cpu().numpy(), features.cpu().numpy()

    @torch.inference_mode()
    def block(self, latents: np.ndarray, tau: np.ndarray, step: np.ndarray, action: np.ndarray, rotary: np.ndarray,
              bias: np.ndarray, storage: NumpyStorage | TorchStorage, pages: np.ndarray
              ) -> tuple[np.ndarray, np.ndarray, torch.Tensor, torch.Tensor]:
        """One pass of the DiT over T frames (see DiT.over_pages), whose window lies in ``pages`` of the storage.

        Returns clean latents and features and, on the device, keys and values (L, H, T, P, d) for the storage.
        """
        x, features, *new = self.model.dit.over_pages(
            self._in(latents)[None], self._in(tau)[None], self._in(step)[None], self._in(action)[None],
            self._in(rotary), self._in(bias), *map(self._in, storage.rows()), self._in(storage.row_index(pages)))
        keys, values = (part[:, 0].unflatten(2, (len(latents), -1)) for part in new)
        return x[0].cpu().numpy(), features[0].cpu().numpy(), keys, values

    @torch.inference_mode()
    def policy(self, features: np.ndarray) -> np.ndarray:
        """Features (P, D) of the newest frame to command chunks (goals, K, A) in SI units."""
        return self.model.action_head(self._in(features)[None])[0].cpu().numpy()

    @torch.inference_mode()
    def outcomes(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Features (T, P, D) of imagined frames to contact logits (T,) and progress (T, goals) in m."""
        logits, progress = self.model.outcome_head(self._in(features)[None])
        return logits[0].cpu().numpy(), progress[0].cpu().numpy()

    @torch.inference_mode()
    def decode(self, latents: np.ndarray, before: np.ndarray) -> np.ndarray:
        """Latents (T, h, w, Z) that follow ``before`` to images (T, 3, H, W) in [-1, 1]."""
        return self.model.vae.decode_clip(self._in(latents), self._in(before)).cpu().numpy()
