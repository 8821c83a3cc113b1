"""Runs a scene forecast with ONNX Runtime on a CPU, in float32 or with dynamic int8 linears.

The graphs are kept in the user's cache folder, like those of the world model.
"""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from onnxruntime import InferenceSession

from worldmodel_ros.engine.backends.onnx import open_graphs
from worldmodel_ros.model.checkpoint_description import read_description
from .ring import Ring

EXPORT_VERSION = 8  # incremented when the exported graphs change
SEE, AGAIN = 'see', 'again'  # graphs; that of the second pass is exported and opened on first use


class OnnxForecast:
    """The graphs of a forecast, shared by all of its streams, and their metadata: ``horizons`` in frames; ``rates`` of the
    rotation by time in rad per frame; and how many tokens are ``per_frame`` and ``queries`` among them."""

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
        """Return a new stream without history."""
        return OnnxStream(self)


class OnnxStream:
    """One robot's forecasts."""

    def __init__(self, network: OnnxForecast) -> None:
        self._network, preset = network, network.preset
        self.times = np.array([0.0, *(preset.step_period * frames for frames in network.horizons)])
        self._own, self._ring = network.per_frame, Ring(preset, network.per_frame, network.queries, network.rates)
        shape = preset.depth, 1, preset.heads, preset.window_frames * self._own, preset.head_dim
        self._keys, self._values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self._features = np.zeros((1, 4 * preset.vae_width, *preset.latent_size), np.float32)
        self.features = np.zeros((network.queries, preset.width), np.float32)  # of the newest frame's slots

    def observe(self, image: np.ndarray, executed: np.ndarray, measured: np.ndarray, passes: int
                ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Take a frame and return presence, places and walls, see ``control.pilot.Forecast``."""
        ring = self._ring
        where = ring.enter(measured)
        # Each layer's window is a separate input, since a graph would copy to split one array.
        window = *self._keys, *self._values
        newest = (to_network(image), self._features, np.array([ring.seen > 0]),
                  *(np.asarray(values, np.float32).reshape(1, 1, 2) for values in (executed, measured)), *where, ring.bias())
        *found, self._features, slots = (told := self._network.run(SEE, *newest, *window))[:8]
        own = told[8:]  # keys, then values, of each layer
        if passes == 2:
            found = [*found[:3], *self._network.run(AGAIN, slots, *where, ring.bias_again(), *own, *window)]
        self.features = slots[0]
        for kept, new in zip(window, own, strict=True):
            kept[:, :, ring.first:ring.first + self._own] = new
        ring.seen += 1
        presence, places, walls = found[3:] if passes else found[:3]
        return presence, places if passes else np.broadcast_to(places, (len(self.times), *places.shape)), walls


def to_network(image: np.ndarray) -> np.ndarray:
    """Convert a frame uint8 (H, W, 3) to float32 (1, 3, H, W) in [-1, 1]."""
    return np.ascontiguousarray(image.transpose(2, 0, 1), np.float32)[None] / np.float32(127.5) - np.float32(1.0)
