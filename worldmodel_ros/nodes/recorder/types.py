"""Message definitions for bags, from the interface files of the installed packages."""
from __future__ import annotations

import re
from functools import lru_cache
from importlib import import_module

from worldmodel_ros.paths import prefixes

_PRIMITIVES = {'bool', 'byte', 'char', 'float32', 'float64', 'int8', 'uint8', 'int16', 'uint16', 'int32', 'uint32',
               'int64', 'uint64', 'string', 'wstring'}
_TYPE_NAME = re.compile(r'(?P<package>\w+)/(?:msg/)?(?P<name>\w+)')
# A field or a constant at the beginning of a line: its type, without array and string bounds.
_FIELD = re.compile(r'^\s*([A-Za-z][\w/]*)(?:<=\d+)?(?:\[[^\]]*\])?\s+\w', re.MULTILINE)


class UnknownTypeError(ValueError):
    """A message type that no installed package defines."""


def message_class(type_name: str) -> type:
    """Return the Python class of 'package/msg/Name'. Raises UnknownTypeError, with the remedy."""
    package, name = _parts(type_name)
    try:
        return getattr(import_module(f'{package}.msg'), name)
    except (ImportError, AttributeError) as error:
        raise UnknownTypeError(f'{type_name} is not installed here ({error}): install the package {package}, or '
                               'source the workspace that has it') from error


@lru_cache
def definition(type_name: str) -> str:
    """
    Return the definition of 'package/msg/Name' with those of all types that it contains, as rosbag2 writes it into MCAP.

    Encoding ``ros2msg`` of https://mcap.dev/spec/registry: the text of the .msg file, comments included, then that of each
    type it depends on, after a line of 80 equals signs and the type's name. Raises UnknownTypeError.
    """
    package, name = _parts(type_name)
    written, waiting, parts = {f'{package}/{name}'}, [f'{package}/{name}'], []
    while waiting:
        current = waiting.pop(0)
        text = _source(current)
        parts.append(text if not parts else f'{"=" * 80}\nMSG: {current}\n{text}')
        for field in _FIELD.findall(re.sub('#.*', '', text)):
            if field not in _PRIMITIVES:
                needed = field if '/' in field else f'{current.split("/")[0]}/{field}'
                if needed not in written:
                    written.add(needed)
                    waiting.append(needed)
    return '\n'.join(parts)


def _source(type_name: str) -> str:
    package, name = _parts(type_name)
    for prefix in prefixes():
        path = prefix / 'share' / package / 'msg' / f'{name}.msg'
        if path.is_file():
            return path.read_text()
    raise UnknownTypeError(f'no share/{package}/msg/{name}.msg in {", ".join(map(str, prefixes()))}: install the '
                           f'package {package}, or source the workspace that has it')


def _parts(type_name: str) -> tuple[str, str]:
    match = _TYPE_NAME.fullmatch(type_name)
    if match is None:
        raise UnknownTypeError(f'{type_name!r} is no message type: one looks like sensor_msgs/msg/Image')
    return match['package'], match['name']
