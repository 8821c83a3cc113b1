"""A session at rest, in a safetensors file."""
from __future__ import annotations

from pathlib import Path

import numpy as np

from ..cache import snapshot
from ..cache.sequence import SequenceCache
from ..model.presets import Preset

FORMAT = '2'


def write(path: str | Path, spec: Preset, state: dict[str, np.ndarray], cache: SequenceCache) -> None:
    """Writes what a session of a model has in its cache and beside it: ``state`` is what `read` returns."""
    from safetensors.numpy import save_file
    arrays = {name: np.ascontiguousarray(array) for name, array in state.items()}
    save_file(arrays | snapshot.save(cache), str(path), metadata={'format': FORMAT, 'model': spec.name})


def read(path: str | Path, spec: Preset, cache: SequenceCache) -> dict[str, np.ndarray]:
    """Replaces what is in a cache by what `write` wrote.

    Returns time int64 (1,), latent (h, w, Z), features (P, D) and encoder_state (1, C, h, w), float32, and of the
    preset's sink_frames, sink_latents (n, h, w, Z) and sink_actions (n, A). Raises ValueError, and changes nothing,
    when the file does not fit the model.
    """
    from safetensors import SafetensorError, safe_open
    try:
        with safe_open(str(path), framework='numpy') as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}
            about = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ValueError(f'{path} is not a saved session: {error}') from error
    if about.get('format') != FORMAT:
        raise ValueError(f'{path} holds a session in format {about.get("format", "1")}, and this version reads '
                         f'format {FORMAT}: load it with the version that saved it, or save a new one')
    expected = {'time': (1,), 'features': (spec.tokens, spec.width),
                'latent': (*spec.latent_size, spec.latent_channels),
                'encoder_state': (1, 4 * spec.vae_width, *spec.latent_size)}
    if 'sink_latents' in arrays:
        expected |= {'sink_latents': (spec.sink_frames, *expected['latent']),
                     'sink_actions': (spec.sink_frames, spec.actions)}
    state = {name: arrays.pop(name) for name in expected if name in arrays}
    try:
        if {name: array.shape for name, array in state.items()} != expected:
            raise ValueError('its tensors have other shapes')
        snapshot.restore(cache, arrays)
    except ValueError as error:
        raise ValueError(f'{path} holds a session of model {about.get("model")!r}, which does not fit '
                         f'{spec.name!r}: {error}') from error
    # Written before there were sinks: the newest frame stands for all of them.
    state.setdefault('sink_latents', state['latent'][None].repeat(spec.sink_frames, 0))
    state.setdefault('sink_actions', np.zeros((spec.sink_frames, spec.actions), np.float32))
    return state
