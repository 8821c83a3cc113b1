"""DiT layers in FP8: weights in e4m3 by rows, activations rounded on the fly, attention and residuals unchanged.

On a GPU each of a layer's four products is one kernel, and another one between two products reads and writes every token once
(``kernels.rows_triton``). On a CPU the same code computes what a GPU would, from the definitions.
"""
from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..kernels.attention import rotate_qk
from ..kernels.linear import fp8_linear, fp8_linear_gelu, fp8_linear_rotate
from ..kernels.quantise import FP8_MAX
from ..kernels.rows import Rounded, quantise_rows, row_kernels
from .dit import Block, DiT, FinalNorm, State

# The linear layers of a block, by submodule name.
LINEARS = ('modulation', 'qkv', 'proj', 'mlp.0', 'mlp.2')
# Modulation is computed per frame, not per token, and shifts all of a frame's tokens alike: in FP8 it would cost more
# accuracy than any other layer (docs/fp8.md), and save hardly any time.
KEPT = ('modulation',)
# Multiple of the largest calibration input that still fits: e4m3 is floating-point, so headroom costs no accuracy.
HEADROOM = 2.0
# Margin of a product's bound: rounding may lengthen a row and a weight by a sixteenth each.
LONGER = 1.14


class Fp8Linear(nn.Module):
    """An ``nn.Linear`` with e4m3 weights, one scale per row, that also takes rows that are already rounded.

    ``input_scale``, float32 (): the calibrated scale that rounds its input, or None to scale each row by itself. ``bound``,
    float32 (2,): a result is at most its row's length before rounding times the first, plus the second (Cauchy-Schwarz).
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight, scale = quantise_rows(linear.weight.detach())
        self.dtype = linear.weight.dtype  # of the results
        self.register_buffer('weight', weight)
        self.register_buffer('weight_scale', scale.t().contiguous())
        self.register_buffer('bias', None if linear.bias is None else linear.bias.detach())
        self.register_buffer('input_scale', None)
        longest = linear.weight.detach().float().norm(dim=-1).amax() * LONGER
        addend = torch.zeros_like(longest) if linear.bias is None else linear.bias.detach().float().abs().amax()
        self.register_buffer('bound', torch.stack([longest, addend]))

    def forward(self, x: Tensor | Rounded, gelu: Tensor | None = None,
                rotate: tuple[Tensor, Tensor, Tensor] | None = None, out: Tensor | None = None) -> Tensor | Rounded:
        """Map x (..., K), or rounded rows (M, K), to (..., N) or (M, N).

        For rounded rows only: with ``gelu``, scales () or (M, 1), return the results' GELU rounded by these; with ``rotate``,
        rotary (2, M, d / 2) and the norms' weights (d,), return qkv (M, 3, H, d), rotated; with ``out``, write to it.
        """
        if gelu is not None:
            return fp8_linear_gelu(x, self.weight, self.weight_scale, self.bias, gelu, self.dtype)
        if rotate is not None:
            return fp8_linear_rotate(x, self.weight, self.weight_scale, self.bias, *rotate, self.dtype)
        if not isinstance(x, Tensor):
            return fp8_linear(x, self.weight, self.weight_scale, self.bias, self.dtype, out)
        rows = row_kernels(x).quantise_rows(x.reshape(-1, x.shape[-1]), self.input_scale)
        return fp8_linear(rows, self.weight, self.weight_scale, self.bias, self.dtype).unflatten(0, x.shape[:-1])


@dataclass(frozen=True)
class Unsummed:
    """x (B, T, P, D) with gate * y still to be added, which the next kernel does while it reads x anyway."""

    x: Tensor
    y: Tensor  # (B * T * P, D)
    gate: Tensor  # (B * T, D)

    @property
    def shape(self) -> torch.Size:
        return self.x.shape


class SummingNorm(FinalNorm):
    """``FinalNorm`` for the output of an ``Fp8Block``."""

    def forward(self, x: Unsummed, shift: Tensor, scale: Tensor) -> Tensor:
        _, features, _ = row_kernels(x.x).modulate_rows(x.x.flatten(0, 2), shift.flatten(0, 1), scale.flatten(0, 1),
                                                        (x.y, x.gate), fp8=False, eps=self.eps)
        return features.view(x.shape)


class Fp8Block(Block):
    """A block whose linear layers are ``Fp8Linear``, except those in ``keep``. The last addition is left to the next kernel.

    ``fused``: the MLP's first product applies GELU and rounding in the same kernel, by a calibrated scale or else by the bound
    that its inputs' lengths set; the qkv product normalises and rotates in its kernel, if ``enter`` is given ``rotary``.
    """

    def __init__(self, block: Block, keep: Collection[str] = KEPT, fused: bool = False):
        nn.Module.__init__(self)  # the parts are the block's own
        self.heads, self.head_dim = block.heads, block.head_dim
        self.q_norm, self.k_norm, self.eps = block.q_norm, block.k_norm, (block.norm1.eps, block.norm2.eps)
        layers = {name: block.get_submodule(name) for name in LINEARS}
        layers = {name: layer if name in keep else _in_fp8(layer) for name, layer in layers.items()}
        self.modulation, self.qkv, self.proj = (layers[name] for name in LINEARS[:3])
        self.mlp = nn.ModuleDict({'0': layers['mlp.0'], '2': layers['mlp.2']})  # under the same names as in a block
        self.fused = fused and isinstance(layers['mlp.0'], Fp8Linear) and _rounding(layers['mlp.2'])[0]
        self.rotating = fused and isinstance(self.qkv, Fp8Linear)

    def enter(self, x: Tensor | Unsummed, cond: Tensor, rotary: Tensor | None = None, modulation: Tensor | None = None
              ) -> tuple[Tensor, State]:
        x, added = (x.x, (x.y, x.gate)) if isinstance(x, Unsummed) else (x, None)
        modulation = self.modulation(cond) if modulation is None else modulation
        shift1, scale1, *others = modulation.flatten(0, 1).chunk(6, -1)
        rows, modulated, _ = row_kernels(x).modulate_rows(x.reshape(-1, x.shape[-1]), shift1, scale1, added,
                                                          *_rounding(self.qkv), self.eps[0])
        rotation = None if rotary is None else (rotary, self.q_norm.weight, self.k_norm.weight)
        if self.rotating and rotation is not None:
            qkv = self.qkv(modulated, rotate=rotation)
        elif isinstance(qkv := self.qkv(modulated), Tensor):
            qkv = qkv.unflatten(-1, (3, -1, self.head_dim))
            if rotation is not None:
                rotate_qk(qkv, *rotation)
        return qkv.unflatten(-4, x.shape[:3]) if isinstance(qkv, Tensor) else qkv, (rows, *others)

    def leave(self, x: Tensor | Unsummed, attended: Tensor, state: State) -> Unsummed:
        rows, gate1, shift2, scale2, gate2 = state
        kernels, out = row_kernels(rows), self.proj(attended.flatten(0, 2))
        first, second = self.mlp['0'], self.mlp['2']
        fp8, static = _rounding(second)
        bound = first.bound if self.fused and static is None else None
        rows, modulated, ahead = kernels.modulate_rows(rows, shift2, scale2, (out, gate1), *_rounding(first),
                                                       self.eps[1], bound)
        if self.fused:
            out = second(first(modulated, ahead if static is None else static))
        else:
            out = second(kernels.gelu_rows(first(modulated), fp8, static))
        return Unsummed(rows.view(x.shape), out, gate2)


def to_fp8(dit: DiT, keep: Collection[str] = KEPT, fused: bool = False) -> DiT:
    """Replace the layers of a DiT with loaded weights by FP8 ones, block by block, so that not both are in memory.

    ``keep`` names linear layers that stay as they are: 'proj' of every block, or '3.proj' of one. ``fused`` as in ``Fp8Block``.
    Call this last, after the layers were divided among processes and cast, since a cast would convert the FP8 weights, too; on
    a GPU cast them to bfloat16, the only type its FP8 products return. Raises ValueError for an unknown name.
    """
    known = {*LINEARS, *(f'{index}.{name}' for index in range(len(dit.blocks)) for name in LINEARS)}
    if unknown := sorted(set(keep) - known):
        raise ValueError(f'no linear layers {unknown} to keep; a block has {", ".join(LINEARS)}, and there are '
                         f'{len(dit.blocks)} blocks: name "proj" or "0.proj"')
    for index, block in enumerate(dit.blocks):
        own = {name for name in LINEARS if {name, f'{index}.{name}'} & set(keep)}
        dit.blocks[index] = Fp8Block(block, own, fused)
    dit.norm = SummingNorm(dit.preset.width)
    return dit


@contextmanager
def calibration(dit: DiT, names: Collection[str] = ('mlp.2',)) -> Iterator[None]:
    """Observe passes of an FP8 DiT; on exit, give the named linear layers an ``input_scale`` that HEADROOM times the largest
    input fits into. All others round each row by its own scale again. Raises RuntimeError if a named layer had no input, or one
    that is not finite. With any error, all scales are as before.

    By default the MLPs' second layer, whose input scale must be known before the product that computes the input is rounded.
    """
    fp8 = {name: layer for name, layer in dit.blocks.named_modules() if isinstance(layer, Fp8Linear)}
    layers = {name: layer for name, layer in fp8.items() if name.partition('.')[2].removesuffix('.linear') in names}
    largest: dict[str, Tensor] = {}

    def watch(name: str):
        def hook(_, inputs: tuple) -> None:
            x = inputs[0]
            found = (x if isinstance(x, Tensor) else x[0].float() * x[1]).abs().amax().float()
            largest[name] = torch.maximum(largest.get(name, found), found)
        return hook
    before = {name: layer.input_scale for name, layer in fp8.items()}
    for layer in fp8.values():
        layer.input_scale = None
    handles = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers.items()]
    try:
        yield
        bad = [name for name in layers if name not in largest or not largest[name].isfinite()]
        if bad:
            raise RuntimeError(f'calibration saw no input, or non-finite input, in layers {bad}')
    except BaseException:
        for name, layer in fp8.items():
            layer.input_scale = before[name]
        raise
    finally:
        for handle in handles:
            handle.remove()
    for name, layer in layers.items():
        layer.input_scale = largest[name] * (HEADROOM / FP8_MAX)


def weight_bytes(module: nn.Module) -> int:
    """Return the memory of a module's parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _in_fp8(layer: nn.Module) -> nn.Module:
    """Convert a linear layer to FP8, or the one inside it, as in layers that sum over processes."""
    if isinstance(layer, nn.Linear):
        return Fp8Linear(layer)
    for name, part in layer.named_children():
        setattr(layer, name, _in_fp8(part))
    return layer


def _rounding(layer: nn.Module) -> tuple[bool, Tensor | None]:
    """Return whether a linear layer takes rounded rows, and by which scale."""
    fp8 = next((part for part in layer.modules() if isinstance(part, Fp8Linear)), None)
    return fp8 is not None, None if fp8 is None else fp8.input_scale
