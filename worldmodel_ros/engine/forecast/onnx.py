"""A scene forecast through ONNX Runtime on a CPU, in float32 or with dynamic int8 linears.

The graphs are kept in the user's cache folder as those of the world model are.
"""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from onnxruntime import InferenceSession

from worldmodel_ros.engine.backends.onnx import open_graphs
from worldmodel_ros.model.checkpoint_description import read_description
from worldmodel_ros.motion import along_arc

EXPORT_VERSION = 8  # counts up when the exported graphs change
SEE, AGAIN = 'see', 'again'  # graphs; a second pass is exported and opened where it is asked for
_UNSEEN = np.float32(-1e4)  # additive mask


class OnnxForecast:
    """The graphs of a forecast, which all of its streams share, and what they say of it: ``horizons`` in frames; ``rates`` of
    the rotation by time in rad a frame; and how many tokens are ``per_frame`` and ``queries`` among them."""

    def __init__(self, folder: Path, threads: int, quantised: bool) -> None:
        self.name, self.preset = 'onnx-int8' if quantised else 'onnx-fp32', read_description(folder).preset

        def opened(graph: str) -> InferenceSession:
            def write(target: Path) -> None:
                from .export import export
                export(folder, target, quantised, graph)
            return open_graphs(folder, quantised, EXPORT_VERSION, (graph,), write, threads)[graph]
        self._open_graph = opened
        self._sessions = {SEE: opened(SEE)}
        known = {key: json.loads(value)
                 for key, value in self._sessions[SEE].get_modelmeta().custom_metadata_map.items()}
        self.horizons, self.rates = tuple(known['horizons']), np.array(known['rates'])
        self.per_frame, self.queries = known['per_frame'], known['queries']

    def run(self, graph: str, *arrays: np.ndarray) -> list[np.ndarray]:
        """Return a graph's outputs."""
        if graph not in self._sessions:
            self._sessions[graph] = self._open_graph(graph)
        session = self._sessions[graph]
        return session.run(None, {i.name: a for i, a in zip(session.get_inputs(), arrays, strict=True)})

    def open(self) -> OnnxStream:
        """Return a stream that knows nothing."""
        return OnnxStream(self)


class OnnxStream:
    """One robot's forecasts. The window is a ring of keys and values: the newest frame takes the oldest one's place."""

    def __init__(self, network: OnnxForecast) -> None:
        self._network, preset = network, network.preset
        self.times = np.array([0.0, *(preset.step_period * frames for frames in network.horizons)])
        self._own, self._frames = network.per_frame, preset.window_frames
        shape = preset.depth, 1, preset.heads, self._frames * self._own, preset.head_dim
        self._keys, self._values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self._features = np.zeros((1, 4 * preset.vae_width, *preset.latent_size), np.float32)
        self._seen = 0  # frames
        self._pose = np.zeros(3)
        self.features = np.zeros((network.queries, preset.width), np.float32)  # of the newest frame's slots

    def observe(self, image: np.ndarray, executed: np.ndarray, measured: np.ndarray, passes: int
                ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Take a frame and return presence, places and walls, see ``control.pilot.Forecast``."""
        twist = np.asarray(measured, np.float32).astype(float)  # as the network is told it
        self._pose, = along_arc(self._pose[None], twist[None], self._network.preset.step_period)
        angle = self._seen * self._network.rates
        where = self._pose.astype(np.float32), np.array([np.cos(angle), np.sin(angle)], np.float32)
        # Each layer's window is an input of its own: a graph would copy what it takes apart.
        window = *self._keys, *self._values
        newest = (to_network(image), self._features, np.array([self._seen > 0]),
                  *(np.asarray(values, np.float32).reshape(1, 1, 2) for values in (executed, measured)), *where,
                  self._bias())
        *found, self._features, slots = (told := self._network.run(SEE, *newest, *window))[:8]
        own = told[8:]  # keys, then values, of each layer
        if passes == 2:
            found = [*found[:3], *self._network.run(AGAIN, slots, *where, self._bias_again(), *own, *window)]
        self.features = slots[0]
        first = self._seen % self._frames * self._own
        for kept, new in zip(window, own, strict=True):
            kept[:, :, first:first + self._own] = new
        self._seen += 1
        presence, places, walls = found[3:] if passes else found[:3]
        return presence, places if passes else np.broadcast_to(places, (len(self.times), *places.shape)), walls

    def _bias(self) -> np.ndarray:
        """Return the mask (N, W * N + N) between a frame's tokens and those of the ring, as far as it is filled, and of the
        frame: the image's tokens see no slot."""
        own = self._own
        slot = np.arange(own) >= own - self._network.queries
        unseen = ~slot[:, None] & np.tile(slot, self._frames + 1)
        unseen[:, self._seen * own:self._frames * own] = True
        return np.where(unseen, _UNSEEN, np.float32(0.0))

    def _bias_again(self) -> np.ndarray:
        """Return the mask of a second pass, which sees everything that there is."""
        queries = self._network.queries
        bias = np.zeros((queries, (self._frames + 1) * self._own + queries), np.float32)
        bias[:, self._seen * self._own:self._frames * self._own] = _UNSEEN
        return bias


def to_network(image: np.ndarray) -> np.ndarray:
    """Convert a frame uint8 (H, W, 3) to float32 (1, 3, H, W) in [-1, 1]."""
    return np.ascontiguousarray(image.transpose(2, 0, 1), np.float32)[None] / np.float32(127.5) - np.float32(1.0)
