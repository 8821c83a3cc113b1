"""The description of an open world model: ``world.json``, next to the checkpoint."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...model.checkpoint_description import WORLD_FILE, ModelError
from ...model.wan.camera import Intrinsics
from ...model.wan.checkpoint import WanCheckpoint
from ...model.wan.config import PATCH, PRESETS, VAE_STRIDE, WanConfig, WanPreset, read_json
from ...model.wan.experts import folders, has_experts
from ...model.wan.schedule import Schedule

_TOKEN = VAE_STRIDE * PATCH  # pixels
_KEYS = {'preset', 'checkpoint', 'vae', 'text', 'prompt', 'text_encoder', 'size', 'top_speed', 'camera_in_base', 'intrinsics',
         'chunk_frames', 'window_frames', 'sink_frames', 'schedule', 'smaller', 'devices', 'boundary'}
# The optical frame (x right, y down, z forward) in a camera body frame (x forward, y left, z up); REP 103.
_OPTICAL = np.array([[0.0, 0.0, 1.0], [-1.0, 0.0, 0.0], [0.0, -1.0, 0.0]])


@dataclass(frozen=True)
class WorldDescription:
    """``size``: of the video, height and width in pixels. ``text``: file with the text encoder's rows for the prompt, or None
    to make them from ``prompt`` and ``text_encoder``. ``top_speed`` of the robot, m/s: the unit of the camera's
    translations (``camera.relative_poses``). ``optical`` (4, 4): the camera's optical frame in the robot's base frame.
    ``intrinsics``, of an image of ``size``: for a camera that publishes none.
    """

    name: str
    preset: WanPreset | None  # None: determined by the checkpoint's network
    checkpoint: Path
    vae: Path
    text: Path | None
    prompt: str
    text_encoder: Path | None
    size: tuple[int, int]
    top_speed: float
    optical: np.ndarray
    intrinsics: Intrinsics | None
    sampling: dict[str, Any]  # what differs from the preset, or replaces it
    smaller: Path | None = None  # folder of a world that stands in where this one would be late
    devices: tuple[str, ...] = ()  # of two networks, the high-noise one first; empty: both on the VAE's device
    boundary: float | None = None  # noise level between them; None: as the checkpoint says, or as published

    @classmethod
    def read(cls, folder: Path) -> WorldDescription:
        """Read ``world.json`` in a folder, to which its paths are relative. Raises ModelError."""
        content = read_json(folder / WORLD_FILE)
        try:
            return cls._of(folder, content)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ModelError(f'{folder / WORLD_FILE}: {error!r}; docs/open_models.md says what belongs there') from error

    @classmethod
    def _of(cls, folder: Path, content: dict[str, Any]) -> WorldDescription:
        if unknown := sorted(set(content) - _KEYS):
            raise ValueError(f'unknown: {", ".join(unknown)}')
        name = content.get('preset')
        if name is not None and name not in PRESETS:
            raise ValueError(f'preset {name!r}: choose one of {", ".join(PRESETS)}')
        height, width = size = tuple(map(int, content.get('size', (480, 832))))
        if min(size) < _TOKEN or height % _TOKEN or width % _TOKEN or max(size) > 4096:
            raise ValueError(f'size {size}: whole tokens of {_TOKEN} pixels')
        speed = float(content['top_speed'])
        if not 0.0 < speed < math.inf:
            raise ValueError(f'top_speed {speed} m/s')
        if ('text' in content) == ('text_encoder' in content):
            raise ValueError('give either text, a file of rows, or text_encoder, a folder, with prompt')
        mount = [float(value) for value in content['camera_in_base']]
        pinhole = [float(value) for value in content.get('intrinsics', ())]
        if len(mount) != 6 or len(pinhole) not in (0, 4) or not np.isfinite([*mount, *pinhole]).all() \
                or any(value <= 0.0 for value in pinhole[:2]):
            raise ValueError('camera_in_base is x, y, z, roll, pitch, yaw, intrinsics fx, fy, cx, cy')
        return cls(
            folder.resolve().name, PRESETS.get(name), folder / content.get('checkpoint', '.'), folder / content['vae'],
            folder / content['text'] if 'text' in content else None, str(content.get('prompt', '')),
            folder / content['text_encoder'] if 'text_encoder' in content else None, size, speed, optical_frame(mount),
            Intrinsics(*pinhole) if pinhole else None,
            {key: content[key] for key in ('chunk_frames', 'window_frames', 'sink_frames', 'schedule') if key in content},
            folder / content['smaller'] if 'smaller' in content else None, _devices(content.get('devices', ())),
            float(content['boundary']) if 'boundary' in content else None)

    @property
    def two_networks(self) -> bool:
        """Whether the checkpoint has a high-noise and a low-noise network."""
        return has_experts(self.checkpoint)

    def network(self) -> WanConfig:
        """Return the configuration of the checkpoint's network, the same for both of two. Raises ModelError for one without
        camera control."""
        with WanCheckpoint(folders(self.checkpoint)[0] if self.two_networks else self.checkpoint) as stored:
            config = stored.config()
        if not config.camera_width or not config.condition_channels:
            raise ModelError(f'{self.name} follows no camera from an image on, and so no robot')
        return config

    def sampled(self, config: WanConfig) -> WanPreset:
        """Return how a network is sampled. Raises ModelError if neither a preset nor the description says."""
        found = [self.preset] if self.preset else [preset for preset in PRESETS.values() if preset.config == config]
        try:
            changes = {key: int(self.sampling[key]) for key in ('chunk_frames', 'window_frames', 'sink_frames')
                       if key in self.sampling}
            if 'schedule' in self.sampling:
                changes['schedule'] = schedule_of(self.sampling['schedule'])
            if changes.get('chunk_frames', 2) < 2:
                raise ValueError(f'chunk_frames is {changes["chunk_frames"]}: it must be 2 or more, as the first frame is '
                                 'the given image')
            if len(changes) == 4:
                return WanPreset(name=self.name, config=config, **changes, licence='')
            if len(found) != 1:
                names = ', '.join(preset.name for preset in found) or 'no preset'
                raise ModelError(f'{self.name}: its network is that of {names}: name a preset in {WORLD_FILE}, or give '
                                 'chunk_frames, window_frames, sink_frames and schedule')
            found[0].check(config)
            return replace(found[0], **changes)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f'{self.name}: {error}') from error


def _devices(names: Sequence[str]) -> tuple[str, ...]:
    if len(names) not in (0, 2) or not all(isinstance(name, str) for name in names):
        raise ValueError('devices are two names, of the network for much noise and of that for little')
    return tuple(names)


def schedule_of(content: dict[str, Any]) -> Schedule:
    """Return the schedule of {"kind": "unipc" or "self_forcing", "steps": [...], "shift": s}. Raises ValueError."""
    kinds = {'unipc': Schedule.unipc, 'self_forcing': Schedule.self_forcing}
    if set(content) != {'kind', 'steps', 'shift'} or content['kind'] not in kinds:
        raise ValueError(f'a schedule is kind ({" or ".join(kinds)}), steps and shift')
    try:
        return kinds[content['kind']]([int(step) for step in content['steps']], float(content['shift']))
    except IndexError as error:
        raise ValueError(f'steps {content["steps"]} are of 1,000') from error


def optical_frame(mount: Sequence[float]) -> np.ndarray:
    """Return the optical frame in the base frame, (4, 4), of a camera body at x, y, z [m] with roll, pitch, yaw [rad]."""
    def turn(axis: int, angle: float) -> np.ndarray:
        c, s, (a, b) = math.cos(angle), math.sin(angle), [(1, 2), (2, 0), (0, 1)][axis]
        out = np.eye(3)
        out[a, a], out[a, b], out[b, a], out[b, b] = c, -s, s, c
        return out
    pose = np.eye(4)
    pose[:3, :3] = turn(2, mount[5]) @ turn(1, mount[4]) @ turn(0, mount[3]) @ _OPTICAL
    pose[:3, 3] = mount[:3]
    return pose
