"""Arguments of several robots, derived from one set: those that must differ between them."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from worldmodel_ros.bringup.description import DescriptionError, asks, read

BASE_FRAME = 'base_link'


def robots(target: str, namespaces: Sequence[str], arguments: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """
    Return the namespace and the arguments of each robot.

    A single robot gets the arguments unchanged. With several, each gets a base frame prefixed with its namespace (like the
    frame_prefix of robot_state_publisher), since frames, unlike topics, have no namespace; if a seed is given, its own
    simulated room, with consecutive seeds starting from that one; and, if a folder to record to is given, a folder in it, named
    after its namespace.

    :raises DescriptionError: for a seed that is not an integer, and for several simulated robots that would each publish
        /clock.
    """
    if len(namespaces) < 2:
        return [(name, dict(arguments)) for name in namespaces]
    if target == 'sim' and read(arguments.get('use_sim_time')) is True:
        raise DescriptionError('use_sim_time: each simulated robot would publish its own /clock: '
                               'leave it false, or start a single robot')
    base_frame = str(arguments.get('base_frame') or BASE_FRAME).strip('/')
    result = []
    for number, name in enumerate(namespaces):
        own = {**arguments, 'base_frame': '/'.join(filter(None, (name.strip('/'), base_frame)))}
        if arguments.get('seed') not in (None, ''):
            own['seed'] = _seed(arguments['seed']) + number
        bag = arguments.get('record')
        if bag not in (None, '') and asks(bag):
            # One level, also for floor_2/left: no bag is in the folder of another. ``robot``: the one without a namespace.
            own['record'] = str(Path(bag, name.strip('/').replace('/', '.') or 'robot'))
        result.append((name, own))
    return result


def _seed(value: Any) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise DescriptionError(f'seed: {value!r} is not a whole number') from error
