"""Node parameters from one table: declared with descriptors, checked before they are set, applied after."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor, SetParametersResult
from rclpy.exceptions import InvalidParameterTypeException, InvalidParameterValueException
from rclpy.node import Node
from rclpy.parameter import Parameter

_INT64_MIN, _INT64_MAX = -2**63, 2**63 - 1


class ParameterError(ValueError):
    """The node cannot start with a parameter's value. The text says which, what is allowed, what to do."""


@dataclass(frozen=True)
class Param:
    """
    One parameter.

    `default` is a value, or a `Parameter.Type` for a parameter that may stay unset and then reads as None
    (the only way to an empty array: rclpy cannot tell the type of one). `low` and `high` are inclusive.
    `check` maps a value to the reason for refusing it, or None. A `fault` is there only with ALLOW_FAULTS. A parameter
    whose name ends in a unit (`_s`,
    `_hz`, `_m`) has that unit.
    """

    name: str
    default: Any
    description: str
    low: float | None = None
    high: float | None = None
    choices: tuple = ()
    read_only: bool = False
    check: Callable[[Any], str | None] | None = None
    fault: bool = False

    def descriptor(self) -> ParameterDescriptor:
        """Return what `ros2 param describe` shows."""
        descriptor = ParameterDescriptor(description=self.description, read_only=self.read_only)
        if self.choices:
            descriptor.additional_constraints = 'one of: ' + ', '.join(map(str, self.choices))
        if self.low is None and self.high is None:
            return descriptor
        if isinstance(self.default, float):
            descriptor.floating_point_range = [FloatingPointRange(
                from_value=-sys.float_info.max if self.low is None else float(self.low),
                to_value=sys.float_info.max if self.high is None else float(self.high))]
        elif isinstance(self.default, int):
            descriptor.integer_range = [IntegerRange(
                from_value=_INT64_MIN if self.low is None else int(self.low),
                to_value=_INT64_MAX if self.high is None else int(self.high))]
        return descriptor

    def refusal(self, value: Any) -> str | None:
        """Return why `value` is refused, or None. Ranges are left to rclpy, which has the descriptor."""
        if value is None:
            return None
        numbers = value if _is_array(value) else (value,)
        if any(isinstance(x, float) and not math.isfinite(x) for x in numbers):
            return f'{self.name}: {value} is not finite; give a finite number'
        if self.choices and value not in self.choices:
            return f'{self.name}: {value!r} is not known; use one of: ' + ', '.join(map(str, self.choices))
        reason = self.check(value) if self.check else None
        return f'{self.name}: {reason}' if reason else None


ALLOW_FAULTS = Param('allow_faults', False, 'for tests: declare the parameters that give the node faults, which anybody on '
                     'the network can then set', read_only=True)


class Parameters(Mapping):
    """
    The parameters of a node (plain or lifecycle), read by name: `parameters['deadline_s']`. Arrays read as
    tuples.

    A change is refused, with the reason, before anything is altered; it is applied by `on_change(name,
    value)`, which is not called for the values that the node starts with. `consistent` maps the values of all
    parameters, as they would be after the change, to the reason for refusing the combination, or None;
    parameters that depend on each other are changed together with `set_parameters_atomically`. Do not keep it
    in `node._parameters`: that is rclpy's.

    Of the parameters that are a `fault` none is declared unless ALLOW_FAULTS, which must come before them, is true: they
    cannot be set then, and read as their defaults.

    Raises ParameterError where a value that the node is started with is refused.
    """

    def __init__(
        self, node: Node, params: Iterable[Param], on_change: Callable[[str, Any], None] | None = None, *,
        consistent: Callable[[Mapping[str, Any]], str | None] | None = None,
    ) -> None:
        self._params: dict[str, Param] = {}
        self._on_change = on_change
        self._consistent = consistent
        self._values: dict[str, Any] = {}
        for param in params:
            if param.fault and not self._values[ALLOW_FAULTS.name]:
                self._values[param.name] = _default(node, param)
                continue
            self._params[param.name] = param
            self._values[param.name] = _declare(node, param)
        reason = consistent(self._values) if consistent else None
        if reason:
            raise ParameterError(reason)
        node.add_on_set_parameters_callback(self._validate)
        node.add_post_set_parameters_callback(self._apply)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self):
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _validate(self, changes: list[Parameter]) -> SetParametersResult:
        values = {change.name: _plain(change.value) for change in changes if change.name in self._params}
        for name, value in values.items():
            reason = self._params[name].refusal(value)
            if reason:
                return SetParametersResult(successful=False, reason=reason)
        reason = self._consistent({**self._values, **values}) if self._consistent and values else None
        return SetParametersResult(successful=not reason, reason=reason or '')

    def _apply(self, changes: list[Parameter]) -> None:
        values = {change.name: _plain(change.value) for change in changes if change.name in self._params}
        # All values first: on_change of one may read another that was set in the same request.
        self._values.update(values)
        if self._on_change:
            for name, value in values.items():
                self._on_change(name, value)


def _default(node: Node, param: Param) -> Any:
    if param.name in node._parameter_overrides:  # rclpy tells of what is given for a declared parameter alone
        raise ParameterError(f'{param.name} is given, and faults are not allowed: leave it out, or start the node with '
                             f'{ALLOW_FAULTS.name}:=true')
    return param.default


def _declare(node: Node, param: Param) -> Any:
    default = list(param.default) if isinstance(param.default, tuple) else param.default
    try:
        value = _plain(node.declare_parameter(param.name, default, param.descriptor()).value)
    except InvalidParameterTypeException as error:
        raise ParameterError(
            f'{error} (a whole number for a parameter of type DOUBLE needs a decimal point: 1.0)') from error
    except InvalidParameterValueException as error:
        raise ParameterError(f'{error}. It is: {param.description}') from error
    reason = param.refusal(value)
    if reason:
        raise ParameterError(reason)
    return value


def _is_array(value: Any) -> bool:
    return not isinstance(value, (str, bytes)) and hasattr(value, '__len__')


def _plain(value: Any) -> Any:
    return tuple(value) if _is_array(value) else value
