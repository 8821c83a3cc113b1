"""Runs the networks with ONNX Runtime on a CPU, in float32 or with dynamic int8 linears.

The graphs are exported from the same modules that PyTorch runs, once per checkpoint, and kept in the user's cache
folder; a node that finds them there never imports torch.
"""
from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnxruntime

from worldmodel_ros.cache.layout import TileLayout
from worldmodel_ros.cache.pool import NumpyStorage
from worldmodel_ros.engine.memory import Window
from worldmodel_ros.model.checkpoint_description import ModelError, checksum, read_description, weight_files
from worldmodel_ros.model.rotary import rotary_angles
from worldmodel_ros.model.sampling import FLOW
from worldmodel_ros.paths import cache_folder
from .protocol import Backend

_log = logging.getLogger(__name__)

# Incremented when the exported graphs change, so that older files in a cache folder are not used.
EXPORT_VERSION = 6
_CHECKSUMS = 'checksums.json'
GRAPHS = ('encode', 'block', 'policy', 'outcomes', 'decode')


def exported(folder: Path, quantised: bool, version: int, graphs: Sequence[str], write: Callable[[Path], None]) -> Path:
    """Return the folder with ``graphs`` of a checkpoint, which ``write`` exports into a folder now if need be; safe against
    another process doing the same. ``version`` distinguishes them from older ones."""
    digest = hashlib.sha256(json.dumps([version, quantised, onnxruntime.__version__, *graphs]).encode())
    for file in (folder / 'model.json', *weight_files(folder)):
        digest.update(file.read_bytes())
    target = cache_folder() / f'{folder.name}-{"int8" if quantised else "fp32"}-{digest.hexdigest()[:16]}'
    if target.is_dir():
        if not (damaged := _damaged(target, graphs)):
            return target
        _log.warning('%s is damaged: the graphs are exported again', damaged)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix='.export-'))
    except OSError as error:
        raise ModelError(f'cannot write exported graphs to {target.parent} ({error}); set WORLDMODEL_CACHE to a '
                         f'folder that can be written') from error
    try:
        write(scratch)
        checksums = {f'{name}.onnx': checksum(scratch / f'{name}.onnx') for name in graphs}
        (scratch / _CHECKSUMS).write_text(json.dumps(checksums))
        if target.is_dir() and _damaged(target, graphs):
            target.rename(scratch / 'damaged')
        scratch.rename(target)
        shutil.rmtree(target / 'damaged', ignore_errors=True)
    except OSError:
        if not target.is_dir():  # else another process was faster, and its files are as good
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _damaged(folder: Path, graphs: Sequence[str]) -> Path | None:
    """Return a file of exported graphs that is not as it was written, or None."""
    try:
        written = json.loads((folder / _CHECKSUMS).read_text())
        return next((folder / f'{name}.onnx' for name in graphs
                     if checksum(folder / f'{name}.onnx') != written[f'{name}.onnx']), None)
    except (OSError, ValueError, KeyError, TypeError):
        return folder


def session_options(threads: int) -> onnxruntime.SessionOptions:
    """Return options to run a graph next to a robot's other processes."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Threads that spin while they wait take cores from the robot's other processes.
    options.add_session_config_entry('session.intra_op.allow_spinning', '0')
    return options


def open_graphs(folder: Path, quantised: bool, version: int, graphs: Sequence[str], write: Callable[[Path], None],
                threads: int) -> dict[str, onnxruntime.InferenceSession]:
    """Return a session on ``threads`` threads of a CPU for each of ``graphs``, which are ``exported`` if need be."""
    files, options = exported(folder, quantised, version, graphs, write), session_options(threads)
    return {name: onnxruntime.InferenceSession(str(files / f'{name}.onnx'), options, providers=['CPUExecutionProvider'])
            for name in graphs}


class OnnxBackend(Backend):
    """The networks of TorchBackend; see there. Arrays are numpy. Calls run one by one: batches are no faster on a CPU."""

    def __init__(self, folder: Path, threads: int, quantised: bool):
        self.name = 'onnx-int8' if quantised else 'onnx-fp32'
        self.preset = read_description(folder).preset
        if self.preset.tile:
            raise ModelError(f'{folder}: preset {self.preset.name!r} attends to tiles, which is too large for ONNX Runtime '
                             f'on a CPU: use a back end of torch')

        def write(target: Path) -> None:
            from .export import export
            export(folder, target, quantised)
        self._sessions = open_graphs(folder, quantised, EXPORT_VERSION, GRAPHS, write, threads)

    def storage(self, layout: TileLayout, pages: int) -> NumpyStorage:
        return NumpyStorage(layout, len(self.preset.cache_layers), self.preset.heads, self.preset.head_dim, pages)

    def run(self, network: str, batch: Sequence[tuple]) -> list:
        call = getattr(self, f'_{network}')
        return [call(*inputs) for inputs in batch]

    def host(self, array: np.ndarray) -> np.ndarray:
        return array

    def stack(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return np.stack(arrays)

    def _run(self, graph: str, *arrays: np.ndarray) -> list[np.ndarray]:
        session = self._sessions[graph]
        return session.run(None, {i.name: a for i, a in zip(session.get_inputs(), arrays, strict=True)})

    def _encode(self, frame: np.ndarray, previous: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        image = np.ascontiguousarray(frame.transpose(2, 0, 1), np.float32) / np.float32(127.5) - np.float32(1.0)
        started = previous is not None
        if not started:
            previous = np.zeros((1, 4 * self.preset.vae_width, *self.preset.latent_size), np.float32)
        latent, features = self._run('encode', image[None], previous, np.array([started]))
        return latent[0], features

    def _commit(self, latents: np.ndarray, actions: np.ndarray, window: Window,
                places: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        _, features, k, v = self._block(latents, 1.0, FLOW, actions, window)
        window.storage.write(*places, k[:, 0], v[:, 0])
        return features

    def _denoise(self, z: np.ndarray, tau: float, rate: float, row: int, actions: np.ndarray, window: Window
                 ) -> tuple[np.ndarray, np.ndarray]:
        x, features, _, _ = self._block(z, tau, row, actions, window)
        return x if rate == 1.0 else z + (x - z) * np.float32(rate), features

    def _block(self, latents: np.ndarray, tau: float, row: int, actions: np.ndarray, window: Window
               ) -> tuple[np.ndarray, ...]:
        count, storage = len(latents), window.storage
        rotary = rotary_angles(self.preset, window.times)
        # The whole pool is an input: the runtime reads the caller's array in place.
        x, features, k, v = self._run(
            'block', latents[None], np.full((1, count), tau, np.float32), np.full((1, count), row, np.int64),
            actions[None], rotary[:, None], window.bias()[None], *storage.rows(),
            storage.row_index(window.pages)[:, None])
        return x[0], features[0], k, v

    def _policy(self, features: np.ndarray, noise: np.ndarray, prefix: np.ndarray, delay: np.ndarray) -> np.ndarray:
        return self._run('policy', features[None], noise[None], prefix[None], delay[None])[0][0]

    def _outcomes(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        logits, progress = self._run('outcomes', features[None])
        return logits[0], progress[0]

    def _decode(self, latents: np.ndarray, before: np.ndarray) -> np.ndarray:
        images = self._run('decode', latents, before)[0]
        return np.clip(np.rint((images + 1.0) * 127.5), 0, 255).astype(np.uint8).transpose(0, 2, 3, 1)
