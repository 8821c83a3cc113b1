"""The folder of an open world model small enough for a test, like a user's except for the sizes."""
import json

import torch
import wan_tiny as tiny
from safetensors.torch import save_file

from worldmodel_ros.model.wan.checkpoint import original_shapes
from worldmodel_ros.model.wan.config import WanConfig
from worldmodel_ros.model.wan.experts import LAYOUTS

SIZE = 32, 48
CONFIG = WanConfig(128, 2, 2, 128, 36, camera_width=1536, text_width=tiny.TEXT_WIDTH, text_tokens=tiny.TEXT_TOKENS)
WORLD = {'vae': 'vae', 'text': 'text/rows.safetensors', 'size': SIZE, 'top_speed': 0.5,
         'camera_in_base': [0.1, 0.0, 0.2, 0.0, 0.1, 0.0],
         'intrinsics': [30.0, 30.0, 24.0, 16.0], 'chunk_frames': 3, 'window_frames': 6, 'sink_frames': 3,
         'schedule': {'kind': 'unipc', 'steps': [0, 500], 'shift': 5.0}}


def write_network(folder, scale=1.0):
    """Write a checkpoint with the original names, whose matrices are multiplied by ``scale``."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tiny.weight(name, shape) * (scale if len(shape) > 1 else 1.0)
               for name, shape in original_shapes(CONFIG).items()}, folder / 'model.safetensors')
    (folder / 'config.json').write_text(json.dumps({
        '_class_name': 'WanModelFast', 'dim': CONFIG.width, 'num_layers': CONFIG.layers, 'num_heads': CONFIG.heads,
        'ffn_dim': CONFIG.ffn, 'in_dim': 36, 'out_dim': 16, 'text_len': tiny.TEXT_TOKENS, 'text_dim': tiny.TEXT_WIDTH}))


def write(folder, networks=1, **changes):
    """Write the folder, with one network or two; ``changes`` to world.json, None removes a key. Needs diffusers, for
    its VAE."""
    from diffusers import AutoencoderKLWan
    from test_wan_diffusers import randomise
    for name, scale in [('.', 1.0)] if networks == 1 else zip(LAYOUTS['original'], (1.0, 0.9)):
        write_network(folder / name, scale)
    torch.manual_seed(0)
    randomise(AutoencoderKLWan(base_dim=8)).save_pretrained(folder / 'vae')
    (folder / 'text').mkdir()
    save_file({'rows': tiny.text()}, folder / 'text' / 'rows.safetensors')
    described = {key: value for key, value in {**WORLD, **changes}.items() if value is not None}
    (folder / 'world.json').write_text(json.dumps(described))
    return folder
