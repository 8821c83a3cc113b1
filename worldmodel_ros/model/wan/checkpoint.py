"""Published checkpoints: original or diffusers' names, safetensors or torch files, read tensor by tensor.

Each tensor, or a process's part of it, goes from the file straight to its place on the device. Torch files are read with
``weights_only``: nothing in them is executed.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..checkpoint_description import ModelError
from ..weights import Part, PartOf, Weights
from .config import PATCH, WanConfig, read_json
from .dit import WanDiT
from .rotary import halves_order

# Diffusers' names of tensors, by the original ones. The norms have swapped names there.
DIFFUSERS = (
    ('time_embedding.0', 'condition_embedder.time_embedder.linear_1'),
    ('time_embedding.2', 'condition_embedder.time_embedder.linear_2'),
    ('text_embedding.0', 'condition_embedder.text_embedder.linear_1'),
    ('text_embedding.2', 'condition_embedder.text_embedder.linear_2'),
    ('time_projection.1', 'condition_embedder.time_proj'),
    ('cross_attn.', 'attn2.'), ('self_attn.', 'attn1.'),
    ('.o.', '.to_out.0.'), ('.q.', '.to_q.'), ('.k.', '.to_k.'), ('.v.', '.to_v.'),
    ('head.modulation', 'scale_shift_table'), ('head.head', 'proj_out'), ('.modulation', '.scale_shift_table'),
    ('ffn.0', 'ffn.net.0.proj'), ('ffn.2', 'ffn.net.2'), ('.norm3.', '.norm2.'))
# In torch files: the student of a training run, its average first; and prefixes that wrappers add to names.
STATES = ('generator_ema', 'generator', 'model', 'state_dict')
WRAPPERS = re.compile(r'^(model\.diffusion_model\.|model\.|module\.)|_fsdp_wrapped_module\.|_orig_mod\.')
# In float32, whatever the layers are in: what is computed once per timestep, scales a whole row, or is first or last.
KEPT = re.compile(r'patch\.|time\.|time_projection\.|head|(blocks\.\d+\.)?(modulation|\w*norm)')


def diffusers_name(name: str) -> str:
    """Return diffusers' name of a tensor of the original layout."""
    for original, other in DIFFUSERS:
        name = name.replace(original, other)
    return name


@dataclass(frozen=True)
class _Source:
    """Where one parameter comes from: tensors of the original layout, their rows one after the other."""

    names: tuple[str, ...]
    reordered: int = 0  # how many of these tensors, from the first on, have heads with reordered channels


def sources(name: str) -> _Source:
    """Return where a parameter of ``WanDiT`` comes from."""
    block = re.match(r'blocks\.\d+\.', name)
    front, own = (block[0], name[block.end():]) if block else ('', name)
    layer, _, kind = own.rpartition('.')
    attention = {'qkv': ('self_attn', 'qkv'), 'proj': ('self_attn', 'o'), 'cross_q': ('cross_attn', 'q'),
                 'cross_kv': ('cross_attn', 'kv'), 'cross_proj': ('cross_attn', 'o')}
    if front and layer in attention:
        group, parts = attention[layer]
        return _Source(tuple(f'{front}{group}.{part}.{kind}' for part in parts), 2 if layer == 'qkv' else 0)
    norms = {'q_norm': 'self_attn.norm_q', 'k_norm': 'self_attn.norm_k', 'cross_q_norm': 'cross_attn.norm_q',
             'cross_k_norm': 'cross_attn.norm_k'}
    if own in norms:
        return _Source((f'{front}{norms[own]}.weight',), 0 if own.startswith('cross') else 1)
    others = {'cross_norm': 'norm3', 'patch': 'patch_embedding', 'text.0': 'text_embedding.0', 'text.2': 'text_embedding.2',
              'time.0': 'time_embedding.0', 'time.2': 'time_embedding.2', 'time_projection': 'time_projection.1',
              'head': 'head.head'}
    if front:
        if layer == 'camera.film':
            return _Source(tuple(f'{front}cam_{part}_layer.{kind}' for part in ('scale', 'shift')))
        others |= {'camera.first': 'cam_injector_layer1', 'camera.second': 'cam_injector_layer2'}
    else:
        others |= {'camera.rays': 'patch_embedding_wancamctrl', 'camera.first': 'c2ws_hidden_states_layer1',
                   'camera.second': 'c2ws_hidden_states_layer2'}
    if own in ('modulation', 'head_modulation'):
        return _Source((f'{front}modulation' if front else 'head.modulation',))
    return _Source((f'{front}{others.get(layer, layer)}.{kind}',))


def original_shapes(config: WanConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a network's checkpoint, by their original names."""
    found = {}
    for name, parameter in WanDiT(config, empty=True).named_parameters():
        names = sources(name).names
        rows = parameter.shape[0] // len(names)
        for source in names:
            found[source] = _stored_shape(config, name, (rows, *parameter.shape[1:]))
    return found


class WanCheckpoint:
    """The tensors of a checkpoint, by their original names; a context manager that keeps its files open.

    ``path``: a folder of safetensors, with an index or without one, or a torch file.
    """

    def __init__(self, path: Path, device: torch.device | str = 'cpu'):
        self.path, self._device = Path(path), str(device)
        self._stack = ExitStack()
        self._stored: dict[str, Callable[[], Any]] = {}  # by stored name: something to slice
        self._names: dict[str, str] = {}  # by original name: the stored one
        self._taken: set[str] = set()

    def __enter__(self) -> WanCheckpoint:
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise
        self._names = dict(self._originals())
        return self

    def __exit__(self, *exception) -> None:
        self._stack.close()
        self._stored.clear()

    def config(self) -> WanConfig:
        """Return the network, from ``config.json`` and, for what that lacks, from the tensors. Raises ModelError."""
        name, width = 'patch_embedding_wancamctrl.weight', 0
        if name in self._names:
            width = int(self._shape(name)[1])
        folder = self.path if self.path.is_dir() else self.path.parent
        return WanConfig.from_json(read_json(folder / 'config.json'), width)

    def take(self, name: str, shape: torch.Size | tuple[int, ...], part: Part | None) -> Tensor:
        """Return a tensor by its original name, or a part of it, on the device. Raises ModelError."""
        if name not in self._names:
            raise ModelError(f'weights in {self.path} lack {name}')
        found = self._shape(name)
        if found != tuple(shape):
            raise ModelError(f'weights in {self.path}: {name} is {found}, and should be {tuple(shape)}')
        self._taken.add(name)
        stored = self._stored[self._names[name]]()
        return (stored[(slice(None),) * len(found)] if part is None else part.of(stored)).to(self._device)

    def left(self) -> list[str]:
        """Return the names that were not taken."""
        return sorted(set(self._names) - self._taken)

    def _shape(self, name: str) -> tuple[int, ...]:
        stored = self._stored[self._names[name]]()
        return tuple(stored.shape if isinstance(stored, Tensor) else stored.get_shape())

    def _open(self) -> None:
        if self.path.is_file():
            self._open_torch(self.path)
            return
        indices = sorted(self.path.glob('*.safetensors.index.json'))
        if len(indices) > 1:
            raise ModelError(f'{self.path} has several indices: {", ".join(file.name for file in indices)}')
        if indices:
            wanted = read_json(indices[0]).get('weight_map')
            if not isinstance(wanted, dict) or not all(Path(str(file)).name == file for file in wanted.values()):
                raise ModelError(f'{indices[0]} does not map tensors to files of its folder')
            files = [self.path / file for file in sorted(set(wanted.values()))]
        else:
            wanted, files = None, sorted(self.path.glob('*.safetensors'))
        if not files:
            raise ModelError(f'{self.path} contains no safetensors files; for a torch file, give the path of the file itself')
        for file in files:
            try:
                opened = self._stack.enter_context(safe_open(str(file), 'pt', device=self._device))
            except (OSError, SafetensorError) as error:
                raise ModelError(f'{file} cannot be read ({error}): download it again') from error
            for name in opened.keys():
                if name in self._stored:
                    raise ModelError(f'{file.name} contains {name}, and so does another file: keep one of the two')
                self._stored[name] = lambda opened=opened, name=name: opened.get_slice(name)
        if wanted is not None and (missing := sorted(set(wanted) - set(self._stored))):
            raise ModelError(f'{self.path} lacks {missing[0]}, which its index names')

    def _open_torch(self, file: Path) -> None:
        try:
            content = torch.load(file, map_location='cpu', weights_only=True, mmap=True)
        except Exception as error:  # unpickling errors of several kinds
            raise ModelError(f'{file} cannot be read as plain tensors: {error}') from error
        for key in STATES:
            if isinstance(content, dict) and isinstance(content.get(key), dict):
                content = content[key]
                break
        if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
            raise ModelError(f'{file} contains no named tensors')
        self._stored = {name: lambda tensor=tensor: tensor for name, tensor in content.items()}

    def _originals(self) -> Iterator[tuple[str, str]]:
        """Yield original name and stored name of each tensor."""
        plain = {WRAPPERS.sub('', name): name for name in self._stored}
        if not any(name.startswith('condition_embedder.') for name in plain):
            yield from plain.items()
            return
        for name, stored in plain.items():
            for original, other in reversed(DIFFUSERS):
                name = name.replace(other, original)
            yield name, stored


def build(config: WanConfig, weights: Weights, device: torch.device | str = 'cpu', layers: torch.dtype = torch.float32,
          part: PartOf = lambda name: None) -> WanDiT:
    """Build a network with weights taken by their original names, its layers in ``layers``, what is not computed per token
    and layer in float32. ``part`` tells which part of an original tensor this process has (``tensor_share``). Raises
    ModelError."""
    dit = WanDiT(config, empty=True)
    for name, empty in list(dit.named_parameters()):
        source = sources(name)
        dtype = torch.float32 if KEPT.match(name) else layers
        rows = empty.shape[0] // len(source.names)
        shape = _stored_shape(config, name, (rows, *empty.shape[1:]))
        pieces = []
        for index, original in enumerate(source.names):
            tensor = weights.take(original, torch.Size(shape), part(original)).to(device, dtype)
            tensor = tensor.flatten(1) if name == 'patch.weight' else tensor[0] if name.endswith('modulation') else tensor
            if index < source.reordered:
                order = halves_order(config.head_dim).to(tensor.device)
                tensor = tensor.unflatten(0, (-1, config.head_dim))[:, order].flatten(0, 1)
            pieces.append(tensor)
        owner, _, own = name.rpartition('.')
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        setattr(dit.get_submodule(owner), own, nn.Parameter(whole.contiguous(), requires_grad=False))
    return dit.eval()


def load(path: Path, device: torch.device | str = 'cpu', layers: torch.dtype = torch.bfloat16,
         part: PartOf = lambda name: None, config: WanConfig | None = None) -> WanDiT:
    """Load a checkpoint, with ``config`` if it has no ``config.json``. Raises ModelError if something is missing, left over
    or of another shape."""
    with WanCheckpoint(path, device) as checkpoint:
        dit = build(config or checkpoint.config(), checkpoint, device, layers, part)
        if left := checkpoint.left():
            raise ModelError(f'weights in {path} have {", ".join(left[:3])} besides, {len(left)} tensors that this network '
                             f'does not have: they belong to another network')
    return dit


def tensor_share(config: WanConfig, rank: int, count: int) -> PartOf:
    """Return a process's parts of the original tensors if heads and hidden units are divided. Raises ValueError if they do
    not divide."""
    if config.heads % count or config.ffn % count:
        raise ValueError(f'{config.heads} heads and {config.ffn} hidden units cannot be divided among {count} processes')

    def own(size: int) -> tuple[tuple[int, int], ...]:
        return ((rank * size // count, (rank + 1) * size // count),)

    def part(name: str) -> Part | None:
        found = re.match(r'blocks\.\d+\.(?:self_attn|cross_attn)\.(q|k|v|norm_q|norm_k|o)\.(weight|bias)$', name)
        if found:
            if found[1] != 'o':
                return Part(0, own(config.width))
            return Part(1, own(config.width)) if found[2] == 'weight' else None
        if re.match(r'blocks\.\d+\.ffn\.0\.', name):
            return Part(0, own(config.ffn))
        return Part(1, own(config.ffn)) if re.match(r'blocks\.\d+\.ffn\.2\.weight$', name) else None
    return part


def _stored_shape(config: WanConfig, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if name == 'patch.weight':
        return shape[0], config.in_channels, 1, PATCH, PATCH
    return (1, *shape) if name.endswith('modulation') else shape
