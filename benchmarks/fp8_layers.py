"""Times the FP8 benchmark's whole layers against bfloat16, eager and compiled by torch."""
from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from fp8_cases import DEVICE, GPU, normal, presets, relative, timed
from torch import Tensor, nn
from torch.nn import functional as F

from worldmodel_ros.kernels.rows import add_rows
from worldmodel_ros.model.dit import Block
from worldmodel_ros.model.precision import Fp8Block, Unsummed, calibration, weight_bytes
from worldmodel_ros.model.tile_attention import attend_within_frames

Layer = Callable[[Tensor | Unsummed, Tensor], Tensor | Unsummed]  # x (1, T, P, D) and condition (1, T, D) to x


class Model(nn.Module):
    """A DiT of one block, which is all that calibration looks at."""

    def __init__(self, block: Block):
        super().__init__()
        self.blocks = nn.ModuleList([block])


@torch.inference_mode()
def layers() -> Iterator[dict]:
    for name, (preset, counts) in presets().items():
        with torch.device(DEVICE):
            block = Block(preset).eval().requires_grad_(False)
            nn.init.normal_(block.modulation.weight, std=0.02)  # where it is zero, a layer does nothing
        whole = copy.deepcopy(block).to(torch.bfloat16)
        blocks = {'bf16': whole, 'fp8': Fp8Block(whole), 'fp8, fused': Fp8Block(whole, fused=True),
                  'fp8, fused, calibrated': Fp8Block(whole, fused=True), 'fp8, modulation too': Fp8Block(whole, ())}
        for tokens in counts:
            frames = max(1, tokens // preset.tokens)
            x, cond = normal(1, frames, tokens // frames, preset.width), normal(1, frames, preset.width)
            angle = torch.rand(tokens, preset.head_dim // 2, device=DEVICE) * 6.28
            rotary = torch.stack([angle.cos(), angle.sin()])
            # An FP8 block does the last addition of the block before it, and leaves its own to the next one.
            unsummed = Unsummed(x, torch.zeros_like(x).flatten(0, 2), torch.zeros_like(cond).flatten(0, 1))
            with calibration(Model(blocks['fp8, fused, calibrated'])):
                layer(blocks['fp8, fused, calibrated'], rotary)(unsummed, cond)
            ways = {way: layer(each, rotary) for way, each in blocks.items()}
            if GPU:
                ways['bf16, compiled'] = torch.compile(plain_layer(whole, rotary), dynamic=False)
            entering = {way: unsummed if isinstance(blocks.get(way), Fp8Block) else x for way in ways}
            exact = layer(block, rotary)(x.float(), cond.float()) - x.float()
            errors = {way: relative(summed(call(entering[way], cond)) - x.float(), exact) for way, call in ways.items()}
            for way, ms in timed({way: graphed(call, entering[way], cond) for way, call in ways.items()}).items():
                yield {'preset': name, 'tokens': tokens, 'layer': way, 'ms': round(ms, 4),
                       'error': round(errors[way], 5), 'bytes': weight_bytes(blocks.get(way, whole))}


def layer(block: Block, rotary: Tensor) -> Layer:
    """Return a function that runs a block attending within frames, as ``DiT.over_tiles`` does."""
    def run(x: Tensor | Unsummed, cond: Tensor) -> Tensor | Unsummed:
        qkv, state = block.enter(x, cond, rotary)
        return block.leave(x, attend_within_frames(qkv), state)
    return run


def summed(x: Tensor | Unsummed) -> Tensor:
    """Return the sum in float32."""
    return x.float() if isinstance(x, Tensor) else add_rows(x.x.flatten(0, 2).float(), x.y, x.gate).view(x.shape)


def plain_layer(block: Block, rotary: Tensor) -> Layer:
    """Return the same with norm, rotation and attention as plain operations, visible to the compiler."""
    def run(x: Tensor, cond: Tensor) -> Tensor:
        qkv, state = block.enter(x, cond)
        q, k, v = qkv.flatten(0, 1).permute(2, 0, 3, 1, 4).unbind(0)
        cos, sin = rotary.unflatten(1, x.shape[1:3])[:, :, None]
        q, k = (torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(v.dtype)
                for a, b in (block.q_norm(q).chunk(2, -1), block.k_norm(k).chunk(2, -1)))
        return block.leave(x, F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape), state)
    return run


def graphed(call: Layer, x: Tensor | Unsummed, cond: Tensor) -> Callable[[], object]:
    """Return the replay of a CUDA graph of the call, which is how the engine runs it."""
    if not GPU:
        return lambda: call(x, cond)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call(x, cond)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(x, cond)
    return graph.replay
