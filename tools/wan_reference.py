#!/usr/bin/env python3
"""Runs the published code of the Wan family at a tiny size on a CPU and saves its outputs: test/fixtures/wan/*.npz.

    git clone https://github.com/robbyant/lingbot-world; python3 -m venv ref
    ref/bin/pip install torch diffusers einops scipy safetensors
    PYTHONPATH=test ref/bin/python tools/wan_reference.py lingbot_world CHECKOUT test/fixtures/wan

CASE is one of lingbot_world (github.com/robbyant/lingbot-world), lingbot_world_v2 (github.com/robbyant/lingbot-world-v2) and
self_forcing (github.com/guandeh17/Self-Forcing). Nothing of CHECKOUT is copied: its modules are imported, its networks get the
weights and inputs of test/wan_tiny.py, in float32, and its flash attention, which needs a GPU, is replaced by PyTorch's. The
loops follow its pipelines, which cannot run on a CPU, with noise, text rows, condition and poses passed in. Needs neither
this package nor a GPU.
"""
from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import numpy as np
import torch
import wan_tiny as tiny
from torch.nn.functional import scaled_dot_product_attention

CHUNKS = 5
CASES = {
    'lingbot_world': dict(chunk=3, window=6, sinks=3, shift=10.0, indices=[0, 179, 358, 679]),
    'lingbot_world_v2': dict(chunk=4, window=10, sinks=2, shift=5.0, indices=[0, 250, 500, 750]),
    'self_forcing': dict(chunk=3, window=6, sinks=0, shift=5.0, steps=[1000, 750, 500, 250])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('case', choices=CASES)
    parser.add_argument('checkout', type=Path)
    parser.add_argument('folder', type=Path)
    parser.add_argument('--commit', help='of CHECKOUT, where it is no repository')
    options = parser.parse_args()
    case = CASES[options.case]
    import_bare(options.checkout)
    torch.manual_seed(0)
    with torch.inference_mode():
        outputs = self_forcing(case) if options.case == 'self_forcing' else lingbot(case)
    outputs['facts'] = np.array(json.dumps({**case, **facts(options.checkout, options.commit)}))
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / f'{options.case}.npz'
    np.savez_compressed(file, **outputs)
    print(file, {name: value.shape for name, value in outputs.items()})
    return 0


def import_bare(checkout: Path) -> None:
    """Make ``wan.modules`` importable without the imports of its packages."""
    for name in ('wan', 'wan.modules', 'wan.utils', 'wan.distributed', 'utils'):
        module = types.ModuleType(name)
        module.__path__ = [str(checkout / name.replace('.', '/'))]
        sys.modules[name] = module


def attention(q, k, v, *_, **__):
    return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def network(module: types.ModuleType, kind: str, **settings) -> torch.nn.Module:
    for name in (module.__name__, 'wan.modules.model'):
        for function in ('attention', 'flash_attention'):
            if hasattr(sys.modules[name], function):
                setattr(sys.modules[name], function, attention)
    model = getattr(module, kind)(text_len=tiny.TEXT_TOKENS, dim=tiny.HEADS * tiny.HEAD_DIM, ffn_dim=tiny.FFN, freq_dim=256,
                                  text_dim=tiny.TEXT_WIDTH, out_dim=16, num_heads=tiny.HEADS,
                                  num_layers=tiny.LAYERS, **settings)
    for name, parameter in model.named_parameters():
        parameter.data = tiny.weight(name, tuple(parameter.shape))
    return model.eval()


def caches(tokens: int) -> tuple[list[dict], list[dict]]:
    def zeros(count: int) -> torch.Tensor:
        return torch.zeros(1, count, tiny.HEADS, tiny.HEAD_DIM)
    own = [{'k': zeros(tokens), 'v': zeros(tokens), 'global_end_index': torch.tensor([0]), 'local_end_index': torch.tensor([0])}
           for _ in range(tiny.LAYERS)]
    return own, [{'k': zeros(tiny.TEXT_TOKENS), 'v': zeros(tiny.TEXT_TOKENS), 'is_init': torch.tensor(0)}
                 for _ in range(tiny.LAYERS)]


def lingbot(case: dict) -> dict[str, np.ndarray]:
    module = importlib.import_module('wan.modules.model_fast')
    solver = importlib.import_module('wan.utils.fm_solvers_unipc')
    camera = importlib.import_module('wan.utils.cam_utils')
    model = network(module, 'WanModelFast', model_type='i2v', in_dim=36, local_attn_size=case['window'],
                    sink_size=case['sinks'])
    frame_tokens = tiny.GRID[0] * tiny.GRID[1]
    own, cross = caches(case['window'] * frame_tokens)
    scheduler = solver.FlowUniPCMultistepScheduler(num_train_timesteps=1000, shift=1, use_dynamic_shifting=False)
    scheduler.set_timesteps(1000, shift=case['shift'])
    timesteps = scheduler.timesteps[case['indices']]
    sigmas, table = scheduler.sigmas.double(), scheduler.timesteps.double()
    frames, outputs = CHUNKS * case['chunk'], {}

    every = 4 * (frames - 1) + 1  # poses at the pixel frames' rate, from which those of latent frames are taken
    dense = tiny.poses(every)
    poses = camera.interpolate_camera_poses(np.linspace(0, every - 1, every), dense[:, :3, :3], dense[:, :3, 3],
                                            np.linspace(0, every - 1, frames))
    relative = camera.compute_relative_poses(poses, framewise=True)
    height, width = (8 * size for size in tiny.LATENT)
    rays = camera.get_plucker_embeddings(relative, torch.tensor([tiny.INTRINSICS]).float().repeat(frames, 1), height, width)
    folded = rays.view(frames, tiny.LATENT[0], 8, tiny.LATENT[1], 8, 6).permute(5, 2, 4, 0, 1, 3)
    folded = folded.reshape(1, 384, frames, *tiny.LATENT)
    outputs |= {'poses': poses.numpy(), 'relative_poses': relative.numpy(), 'rays': rays[::7, ::9, ::11].numpy(),
                'rays_first_column': folded[0, :, 1, 0, 0].numpy()}

    velocities, chunks = [], []
    for chunk in range(CHUNKS):
        noise, first = tiny.noise(chunk, case['chunk']), chunk * case['chunk']
        common = dict(context=[tiny.text()], seq_len=case['chunk'] * frame_tokens, y=[tiny.condition(chunk, case['chunk'])],
                      dit_cond_dict={'c2ws_plucker_emb': folded[:, :, first:first + case['chunk']].chunk(1)}, kv_cache=own,
                      crossattn_cache=cross, current_start=first * frame_tokens,
                      max_attention_size=case['window'] * frame_tokens)
        latents = noise(0)
        for index, t in enumerate(timesteps):
            velocity = model(x=[latents], t=torch.stack([t]), **common)[0]
            velocities.append(velocity)
            sigma = sigmas[torch.argmin((table - t).abs())]
            clean = (latents.double() - sigma * velocity.double()).float()
            if index < len(timesteps) - 1:
                latents = scheduler.add_noise(clean, noise(index + 1), timesteps[index + 1])
        velocities.append(model(x=[clean], t=torch.stack([timesteps[-1] * 0.0]), **common)[0])
        chunks.append(clean)
    return outputs | summary(model, velocities, chunks, timesteps)


def self_forcing(case: dict) -> dict[str, np.ndarray]:
    module = importlib.import_module('wan.modules.causal_model')
    schedulers = importlib.import_module('utils.scheduler')
    model = network(module, 'CausalWanModel', model_type='t2v', in_dim=16, local_attn_size=case['window'],
                    sink_size=case['sinks'])
    for block in model.blocks:
        block.self_attn.max_attention_size = case['window'] * tiny.GRID[0] * tiny.GRID[1]
    scheduler = schedulers.FlowMatchScheduler(shift=case['shift'], sigma_min=0.0, extra_one_step=True)
    scheduler.set_timesteps(1000, training=True)
    steps = torch.cat([scheduler.timesteps, torch.zeros(1)])[1000 - torch.tensor(case['steps'])]
    frame_tokens = tiny.GRID[0] * tiny.GRID[1]
    own, cross = caches(case['window'] * frame_tokens)
    velocities, chunks = [], []
    for chunk in range(CHUNKS):
        noise = tiny.noise(chunk, case['chunk'])
        common = dict(context=[tiny.text()], seq_len=case['chunk'] * frame_tokens, kv_cache=own, crossattn_cache=[
            {**layer, 'is_init': False} for layer in cross], current_start=chunk * case['chunk'] * frame_tokens)

        def velocity_of(latents: torch.Tensor, t: torch.Tensor, common: dict = common) -> torch.Tensor:
            velocities.append(model(latents[None], t=t.expand(1, case['chunk']), **common)[0])
            return velocities[-1]
        latents = noise(0)
        for index, t in enumerate(steps):
            velocity = velocity_of(latents, t)
            sigma = scheduler.sigmas.double()[torch.argmin((scheduler.timesteps.double() - t.double()).abs())]
            clean = (latents.double() - sigma * velocity.double()).float()
            if index < len(steps) - 1:
                latents = scheduler.add_noise(clean.transpose(0, 1), noise(index + 1).transpose(0, 1),
                                              steps[index + 1].expand(case['chunk'])).transpose(0, 1)
        velocity_of(clean, torch.zeros(()))
        chunks.append(clean)
    return summary(model, velocities, chunks, steps)


def summary(model: torch.nn.Module, velocities: list, chunks: list, timesteps: torch.Tensor) -> dict[str, np.ndarray]:
    """Return the first pass, the last commit, all chunks, and the format of a checkpoint that the reference writes."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size='4MB')
        config = json.loads((Path(folder) / 'config.json').read_text())
        index = json.loads(next(Path(folder).glob('*.index.json')).read_text())['weight_map']
    shapes = {name: list(parameter.shape) for name, parameter in model.state_dict().items()}
    return {'first_velocity': velocities[0].numpy(), 'last_velocity': velocities[-1].numpy(),
            'chunks': torch.stack(chunks).numpy(), 'timesteps': timesteps.double().numpy(),
            'checkpoint': np.array(json.dumps({'config': config, 'shapes': shapes, 'files': index}))}


def facts(checkout: Path, commit: str | None) -> dict[str, object]:
    """Return the version of the code: its commit if there is a repository, and checksums of the imported files."""
    found = subprocess.run(['git', '-C', str(checkout), 'rev-parse', 'HEAD'], capture_output=True, text=True)
    files = {str(Path(module.__file__).relative_to(checkout)): hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()
             for module in list(sys.modules.values()) if str(getattr(module, '__file__', None) or '').startswith(str(checkout))}
    return {'commit': commit or found.stdout.strip(), 'files': files, 'torch': torch.__version__,
            'diffusers': importlib.import_module('diffusers').__version__}


if __name__ == '__main__':
    raise SystemExit(main())
