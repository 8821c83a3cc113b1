"""Decodes the bytes of messages into objects, by the definitions in the bag, else those of ROS 2 Jazzy."""
from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from rosbags.interfaces import MessageDefinition, MessageDefinitionFormat
from rosbags.typesys import Stores, get_types_from_idl, get_types_from_msg, get_typestore

from .problems import MessageError

_IDL_SEPARATOR = '=' * 80 + '\n'


@lru_cache(maxsize=256)
def decoder(name: str, definition: MessageDefinition) -> Callable[[bytes], Any]:
    """
    Return the function that decodes a message of type ``name`` ('sensor_msgs/msg/Image') from its CDR bytes.

    Each type has its own store, so that a bag may have two definitions of one type. Raises MessageError for a type without a
    definition, or with one that cannot be read.
    """
    try:
        if definition.format is MessageDefinitionFormat.NONE:
            store = get_typestore(Stores.ROS2_JAZZY)
        else:
            store = get_typestore(Stores.EMPTY)
            store.register(_parse(name, definition))
        store.get_msgdef(name)
    except Exception as error:  # the parser raises many types
        what = ('the bag has no definition of it, and it is none of ROS 2 Jazzy\'s'
                if definition.format is MessageDefinitionFormat.NONE else
                f'its definition in the bag is broken: {error}')
        raise MessageError(f'messages of type {name} cannot be read: {what}. Record with a rosbag2 of Iron or later, '
                           'which stores definitions, or convert the topic to a standard type') from error
    return lambda raw: store.deserialize_cdr(raw, name)


def _parse(name: str, definition: MessageDefinition) -> dict:
    if definition.format is MessageDefinitionFormat.MSG:
        return get_types_from_msg(definition.data, name)
    if not definition.data.startswith(f'{_IDL_SEPARATOR}IDL: '):
        return get_types_from_idl(definition.data)
    types: dict = {}
    for part in definition.data.split(_IDL_SEPARATOR)[1:]:
        types.update(get_types_from_idl(part.split('\n', 1)[1]))
    return types
