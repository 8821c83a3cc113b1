"""Node parameters from one table: declared with descriptors, checked before they are set, then applied."""

import difflib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor, SetParametersResult
from rclpy.exceptions import InvalidParameterTypeException, InvalidParameterValueException
from rclpy.node import Node
from rclpy.parameter import Parameter

from worldmodel_ros.parameters.declaration import ALLOW_FAULTS, Param
from worldmodel_ros.parameters.tables import TABLES

_INT64_MIN, _INT64_MAX = -2**63, 2**63 - 1
_TYPES = {'string_array': Parameter.Type.STRING_ARRAY, 'double_array': Parameter.Type.DOUBLE_ARRAY,
          'double': Parameter.Type.DOUBLE}  # types that may be unset
_ALIKE = 0.8  # of two names, as difflib measures it: one is taken for a misspelling of the other


class ParameterError(ValueError):
    """The node cannot start with a parameter's value. The text says which, what is allowed, and what to do."""


def descriptor(param: Param) -> ParameterDescriptor:
    """Return what ``ros2 param describe`` shows."""
    unit = f' [{param.unit}]' if param.unit else ''
    constraints = [*([f'one of: {param.allowed()}'] if param.choices else []),
                   *(['fixed while the node is configured'] if param.while_configured else [])]
    described = ParameterDescriptor(description=f'{param.description}{unit}', read_only=param.read_only,
                                    additional_constraints='; '.join(constraints))
    if param.low is None and param.high is None:
        return described
    if param.type == 'double':
        described.floating_point_range = [FloatingPointRange(
            from_value=-sys.float_info.max if param.low is None else float(param.low),
            to_value=sys.float_info.max if param.high is None else float(param.high))]
    elif param.type == 'int':
        described.integer_range = [IntegerRange(
            from_value=_INT64_MIN if param.low is None else int(param.low),
            to_value=_INT64_MAX if param.high is None else int(param.high))]
    return described


class Parameters(Mapping):
    """
    The parameters of a node (plain or lifecycle), read by name: ``parameters['deadline_s']``. Arrays read as tuples.

    A change is refused, with the reason, before anything is altered. Accepted changes are passed to ``on_change(name,
    value)``, which is not called for initial values. ``consistent`` maps the values of all parameters, as they would be after
    the change, to the reason for refusing the combination, or None; parameters that depend on each other are changed together
    with ``set_parameters_atomically``. Do not store this object as ``node._parameters``: rclpy uses that name.

    The former name of a parameter is declared too and always has the value of the new one. Setting it, at start or later, logs
    a warning; different values under the two names are refused.

    ``fault`` parameters are declared only if ALLOW_FAULTS, which must precede them, is true; otherwise they cannot be set and
    read as their defaults.

    Raises ParameterError if an initial value is refused, or one is given to a name that no node of this package has and that
    looks like a misspelt one of this node: ROS would ignore it, and a limit that was to be set would not be.
    """

    def __init__(
        self, node: Node, params: Iterable[Param], on_change: Callable[[str, Any], None] | None = None, *,
        consistent: Callable[[Mapping[str, Any]], str | None] | None = None,
    ) -> None:
        self._params: dict[str, Param] = {}
        self._on_change = on_change
        self._consistent = consistent
        self._values: dict[str, Any] = {}
        self._new_names: dict[str, str] = {}  # by former name
        self._logger = node.get_logger()
        for param in params:
            if param.fault and not self._values[ALLOW_FAULTS.name]:
                self._values[param.name] = _default(node, param)
                continue
            if param.formerly:
                self._take_former(node, param)
            self._params[param.name] = param
            self._values[param.name] = _declare(node, param)
            if param.formerly:
                node.declare_parameter(
                    param.formerly, _to_ros(self._values[param.name]), descriptor(replace(
                        param, description=f'deprecated: use {param.name}', formerly='')), ignore_override=True)
        self._check_names(node)
        reason = consistent(self._values) if consistent else None
        if reason:
            raise ParameterError(reason)
        node.add_pre_set_parameters_callback(self._both_names)
        node.add_on_set_parameters_callback(self._validate)
        node.add_post_set_parameters_callback(self._apply)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self):
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _check_names(self, node: Node) -> None:
        own = [*self._params, *self._new_names]
        # A file may be for several nodes (/**).
        others = {name for table in TABLES.values() for param in table for name in (param.name, param.formerly)}
        for name in node._parameter_overrides:
            if not node.has_parameter(name) and name not in others and (
                    alike := difflib.get_close_matches(name, own, 1, _ALIKE)):
                raise ParameterError(f'there is no parameter {name}: {alike[0]} is meant, or leave it out')

    def _take_former(self, node: Node, param: Param) -> None:
        """Give a parameter the override of its former name from a file or the command line."""
        given = node._parameter_overrides  # rclpy's public API tells the overrides of declared parameters only
        former, present = given.get(param.formerly), given.get(param.name)
        self._new_names[param.formerly] = param.name
        if former is None:
            return
        if present is not None and _plain(present.value) != _plain(former.value):
            raise ParameterError(_contradiction(param.formerly, former.value, param.name, present.value))
        self._warn(param.formerly)
        given[param.name] = Parameter(param.name, former.type_, former.value)

    def _warn(self, former: str) -> None:
        self._logger.warning(f'parameter {former} is deprecated, and the next release will not know it: '
                             f'use {self._new_names[former]}')

    def _both_names(self, changes: list[Parameter]) -> list[Parameter]:
        """Apply a change of the new or former name to the other name as well."""
        given = {change.name for change in changes}
        former_names = {new: former for former, new in self._new_names.items()}
        result = list(changes)
        for change in changes:
            other = self._new_names.get(change.name) or former_names.get(change.name)
            if other and other not in given:
                result.append(Parameter(other, change.type_, change.value))
            if change.name in self._new_names:
                self._warn(change.name)
        return result

    def _validate(self, changes: list[Parameter]) -> SetParametersResult:
        given = {change.name: _plain(change.value) for change in changes}
        values = {name: value for name, value in given.items() if name in self._params}
        for name, value in values.items():
            reason = self._params[name].refusal(value)
            if reason:
                return SetParametersResult(successful=False, reason=reason)
        for former, new in self._new_names.items():
            if {former, new} <= set(given) and given[former] != given[new]:
                return SetParametersResult(
                    successful=False, reason=_contradiction(former, given[former], new, given[new]))
        reason = self._consistent({**self._values, **values}) if self._consistent and values else None
        return SetParametersResult(successful=not reason, reason=reason or '')

    def _apply(self, changes: list[Parameter]) -> None:
        values = {change.name: _plain(change.value) for change in changes if change.name in self._params}
        # All values first: on_change for one may read another that was set in the same request.
        self._values.update(values)
        if self._on_change:
            for name, value in values.items():
                self._on_change(name, value)


def _default(node: Node, param: Param) -> Any:
    if param.name in node._parameter_overrides:  # rclpy's public API tells the overrides of declared parameters only
        raise ParameterError(f'{param.name} is given, and faults are not allowed: leave it out, or start the node with '
                             f'{ALLOW_FAULTS.name}:=true')
    return param.default


def _declare(node: Node, param: Param) -> Any:
    default = _TYPES[param.type] if param.default is None else _to_ros(param.default)
    try:
        value = _plain(node.declare_parameter(param.name, default, descriptor(param)).value)
    except InvalidParameterTypeException as error:
        raise ParameterError(
            f'{error} (a whole number for a parameter of type DOUBLE needs a decimal point: 1.0)') from error
    except InvalidParameterValueException as error:
        raise ParameterError(f'{error}. It is: {param.description}') from error
    reason = param.refusal(value)
    if reason:
        raise ParameterError(reason)
    return value


def _contradiction(former: str, old: Any, name: str, new: Any) -> str:
    return f'{former} ({old}) is the former name of {name} ({new}): give {name} alone'


def _is_array(value: Any) -> bool:
    return not isinstance(value, (str, bytes)) and hasattr(value, '__len__')


def _plain(value: Any) -> Any:
    return tuple(value) if _is_array(value) else value


def _to_ros(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
