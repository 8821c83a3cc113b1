"""Checkpoints: a folder with ``model.json`` (preset and provenance) and safetensors files of at most 16 MiB."""
from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode

from .checkpoint_description import FORMAT, ModelError, checksum, read_description, weight_files
from .weights import SCALE, PartOf, StoredWeights, build, dequantised, quantised, read_tensors
from .world_model import WorldModel

if TYPE_CHECKING:
    from .scene_forecast import SceneForecast

MAX_FILE_BYTES = 15 * 1024 * 1024
_UNSTORED = 2 ** 20  # numbers of a model that are computed, not stored


def save(model: WorldModel | SceneForecast, folder: Path, provenance: dict, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the model with floating-point tensors in ``dtype``, replacing the files of an older model in the folder once all
    new ones are written. With int8, the matrices of the DiT's layers are stored in 8 bits, rounded row by row, and all else in
    bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in _stored(model, dtype):
        if size + tensor.nbytes > MAX_FILE_BYTES and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    checksums = {}
    with TemporaryDirectory(prefix='.new-', dir=folder) as made:  # so that a full disk or an interrupt costs no older model
        new = Path(made)
        for index, shard in enumerate(shards):
            file = new / f'weights-{index + 1:02d}.safetensors'
            save_file(shard, str(file))
            checksums[file.name] = checksum(file)
        description = {'format': FORMAT, 'preset': model.preset.to_dict(), 'provenance': provenance, 'crc32': checksums}
        (new / 'model.json').write_text(json.dumps(description, indent=1) + '\n')
        for old in folder.glob('*.safetensors'):
            old.unlink()
        for file in (*checksums, 'model.json'):
            (new / file).replace(folder / file)


def is_8_bit(folder: Path) -> bool:
    """Return whether the matrices of the layers are stored in 8 bits."""
    for file in folder.glob('*.safetensors'):
        with safe_open(str(file), 'pt') as stored:
            if any(name.endswith(SCALE) for name in stored.keys()):
                return True
    return False


def _stored(model: WorldModel | SceneForecast, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors as they are written, on the host, by name."""
    floating = torch.bfloat16 if dtype is torch.int8 else dtype
    for name, tensor in model.state_dict().items():
        tensor = tensor.detach().cpu()
        if dtype is torch.int8 and name.startswith('dit.blocks.') and tensor.ndim == 2:
            matrix, scale = quantised(tensor)
            yield name, matrix
            yield name + SCALE, scale
            continue
        # The latents' normalisation scales every frame, so it keeps its full precision.
        keep = not tensor.is_floating_point() or name.rpartition('.')[2].startswith('latent_')
        yield name, tensor.to(tensor.dtype if keep else floating).contiguous()


def load(folder: Path, device: torch.device | str = 'cpu', layers: torch.dtype = torch.float32,
         part: PartOf = lambda name: None) -> WorldModel:
    """Read a checkpoint straight to a device; return the model in evaluation mode, in float32 except for the layers of its DiT.

    ``part`` as in ``weights.build``. Raises ModelError if the folder, its description or a tensor is missing or does not fit.
    """
    preset = read_description(folder).preset
    with StoredWeights(folder, device) as weights:
        try:
            with _Bounded(weights):
                model = build(preset, weights, device, layers, part)
        except (RuntimeError, ValueError, TypeError) as error:
            if isinstance(error, ModelError):
                raise
            raise ModelError(f'no model can be made of preset {preset.name!r} in {folder}: {error}') from error
        state = model.state_dict()
        if unknown := weights.names() - set(state):
            raise ModelError(f'weights in {folder} do not fit preset {preset.name!r}: they have '
                             f'{", ".join(sorted(unknown))} besides')
        for name, buffer in model.named_buffers():
            if name in state:
                buffer.copy_(weights.take(name, buffer.shape, None))
    return model.to(device)  # also what no checkpoint holds, such as the order of tokens


class _Bounded(TorchFunctionMode):
    """Limits the numbers allocated by those in the weights: a damaged description may ask for any size of tensor."""

    def __init__(self, weights: StoredWeights) -> None:
        super().__init__()
        self._left = 2 * weights.count() + _UNSTORED

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.empty, torch.zeros, torch.ones, torch.randn):
            self._left -= math.prod(args[0] if isinstance(args[0], Sequence) else args)
            if self._left < 0:
                raise ModelError('model.json describes a larger model than the weights are of: restore it from the release, or '
                                 'train again')
        return func(*args, **(kwargs or {}))


def start_from(model: WorldModel, folder: Path) -> list[str]:
    """Give a model to be trained the weights of a checkpoint; return the names of the parts left as they are, since the
    checkpoint has them in another form: heads, which are soon trained again.

    Raises ModelError if the checkpoint cannot be read, or if its VAE or DiT does not fit.
    """
    preset, state, fresh = read_description(folder).preset, _read_weights(folder), []
    for name, part in model.named_children():
        try:
            part.load_state_dict({key.removeprefix(f'{name}.'): tensor for key, tensor in state.items()
                                  if key.startswith(f'{name}.')})
        except RuntimeError as error:
            if not name.endswith('_head'):
                raise ModelError(f'{folder}, of preset {preset.name!r}, is no start for a {model.preset.name!r}: its '
                                 f'{name} has another shape; name a checkpoint of the same size') from error
            fresh.append(name)
    return fresh


def take_autoencoder(model: WorldModel, folder: Path) -> None:
    """Give a model to be trained the autoencoder of a checkpoint; being convolutional, it may be of another image size.
    Raises ModelError if the checkpoint cannot be read or its autoencoder does not fit."""
    state = {name.removeprefix('vae.'): tensor for name, tensor in _read_weights(folder).items() if name.startswith('vae.')}
    try:
        model.vae.load_state_dict(state)
    except RuntimeError as error:
        raise ModelError(f'the autoencoder of {folder}, of preset {read_description(folder).preset.name!r}, is no start for a '
                         f'{model.preset.name!r}: it has another width; name a checkpoint with the same') from error


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint, floating-point ones as float32."""
    state: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        state |= read_tensors(file)
    scales = {name: state.pop(name + SCALE) for name in list(state) if name + SCALE in state}
    state |= {name: dequantised(state[name], scale) for name, scale in scales.items()}
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
