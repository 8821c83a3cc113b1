"""What a running world model does as a Rerun recording: camera, predicted frames, candidates with their scores, plan, tiers and
limits on one timeline, from a bag or from live messages.

Needs the extra ``[view]``. Messages are recognised by type, so that topics may have any names; each is shown under its own.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import rerun as rr
import rerun.blueprint as rrb

from worldmodel_ros.bags.problems import MessageError
from worldmodel_ros.bags.source import Bag
from worldmodel_ros.inputs.images import ImageError, to_rgb
from worldmodel_ros.motion import path

TIMELINE = 'ROS time'
_CHOSEN, _REJECTED, _VETOED = (30, 200, 60), (150, 150, 150), (220, 30, 30)
_THINGS, _PLAN = (130, 60, 200), (40, 100, 240)
# An entity's values are sent as columns: a call for each costs a third of a millisecond, and a tick has fifty of them.
_ROWS, _BYTES = 256, 1 << 20  # of one entity, that wait
_QUALITY = 90                 # of the JPEG that a raw image becomes


@dataclass
class _Column:
    """Rows of one entity that wait to be sent: ``times`` in ns, and a row for each, which ``columns`` turns into columns."""

    columns: Callable[[list], Any]
    times: list[int] = field(default_factory=list)
    rows: list = field(default_factory=list)
    size: int = 0


class Recording:
    """A Rerun recording that grows message by message; what waits is sent by ``flush``. Not thread-safe."""

    def __init__(self, stream: rr.RecordingStream, every: float = 0.0) -> None:
        """``every``: seconds in which at most one message of each topic is shown; 0: all are."""
        self._stream, self._every = stream, round(every * 1e9)
        self._waiting: dict[str, _Column] = {}
        self._unlabelled: set[str] = set()
        self._next: dict[str, int] = {}
        self._time = 0
        self.shown: dict[str, int] = {}

    def wants(self, topic: str, log_ns: int) -> bool:
        """Return whether a message of a topic that was received at ``log_ns`` is shown, by ``every``."""
        return not self._every or not self._next.get(topic, log_ns) - self._every <= log_ns < self._next.get(topic, log_ns)

    def add(self, topic: str, type_name: str, message: Any, log_ns: int) -> None:
        """
        Show a message of one of TYPES, at the stamp of its header, which is that of its observation; without one, at the
        time of its receipt. One that cannot be read is left out.
        """
        self._time = _stamp(message) or log_ns
        self._next[topic] = log_ns + self._every
        try:
            _SHOWS[type_name](self, topic, message)
        except ImageError:
            return
        self.shown[topic] = self.shown.get(topic, 0) + 1

    def flush(self) -> None:
        """Send all that waits."""
        for entity in self._waiting:
            self._send(entity)
        self._stream.flush()

    def scalar(self, entity: str, value: float) -> None:
        self._row(entity, _scalars, float(value))

    def text(self, entity: str, text: str) -> None:
        self._row(entity, _texts, text)

    def encoded(self, entity: str, data: bytes) -> None:
        """Show a JPEG or a PNG."""
        self._row(entity, _encoded, data, len(data))

    def lines(self, entity: str, strips: Sequence[np.ndarray], colours: Sequence, radii: Sequence[float],
              labels: Sequence[str]) -> None:
        """Show lines (T, 2), with labels that appear when one is pointed at."""
        if entity not in self._unlabelled:
            self._unlabelled.add(entity)
            self._stream.log(entity, rr.LineStrips2D.from_fields(show_labels=False), static=True)
        self._row(entity, _lines, (strips, colours, radii, labels))

    def points(self, entity: str, places: Sequence[np.ndarray], radii: Sequence[float], labels: Sequence[str]) -> None:
        self._row(entity, _points, (places, radii, labels))

    def _row(self, entity: str, columns: Callable[[list], Any], row: Any, size: int = 0) -> None:
        waiting = self._waiting.get(entity)
        if waiting is None:
            waiting = self._waiting[entity] = _Column(columns)
        waiting.times.append(self._time)
        waiting.rows.append(row)
        waiting.size += size
        if len(waiting.rows) >= _ROWS or waiting.size >= _BYTES:
            self._send(entity)

    def _send(self, entity: str) -> None:
        waiting = self._waiting[entity]
        if waiting.rows:
            times = rr.TimeColumn(TIMELINE, timestamp=np.array(waiting.times, 'datetime64[ns]'))
            self._stream.send_columns(entity, indexes=[times], columns=waiting.columns(waiting.rows))
            self._waiting[entity] = _Column(waiting.columns)


def write_recording(bag: Bag, target: Path, every: float = 0.0, progress: Callable[[float], None] = lambda share: None
                    ) -> dict[str, int]:
    """
    Write a bag's messages to a .rrd file, in memory that does not grow with the bag; return how many messages of each topic
    were shown. ``every`` as in Recording. A message that cannot be read is left out.
    """
    stream = rr.RecordingStream('worldmodel', recording_id=bag.path.name)
    wanted = {name: topic.type for name, topic in bag.topics.items() if topic.type in TYPES}
    stream.save(target, default_blueprint=layout(wanted))
    recording = Recording(stream, every)
    count, done = sum(bag.topics[name].count for name in wanted), 0
    for record in bag.messages(wanted):
        done += 1
        if done % 1000 == 0:
            progress(done / max(count, done))
        if not recording.wants(record.topic.name, record.log_ns):
            continue
        try:
            message = bag.deserialize(record.topic, record.raw)
        except MessageError:
            continue
        recording.add(record.topic.name, record.topic.type, message, record.log_ns)
    recording.flush()
    stream.disconnect()
    return recording.shown


def _scalars(rows: list[float]) -> Any:
    return rr.Scalars.columns(scalars=np.array(rows))


def _texts(rows: list[str]) -> Any:
    return rr.TextLog.columns(text=rows)


def _encoded(rows: list[bytes]) -> Any:
    return rr.EncodedImage.columns(blob=rows, media_type=[
        'image/png' if data.startswith(b'\x89PNG') else 'image/jpeg' for data in rows])


def _lines(rows: list[tuple]) -> Any:
    strips, colours, radii, labels = ([each for row in rows for each in row[part]] for part in range(4))
    return rr.LineStrips2D.columns(strips=strips, colors=colours, radii=radii, labels=labels).partition(
        [len(row[0]) for row in rows])


def _points(rows: list[tuple]) -> Any:
    places, radii, labels = ([each for row in rows for each in row[part]] for part in range(3))
    return rr.Points2D.columns(positions=np.reshape(places, (-1, 2)), radii=radii, labels=labels, colors=[_THINGS] * len(places)
                               ).partition([len(row[0]) for row in rows])


def _stamp(message: Any) -> int:
    header = getattr(message, 'header', None)
    return header.stamp.sec * 10 ** 9 + header.stamp.nanosec if header else 0


def _image(recording: Recording, topic: str, message: Any) -> None:
    rgb = to_rgb(message, (message.height, message.width))
    _, data = cv2.imencode('.jpg', cv2.cvtColor(rgb, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
    recording.encoded(topic, data.tobytes())


def _compressed(recording: Recording, topic: str, message: Any) -> None:
    recording.encoded(topic, bytes(message.data))


def _future(recording: Recording, topic: str, message: Any) -> None:
    for number, frame in enumerate(message.frames, 1):
        recording.encoded(f'{topic}/frames/{number}', bytes(frame.data))
    if len(message.collision_risk):
        recording.scalar(f'{topic}/collision_risk', max(message.collision_risk))
    recording.scalar(f'{topic}/progress', message.progress)


def _decision(recording: Recording, topic: str, message: Any) -> None:
    candidates = message.candidates
    recording.lines(
        f'{topic}/candidates', [_drawn(each.x, each.y) for each in candidates],
        [_CHOSEN if each.name == message.chosen else _VETOED if each.vetoed else _REJECTED for each in candidates],
        [0.02 if each.name == message.chosen else 0.006 for each in candidates],
        [f'{each.name} {each.score:.2f}' for each in candidates])
    for each in candidates:
        # ``followed`` is one of the others under another name, a different one at each tick.
        recording.scalar(f'{topic}/scores/{rr.escape_entity_path_part(each.name)}', each.score)
    recording.points(f'{topic}/things', [_drawn(each.x[:1], each.y[:1])[0] for each in message.things],
                     [each.radius for each in message.things], [each.name for each in message.things])
    vetoed = sum(each.vetoed for each in candidates)
    recording.scalar(f'{topic}/vetoed', vetoed)
    recording.text(f'{topic}/chosen', f'{message.task}: {message.chosen}'
                   + (f', {vetoed} of {len(candidates)} vetoed' if vetoed else ''))


def _chunk(recording: Recording, topic: str, message: Any) -> None:
    names = list(message.names)
    values = np.asarray(message.values, float).reshape(-1, max(1, len(names)))
    for name, value in zip(names, values[0] if len(values) else (), strict=False):
        recording.scalar(f'{topic}/{name}', value)
    if names == ['linear.x', 'angular.z'] and len(values):
        poses = path(values, message.step_period)
        recording.lines(f'{topic}/path', [_drawn(poses[:, 0], poses[:, 1])], [_PLAN], [0.015], [''])
    recording.scalar(f'{topic}/tier', message.tier)


def _deadline(recording: Recording, topic: str, message: Any) -> None:
    for name in ('tier', 'verdict', 'budget', 'latency', 'observation_age', 'predicted'):
        recording.scalar(f'{topic}/{name}', getattr(message, name))
    if message.reason:
        recording.text(f'{topic}/reason', message.reason)


def _gate(recording: Recording, topic: str, message: Any) -> None:
    for name in ('state', 'passed', 'limited', 'stops'):
        recording.scalar(f'{topic}/{name}', getattr(message, name))
    if message.reason:
        recording.text(f'{topic}/reason', message.reason)


def _twist(recording: Recording, topic: str, message: Any) -> None:
    twist = getattr(message, 'twist', message)
    recording.scalar(f'{topic}/linear.x', twist.linear.x)
    recording.scalar(f'{topic}/angular.z', twist.angular.z)


def _text(recording: Recording, topic: str, message: Any) -> None:
    recording.text(topic, message.data)


def _drawn(x: Any, y: Any) -> np.ndarray:
    """Places (T, 2) in base_link as they are drawn: ahead is up, left is left."""
    return np.stack([-np.asarray(y, float), -np.asarray(x, float)], 1)


_SHOWS: Mapping[str, Callable[[Recording, str, Any], None]] = {
    'sensor_msgs/msg/Image': _image, 'sensor_msgs/msg/CompressedImage': _compressed,
    'worldmodel_ros/msg/PredictedFuture': _future, 'worldmodel_ros/msg/Decision': _decision,
    'worldmodel_ros/msg/ActionChunk': _chunk, 'worldmodel_ros/msg/DeadlineStatus': _deadline,
    'worldmodel_ros/msg/CommandStatus': _gate, 'geometry_msgs/msg/Twist': _twist, 'geometry_msgs/msg/TwistStamped': _twist,
    'std_msgs/msg/String': _text}
TYPES = frozenset(_SHOWS)


def layout(topics: Mapping[str, str]) -> rrb.Blueprint:
    """Return the layout: images left, decisions right, numbers over time below; ``topics``: type of each, by name."""
    seen, decided, plots = panels(topics)
    return rrb.Blueprint(rrb.Vertical(rrb.Horizontal(rrb.Grid(*seen), *decided), rrb.Grid(*plots)))


def panels(topics: Mapping[str, str]) -> tuple[list[rrb.View], list[rrb.View], list[rrb.View]]:
    """Return the panels: images, decisions, and numbers over time; ``topics`` as in layout."""
    def of(*types: str) -> list[str]:
        return [name for name, type_name in topics.items() if type_name.rpartition('/')[2] in types]
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
    return seen, decided, plots
