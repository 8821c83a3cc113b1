"""What benchmarks/wan.py compares with: the published loop of LingBot-World-Fast, and diffusers' transformer, each compiled.

The loop is reimplemented from the published code, on the weights of this package's network, layer by layer in
PyTorch's own operations: keys and values in one tensor that is moved by a clone, PyTorch's attention, the prompt's padding
attended to, the camera's layers in each pass.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from worldmodel_ros.model.wan.config import PATCH
from worldmodel_ros.model.wan.dense import normalise
from worldmodel_ros.model.wan.dit import Modulation, Prompt, WanBlock, WanDiT, patchify, unpatchify
from worldmodel_ros.model.wan.rotary import rotate, rotation

EPS = 1e-6


def enter(x: Tensor, modulation: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return queries, keys and values (N, 3 * D)."""
    rows = F.layer_norm(x, x.shape[-1:], eps=EPS) * (1.0 + modulation[1]) + modulation[0]
    return F.linear(rows.to(weight.dtype), weight, bias)


def normalise_and_rotate(qkv: Tensor, rotary: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = normalise(qkv, q_weight, k_weight, EPS)
    cos, sin = rotary[:, :, None]
    return tuple(part.to(qkv.dtype) for part in (rotate(q, cos, sin), rotate(k, cos, sin), v))


def leave(x: Tensor, attended: Tensor, modulation: Tensor, scale: Tensor, shift: Tensor, keys: Tensor, values: Tensor,
          weights: list[Tensor]) -> Tensor:
    """Return the stream after the layer."""
    proj, proj_bias, norm, norm_bias, q_weight, q_bias, out, out_bias, first, first_bias, second, second_bias = weights
    x = x + modulation[2] * F.linear(attended, proj, proj_bias).float()
    x = (1.0 + scale.float()) * x + shift.float()
    rows = F.layer_norm(x, x.shape[-1:], norm.float(), norm_bias.float(), EPS)
    q = F.linear(rows.to(proj.dtype), q_weight, q_bias)
    q = F.rms_norm(q.float(), q.shape[-1:], None, EPS).to(proj.dtype)  # the weights are folded into the keys
    q = q.unflatten(-1, (len(keys), -1)).transpose(0, 1)[None]
    crossed = F.scaled_dot_product_attention(q, keys[None], values[None])[0].transpose(0, 1).flatten(1)
    x = x + F.linear(crossed, out, out_bias).float()
    rows = (F.layer_norm(x, x.shape[-1:], eps=EPS) * (1.0 + modulation[4]) + modulation[3]).to(proj.dtype)
    hidden = F.gelu(F.linear(rows, first, first_bias), approximate='tanh')
    return x + modulation[5] * F.linear(hidden, second, second_bias).float()


def weights_of(block: WanBlock) -> list[Tensor]:
    """Return the weights that ``leave`` takes."""
    return [block.proj.weight, block.proj.bias, block.cross_norm.weight, block.cross_norm.bias, block.cross_q.weight,
            block.cross_q.bias, block.cross_proj.weight, block.cross_proj.bias, block.ffn[0].weight,
            block.ffn[0].bias, block.ffn[2].weight, block.ffn[2].bias]


class PublishedPass:
    """Replaces a ``WanDiT`` in a ``Sampler``."""

    def __init__(self, dit: WanDiT, rays: Tensor, compiled: bool):
        self.dit, self.rays = dit, rays
        self._enter, self._leave = (torch.compile(f, dynamic=False) if compiled else f for f in (enter, leave))

    def modulation(self, timestep: float) -> Modulation:
        return self.dit.modulation(timestep)

    def __call__(self, latents: Tensor, modulation: Modulation, prompt: Prompt, camera: None, attention: MovedWindow) -> Tensor:
        _, frames, height, width = latents.shape
        x = self.dit.patch(patchify(latents.float()))
        camera = self.dit.camera_control(self.rays)
        for layer, block in enumerate(self.dit.blocks):
            qkv = self._enter(x, modulation.blocks[layer], block.qkv.weight, block.qkv.bias)
            attended = attention.attend(layer, qkv.unflatten(-1, (3, block.heads, -1)), block.q_norm, block.k_norm)
            x = self._leave(x, attended, modulation.blocks[layer], *camera[layer].chunk(2, -1), prompt.keys[layer],
                            prompt.values[layer], weights_of(block))
        shift, scale = modulation.head
        x = F.layer_norm(x, x.shape[-1:], eps=EPS) * (1.0 + scale) + shift
        return unpatchify(self.dit.head(x), frames, height // PATCH, width // PATCH)

    keep = __call__  # its last pass is complete


class MovedWindow:
    """The published loop's cache: one tensor a layer, whose frames behind the sinks are moved by a clone."""

    def __init__(self, dit: WanDiT, grid: tuple[int, int], chunk: int, window: int, sinks: int, compiled: bool):
        config, tokens = dit.config, math.prod(grid)
        self._grid, self._device, self._tokens, self._head_dim = grid, dit.device, tokens, config.head_dim
        self.frame, self._sinks, self._own = 0, sinks * tokens, chunk * tokens
        shape = 1, window * tokens, config.heads, config.head_dim
        self._k, self._v = ([torch.zeros(shape, dtype=torch.bfloat16, device=dit.device) for _ in range(config.layers)]
                            for _ in range(2))
        self._prepare = torch.compile(normalise_and_rotate, dynamic=False) if compiled else normalise_and_rotate

    @contextmanager
    def chunk(self, frames: int, observed: bool = False) -> Iterator[MovedWindow]:
        self._rotary = rotation(self._head_dim, self.frame + np.arange(frames), self._grid, self._device)
        end = self.frame * self._tokens + self._own
        self._end, full = min(end, self._k[0].shape[1]), end > self._k[0].shape[1]
        self._moves = set(range(len(self._k))) if full else set()  # only in the first pass of a chunk
        yield self
        self.frame += frames

    def attend(self, layer: int, qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> Tensor:
        q, k, v = self._prepare(qkv, self._rotary, q_weight, k_weight)
        for cache, new in ((self._k[layer], k), (self._v[layer], v)):
            if layer in self._moves:
                cache[:, self._sinks:-self._own] = cache[:, self._sinks + self._own:].clone()
            cache[:, self._end - self._own:self._end] = new
        self._moves.discard(layer)
        seen = (cache[layer][:, :self._end] for cache in (self._k, self._v))
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q[None], *seen)))
        return out[0].transpose(0, 1).flatten(1)
