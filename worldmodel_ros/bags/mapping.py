"""
Which topics of a bag are the camera, the actions, the odometry, the goal and the task, and what their fields mean.

A mapping comes from a YAML file (config/evaluate/ has commented ones); what the file leaves open is guessed if there is only
one sensible guess (``guess``), else the user is asked.
"""
from __future__ import annotations

import math
from collections.abc import Mapping as Map
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from worldmodel_ros.inputs import ticks
from .fields import Field, YawRate
from .problems import BagError

_TOPICS = {'image_topic': 'image_topic', 'camera_info_topic': 'info_topic', 'action_topic': 'action_topic',
           'goal_topic': 'goal_topic', 'odometry_topic': 'odometry_topic',
           'task_topic': 'task_topic'}  # keys of a file -> fields of Mapping
_KEYS = {*_TOPICS, 'image_stamps', 'image_rectified', 'camera_pitch_deg', 'actions', 'executed_timeout_s', 'notes'}
_FIELD, _STEERED = {'field', 'scale', 'offset'}, {'speed', 'steering', 'wheelbase'}  # keys of an action
STAMPS = ('header', 'log')


@dataclass(frozen=True)
class Mapping:
    """
    ``actions`` are in the order of the model's action names; empty if no actions were recorded (``action_topic`` None).
    ``info_topic``: the camera's CameraInfo, by which images are warped to the view of the model's own camera; None if there is
    none. ``image_stamps``: 'header', or 'log' for the time of receipt if the camera's stamps are useless. ``rectified`` and
    ``pitch`` [degrees downwards, None: as in training] of the camera: like the node's image_rectified and camera_pitch_deg.
    ``executed_timeout`` [s]: for how long an action is in force, like the node's parameter. ``odometry_topic`` and
    ``task_topic`` are for decisions on a forecast of the scene; None if not recorded. ``notes``: remarks for the reader of a
    report, such as that a scale is assumed.
    """

    image_topic: str
    action_topic: str | None
    actions: tuple[Field | YawRate, ...]
    goal_topic: str | None = None
    info_topic: str | None = None
    image_stamps: str = 'header'
    rectified: bool = False
    pitch: float | None = None
    executed_timeout: float = ticks.EXECUTED_TIMEOUT
    odometry_topic: str | None = None
    task_topic: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def topics(self) -> list[str]:
        """The names of the topics that a world model uses."""
        return [name for name in (self.image_topic, self.info_topic, self.action_topic, self.goal_topic) if name]

    @property
    def is_twist(self) -> bool:
        """Whether the action is linear.x and angular.z of a Twist or TwistStamped, unscaled."""
        return self.actions in (twist_fields('', ('linear.x', 'angular.z')),
                                twist_fields('twist.', ('linear.x', 'angular.z')))

    def action(self, message: Any) -> tuple[float, ...]:
        """Return the model's action in a message [SI units]. Raises MessageError."""
        return tuple(field.read(message) for field in self.actions)

    def to_dict(self) -> dict:
        """Return the mapping for JSON."""
        return asdict(self)


def twist_fields(prefix: str, names: tuple[str, ...]) -> tuple[Field, ...]:
    """Return the fields of actions that are named like a Twist's: 'linear.x', 'angular.z'."""
    return tuple(Field(prefix + name) for name in names)


def read_config(path: Path, action_names: tuple[str, ...]) -> dict[str, Any]:
    """
    Return the fields of Mapping that are set in a YAML file. Raises BagError for a file that cannot be read or has unknown
    keys or invalid values.
    """
    try:
        config = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BagError(f'{path} cannot be read as YAML: {error}') from error
    if not isinstance(config, Map) or set(config) - _KEYS:
        unknown = sorted(map(str, set(config) - _KEYS)) if isinstance(config, Map) else config
        raise BagError(f'{path}: {unknown} is not known; the keys are {", ".join(sorted(_KEYS))}')
    for key in _TOPICS:
        if not isinstance(config.get(key, ''), str):
            raise BagError(f'{path}: {key} must be the name of a topic, or none, got {config[key]!r}')
    if config.get('image_topic') == 'none':
        raise BagError(f'{path}: image_topic must be the name of a topic: a world model needs images')
    result: dict[str, Any] = {field: _topic(config[key]) for key, field in _TOPICS.items() if key in config}
    if 'image_stamps' in config:
        if config['image_stamps'] not in STAMPS:
            raise BagError(f'{path}: image_stamps must be one of {", ".join(STAMPS)}, got {config["image_stamps"]!r}')
        result['image_stamps'] = config['image_stamps']
    if 'image_rectified' in config:
        if not isinstance(config['image_rectified'], bool):
            raise BagError(f'{path}: image_rectified must be true or false, got {config["image_rectified"]!r}')
        result['rectified'] = config['image_rectified']
    if 'camera_pitch_deg' in config:
        pitch = config['camera_pitch_deg']
        if not _is_number(pitch) or not -90.0 <= pitch <= 90.0:
            raise BagError(f'{path}: camera_pitch_deg must be -90 to 90 [degrees], down is positive, got {pitch!r}')
        result['pitch'] = float(pitch)
    if 'executed_timeout_s' in config:
        result['executed_timeout'] = _timeout(config['executed_timeout_s'], path)
    if 'actions' in config:
        result['actions'] = _actions(config['actions'], action_names, path)
    notes = config.get('notes', [])
    result['notes'] = tuple(map(str, notes if isinstance(notes, list) else [notes]))
    return result


def _topic(name: str) -> str | None:
    if name == 'none':
        return None
    return name if name.startswith('/') else f'/{name}'


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _timeout(value: Any, path: Path) -> float:
    if not _is_number(value) or not 0.0 <= value < math.inf:
        raise BagError(f'{path}: executed_timeout_s must be a time [s], 0 or more, got {value!r}')
    return float(value)


def _actions(config: Any, names: tuple[str, ...], path: Path) -> tuple[Field | YawRate, ...]:
    if not isinstance(config, Map) or set(config) != set(names):
        got = ', '.join(map(str, config)) if isinstance(config, Map) else config
        raise BagError(f'{path}: actions must give a field for each action of the model, which are {", ".join(names)}; '
                       f'got {got}')
    return tuple(_action(config[name], f'{path}: actions: {name}') for name in names)


def _action(config: Any, where: str) -> Field | YawRate:
    try:
        if isinstance(config, str):
            return Field(config)
        if set(config) - (_STEERED if 'wheelbase' in config else _FIELD):
            raise ValueError('a key that is not known')
        if 'wheelbase' in config:
            speed, steering = (_action(config[key], f'{where}: {key}') for key in ('speed', 'steering'))
            return YawRate(speed, steering, float(config['wheelbase']))
        return Field(config['field'], float(config.get('scale', 1.0)), float(config.get('offset', 0.0)))
    except BagError as error:
        raise BagError(f'{where}: {error}') from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BagError(f'{where}: write {{field: twist.linear.x, scale: 1.0, offset: 0.0}}, or for a steered car '
                       '{speed: drive.speed, steering: drive.steering_angle, wheelbase: 0.26}; '
                       f'got {config!r}') from error
