"""Fields of messages: their paths, and their conversion to SI units."""
from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from .problems import BagError, MessageError

_STEP = re.compile(r'(?P<name>[A-Za-z_]\w*)(\[(?P<index>[^\]]+)\])?$')


@dataclass(frozen=True)
class Field:
    """
    scale * (value at ``path``) + offset, in SI units.

    A path is written as 'twist.linear.x', 'data[0]', or 'velocity[left_wheel]' for the entry of that name in the message's
    list of names.
    """

    path: str
    scale: float = 1.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        if not all(_STEP.match(step) for step in self.path.split('.')):
            raise BagError(f'{self.path!r} is not the path of a field: write it as twist.linear.x, data[0] or '
                           'velocity[joint]')
        if not (math.isfinite(self.scale) and math.isfinite(self.offset)):
            raise BagError(f'{self.path}: scale is {self.scale} and offset {self.offset}: give finite numbers')

    def read(self, message: Any) -> float:
        """Return the number in a message. Raises MessageError if it is missing."""
        value = message
        for step in self.path.split('.'):
            name, index = _STEP.match(step).group('name', 'index')
            if not hasattr(value, name):
                raise self._missing(f'there is no {name!r}', value)
            owner, value = value, getattr(value, name)
            if index is not None:
                value = self._entry(owner, value, index)
        if hasattr(value, '__len__') or not hasattr(value, '__float__'):  # arrays have both
            raise self._missing('it is no number', value)
        return float(value) * self.scale + self.offset

    def _entry(self, owner: Any, values: Any, index: str) -> Any:
        number = int(index) if index.isdigit() else self._number_of(owner, index)
        try:
            return values[number]
        except (IndexError, TypeError) as error:
            raise self._missing(f'there is no entry {number}', values) from error

    def _number_of(self, owner: Any, name: str) -> int:
        names = list(getattr(owner, 'name', ()))
        if name not in names:
            raise self._missing(f'the names are {", ".join(names) or "none"}', owner)
        return names.index(name)

    def _missing(self, why: str, value: Any) -> MessageError:
        fields = ', '.join(k for k in vars(value) if not k.startswith('_')) if hasattr(value, '__dict__') else ''
        return MessageError(f'field {self.path}: {why}' + (f', only {fields}' if fields else ''))


@dataclass(frozen=True)
class YawRate:
    """The yaw rate [rad/s] of a steered car: speed * tan(steering angle) / wheelbase (kinematic bicycle model)."""

    speed: Field       # m/s
    steering: Field    # rad, left is positive
    wheelbase: float   # m

    def __post_init__(self) -> None:
        if not 0.0 < self.wheelbase < math.inf:
            raise BagError(f'the wheelbase is {self.wheelbase} m: give the distance between the axles')

    def read(self, message: Any) -> float:
        """Return the yaw rate in a message; NaN for an infinite angle. Raises MessageError if a number is missing."""
        angle = self.steering.read(message)
        return self.speed.read(message) * (math.tan(angle) if math.isfinite(angle) else math.nan) / self.wheelbase
