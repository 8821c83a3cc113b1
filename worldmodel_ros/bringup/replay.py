"""Prepares a replay from its bag before anything starts: how the camera was recorded, and which player is suitable."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worldmodel_ros.bringup.description import DescriptionError, absolute_namespace

NAMESPACE = 'replay'  # default, so that played commands do not reach the base of a robot on the same domain
# Of the world model, whatever the robot's parameter files say: actions are played under this name and type.
PARAMETERS = {'world_model_node': {'executed_action_topic': 'cmd_vel', 'enable_stamped_cmd_vel': True}}


@dataclass(frozen=True)
class Replay:
    """
    ``arguments``: the completed arguments of the bring-up. ``topics`` maps each played topic to the model's relative topic
    name. ``plain``: the bag is undamaged and its messages can be published as recorded, so that any player will do.
    """

    arguments: dict[str, Any]
    topics: dict[str, str]
    plain: bool

    def ros2_bag_play(self, namespace: str) -> list[str]:
        """Return the ``ros2 bag play`` command that plays it into a namespace; needs ros2bag."""
        given = self.arguments
        prefix = absolute_namespace(namespace).rstrip('/')
        command = ['ros2', 'bag', 'play', given['bag'], '--clock-topics-all', '--disable-keyboard-controls',
                   '--rate', str(given['rate']), '--topics', *self.topics,
                   '--remap', *(f'{source}:={prefix}/{name}' for source, name in self.topics.items())]
        return command + [f'--{option.replace("_", "-")}' for option in ('loop', 'start_paused')
                          if str(given.get(option)).lower() == 'true']


def prepare(arguments: Mapping[str, Any]) -> Replay:
    """
    Inspect the bag named in the arguments of a bring-up.

    :param arguments: of config/bringup.yaml, at least ``bag``; None and '' count as not given.
    :raises DescriptionError: if there is no such bag, or the roles of its topics cannot be guessed.
    """
    from worldmodel_ros.bags.guess import find_mapping
    from worldmodel_ros.bags.playback import COMPRESSED_IMAGE, parts
    from worldmodel_ros.bags.problems import BagError
    from worldmodel_ros.bags.source import open_bag
    from worldmodel_ros.engine.loading import model_folder
    from worldmodel_ros.model.checkpoint_description import ModelError, read_description

    given = {name: value for name, value in arguments.items() if value not in (None, '')}
    if 'bag' not in given:
        raise DescriptionError('bag: name the rosbag2 folder to play')
    try:
        rate = float(given.get('rate', 1.0))
    except ValueError as error:
        raise DescriptionError(f'rate: {given["rate"]!r} is no number') from error
    # Absolute, for processes with another working directory.
    paths = {name: str(Path(given[name]).expanduser().absolute()) for name in ('bag', 'config', 'record')
             if name in given}
    try:
        preset = read_description(model_folder(str(given.get('model', 'tiny')))).preset
        with open_bag(paths['bag']) as bag:
            mapping = find_mapping(bag, preset, Path(paths['config']) if 'config' in paths else None)
            played = parts(bag, mapping)
            plain = not bag.problems and all(part.convert is None for part in played)
    except (BagError, ModelError) as error:
        raise DescriptionError(str(error)) from error
    compressed = played[0].name == COMPRESSED_IMAGE
    return Replay(
        {**given, **paths, 'rate': rate, 'use_sim_time': True,
         'image_transport': 'compressed' if compressed else 'raw'},
        {part.topic.name: part.name for part in played}, plain)
