"""Dataclasses read from YAML: every key is checked, and errors name the file and the key."""
from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml


class ConfigError(ValueError):
    """A configuration that cannot be used: says which file and key, and what to do."""


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises ConfigError."""
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f'{path} cannot be read as YAML: {error}') from error
    if not isinstance(content, dict):
        raise ConfigError(f'{path} must hold keys and values; config/train/tiny.yaml is an example')
    return content


def with_values(content: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's content with other values for some keys, such as 'teacher.steps'. Raises ConfigError for a key of what is
    no section."""
    result = dict(content)
    for key, value in values.items():
        section = result
        *names, last = key.split('.')
        for name in names:
            if not isinstance(section.get(name) or {}, Mapping):
                raise ConfigError(f'--set {key}: {name} is {section[name]!r}, and no section of keys')
            section[name] = dict(section.get(name) or {})
            section = section[name]
        section[last] = value
    return result


def parse_override(text: str) -> tuple[str, Any]:
    """Return key and value of 'KEY=VALUE', the value as YAML. Raises ConfigError."""
    key, equals, value = text.partition('=')
    if not equals:
        raise ConfigError(f'--set {text}: write KEY=VALUE, such as teacher.steps=1000')
    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f'--set {text}: the value cannot be read as YAML: {error}') from error


def build(kind: type, content: Any, where: str, prefix: str = '') -> Any:
    """
    Return a dataclass of a file's content, with sections as nested dataclasses.

    ``where`` names the file in errors, ``prefix`` the section, with a trailing dot. Raises ConfigError for keys that are
    unknown or missing, values of another kind, and those that the dataclass refuses with ValueError.
    """
    if not isinstance(content, Mapping):
        raise ConfigError(f'{where}: {prefix.rstrip(".")} must be a section of keys, got {content!r}')
    known = {f.name: f for f in fields(kind)}
    unknown = [f'{prefix}{key}' for key in content if key not in known]
    if unknown:
        raise ConfigError(f'{where}: {", ".join(unknown)} is not known; the keys of '
                          f'{prefix.rstrip(".") or "the file"} are {", ".join(known)}')
    missing = [prefix + f.name for f in known.values()
               if f.name not in content and f.default is MISSING and f.default_factory is MISSING]
    if missing:
        raise ConfigError(f'{where}: {", ".join(missing)} is missing')
    hints = get_type_hints(kind)
    values = {key: _value(hints[key], value, where, prefix + key) for key, value in content.items()}
    try:
        return kind(**values)
    except ValueError as error:
        raise ConfigError(f'{where}: {prefix}{error}') from error


def _value(kind: Any, value: Any, where: str, key: str) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        if value is None:
            return None
        kind = next(option for option in get_args(kind) if option is not type(None))
    if get_origin(kind) is Mapping:
        if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            return {name: _value(get_args(kind)[1], item, where, f'{key}.{name}') for name, item in value.items()}
        raise ConfigError(f'{where}: {key} must be a section of keys, got {value!r}')
    if is_dataclass(kind):
        return build(kind, value, where, key + '.')
    if get_origin(kind) is tuple:
        if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise ConfigError(f'{where}: {key} must be a list of names, got {value!r}')
    if kind is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return float(value)  # YAML reads 1e-3 as a string
        except ValueError:
            pass
    if type(value) is not kind:
        raise ConfigError(f'{where}: {key} must be of type {kind.__name__}, got {value!r}')
    return value
