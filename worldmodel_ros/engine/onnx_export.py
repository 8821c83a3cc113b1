"""Exports the networks of a checkpoint as ONNX graphs, optionally with dynamically quantised int8 linears."""
from __future__ import annotations

import logging
import warnings
from pathlib import Path

import torch
from torch import nn

from ..model import checkpoint
from ..model.presets import Preset
from ..model.rotary import rotary_angles
from ..model.steps import FLOW

OPSET = 20


class _Call(nn.Module):
    """A method of a module as a module, which is what the exporter takes."""

    def __init__(self, module: nn.Module, method: str):
        super().__init__()
        self.module, self.method = module, method

    def forward(self, *inputs):
        return getattr(self.module, self.method)(*inputs)


def example_block(preset: Preset, frames: int) -> tuple[torch.Tensor, ...]:
    """Inputs of one pass of the DiT over ``frames`` frames with a full window."""
    h, w = preset.latent_size
    window = (preset.depth, 1, preset.heads, preset.window_frames * preset.tokens, preset.head_dim)
    return (torch.randn(1, frames, h, w, preset.latent_channels), torch.full((1, frames), 0.5),
            torch.full((1, frames), FLOW), torch.zeros(1, frames, preset.actions),
            torch.from_numpy(rotary_angles(preset, range(frames))),
            torch.zeros(frames, preset.window_frames + frames), torch.randn(window), torch.randn(window))


def export(folder: Path, target: Path, quantised: bool) -> None:
    """Writes one graph per network call of the checkpoint in ``folder`` into ``target``."""
    model = checkpoint.load(folder)
    preset = model.preset
    h, w = preset.latent_size
    k, t = preset.chunk_frames, torch.export.Dim('frames', min=1, max=64)
    image = torch.zeros(1, 3, *preset.image_size)
    previous = torch.zeros(1, 4 * preset.vae_width, h, w)
    latents = torch.randn(k, h, w, preset.latent_channels)
    features = torch.randn(1, k, preset.tokens, preset.width)
    window = preset.window_frames
    calls = {
        'encode': (_Call(model.vae, 'encode'), (image, previous), None),
        'policy': (model.action_head, (features[:, 0],), None),
        'outcomes': (model.outcome_head, (features,), ({1: t},)),
        'decode': (_Call(model.vae, 'decode_clip'), (latents, latents[0]), (({0: t}, None),)),
    }
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        logging.getLogger('torch.onnx').setLevel(logging.ERROR)
        for name, (module, inputs, shapes) in calls.items():
            _export(module, inputs, target / f'{name}.onnx', shapes)
        # A block has one frame (a commit) or a chunk's: the frame count stays free.
        _export(model.dit, example_block(preset, k), target / 'block.onnx',
                ({1: t}, {1: t}, {1: t}, {1: t}, {1: t}, {0: t, 1: window + t}, None, None))
    if quantised:
        for name in ('block', 'policy', 'outcomes'):
            _quantise(target / f'{name}.onnx')


def _export(module: nn.Module, inputs: tuple, file: Path, shapes) -> None:
    torch.onnx.export(module.eval(), inputs, str(file), dynamo=True, opset_version=OPSET, dynamic_shapes=shapes,
                      external_data=False, verbose=False)


def _quantise(file: Path) -> None:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic
    logging.getLogger().setLevel(logging.ERROR)  # the quantiser advises, on the root logger, what was done already
    model = onnx.load(str(file))
    # The exporter's notes on shapes contradict the quantiser's own transposed weights; it can infer them afresh.
    del model.graph.value_info[:]
    # Per channel, since adaLN's rows differ in range by orders of magnitude.
    quantize_dynamic(model, str(file), weight_type=QuantType.QInt8, per_channel=True,
                     extra_options={'MatMulConstBOnly': True})
