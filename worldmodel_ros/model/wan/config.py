"""The network configuration of a checkpoint, and how each published model is sampled."""
from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint_description import ModelError
from ..presets import SequencePreset
from .schedule import Schedule

PATCH = 2  # rows and columns of latents in a token
VAE_STRIDE = 8  # pixels per latent, along rows and columns
VAE_FRAMES = 4  # pixel frames per latent frame, except the first, which is one


@dataclass(frozen=True)
class WanConfig:
    """The network of a checkpoint.

    ``in_channels``: 16 of noise and, with an image, 4 of mask and 16 of its latents. ``camera_width``: numbers that describe
    the camera's rays in a token, 0 without a camera. ``text_tokens``: rows of text that the network was trained with; shorter
    prompts are padded with zeros, which count.
    """

    width: int
    layers: int
    heads: int
    ffn: int
    in_channels: int
    out_channels: int = 16
    camera_width: int = 0
    text_width: int = 4096
    text_tokens: int = 512
    time_width: int = 256
    eps: float = 1e-6

    def __post_init__(self):
        sizes = self.width, self.layers, self.heads, self.ffn, self.in_channels, self.out_channels, self.text_width
        if min(sizes) < 1 or self.width % self.heads or self.head_dim % 2 or self.head_dim < 6 or self.time_width % 2:
            raise ValueError(f'invalid network {self}: width must be a multiple of heads, heads of even width')

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def condition_channels(self) -> int:
        """Channels of the first image's condition, 0 for a model of text alone."""
        return self.in_channels - self.out_channels

    @property
    def parameters(self) -> int:
        """Numbers in all weights and biases."""
        d, f = self.width, self.ffn
        block = 8 * (d * d + d) + 4 * d + 2 * d + 2 * d * f + f + d + 6 * d
        ends = (self.in_channels * PATCH ** 2 + 1) * d + (self.text_width + 1) * d + (d + 1) * d \
            + (self.time_width + 1) * d + (d + 1) * d + (d + 1) * 6 * d + 2 * d + (d + 1) * self.out_channels * PATCH ** 2
        if self.camera_width:
            block += 4 * (d * d + d)
            ends += (self.camera_width + 1) * d + 2 * (d + 1) * d
        return self.layers * block + ends

    @classmethod
    def from_json(cls, content: dict[str, Any], camera_width: int = 0) -> WanConfig:
        """Return the network of a ``config.json``, in the original names or in diffusers'.

        ``camera_width`` is that of the weights, as no config has it. Raises ModelError for what this package cannot run: CLIP
        features of an image, other patches, no norms.
        """
        try:
            for key, wanted in (('image_dim', None), ('added_kv_proj_dim', None), ('qk_norm', (True, 'rms_norm_across_heads')),
                                ('cross_attn_norm', (True,)), ('patch_size', ([1, PATCH, PATCH], (1, PATCH, PATCH)))):
                given = content.get(key, wanted if wanted is None else wanted[0])
                if given != wanted and given not in (wanted or ()):
                    raise ModelError(f'{key} is {given!r} in config.json: this network is not supported')
            common = {'eps': float(content.get('eps', 1e-6)), 'camera_width': camera_width,
                      'text_width': int(content.get('text_dim', 4096)), 'text_tokens': int(content.get('text_len', 512)),
                      'time_width': int(content.get('freq_dim', 256)), 'ffn': int(content['ffn_dim']),
                      'layers': int(content['num_layers'])}
            if 'dim' in content:
                return cls(width=int(content['dim']), heads=int(content['num_heads']), in_channels=int(content['in_dim']),
                           out_channels=int(content['out_dim']), **common)
            heads = int(content['num_attention_heads'])
            return cls(width=heads * int(content['attention_head_dim']), heads=heads, in_channels=int(content['in_channels']),
                       out_channels=int(content['out_channels'] or content['in_channels']), **common)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f'config.json does not describe a network of the Wan family: {error!r}') from error


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; raises ModelError if there is none."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f'{file} cannot be read: {error}') from error
    if not isinstance(content, dict):
        raise ModelError(f'{file} does not contain a JSON object')
    return content


@dataclass(frozen=True, kw_only=True)
class WanPreset(SequencePreset):
    """How a model is sampled: latent frames of a chunk, of the window (including the chunk being denoised) and of the sinks,
    the first frames, which never leave it.

    ``licence`` is that of the published weights, of which this package contains none.
    """

    config: WanConfig
    schedule: Schedule
    sink_frames: int
    licence: str

    def __post_init__(self):
        if not 0 < self.chunk_frames <= self.window_frames - self.sink_frames or self.sink_frames < 0:
            raise ValueError(f'{self.name}: a window of {self.window_frames} frames has no room for {self.sink_frames} sinks '
                             f'and a chunk of {self.chunk_frames}')

    @property
    def slab_frames(self) -> int:
        """Frames that are evicted together: the greatest common divisor of chunk, window and sinks."""
        return math.gcd(self.chunk_frames, self.window_frames, self.sink_frames)

    def check(self, config: WanConfig) -> None:
        """Raise ModelError if a checkpoint's network is not the one that this preset was published for."""
        if config != self.config:
            raise ModelError(f'the checkpoint has {config}, and {self.name} is {self.config}: choose another preset')


CAMERA = 6 * VAE_STRIDE ** 2 * PATCH ** 2  # six numbers per ray, one ray per pixel
FAST_14B = WanConfig(width=5120, layers=40, heads=40, ffn=13824, in_channels=36, camera_width=CAMERA)
CAUSAL_1_3B = WanConfig(width=1536, layers=30, heads=12, ffn=8960, in_channels=36, camera_width=CAMERA)

PRESETS = {preset.name: preset for preset in (
    WanPreset(name='lingbot_world_fast', config=FAST_14B, schedule=Schedule.unipc((0, 179, 358, 679), shift=10.0),
              chunk_frames=3, window_frames=18, sink_frames=9, licence='Apache-2.0'),
    WanPreset(name='lingbot_world_v2_14b', config=FAST_14B, schedule=Schedule.unipc((0, 250, 500, 750), shift=10.0),
              chunk_frames=4, window_frames=18, sink_frames=6, licence='CC BY-NC-SA 4.0'),
    WanPreset(name='lingbot_world_v2_1.3b', config=CAUSAL_1_3B, schedule=Schedule.unipc((0, 250, 500, 750), shift=5.0),
              chunk_frames=4, window_frames=18, sink_frames=6, licence='CC BY-NC-SA 4.0'),
    WanPreset(name='self_forcing_1.3b', config=WanConfig(width=1536, layers=30, heads=12, ffn=8960, in_channels=16),
              schedule=Schedule.self_forcing((1000, 750, 500, 250), shift=5.0),
              chunk_frames=3, window_frames=21, sink_frames=0, licence='Apache-2.0'))}
