"""Exports the networks of a checkpoint as ONNX graphs, optionally with dynamically quantised int8 linears."""
from __future__ import annotations

import logging
import warnings
from pathlib import Path

import torch
from torch import nn

from worldmodel_ros.engine.memory import page_layout, slabs_of
from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.presets import Preset
from worldmodel_ros.model.rotary import rotary_angles
from worldmodel_ros.model.sampling import FLOW

OPSET = 20


class _Call(nn.Module):
    """Wraps a module's method as a module, as the exporter requires."""

    def __init__(self, module: nn.Module, method: str):
        super().__init__()
        self.module, self.method = module, method

    def forward(self, *inputs):
        return getattr(self.module, self.method)(*inputs)


def example_block(preset: Preset, frames: int) -> tuple[torch.Tensor, ...]:
    """Return inputs of one pass of the DiT over ``frames`` frames, with a pool that just holds their window."""
    h, w = preset.latent_size
    layout = page_layout(preset)
    pages = slabs_of(preset.window_frames, layout) * layout.tiles
    layers = len(preset.cache_layers)
    index = torch.arange(layers * preset.heads * pages).reshape(layers, preset.heads, pages)
    rows = (index.numel(), layout.page_tokens, preset.head_dim)
    return (torch.randn(1, frames, h, w, preset.latent_channels), torch.full((1, frames), 0.5),
            torch.full((1, frames), FLOW), torch.zeros(1, frames, preset.actions),
            torch.from_numpy(rotary_angles(preset, range(frames)))[:, None],
            torch.zeros(1, frames, pages * layout.page_tokens + frames * preset.tokens),
            torch.randn(rows), torch.randn(rows), index[:, None])


def export(folder: Path, target: Path, quantised: bool) -> None:
    """Write one graph per network call of the checkpoint in ``folder`` into ``target``."""
    model = checkpoint.load(folder)
    preset = model.preset
    h, w = preset.latent_size
    k, t, rows = preset.chunk_frames, torch.export.Dim('frames', min=1, max=64), torch.export.Dim('rows', min=2)
    image = torch.zeros(1, 3, *preset.image_size)
    previous = torch.zeros(1, 4 * preset.vae_width, h, w)
    latents = torch.randn(k, h, w, preset.latent_channels)
    features = torch.randn(1, k, preset.tokens, preset.width)
    noise = torch.randn(1, len(preset.goals), k, preset.actions)
    calls = {
        'encode': (_Call(model.vae, 'encode_next'), (image, previous, torch.ones(1, dtype=torch.bool)), None),
        'policy': (model.action_head, (features[:, 0], noise, noise[:, 0], torch.ones(1, dtype=torch.int64)), None),
        'outcomes': (model.outcome_head, (features,), ({1: t},)),
        'decode': (_Call(model.vae, 'decode_clip'), (latents, latents[0]), (({0: t}, None),)),
    }
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        logging.getLogger('torch.onnx').setLevel(logging.ERROR)
        for name, (module, inputs, shapes) in calls.items():
            export_graph(module, inputs, target / f'{name}.onnx', shapes)
        # A block has one frame (a commit) or a chunk's, and engines have pools of any size: both dimensions are dynamic.
        block = example_block(preset, k)
        window = block[5].shape[2] - k * preset.tokens
        export_graph(_Call(model.dit, 'over_pages'), block, target / 'block.onnx',
                ((*[{1: t}] * 4, {2: t}, {1: t, 2: window + preset.tokens * t}, {0: rows}, {0: rows}, None),))
    if quantised:
        for name in ('block', 'policy', 'outcomes'):
            quantise(target / f'{name}.onnx')


def export_graph(module: nn.Module, inputs: tuple, file: Path, shapes) -> None:
    """Write a module as a graph; ``shapes``: the dynamic dimensions of its inputs, as of ``torch.export``."""
    torch.onnx.export(module.eval(), inputs, str(file), dynamo=True, opset_version=OPSET, dynamic_shapes=shapes,
                      external_data=False, verbose=False)


def quantise(file: Path, kinds: tuple[str, ...] | None = None) -> None:
    """Quantise a graph's linears to int8, with dynamic ranges of the activations; ``kinds``: operators to quantise, by default
    all that can be."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic
    logging.getLogger().setLevel(logging.ERROR)  # on the root logger, the quantiser advises steps that were already done
    model = onnx.load(str(file))
    # The exporter's shapes contradict the quantiser's own transposed weights; it can infer them again.
    del model.graph.value_info[:]
    # Per channel, since adaLN's rows differ in range by orders of magnitude. 7-bit weights, since processors without VNNI
    # add two 8-bit products in 16 bits, where they saturate.
    quantize_dynamic(model, str(file), weight_type=QuantType.QInt8, per_channel=True, reduce_range=True,
                     op_types_to_quantize=kinds, extra_options={'MatMulConstBOnly': True})
