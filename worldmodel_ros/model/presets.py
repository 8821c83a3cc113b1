"""Model sizes: everything that a checkpoint must agree on with the code that loads it."""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, Field, asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

POLICIES = ('regression', 'flow')
TURN = 'angular.z'  # the action that turns the robot
FORWARD = 'linear.x'  # the action that moves it ahead
_LARGEST = 2 ** 16  # of any whole number in a description, so that what is computed from them stays finite
_DEEPEST = 2 ** 10  # layers


@dataclass(frozen=True)
class Camera:
    """The camera that a model was trained with: a pinhole with square pixels and its principal point at the image centre.

    ``vertical_fov``: degrees; ``height`` of its centre above the ground: m; ``pitch``: degrees downwards.
    """

    vertical_fov: float
    height: float
    pitch: float

    def __post_init__(self) -> None:
        if not 0.0 < self.vertical_fov < 180.0:
            raise ValueError(f'camera: vertical_fov is {self.vertical_fov}, and must be above 0 and below 180 degrees')


@dataclass(frozen=True, kw_only=True)
class SequencePreset:
    """What every video model here has: chunks of frames denoised together, and the window of frames they see. The open
    models' presets (``wan.config``) share it."""

    name: str
    chunk_frames: int
    window_frames: int

    @property
    def context_frames(self) -> int:
        """Frames that a chunk sees in a long session, not counting sinks."""
        return self.window_frames


@dataclass(frozen=True, kw_only=True)
class VideoPreset(SequencePreset):
    """What networks, memory, sampler and back ends need: how frames become tokens, layers, and which pages they see.

    A frame of ``image_size`` becomes a latent of ``latent_size`` with ``latent_channels`` channels, cut into square patches of
    ``patch`` latents; one patch is one token. A chunk is ``chunk_frames`` frames, denoised together, that attend to the last
    ``window_frames`` observed frames.

    If an image has many tokens, most layers attend within their frame only; the others, the cache layers, attend to whole tiles
    of ``tile`` (frames, rows, columns) tokens: those in a neighbourhood of (slabs, rows, columns) of tiles around their own,
    where 0 is unbounded. ``patterns`` are the neighbourhoods of the cache layers, in turn.
    """

    image_size: tuple[int, int]  # height, width in pixels
    vae_width: int
    vae_downsample: int
    latent_channels: int
    patch: int
    width: int
    depth: int
    heads: int
    step_period: float  # s between frames
    # Later additions; a description without them means these values.
    cache_every: int = 1  # every n-th layer is a cache layer
    tile: tuple[int, int, int] | None = None  # None: a tile is a frame, and every frame of the window is attended to
    patterns: tuple[tuple[int, int, int], ...] = ()
    sink_slabs: int = 0  # the first slabs of a session, kept in its cache whatever their age
    keyframe_slabs: int = 0  # further slabs kept behind the window, chosen by where the robot was (``cache.keyframes``)
    heading_pairs: int = 0  # rotary pairs for time that follow the robot's heading instead, see ``rotary``
    sink_frames: int = 0  # see ``sinks_from``
    sink_statistics: float = 0.0  # share of the observed mean and deviation, see ``anchor_statistics_from``
    sink_statistics_after: int = 0  # predicted frames

    def __post_init__(self):
        height, width = self.image_size
        cell = self.vae_downsample * self.patch
        if height % cell or width % cell:
            raise ValueError(f'preset {self.name}: image_size {self.image_size} must be a multiple of {cell} '
                             f'(vae_downsample x patch)')
        if self.width % self.heads or self.head_dim % 2:
            raise ValueError(f'preset {self.name}: width {self.width} must divide into {self.heads} heads of even size')
        if not self.step_period > 0.0:
            raise ValueError(f'preset {self.name}: step_period is {self.step_period} s, and must be above 0')
        if not self.cache_layers:
            raise ValueError(f'preset {self.name}: cache_every {self.cache_every} leaves no cache layer among '
                             f'{self.depth}')
        self._check_tiles()

    def _check_tiles(self) -> None:
        if self.tile is None:
            if self.patterns or self.sink_slabs or self.keyframe_slabs or self.heading_pairs:
                raise ValueError(f'preset {self.name}: patterns, sink_slabs and keyframe_slabs are made of tiles, and '
                                 f'heading_pairs are for layers that attend to them: give a tile')
            if self.sink_frames and (not 0 < self.sink_frames < self.window_frames
                                     or self.window_frames % self.chunk_frames or self.sink_frames % self.chunk_frames):
                raise ValueError(f'preset {self.name}: sink_frames is {self.sink_frames}: it must be 0, or some of the '
                                 f'whole chunks of {self.chunk_frames} of a window, which has {self.window_frames}')
            if 2 * self.sink_frames > self.window_frames + self.chunk_frames:  # a session may have seen a single frame
                raise ValueError(f'preset {self.name}: sink_frames is {self.sink_frames}: when a branch of a new session needs '
                                 f'them, it may have fewer frames; at most half of a window ({self.window_frames}) and a '
                                 f'chunk ({self.chunk_frames}) together are possible')
            if not 0.0 <= self.sink_statistics <= float(self.sink_frames > 0):
                raise ValueError(f'preset {self.name}: sink_statistics is {self.sink_statistics}: it is a share, from 0 '
                                 f'to 1, and 0 without sink_frames')
            return
        if self.sink_frames:
            raise ValueError(f'preset {self.name}: with tiles, the sinks are sink_slabs; leave sink_frames 0')
        if not 0.0 <= self.sink_statistics <= 1.0:
            raise ValueError(f'preset {self.name}: sink_statistics is {self.sink_statistics}: it is a share, from 0 to 1')
        pairs = self.head_dim // 2
        if self.heading_pairs > pairs - 2 * (pairs // 3):
            raise ValueError(f'preset {self.name}: heading_pairs is {self.heading_pairs}: of the {pairs} pairs of a head, '
                             f'{pairs - 2 * (pairs // 3)} are for time, of which they are taken')
        sizes = self.chunk_frames, *self.grid
        if any(whole % part for whole, part in zip(sizes, self.tile)):
            raise ValueError(f'preset {self.name}: a chunk of (frames, rows, columns) {sizes} must be whole tiles of '
                             f'{self.tile}')
        if not self.patterns or any(len(pattern) != 3 or min(pattern) < 0 for pattern in self.patterns):
            raise ValueError(f'preset {self.name}: patterns are (slabs, rows, columns) of tiles, at least one, 0 being '
                             f'without bounds; not {self.patterns}')

    @property
    def staying_slabs(self) -> int:
        """How many slabs stay in a session's cache behind its window."""
        return self.sink_slabs + self.keyframe_slabs

    @property
    def staying_frames(self) -> int:
        """The same in frames; 0 without tiles."""
        return self.tile[0] * self.staying_slabs if self.tile else 0

    @property
    def context_frames(self) -> int:
        return self.window_frames + (self.keyframe_slabs * self.tile[0] if self.tile else 0)

    @cached_property
    def latent_size(self) -> tuple[int, int]:
        return self.image_size[0] // self.vae_downsample, self.image_size[1] // self.vae_downsample

    @cached_property
    def grid(self) -> tuple[int, int]:
        """Tokens of a frame: rows, columns."""
        return self.latent_size[0] // self.patch, self.latent_size[1] // self.patch

    @cached_property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1]

    @cached_property
    def token_dim(self) -> int:
        return self.latent_channels * self.patch ** 2

    @cached_property
    def head_dim(self) -> int:
        return self.width // self.heads

    @cached_property
    def cache_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that attend to the cache; the others attend within their frame."""
        return tuple(range(self.cache_every - 1, self.depth, self.cache_every))

    @cached_property
    def sinks_from(self) -> float:
        """Predicted frames of a branch from which on its chunks have sinks, infinite for none: the last ``sink_frames``
        observed frames, which replace the oldest of the window when they would have left it (attention sinks of frames:
        LongLive, Yang et al. 2025; Rolling Forcing, Liu et al. 2025). This keeps predictions similar to what was observed."""
        return self.window_frames - self.sink_frames + 1 if self.sink_frames else math.inf

    @cached_property
    def kept_frames(self) -> int:
        """Number of last observed frames whose latents a session keeps: its sinks, or with tiles as many as a window has,
        whose statistics chunks take over."""
        return self.sink_frames or (self.window_frames if self.sink_statistics else 0)

    @cached_property
    def anchor_statistics_from(self) -> float:
        """Predicted frames of a branch from which on its chunks take over channel statistics of the ``kept_frames``
        (``adain``), so that colours and contrast do not fade; infinite for none. Only far ahead: while the observations
        still determine the prediction, it would add error."""
        if not self.sink_statistics:
            return math.inf
        return max(self.sink_statistics_after, self.sinks_from) if self.sink_frames else self.sink_statistics_after


@dataclass(frozen=True, kw_only=True)
class Preset(VideoPreset):
    """A robot's model: a video model with actions, goals and policy, and the camera of its training."""

    action_names: tuple[str, ...]
    action_low: tuple[float, ...]  # SI units: m/s, rad/s
    action_high: tuple[float, ...]
    goals: tuple[str, ...]
    # Later additions.
    policy: str = 'regression'  # one of POLICIES
    head_features: int = 0  # per token, in layers over a frame's flattened tokens; 0: ``width``
    camera: Camera | None = None  # of all training images; None: unknown

    def __post_init__(self):
        super().__post_init__()
        if not len(self.action_names) == len(self.action_low) == len(self.action_high):
            raise ValueError(f'preset {self.name}: action_names, action_low and action_high differ in length')
        if not all(low < high for low, high in zip(self.action_low, self.action_high)):
            raise ValueError(f'preset {self.name}: action_low {self.action_low} must lie below action_high {self.action_high}')
        for what, names in (('action_names', self.action_names), ('goals', self.goals)):
            if len(set(names)) < len(names):
                raise ValueError(f'preset {self.name}: {what} has one name twice: {", ".join(names)}')
        if self.heading_pairs and TURN not in self.action_names:
            raise ValueError(f'preset {self.name}: heading_pairs is {self.heading_pairs}, and no action is {TURN}')
        if self.keyframe_slabs and not {TURN, FORWARD} <= set(self.action_names):
            raise ValueError(f'preset {self.name}: keyframe_slabs is {self.keyframe_slabs}, and only the actions {FORWARD} and '
                             f'{TURN} tell where the robot is; it has {", ".join(self.action_names)}')
        if self.policy not in POLICIES:
            raise ValueError(f'preset {self.name}: unknown policy {self.policy!r}; known: {", ".join(POLICIES)}')

    @cached_property
    def actions(self) -> int:
        return len(self.action_names)

    @cached_property
    def turn(self) -> int:
        """Index of the action that is the rate of turn, rad/s."""
        return self.action_names.index(TURN)

    @cached_property
    def forward(self) -> int:
        """Index of the action that is the forward speed, m/s."""
        return self.action_names.index(FORWARD)

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> Preset:
        if not isinstance(values, dict):
            raise ValueError(f'preset: {values!r} is no object of names and values')
        known = {f.name for f in fields(cls)}
        missing = {f.name for f in fields(cls) if f.default is MISSING} - set(values)
        if missing or set(values) - known:
            raise ValueError(f'preset: unknown fields {sorted(set(values) - known)}, missing {sorted(missing)}')
        given = {key: _tuples(value) for key, value in values.items()}
        given['camera'] = _camera(given.get('camera'))
        for field in fields(cls):
            if field.name in given and not _FORMS[field.type](given[field.name], _smallest(field)):
                raise ValueError(f'preset: {field.name} is {given[field.name]!r}, and must be {field.type}, whole numbers '
                                 f'from {_smallest(field)} to {_LARGEST}')
        if given['depth'] > _DEEPEST:
            raise ValueError(f'preset: depth is {given["depth"]}, {_DEEPEST} layers are allowed')
        return cls(**given)


def _camera(values: object) -> Camera | None:
    if values is None:
        return None
    names = {f.name for f in fields(Camera)}
    if not isinstance(values, dict) or set(values) != names or not all(map(_real, values.values())):
        raise ValueError(f'preset: camera is {values!r}, and must be numbers for {", ".join(sorted(names))}, or null')
    return Camera(**values)


def _smallest(field: Field) -> int:
    """Return the smallest whole number that a field may have: 0 where that means none."""
    return 0 if field.default in (0, ()) else 1


def _whole(value: Any, smallest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and smallest <= value <= _LARGEST


def _real(value: Any, _: int = 0) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _words(value: Any, _: int = 0) -> bool:
    return isinstance(value, str)


def _tuple(item: Callable[[Any, int], bool], length: int | None = None) -> Callable[[Any, int], bool]:
    def check(value: Any, smallest: int) -> bool:
        return (isinstance(value, tuple) and len(value) == (length or len(value))
                and all(item(each, smallest) for each in value))
    return check


# Checks of a description's values, by the type of their field.
_FORMS: dict[str, Callable[[Any, int], bool]] = {
    'int': _whole, 'float': _real, 'str': _words, 'tuple[str, ...]': _tuple(_words), 'tuple[float, ...]': _tuple(_real),
    'tuple[int, int]': _tuple(_whole, 2), 'Camera | None': lambda value, _: value is None or isinstance(value, Camera),
    'tuple[int, int, int] | None': lambda value, smallest: value is None or _tuple(_whole, 3)(value, smallest),
    'tuple[tuple[int, int, int], ...]': _tuple(_tuple(_whole, 3))}


def _tuples(value: object) -> object:
    """Convert lists, as JSON has them, to tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


SIMULATED = Camera(vertical_fov=90.0, height=0.25, pitch=8.0)  # nominal in worldmodel_ros/sim/scene.py, which randomises it

TINY = Preset(
    name='tiny', image_size=(64, 64), vae_width=32, vae_downsample=8, latent_channels=16, patch=2,
    width=256, depth=6, heads=4, chunk_frames=4, window_frames=16, step_period=0.1,
    action_names=('linear.x', 'angular.z'), action_low=(-0.3, -1.5), action_high=(0.6, 1.5),
    goals=('red', 'green', 'blue', 'yellow'), policy='flow', head_features=64,
    sink_frames=8, sink_statistics=0.3, sink_statistics_after=64, camera=SIMULATED)

NO_SINKS = {'sink_frames': 0, 'sink_statistics': 0.0, 'sink_statistics_after': 0}

SMALL = replace(TINY, name='small', image_size=(128, 128), vae_width=48, width=512, depth=8, heads=8, **NO_SINKS)

# ``small`` with the autoencoder of ``tiny``, to compare with ``small_tiles`` after the same minutes of training.
SMALL_NARROW = replace(SMALL, name='small_narrow', vae_width=32)

# For speed measurements with random weights: none of this size are shipped.
BASE = replace(TINY, name='base', image_size=(256, 256), vae_width=64, width=1024, depth=16, heads=8,
               head_features=32, **NO_SINKS)

# No weights of these sizes either. Four of the six cache layers see the 18 surrounding tiles of this slab and the previous
# one, two see the whole window at their place: 27 tiles on average.
ROBOT_3B = replace(BASE, name='robot_3b', patch=1, width=3072, depth=18, heads=24, chunk_frames=16, window_frames=160,
                   head_features=8, cache_every=3, tile=(4, 8, 8), patterns=((2, 3, 3), (2, 3, 3), (0, 1, 1)),
                   sink_slabs=1)

# The 3-D cache at a size that can be trained on one GPU: 16,384 tokens, half the window's and half the keyframes'. Cache layers
# see in turn the whole plane of the newest four slabs and their own place in all slabs; heads have the width that the Hopper
# kernels take.
SMALL_TILES = replace(TINY, name='small_tiles', image_size=(128, 128), patch=1, depth=15, heads=2, window_frames=32,
                      head_features=8, cache_every=3, tile=(4, 8, 8), patterns=((4, 0, 0), (0, 1, 1)), sink_slabs=1,
                      keyframe_slabs=8, heading_pairs=8, **NO_SINKS)

# The same parts with hardly any work, to try training over tiles on a CPU. It learns nothing.
SMOKE_TILES = replace(SMALL_TILES, name='smoke_tiles', image_size=(64, 64), width=64, depth=6, heads=2, window_frames=16,
                      tile=(4, 4, 4), patterns=((2, 0, 0), (0, 1, 1)), keyframe_slabs=2, heading_pairs=2)

# The same network over a quarter of the tokens: 4,096 a chunk.
ROBOT_3B_4K = replace(ROBOT_3B, name='robot_3b_4k', patch=2)

PRESETS = {preset.name: preset for preset in (TINY, SMALL, SMALL_NARROW, SMALL_TILES, SMOKE_TILES, BASE, ROBOT_3B,
                                            ROBOT_3B_4K)}
