"""Finds the mapping of a bag: as configured by the user, else the only sensible guess, else an error that asks the user."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from worldmodel_ros.inputs.topics import info_topic
from worldmodel_ros.model.presets import Preset
from .mapping import Mapping, read_config, twist_fields
from .problems import BagError, MessageError
from .source import Bag, Topic

# The topics of the world model node, unless remapped.
_IMAGE, _ACTION, _GOAL, _WHEELS, _TASK = '/camera/image_raw', '/cmd_vel', '/goal', '/odom', '/task'
_COMPRESSED = '/compressed'
_NO_CAMERA = ('/predicted_image/compressed', '/goal_image')  # of the world model node
_IMAGES = ('sensor_msgs/msg/Image', 'sensor_msgs/msg/CompressedImage')
_DEPTH = ('16UC1', '32FC1', 'mono16')
# Message type -> prefix of the fields of a Twist.
_TWISTS = {'geometry_msgs/msg/TwistStamped': 'twist.', 'geometry_msgs/msg/Twist': ''}
_ODOMETRY = {'nav_msgs/msg/Odometry': 'twist.twist.'}
_STEERED = {'ackermann_msgs/msg/AckermannDriveStamped': 'drive.', 'ackermann_msgs/msg/AckermannDrive': ''}
_UNNAMED = {'std_msgs/msg/Float64MultiArray': 'data[0]', 'sensor_msgs/msg/JointState': 'velocity[JOINT]'}
_STRING, _TASK_TYPE = 'std_msgs/msg/String', 'worldmodel_ros/msg/Task'
_INFO = 'sensor_msgs/msg/CameraInfo'
# Topics that are used if they have the name and type that the node subscribes to, in the namespace of the images if their topic
# tells it.
_PLAIN = {'goal_topic': (_GOAL, _STRING), 'odometry_topic': (_WHEELS, next(iter(_ODOMETRY))), 'task_topic': (_TASK, _TASK_TYPE)}


class MappingQuestion(BagError):
    """The mapping is ambiguous: the text lists what there is, and what to write into the file of --config."""


def find_mapping(bag: Bag, preset: Preset, config: Path | None = None) -> Mapping:
    """
    Return the mapping of a bag: which topics are images, actions, goals etc., from the YAML file ``config``, the rest guessed.

    Raises MappingQuestion if the user has to choose, and BagError if the bag has no colour images, or lacks topics that the
    file names.
    """
    given = read_config(config, preset.action_names) if config else {}
    notes = list(given.get('notes', ()))
    if 'image_topic' not in given:
        given['image_topic'] = _image_topic(bag)
    if 'action_topic' not in given:
        given['action_topic'] = _action_topic(bag, notes)
    _check(bag, 'image_topic', given['image_topic'], _IMAGES)
    _check(bag, 'action_topic', given['action_topic'], ())
    _check(bag, 'camera_info_topic', given.get('info_topic'), (_INFO,))
    if 'info_topic' not in given:
        topic = bag.topics.get(info_topic(given['image_topic']))
        given['info_topic'] = topic.name if topic and topic.type == _INFO else None
    image = given['image_topic'].removesuffix(_COMPRESSED)
    namespace = image.removesuffix(_IMAGE) if image.endswith(_IMAGE) else ''
    for key, (name, kind) in _PLAIN.items():
        _check(bag, key, given.get(key), (kind,))
        if key not in given:
            topic = bag.topics.get(namespace + name)
            if topic and topic.type == kind:
                given[key] = topic.name
            elif key == 'odometry_topic':
                given[key] = _only(bag, kind, '')
            else:  # in a known namespace, the only one is another robot's
                given[key] = None if namespace else _only(bag, kind, name)
    if given['action_topic'] is None:
        given['actions'] = ()
    elif 'actions' not in given:
        given['actions'] = _fields(bag.topics[given['action_topic']], preset.action_names)
    return Mapping(**{**given, 'notes': tuple(notes)})


def _only(bag: Bag, kind: str, ending: str) -> str | None:
    """Return the topic of that type with that end of its name; None unless there is exactly one with messages."""
    found = [topic.name for topic in bag.topics.values() if topic.type == kind and topic.count and topic.name.endswith(ending)]
    return found[0] if len(found) == 1 else None


def _image_topic(bag: Bag) -> str:
    cameras = {t.name: t for t in bag.topics.values() if t.type in _IMAGES and t.count and not t.name.endswith(_NO_CAMERA)}
    if not cameras:
        raise BagError(f'{bag.path} has no images (sensor_msgs/Image or CompressedImage); its topics are {_list(bag)}. '
                       'Record the camera too')
    depth = {name for name, topic in cameras.items() if _is_depth(bag, topic)}
    colour = [name for name in cameras if name not in depth]
    # If a camera was recorded both raw and compressed, take raw.
    colour = [name for name in colour if name.removesuffix(_COMPRESSED) == name
              or name.removesuffix(_COMPRESSED) not in colour]
    if not colour:
        raise BagError(f'{bag.path} has depth images only ({", ".join(sorted(depth))}), but the model needs '
                       'colour: record the colour camera')
    known = [name for name in colour if name.removesuffix(_COMPRESSED) == _IMAGE]
    return _choose('image_topic', 'cameras', colour, known, bag)


def _is_depth(bag: Bag, topic: Topic) -> bool:
    for record in bag.messages([topic.name]):
        try:
            message = bag.deserialize(record.topic, record.raw)
        except MessageError:
            return False
        label = message.encoding if hasattr(message, 'encoding') else message.format
        return 'compressedDepth' in label or label.split(';')[0].strip() in _DEPTH
    return False


def _action_topic(bag: Bag, notes: list[str]) -> str | None:
    def of(types: Iterable[str]) -> list[str]:
        return [t.name for t in bag.topics.values() if t.type in types and t.count]
    for types in (_TWISTS, _STEERED, _ODOMETRY):
        found = of(types)
        if found:
            chosen = _choose('action_topic', 'action topics', found, [n for n in found if n == _ACTION], bag)
            if types is _ODOMETRY:
                notes.append(f'No commands were recorded: the measured motion of {chosen} is taken as the action.')
            return chosen
    if of(_UNNAMED):
        raise MappingQuestion(
            f'{bag.path}: the numbers in {", ".join(of(_UNNAMED))} may be the actions, but their type does not say '
            f'what they mean. Write into a file for --config:\n\naction_topic: {of(_UNNAMED)[0]}\n\nand you will be '
            'asked for its fields; or action_topic: none, to use no actions')
    return None


def _choose(key: str, what: str, found: list[str], known: list[str], bag: Bag) -> str:
    if len(found) == 1:
        return found[0]
    if len(known) == 1:
        return known[0]
    topics = [bag.topics[name] for name in sorted(found)]
    lines = '\n'.join(f'  {topic.name}   {topic.type}, {topic.count} messages' for topic in topics)
    raise MappingQuestion(f'{bag.path} has {len(found)} {what}:\n{lines}\nWrite the right one into a file for '
                          f'--config:\n\n{key}: {topics[0].name}\n')


def _fields(topic: Topic, names: tuple[str, ...]) -> tuple[Any, ...]:
    twist = {**_TWISTS, **_ODOMETRY}.get(topic.type)
    if twist is not None and all(name in ('linear.x', 'linear.y', 'angular.z') for name in names):
        return twist_fields(twist, names)
    lines = '\n'.join(f'  {name}: {_example(topic, name)}' for name in names)
    raise MappingQuestion(
        f'{topic.name} is a {topic.type}, and its fields must be mapped to the actions of the model. Write into a file '
        'for --config, with your fields, and scales to SI units:\n\n'
        f'action_topic: {topic.name}\nactions:\n{lines}\n')


def _example(topic: Topic, name: str) -> str:
    steered = _STEERED.get(topic.type)
    if steered is None:
        return f'{{field: {_UNNAMED.get(topic.type, "FIELD")}, scale: 1.0, offset: 0.0}}'
    if name == 'angular.z':
        return f'{{speed: {steered}speed, steering: {steered}steering_angle, wheelbase: METRES}}'
    return f'{steered}speed'


def _check(bag: Bag, key: str, name: str | None, types: Sequence[str]) -> None:
    if name is None:
        return
    if name not in bag.topics:
        raise BagError(f'{key} is {name}, which is not in {bag.path}; its topics are {_list(bag)}')
    if types and bag.topics[name].type not in types:
        raise BagError(f'{key}: {name} is a {bag.topics[name].type}, but it must be a {" or ".join(types)}')


def _list(bag: Bag) -> str:
    return ', '.join(f'{t.name} ({t.type.split("/")[-1]})' for t in bag.topics.values()) or 'none'
