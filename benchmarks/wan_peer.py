"""One denoising step of diffusers' Wan transformer at the size of ``robot_3b``: what an open video model costs.

    pip install diffusers          # for this alone: the package does not need it
    python benchmarks/wan_peer.py --json benchmarks/results/wan_peer_h100.json

bf16, random weights, blocks compiled as diffusers does it (``compile_repeated_blocks``), by each attention of PyTorch
in turn; the row is of the faster one. The width, heads, layers, MLP and tokens are those of ``robot_3b``, but not the
network (``differs``), so the row has the operations of each (``tflop``), and the ratio of the two times does not compare
implementations. ``python benchmarks/tick.py --presets robot_3b --dtypes bf16 --steps 1`` measures ours. Without a GPU
it runs at a small size, which tests the code and measures nothing.
"""
from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

from result_file import command, write_result
import torch
from tick_baseline import Clock
from tick_measure import WARM, summary
from tick_work import PEAK, chunk_flops

from worldmodel_ros.machine import machine, versions
from worldmodel_ros.model.presets import ROBOT_3B, Preset

ON_GPU = torch.cuda.is_available()
TEXT = 16  # tokens of the prompt: few enough to cost nothing
ATTENTIONS = ('native', '_native_cudnn') if ON_GPU else ('native',)  # diffusers' names; native: PyTorch's own choice
DIFFERS = (
    'attention: the peer has all tokens of the chunk in every layer, and none of the past; robot_3b a frame in 12 of '
    '18 layers, 27 tiles (6,912 tokens, mean) of the chunk and of 16 s of past in 6',
    'the peer attends to a prompt in every layer, 4 more products of which 2 are over all tokens; robot_3b to none',
    'the peer has one noise level a call; robot_3b one a frame, with the actions',
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--calls', type=int, default=20, help='timed, of each attention')
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    try:
        from diffusers import WanTransformer3DModel
    except ImportError as error:
        raise SystemExit(f'wan_peer.py: {error}. The peer is no dependency of this project: pip install diffusers, '
                         'next to the PyTorch that is here') from error
    device = torch.device('cuda' if ON_GPU else 'cpu')
    config = peer_config(ROBOT_3B) if ON_GPU else SMALL
    model, found, failed = build(WanTransformer3DModel, config, device), [], {}
    for attention in ATTENTIONS:
        try:
            found.append(measure(model, attention, options.calls, device))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
        except Exception as error:  # keep measuring the other one
            failed[attention] = f'{type(error).__name__}: {error}'
    result = {'command': command(), 'weights': 'random',
              'machine': machine(), 'versions': versions(('torch', 'triton', 'diffusers')), 'failed': failed,
              'rows': [row(model, found, device)] if found else []}
    write_result(result, options.json, show=True)
    return 0 if found else 1


def peer_config(preset: Preset) -> dict:
    """Return arguments of a WanTransformer3DModel with a preset's sizes."""
    return {'patch_size': (1, preset.patch, preset.patch), 'num_attention_heads': preset.heads,
            'attention_head_dim': preset.head_dim, 'num_layers': preset.depth, 'ffn_dim': 4 * preset.width,
            'in_channels': preset.latent_channels, 'out_channels': preset.latent_channels}


SMALL = {**peer_config(ROBOT_3B), 'num_attention_heads': 2, 'attention_head_dim': 24, 'num_layers': 2, 'ffn_dim': 96}


def build(kind: type, config: dict, device: torch.device) -> torch.nn.Module:
    """Build the network with random weights, in the types in which diffusers loads trained ones for bfloat16."""
    torch.manual_seed(0)
    with device:
        model = kind(**config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if not any(part in name.split('.') for part in model._keep_in_fp32_modules):
            parameter.data = parameter.data.to(torch.bfloat16)
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats(device)  # excludes the float32 initialisation
    return model


@torch.inference_mode()
def measure(model: torch.nn.Module, attention: str, calls: int, device: torch.device) -> dict:
    """Return ms of a call, after compilation."""
    torch.compiler.reset()
    model.set_attention_backend(attention)
    model.compile_repeated_blocks(fullgraph=True)
    latents = torch.randn(latent_shape(), dtype=torch.bfloat16, device=device)
    inputs = {'timestep': torch.tensor([500], device=device),
              'encoder_hidden_states': torch.randn(1, TEXT, model.config.text_dim, dtype=torch.bfloat16, device=device)}
    start, clock = time.perf_counter(), Clock(device)
    for _ in range(WARM):
        out, = model(latents, **inputs, return_dict=False)
    if out.shape != latents.shape or not out.isfinite().all():
        raise RuntimeError(f'the peer gave {tuple(out.shape)} or what is not finite: its times mean nothing')
    compiled = time.perf_counter() - start
    ms = [clock.ms(lambda: model(latents, **inputs, return_dict=False)) for _ in range(calls)]
    return {'attention': attention, 'calls': calls, 'call_ms': summary(ms), 'compile_s': round(compiled, 1)}


def latent_shape() -> tuple[int, ...]:
    """Return batch, channels, frames, rows, columns: a chunk's, or a small one's."""
    if ON_GPU:
        return 1, ROBOT_3B.latent_channels, ROBOT_3B.chunk_frames, *ROBOT_3B.latent_size
    return 1, ROBOT_3B.latent_channels, 2, 4, 4


def peer_flops(config: dict, tokens: int) -> dict[str, float]:
    """As ``tick_work.chunk_flops``: q, k, v and out of a token, q and out of its attention to the text, and the MLP."""
    width = config['num_attention_heads'] * config['attention_head_dim']
    linear = tokens * (6 * width ** 2 + 2 * width * config['ffn_dim']) + TEXT * 2 * width ** 2
    return {'linear': 2.0 * linear * config['num_layers'],
            'attention': 4.0 * tokens * width * (tokens + TEXT) * config['num_layers']}


def row(model: torch.nn.Module, found: list[dict], device: torch.device) -> dict:
    best = min(found, key=lambda each: each['call_ms']['p50'])
    config = {name: model.config[name] for name in SMALL}
    tokens = math.prod(latent_shape()[2:]) // math.prod(config['patch_size'])
    flops = {'peer': peer_flops(config, tokens), 'robot_3b': chunk_flops(ROBOT_3B, steps=1)}
    rate = sum(flops['peer'].values()) / (best['call_ms']['p50'] * 1e-3)
    return {'gpu': torch.cuda.get_device_name() if ON_GPU else 'none', 'gpus': int(ON_GPU),
            'peer': type(model).__name__, 'config': config, 'tokens': tokens, 'text_tokens': TEXT, 'steps': 1,
            'dtype': 'bf16', 'parameters': sum(p.numel() for p in model.parameters()), **best,
            'by_attention': {each['attention']: each['call_ms']['p50'] for each in found},
            'tflop': {name: {part: round(value / 1e12, 3) for part, value in parts.items()}
                      for name, parts in flops.items()},
            'bf16_mfu': round(rate / PEAK['bf16'], 4) if ON_GPU else None,
            'allocated_gib': round(torch.cuda.max_memory_allocated(device) / 2 ** 30, 3) if ON_GPU else None,
            'differs': DIFFERS}


if __name__ == '__main__':
    raise SystemExit(main())
