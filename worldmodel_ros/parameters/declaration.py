"""Declaration of a parameter, and the check of its values."""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Named as in ``ros2 param describe`` and generate_parameter_library.
TYPES = {bool: 'bool', int: 'int', float: 'double', str: 'string'}
UNITS = {'s': 's', 'ms': 'ms', 'hz': 'Hz', 'mb': 'MB'}  # by the suffix of a parameter's name
_INT64 = range(-2**63, 2**63)


@dataclass(frozen=True)
class Param:
    """
    One parameter.

    ``default``: a value, with arrays as tuples; None if the parameter may stay unset, which then reads as None and requires
    ``type``: bool, int, double, string, or one of these with ``_array`` (also the only way to declare an empty array, whose
    type rclpy cannot infer). ``low`` and ``high`` are inclusive. ``unit``: not needed if the name ends in ``_s``, ``_ms``,
    ``_hz`` or ``_mb``. ``read_only``: as in ROS; ``while_configured``: cannot be changed while a lifecycle node is configured.
    ``check`` returns the reason for refusing a value, or None; it is not applied to the default. A ``fault`` exists only with
    ALLOW_FAULTS. ``formerly``: the old name, accepted with a warning for one release.

    Raises ValueError for a default outside its own bounds or choices.
    """

    name: str
    default: Any
    description: str
    unit: str = ''
    low: float | None = None
    high: float | None = None
    choices: tuple = ()
    read_only: bool = False
    while_configured: bool = False
    check: Callable[[Any], str | None] | None = None
    fault: bool = False
    formerly: str = ''
    type: str = ''

    def __post_init__(self) -> None:
        if not self.type:
            if not (kind := _type(self.default)):
                raise ValueError(f'{self.name}: give the type of a parameter whose default does not tell it')
            object.__setattr__(self, 'type', kind)
        if not self.unit:
            object.__setattr__(self, 'unit', UNITS.get(self.name.rpartition('_')[2], '') if '_' in self.name else '')
        if reason := self._misfit(self.default):
            raise ValueError(f'{self.name}: the default {reason}')

    def refusal(self, value: Any) -> str | None:
        """Return why ``value`` is refused by its type, bounds, choices or ``check``; None if it is not."""
        if value is None:
            return None
        reason = self._misfit(value) or (self.check(value) if self.check else None)
        return f'{self.name}: {reason}' if reason else None

    def allowed(self) -> str:
        """Return the choices, or the bounds, as text; '' if there are none."""
        if self.choices:
            return ', '.join(map(str, self.choices))
        if self.low is None or self.high is None:
            return ''.join(f'{bound:.12g} or {word}' for bound, word in ((self.low, 'more'), (self.high, 'less'))
                           if bound is not None)
        return f'{self.low:.12g} .. {self.high:.12g}'

    def help(self) -> str:
        """Return the text of a launch argument that sets this parameter."""
        sentences = [self.description[0].upper() + self.description[1:] + (f' [{self.unit}]' if self.unit else '')]
        if self.allowed():
            sentences.append(f'Allowed: {self.allowed()}')
        if self.default not in (None, ''):
            sentences.append(f'Default: {str(self.default).lower() if isinstance(self.default, bool) else self.default}')
        return '. '.join(sentences) + '.'

    def _misfit(self, value: Any) -> str | None:
        if value is None:
            return None
        if not self._has_type(value):
            point = ' (a whole number for a double needs a decimal point: 1.0)' if 'double' in self.type else ''
            return f'{value!r} is no {self.type}{point}'
        for number in value if self.type.endswith('_array') else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                return f'{value} is not finite; give a finite number'
            if (self.low is not None and number < self.low) or (self.high is not None and number > self.high):
                return f'{value} is out of bounds; give {self.allowed()}'
        if self.choices and value not in self.choices:
            return f'{value!r} is not known; use one of: {self.allowed()}'
        return None

    def _has_type(self, value: Any) -> bool:
        if self.type.endswith('_array'):
            one = self.type.removesuffix('_array')
            return isinstance(value, (list, tuple)) and all(_type(each) == one for each in value)
        return _type(value) == self.type and (self.type != 'int' or value in _INT64)


def _type(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f'{_type(value[0])}_array' if value else ''
    return TYPES.get(type(value), '')


# Named as in diagnostic_updater.
DIAGNOSTICS_PERIOD = Param('diagnostic_updater.period', 1.0, 'period of the reports on /diagnostics (steady clock)', 's',
                           low=0.05, high=60.0, read_only=True)
ALLOW_FAULTS = Param('allow_faults', False, 'for tests: declare the parameters that inject faults, which anyone on the '
                     'network can then set', read_only=True)
