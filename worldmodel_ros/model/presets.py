"""Sizes of the models: everything that a checkpoint must agree on with the code that loads it."""
from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields, replace

POLICIES = ('regression', 'flow')


@dataclass(frozen=True)
class Preset:
    """Shape of one world model.

    A frame of ``image_size`` becomes a latent of ``latent_size`` with ``latent_channels`` channels, cut into square
    patches of ``patch`` latents; one patch is one token. A chunk is ``chunk_frames`` frames, denoised together, that
    attend to the last ``window_frames`` observed frames.
    """

    name: str
    image_size: tuple[int, int]  # height, width in pixels
    vae_width: int
    vae_downsample: int
    latent_channels: int
    patch: int
    width: int
    depth: int
    heads: int
    chunk_frames: int
    window_frames: int
    step_period: float  # s between frames
    action_names: tuple[str, ...]
    action_low: tuple[float, ...]  # SI units: m/s, rad/s
    action_high: tuple[float, ...]
    goals: tuple[str, ...]
    # Fields that came later; a description without them means these values.
    policy: str = 'regression'  # one of POLICIES
    head_features: int = 0  # per token, in layers over a frame's flattened tokens; 0: all of width

    def __post_init__(self):
        height, width = self.image_size
        cell = self.vae_downsample * self.patch
        if height % cell or width % cell:
            raise ValueError(f'preset {self.name}: image_size {self.image_size} must be a multiple of {cell} '
                             f'(vae_downsample x patch)')
        if self.width % self.heads or self.head_dim % 2:
            raise ValueError(f'preset {self.name}: width {self.width} must divide into {self.heads} heads of even size')
        if not len(self.action_names) == len(self.action_low) == len(self.action_high):
            raise ValueError(f'preset {self.name}: action_names, action_low and action_high differ in length')
        if self.policy not in POLICIES:
            raise ValueError(f'preset {self.name}: unknown policy {self.policy!r}; known: {", ".join(POLICIES)}')

    @property
    def latent_size(self) -> tuple[int, int]:
        return self.image_size[0] // self.vae_downsample, self.image_size[1] // self.vae_downsample

    @property
    def grid(self) -> tuple[int, int]:
        """Tokens of a frame: rows, columns."""
        return self.latent_size[0] // self.patch, self.latent_size[1] // self.patch

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def token_dim(self) -> int:
        return self.latent_channels * self.patch ** 2

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def actions(self) -> int:
        return len(self.action_names)

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> Preset:
        known = {f.name for f in fields(cls)}
        missing = {f.name for f in fields(cls) if f.default is MISSING} - set(values)
        if missing or set(values) - known:
            raise ValueError(f'preset: unknown fields {sorted(set(values) - known)}, missing {sorted(missing)}')
        return cls(**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})


TINY = Preset(
    name='tiny', image_size=(64, 64), vae_width=32, vae_downsample=8, latent_channels=16, patch=2,
    width=256, depth=6, heads=4, chunk_frames=4, window_frames=16, step_period=0.1,
    action_names=('linear.x', 'angular.z'), action_low=(-0.3, -1.5), action_high=(0.6, 1.5),
    goals=('red', 'green', 'blue', 'yellow'), policy='flow', head_features=64)

SMALL = replace(TINY, name='small', image_size=(128, 128), vae_width=48, width=512, depth=8, heads=8)

# No weights of this size are shipped: it serves to measure speed, with random ones.
BASE = replace(TINY, name='base', image_size=(256, 256), vae_width=64, width=1024, depth=16, heads=8,
               head_features=32)

PRESETS = {preset.name: preset for preset in (TINY, SMALL, BASE)}
