"""Maps the keys of openpi observations to the model's inputs: a YAML file, since each robot has its own keys."""
from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from worldmodel_ros.model.presets import Preset

_MAX_SIDE = 8192     # pixels
_LONGEST_TEXT = 4096  # characters of a prompt


class ContractError(ValueError):
    """An invalid contract; the text says why."""


class ObservationError(ValueError):
    """An observation that violates the contract; the text says why."""


@dataclass(frozen=True)
class Contract:
    """
    ``image``, ``state`` and ``goal`` are keys of an observation; a key ``a/b`` is also looked for as ``b`` in a map ``a``.

    ``image``: uint8 (H, W, 3) or (3, H, W), RGB. ``goals``: goal of the model -> words, any of which in the text of ``goal``
    selects it; so does a goal's own name. ``executed``: columns of the vector ``state`` that are the measured action, in
    the order of the model's actions and in their units; empty: the state is not read. ``deadline_ms``: of an observation
    without one. ``mount``: pose of the camera in the robot's base, x, y, z [m], roll, pitch, yaw [rad] (REP 103).
    """

    image: str = 'observation/image'
    state: str = 'observation/state'
    goal: str = 'prompt'
    goals: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    executed: tuple[int, ...] = ()
    deadline_ms: float = 1000.0
    mount: tuple[float, ...] = (0.10, 0.0, 0.25, 0.0, 0.1396, 0.0)  # the simulated robot's

    @classmethod
    def read(cls, path: Path) -> Contract:
        """Return the contract of the maps ``openpi`` and ``camera`` in a YAML file. Raises ContractError."""
        try:
            whole = yaml.safe_load(path.read_text())
            if not isinstance(whole, dict) or not isinstance(whole.get('openpi'), dict) \
                    or not isinstance(whole.get('camera') or {}, dict):
                raise ContractError(f'{path} is no contract: it must have a map, openpi, and may have another one, camera; '
                                    'config/gateway.yaml is an example')
            given = {**whole['openpi'], **(whole.get('camera') or {})}
            unknown = set(given) - {each.name for each in fields(cls)}
            if unknown:
                raise ContractError(f'{path}: unknown {", ".join(sorted(map(str, unknown)))}')
            words, columns = given.pop('goals', None) or {}, given.pop('executed', None) or []
            # A text would be taken for a list of its letters.
            if not all(isinstance(each, list) for each in (columns, *words.values())):
                raise ContractError(f'{path}: goals has a list of words for each goal, and executed is a list of columns')
            goals = {str(goal): tuple(map(str, each)) for goal, each in words.items()}
            executed = tuple(columns)
            mount = tuple(map(float, given.pop('mount', cls.mount)))
            if len(mount) != 6 or not all(map(math.isfinite, mount)):
                raise ContractError(f'{path}: mount is x, y, z, roll, pitch, yaw, six numbers')
            made = cls(goals=goals, executed=executed, mount=mount, **given)
            keys_are_texts = all(isinstance(key, str) for key in (made.image, made.state, made.goal))
            columns_are_whole = all(type(column) is int and column >= 0 for column in executed)
            if not keys_are_texts or not columns_are_whole or type(made.deadline_ms) not in (int, float) \
                    or not 0 < made.deadline_ms <= 60_000:
                raise ContractError(f'{path}: keys are texts, columns are 0 or more, deadline_ms is above 0 and at most a '
                                    'minute')
            return made
        except ContractError:
            raise
        except (OSError, yaml.YAMLError, TypeError, KeyError, AttributeError, ValueError) as error:
            raise ContractError(f'{path} is no contract: {error}') from error

    def check(self, spec: Preset) -> None:
        """Raise ContractError if the contract is for another robot than the model."""
        unknown = set(self.goals) - set(spec.goals)
        if unknown:
            raise ContractError(f'goals {", ".join(sorted(unknown))}: the model knows {", ".join(spec.goals)}')
        if self.executed and len(self.executed) != spec.actions:
            raise ContractError(f'executed names {len(self.executed)} columns, and the model\'s actions are '
                                f'{", ".join(spec.action_names)}')

    def image_of(self, observation: Mapping[str, Any]) -> np.ndarray:
        """Return the image, uint8 (H, W, 3). Raises ObservationError."""
        image = _look_up(observation, self.image)
        if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3:
            raise ObservationError(f'{self.image} must be an image, uint8 (H, W, 3), and is {_kind(image)}')
        if image.shape[2] != 3 and image.shape[0] == 3:
            image = image.transpose(1, 2, 0)
        if image.shape[2] != 3 or not 0 < min(image.shape) or max(image.shape) > _MAX_SIDE:
            raise ObservationError(f'{self.image} must be (H, W, 3) or (3, H, W), sides up to {_MAX_SIDE}, and is '
                                   f'{image.shape}')
        return image

    def goal_of(self, observation: Mapping[str, Any], spec: Preset) -> str:
        """Return the goal that the text of the observation names; empty: there is no text. Raises ObservationError."""
        text = _look_up(observation, self.goal)
        if text is None:
            return ''
        if not isinstance(text, str) or len(text) > _LONGEST_TEXT:
            raise ObservationError(f'{self.goal} must be a text of up to {_LONGEST_TEXT} characters')
        if not text:
            return ''
        named = [goal for goal in spec.goals
                 if any(re.search(rf'\b{re.escape(word)}\b', text, re.IGNORECASE)
                        for word in (goal, *self.goals.get(goal, ())))]
        if len(named) != 1:
            raise ObservationError(f'{self.goal} names {" and ".join(named) or "no goal"}: name one of '
                                   f'{", ".join(spec.goals)}')
        return named[0]

    def executed_of(self, observation: Mapping[str, Any]) -> np.ndarray | None:
        """Return the measured action (A,) in the state; None if the contract reads none. Raises ObservationError."""
        if not self.executed:
            return None
        state = _look_up(observation, self.state)
        if not isinstance(state, np.ndarray) or state.ndim != 1 or state.dtype.kind not in 'fiu' \
                or len(state) <= max(self.executed):
            raise ObservationError(f'{self.state} must be a vector of more than {max(self.executed)} numbers, and is '
                                   f'{_kind(state)}')
        return state[list(self.executed)].astype(np.float32)


def _look_up(observation: Mapping[str, Any], key: str) -> Any:
    if key in observation:
        return observation[key]
    value: Any = observation
    for part in key.split('/'):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def _kind(value: Any) -> str:
    if value is None:
        return 'not there'
    return f'{value.dtype} {value.shape}' if isinstance(value, np.ndarray) else f'a {type(value).__name__}'
