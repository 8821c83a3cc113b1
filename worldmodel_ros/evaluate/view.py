"""A bag as a Rerun recording: camera, predicted frames, candidates with their scores, plan, tiers and limits on one timeline.

Needs the extra ``[view]``. Messages are told by their type, so that topics may have any names; each is shown under its own.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import rerun as rr
import rerun.blueprint as rrb

from worldmodel_ros.bags.problems import MessageError
from worldmodel_ros.bags.source import Bag
from worldmodel_ros.motion import path
from worldmodel_ros.inputs.images import ImageError, to_rgb

TIMELINE = 'ROS time'
_CHOSEN, _REJECTED, _VETOED = (30, 200, 60), (150, 150, 150), (220, 30, 30)
_THINGS, _PLAN = (130, 60, 200), (40, 100, 240)


def write_recording(bag: Bag, target: Path, progress: Callable[[float], None] = lambda share: None) -> dict[str, int]:
    """
    Write what a bag holds to a .rrd file; return how many messages of each topic were shown.

    A message is at the stamp of its header, which is that of its observation; without one, at the time of its receipt. A
    message that cannot be read is left out.
    """
    stream = rr.RecordingStream('worldmodel', recording_id=bag.path.name)
    stream.save(target, default_blueprint=_layout(bag))
    shown: dict[str, int] = {}
    wanted = [name for name, topic in bag.topics.items() if topic.type in _SHOWS]
    count, done = sum(bag.topics[name].count for name in wanted), 0
    for record in bag.messages(wanted):
        done += 1
        try:
            message = bag.deserialize(record.topic, record.raw)
            stream.set_time(TIMELINE, timestamp=np.datetime64(_stamp(message) or record.log_ns, 'ns'))
            _SHOWS[record.topic.type](stream, record.topic.name, message)
        except (MessageError, ImageError):
            continue
        shown[record.topic.name] = shown.get(record.topic.name, 0) + 1
        if done % 100 == 0:
            progress(done / max(count, done))
    stream.flush()
    stream.disconnect()
    return shown


def _stamp(message: Any) -> int:
    header = getattr(message, 'header', None)
    return header.stamp.sec * 10 ** 9 + header.stamp.nanosec if header else 0


def _image(stream: rr.RecordingStream, topic: str, message: Any) -> None:
    stream.log(topic, rr.Image(to_rgb(message, (message.height, message.width))).compress())


def _compressed(stream: rr.RecordingStream, topic: str, message: Any) -> None:
    stream.log(topic, _encoded(message.data))


def _future(stream: rr.RecordingStream, topic: str, message: Any) -> None:
    for number, frame in enumerate(message.frames, 1):
        stream.log(f'{topic}/frames/{number}', _encoded(frame.data))
    risk = np.asarray(message.collision_risk)
    if len(risk):
        stream.log(f'{topic}/collision_risk', rr.Scalars(float(risk.max())))
    stream.log(f'{topic}/progress', rr.Scalars(float(message.progress)))


def _decision(stream: rr.RecordingStream, topic: str, message: Any) -> None:
    candidates = message.candidates
    stream.log(f'{topic}/candidates', rr.LineStrips2D(
        [_drawn(each.x, each.y) for each in candidates], labels=[f'{each.name} {each.score:.2f}' for each in candidates],
        colors=[_CHOSEN if each.name == message.chosen else _VETOED if each.vetoed else _REJECTED for each in candidates],
        radii=[0.02 if each.name == message.chosen else 0.006 for each in candidates], show_labels=False))
    for each in candidates:
        # What is followed is one of the others by another name, at each tick another one.
        stream.log(f'{topic}/scores/{rr.escape_entity_path_part(each.name)}', rr.Scalars(float(each.score)))
    stream.log(f'{topic}/things', rr.Points2D(
        [_drawn(each.x[:1], each.y[:1])[0] for each in message.things], labels=[each.name for each in message.things],
        radii=[each.radius for each in message.things], colors=_THINGS))
    vetoed = sum(each.vetoed for each in candidates)
    stream.log(f'{topic}/vetoed', rr.Scalars(vetoed))
    stream.log(f'{topic}/chosen', rr.TextLog(f'{message.task}: {message.chosen}'
                                             + (f', {vetoed} of {len(candidates)} vetoed' if vetoed else '')))


def _chunk(stream: rr.RecordingStream, topic: str, message: Any) -> None:
    names = list(message.names)
    values = np.asarray(message.values, float).reshape(-1, max(1, len(names)))
    for name, value in zip(names, values[0] if len(values) else (), strict=False):
        stream.log(f'{topic}/{name}', rr.Scalars(float(value)))
    if names == ['linear.x', 'angular.z'] and len(values):
        poses = path(values, message.step_period)
        stream.log(f'{topic}/path', rr.LineStrips2D([_drawn(poses[:, 0], poses[:, 1])], colors=_PLAN, radii=0.015))
    stream.log(f'{topic}/tier', rr.Scalars(int(message.tier)))


def _deadline(stream: rr.RecordingStream, topic: str, message: Any) -> None:
    for name in ('tier', 'verdict', 'budget', 'latency', 'observation_age', 'predicted'):
        stream.log(f'{topic}/{name}', rr.Scalars(float(getattr(message, name))))
    if message.reason:
        stream.log(f'{topic}/reason', rr.TextLog(message.reason))


def _gate(stream: rr.RecordingStream, topic: str, message: Any) -> None:
    for name in ('state', 'passed', 'limited', 'stops'):
        stream.log(f'{topic}/{name}', rr.Scalars(float(getattr(message, name))))
    if message.reason:
        stream.log(f'{topic}/reason', rr.TextLog(message.reason))


def _twist(stream: rr.RecordingStream, topic: str, message: Any) -> None:
    twist = getattr(message, 'twist', message)
    stream.log(f'{topic}/linear.x', rr.Scalars(float(twist.linear.x)))
    stream.log(f'{topic}/angular.z', rr.Scalars(float(twist.angular.z)))


def _text(stream: rr.RecordingStream, topic: str, message: Any) -> None:
    stream.log(topic, rr.TextLog(message.data))


def _encoded(data: Any) -> rr.EncodedImage:
    contents = bytes(data)
    return rr.EncodedImage(contents=contents, media_type='image/png' if contents.startswith(b'\x89PNG') else 'image/jpeg')


def _drawn(x: Any, y: Any) -> np.ndarray:
    """Places (T, 2) in base_link as they are drawn: ahead is up, left is left."""
    return np.stack([-np.asarray(y, float), -np.asarray(x, float)], 1)


_SHOWS: Mapping[str, Callable[[rr.RecordingStream, str, Any], None]] = {
    'sensor_msgs/msg/Image': _image, 'sensor_msgs/msg/CompressedImage': _compressed,
    'worldmodel_ros/msg/PredictedFuture': _future, 'worldmodel_ros/msg/Decision': _decision,
    'worldmodel_ros/msg/ActionChunk': _chunk, 'worldmodel_ros/msg/DeadlineStatus': _deadline,
    'worldmodel_ros/msg/CommandStatus': _gate, 'geometry_msgs/msg/Twist': _twist, 'geometry_msgs/msg/TwistStamped': _twist,
    'std_msgs/msg/String': _text}


def _layout(bag: Bag) -> rrb.Blueprint:
    """What is seen left, what is decided right, numbers over time below."""
    def of(*types: str) -> list[str]:
        return [name for name, topic in bag.topics.items() if topic.type.rpartition('/')[2] in types]
    seen = [rrb.Spatial2DView(origin=name, name=name) for name in of('Image', 'CompressedImage')]
    seen += [rrb.Spatial2DView(origin=f'{name}/frames/{number}', name=f'predicted, step {number}')
             for name in of('PredictedFuture') for number in (1, 4)]
    decided = [rrb.Spatial2DView(origin='/', name='candidates and plan', contents=[
        *(f'+ {name}/{part}' for name in of('Decision') for part in ('candidates', 'things')),
        *(f'+ {name}/path' for name in of('ActionChunk'))])]
    deadline = of('DeadlineStatus')
    numbers = [('scores', [f'+ {name}/scores/**' for name in of('Decision')]),
               ('tier', [f'+ {name}/tier' for name in deadline]),
               ('latency and budget [s]', [f'+ {name}/{part}' for name in deadline for part in ('latency', 'budget')]),
               ('gate', [f'+ {name}/{part}' for name in of('CommandStatus') for part in ('state', 'limited', 'stops')]),
               ('commands', [f'+ {name}/**' for name in of('Twist', 'TwistStamped')])]
    plots = [rrb.TimeSeriesView(origin='/', name=name, contents=contents) for name, contents in numbers if contents]
    return rrb.Blueprint(rrb.Vertical(rrb.Horizontal(rrb.Grid(*seen), *decided), rrb.Grid(*plots)))
