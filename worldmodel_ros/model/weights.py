"""Sources of a model's weights: safetensors files or a seed, tensor by tensor, straight to the device.

The layers of the DiT, nearly all of a large model, are first created without memory. A process that has only a part of them
(some heads, some hidden units) reads and keeps only that.
"""
from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from .checkpoint_description import ModelError, weight_files
from .presets import Preset
from .world_model import WorldModel

DRAWN_STD = 0.6  # of random matrices, times the square root of their inputs: as torch initialises its layers
DRAWN_BIAS = 0.02
SCALE = '.row_scale'  # suffix to the name of an 8-bit matrix: the factor of each of its rows


@dataclass(frozen=True)
class Part:
    """A process's part of a tensor: ``ranges`` (from, to) along ``axis``, one after the other."""

    axis: int
    ranges: tuple[tuple[int, int], ...]

    def of(self, whole) -> Tensor:
        """Return the part of a tensor, or of a slice of safetensors, which then reads no more than that."""
        front = (slice(None),) * self.axis
        return torch.cat([whole[(*front, slice(*part))] for part in self.ranges], self.axis)


PartOf = Callable[[str], 'Part | None']  # by a tensor's name; None: all of it


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. Raises ModelError if it cannot be read."""
    try:
        return load_file(str(file))
    except Exception as error:  # safetensors raises its own and OS errors; each means the same here
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> ModelError:
    return ModelError(f'{file} cannot be read ({error}); restore it from the release or train again')


class Weights(Protocol):
    """A source of tensors, by their names in the model."""

    def take(self, name: str, shape: torch.Size, part: Part | None) -> Tensor:
        """Return a tensor, or its part, on the device; ``shape`` is that of the whole. Raises ModelError."""


class StoredWeights:
    """The safetensors files of a checkpoint; a context manager that keeps them open."""

    def __init__(self, folder: Path, device: torch.device | str = 'cpu'):
        self._folder, self._device = folder, str(device)
        self._stack = ExitStack()
        self._files: dict[str, object] = {}  # by tensor

    def __enter__(self) -> StoredWeights:
        for file in weight_files(self._folder):
            try:
                opened = self._stack.enter_context(safe_open(str(file), 'pt', device=self._device))
            except (OSError, SafetensorError) as error:
                self._stack.close()
                raise _unreadable(file, error) from error
            self._files |= dict.fromkeys(opened.keys(), opened)
        return self

    def __exit__(self, *exception) -> None:
        self._stack.close()

    def names(self) -> set[str]:
        return {name for name in self._files if not (name.endswith(SCALE) and name.removesuffix(SCALE) in self._files)}

    def count(self) -> int:
        """Return how many numbers all tensors have together."""
        return sum(math.prod(file.get_slice(name).get_shape()) for name, file in self._files.items())

    def take(self, name: str, shape: torch.Size, part: Part | None) -> Tensor:
        if name not in self._files:
            hint = ': they are of a scene forecast, which is no world model' if 'slot.1.weight' in self._files else ''
            raise ModelError(f'weights in {self._folder} lack {name}{hint}')
        stored = self._files[name].get_slice(name)
        if tuple(stored.get_shape()) != tuple(shape):
            raise ModelError(f'weights in {self._folder}: {name} is {tuple(stored.get_shape())}, and should be '
                             f'{tuple(shape)}')
        tensor = self._files[name].get_tensor(name) if part is None else part.of(stored)
        scale = self._files.get(name + SCALE)
        if scale is None:
            if tensor.dtype == torch.int8:
                raise ModelError(f'weights in {self._folder} have {name} in 8 bits without the scales of its rows')
            return tensor
        rows = scale.get_tensor(name + SCALE)
        if tensor.dtype != torch.int8 or rows.shape != shape[:1]:
            raise ModelError(f'weights in {self._folder}: {name} is {tensor.dtype} with {tuple(rows.shape)} scales, and should '
                             f'be int8 with {shape[0]}')
        return dequantised(tensor, rows if part is None or part.axis else part.of(rows))


def quantised(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a matrix (rows, columns) to 8 bits: int8, and the factor of each row, float32 (rows,)."""
    scale = matrix.float().abs().amax(1).clamp_min(1e-12) / 127.0
    return (matrix.float() / scale[:, None]).round().to(torch.int8), scale


def dequantised(matrix: Tensor, scale: Tensor) -> Tensor:
    """Invert ``quantised``; float32."""
    return matrix.float() * scale[:, None]


class RandomWeights:
    """Weights drawn from a seed, each tensor by itself, so that all processes' parts are of one model. Nothing starts at
    zero: an identity would hide mistakes."""

    def __init__(self, seed: int = 0, device: torch.device | str = 'cpu'):
        self._seed, self._device = seed, device

    def take(self, name: str, shape: torch.Size, part: Part | None) -> Tensor:
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(f'{self._seed} {name}'.encode()))
        if len(shape) < 2 and not name.endswith('bias'):
            whole = torch.ones(shape, device=self._device)  # a norm's
        else:
            std = DRAWN_BIAS if len(shape) < 2 else DRAWN_STD / math.sqrt(math.prod(shape[1:]))
            whole = torch.randn(shape, generator=generator, device=self._device) * std
        return whole if part is None else part.of(whole)


def build(preset: Preset, weights: Weights, device: torch.device | str = 'cpu', layers: torch.dtype = torch.float32,
          part: PartOf = lambda name: None) -> WorldModel:
    """Return a model for evaluation with the given weights, in float32, the layers of its DiT in ``layers``.

    Where ``part`` says so, a parameter of the layers is a part of the preset's. Raises ModelError for weights that do not fit.
    """
    with torch.device(device):
        model = WorldModel(preset, empty_layers=True)
    for name, parameter in list(model.named_parameters()):
        owner, _, own_name = name.rpartition('.')
        dtype = layers if name.startswith('dit.blocks.') else torch.float32
        tensor = weights.take(name, parameter.shape, part(name)).to(device, dtype)
        setattr(model.get_submodule(owner), own_name, nn.Parameter(tensor, requires_grad=False))
    return model.eval()
