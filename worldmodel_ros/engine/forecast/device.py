"""A scene forecast on a GPU: its passes are CUDA graphs, and the windows of its streams stay on the device."""
from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from worldmodel_ros.engine.backends.cuda_graphs import Eager, Graphs
from worldmodel_ros.model.presets import Preset
from worldmodel_ros.model.scene_forecast import HORIZONS, QUERIES, SLOTS, WALLS, SceneForecast, _rates
from .passes import Again, See, attend_in_parts
from .ring import Ring

_PATHS = 1 + len(HORIZONS)


class DeviceForecast:
    """The network on ``device`` in float32, shared by all streams. ``turn``: lock that a stream holds while it uses the
    network, since its graphs have one set of inputs."""

    def __init__(self, folder: Path, device: torch.device | str = 'cuda') -> None:
        self.device, self.turn = torch.device(device), threading.Lock()
        self.name = f'torch-{self.device.type}'
        self._net = SceneForecast.load(folder, self.device).requires_grad_(False)
        for layer in self._net.layers:
            layer.attend = attend_in_parts
        self._see, self._again = See(self._net), Again(self._net)
        self._launch = Graphs(self.device) if self.device.type == 'cuda' else Eager(self.device)

    @property
    def preset(self) -> Preset:
        return self._net.preset

    def open(self) -> DeviceStream:
        """Return a new stream without history."""
        return DeviceStream(self, Ring(self.preset, self._net.per_frame, QUERIES, _rates(self._net.pairs).numpy()))

    def window(self) -> Tensor:
        """Return an empty window: keys, then values, of each layer, (2 * depth, H, W * N, d)."""
        preset = self.preset
        return torch.zeros(2 * preset.depth, preset.heads, preset.window_frames * self._net.per_frame, preset.head_dim,
                           device=self.device)

    @torch.inference_mode()
    def see(self, *inputs: np.ndarray | Tensor) -> tuple[Tensor, ...]:
        """Run ``_see_once``; return the frame's forecasts, flat, its features and slots, and its own keys and values."""
        return self._launch('see', self._see_once, [[each] for each in inputs])

    @torch.inference_mode()
    def again(self, *inputs: np.ndarray | Tensor) -> Tensor:
        """Run ``_see_again``; return the forecasts of the slots, flat."""
        return self._launch('again', self._see_again, [[each] for each in inputs])[0]

    def _see_once(self, image: Tensor, previous: Tensor, started: Tensor, motion: Tensor, pose: Tensor, turn: Tensor,
                  bias: Tensor, window: Tensor) -> tuple[Tensor, ...]:
        """Take the arguments of ``See`` with a batch dimension, except image, uint8 (1, H, W, 3), and motion, executed and
        measured, (1, 2, 2)."""
        pixels = image.permute(0, 3, 1, 2).float() / 127.5 - 1.0
        executed, measured = motion[:, :1], motion[:, 1:]
        *told, features, slots = (found := self._see(pixels, previous, started, executed, measured, pose[0], turn[0], bias[0],
                                                    *_halves(window)))[:8]
        return _flat(told)[None], features, slots, torch.stack(found[8:], 1)

    def _see_again(self, slots: Tensor, pose: Tensor, turn: Tensor, bias: Tensor, own: Tensor, window: Tensor
                   ) -> tuple[Tensor]:
        return _flat(self._again(slots, pose[0], turn[0], bias[0], *_halves(own), *_halves(window)))[None],


def _halves(window: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return keys and values of each layer, (1, H, S, d), from (1, 2 * depth, H, S, d)."""
    keys, values = window.transpose(0, 1).chunk(2)
    return list(keys), list(values)


def _flat(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])


class DeviceStream:
    """One robot's forecasts, for one thread; other threads may use other streams."""

    def __init__(self, network: DeviceForecast, ring: Ring) -> None:
        self._network, self._ring, preset = network, ring, network.preset
        self.times = np.array([0.0, *(preset.step_period * frames for frames in HORIZONS)])
        self._window = network.window()
        self._features = torch.zeros(4 * preset.vae_width, *preset.latent_size, device=network.device)
        self._slots = torch.zeros(QUERIES, preset.width)

    @property
    def features(self) -> np.ndarray:
        """Features of the newest frame's slots, (QUERIES, D)."""
        return self._slots.cpu().numpy()

    def observe(self, image: np.ndarray, executed: np.ndarray, measured: np.ndarray, passes: int
                ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Take a frame and return presence, places and walls, see ``control.pilot.Forecast``."""
        # Each thread has its own CUDA stream, so hold the lock until the results are on the host.
        with self._network.turn:
            return self._observe(image, executed, measured, passes)

    def _observe(self, image: np.ndarray, executed: np.ndarray, measured: np.ndarray, passes: int
                 ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        network, ring = self._network, self._ring
        where = ring.enter(measured)
        told, features, slots, own = network.see(
            image, self._features, np.array(ring.seen > 0), np.array([executed, measured], np.float32), *where, ring.bias(),
            self._window)
        if passes == 2:
            told = torch.cat([told, network.again(slots[0], *where, ring.bias_again(), own[0], self._window)], 1)
        self._window[:, :, ring.first:ring.first + own.shape[3]] = own[0]
        self._features, self._slots = features[0], slots[0]
        ring.seen += 1
        numbers = told[0].cpu().numpy()
        alone, at = SLOTS + 2 * SLOTS + WALLS, SLOTS + 2 * _PATHS * SLOTS + WALLS
        if not passes:
            presence, places, walls = np.split(numbers[:alone], [SLOTS, 3 * SLOTS])
            return presence, np.broadcast_to(places.reshape(SLOTS, 2), (_PATHS, SLOTS, 2)), walls
        presence, places, walls = np.split(numbers[-at:], [SLOTS, SLOTS + 2 * _PATHS * SLOTS])
        return presence, places.reshape(_PATHS, SLOTS, 2), walls
