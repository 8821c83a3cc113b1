"""Gives a process its heads and hidden units of every layer (Megatron-LM, Shoeybi et al. 2019)."""
from __future__ import annotations

from torch import Tensor, nn

from worldmodel_ros.model.dit import DiT
from worldmodel_ros.model.presets import Preset
from worldmodel_ros.model.weights import Part, PartOf
from .group import TensorParallel


def share(preset: Preset, rank: int, count: int) -> PartOf:
    """Return a process's part of each tensor of a model."""
    def ranges(size: int, parts: int = 1) -> tuple[tuple[int, int], ...]:
        own = size // count
        return tuple((part * size + rank * own, part * size + (rank + 1) * own) for part in range(parts))

    d = preset.width
    outputs = {'qkv': ranges(d, 3), 'mlp.0': ranges(4 * d), 'modulation': ranges(6 * d)}
    inputs = {'proj': ranges(d), 'mlp.2': ranges(4 * d)}

    def part(name: str) -> Part | None:
        if not name.startswith('dit.blocks.'):
            return None
        layer, _, tensor = name.split('.', 3)[3].rpartition('.')
        if layer in outputs:
            return Part(0, outputs[layer])
        return Part(1, inputs[layer]) if layer in inputs and tensor == 'weight' else None
    return part


def join(dit: DiT, group: TensorParallel) -> None:
    """Make layers that hold their ``share`` of the weights exchange what they need of each other, in place."""
    for block in dit.blocks:
        block.heads //= group.count
        block.modulation = GatheredOutputs(block.modulation, group)
        block.proj, block.mlp[2] = SummedProducts(block.proj, group), SummedProducts(block.mlp[2], group)


class SummedProducts(nn.Module):
    """A linear layer whose inputs are divided among processes; their products are summed."""

    def __init__(self, linear: nn.Linear, group: TensorParallel):
        super().__init__()
        self.bias, self._group = linear.bias, group
        linear.bias = None
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self._group.sum(self.linear(x)) + self.bias


class GatheredOutputs(nn.Module):
    """A linear layer whose outputs are divided among processes, and gathered in each."""

    def __init__(self, linear: nn.Linear, group: TensorParallel):
        super().__init__()
        self.linear, self._group = linear, group

    def forward(self, x: Tensor) -> Tensor:
        return self._group.gather(self.linear(x), -1)
