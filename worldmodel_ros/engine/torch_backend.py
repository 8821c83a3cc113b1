"""Network calls through PyTorch, on a CPU or a GPU; the definition that other back ends are tested against."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

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

    def _in(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    @torch.inference_mode()
    def encode(self, image: np.ndarray, previous: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Image (3, H, W) in [-1, 1] and the last features to a latent (h, w, Z) and features (1, C, h, w)."""
        state = None if previous is None else self._in(previous)
        latent, features = self.model.vae.encode(self._in(image)[None], state)
        return latent[0].cpu().numpy(), features.cpu().numpy()

    @torch.inference_mode()
    def block(self, latents: np.ndarray, tau: np.ndarray, step: np.ndarray, action: np.ndarray, rotary: np.ndarray,
              bias: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """One pass of the DiT over T frames (see DiT.forward): clean latents, features, keys, values."""
        x, features, keys, values = self.model.dit(
            self._in(latents)[None], self._in(tau)[None], self._in(step)[None], self._in(action)[None],
            self._in(rotary), self._in(bias), self._in(k), self._in(v))
        return x[0].cpu().numpy(), features[0].cpu().numpy(), keys.cpu().numpy(), values.cpu().numpy()

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
