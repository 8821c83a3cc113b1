"""
Export a scene forecast as ONNX graphs: the pass over a frame, and a second pass over its slots.

The graphs' metadata holds what else a stream needs to know of the network.
"""
from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path

import onnx
import torch
from torch import Tensor, nn

from worldmodel_ros.engine.backends.export import export_graph, quantise
from worldmodel_ros.model.scene_forecast import HORIZONS, QUERIES, SceneForecast, _rates
from .passes import Again, See, attend_in_parts


class _Norm(nn.Module):
    """``nn.RMSNorm`` written so that ONNX Runtime recognises it in a graph and fuses it into one operator."""

    def __init__(self, norm: nn.RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def export(folder: Path, target: Path, quantised: bool, which: str) -> None:
    """Write the graph ``which``, ``see`` or ``again``, of the forecast in ``folder`` into ``target``."""
    net = SceneForecast.load(folder)
    for module in list(net.modules()):
        for name, part in list(module.named_children()):
            if isinstance(part, nn.RMSNorm):
                setattr(module, name, _Norm(part))
    for layer in net.layers:
        layer.attend = attend_in_parts
    preset, own, seen = net.preset, net.per_frame, net.preset.window_frames * net.per_frame
    h, w = preset.latent_size

    def kept(count: int) -> Tensor:
        return torch.randn(preset.depth, 1, preset.heads, count, preset.head_dim)

    window, newest = ([list(kept(count)), list(kept(count))] for count in (seen, own))
    pose, turn = torch.randn(3), torch.randn(2, net.pairs)
    see = (torch.zeros(1, 3, *preset.image_size), torch.zeros(1, 4 * preset.vae_width, h, w), torch.ones(1, dtype=torch.bool),
           torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), pose, turn, torch.zeros(own, seen + own), *window)
    again = (torch.randn(1, QUERIES, preset.width), pose, turn, torch.zeros(QUERIES, seen + own + QUERIES), *newest,
             *window)
    known = {'horizons': HORIZONS, 'rates': _rates(net.pairs).tolist(), 'per_frame': own, 'queries': QUERIES}
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        logging.getLogger('torch.onnx').setLevel(logging.ERROR)
        file = target / f'{which}.onnx'
        module, inputs = {'see': (See, see), 'again': (Again, again)}[which]
        export_graph(module(net), inputs, file, None)
        if quantised:
            quantise(file, ('MatMul',))
        graph = onnx.load(str(file))
        onnx.helper.set_model_props(graph, {key: json.dumps(value) for key, value in known.items()})
        onnx.save(graph, str(file))
