"""
Reads rosbag2 recordings without ROS: folders and single files, MCAP and SQLite, intact or damaged.

    with open_bag(Path('drive')) as bag:
        for topic, raw, log_ns in bag.messages(['/cmd_vel']):
            message = bag.deserialize(topic, raw)
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import zstandard
from rosbags.interfaces import MessageDefinition, Qos

from .decoding import decoder
from .files import BagFiles, find_files
from .merge import Stream, merge
from .problems import BagError, MessageError, Problem
from .steps_back import StepsBack
from .storage import Message, StorageFile
from .unpacking import TooLarge, unpack_message

_ZSTD = b'\x28\xb5\x2f\xfd'  # not the start of a CDR message, whose first byte is 0


@dataclass(frozen=True)
class Topic:
    """
    One topic of a bag. ``type`` is written as 'sensor_msgs/msg/Image'; ``count``: number of messages as stated by the files;
    ``qos``: the profiles that its publishers offered, if recorded.
    """

    name: str
    type: str
    count: int
    qos: tuple[Qos, ...]
    definition: MessageDefinition


class Record(NamedTuple):
    """One message: its CDR bytes, and its time of receipt by the recorder [ns]."""

    topic: Topic
    raw: bytes
    log_ns: int


class Bag:
    """
    An open recording. ``problems`` may grow while messages are read; ``start_ns`` and ``end_ns`` are the times of the first
    and last message [ns], None if there are no messages.
    """

    def __init__(self, path: Path, files: BagFiles, resources: ExitStack) -> None:
        self.path = path
        self.problems: list[Problem] = list(files.problems)
        self._resources = resources
        self._storages = [StorageFile(file, self.problems) for file in files.paths]
        for storage in self._storages:
            resources.callback(storage.close)
        self._storages = [storage for storage in self._storages if storage.readable]
        if not self._storages:
            raise BagError(f'{path}: no message can be read from it. ' + ' '.join(p.text for p in self.problems))
        self.topics = _topics(self._storages, self.problems)
        self._filled = [s for s in self._storages if s.start_ns is not None]
        self.start_ns = min((s.start_ns for s in self._filled), default=None)
        self.end_ns = max((s.end_ns for s in self._filled), default=None)
        found = sum(storage.message_count for storage in self._storages)
        if not self.problems and files.message_count is not None and found < files.message_count:
            self.problems.append(Problem(
                'missing messages', f'{path}: metadata.yaml counts {files.message_count} messages, the files hold '
                f'{found}: what is there is read; look for the part that was not copied', files.message_count - found))
        steps_back = _steps_back_between(self._filled)
        if steps_back.count:
            self.problems.append(steps_back.problem(path))
        # Merged by time, a file from before the step would interleave with one from after it.
        self._goes_back = bool(steps_back.count) or any(storage.goes_back for storage in self._filled)

    def messages(self, names: Collection[str] | None = None) -> Iterator[Record]:
        """
        Yield the messages of the topics ``names`` (None: all) by time of receipt, or in the order of recording if that time
        goes back. Reads lazily, in memory that does not grow with the bag. May be called again, for another pass.
        """
        wanted = self.topics if names is None else {name: self.topics[name] for name in names if name in self.topics}
        refused: Counter[str] = Counter()
        for connection, log_ns, raw in self._in_order(wanted):
            if raw[:4] == _ZSTD:
                try:
                    raw = unpack_message(raw)
                except (TooLarge, zstandard.ZstdError) as error:
                    refused[connection.topic] += 1
                    self._note_packed(connection.topic, refused[connection.topic], error)
                    continue
            yield Record(wanted[connection.topic], raw, log_ns)

    def _in_order(self, topics: dict[str, Topic]) -> Iterator[Message]:
        if self._goes_back:
            return chain.from_iterable(storage.messages(topics) for storage in self._filled)
        return merge([Stream(s.start_ns, lambda s=s: s.messages(topics)) for s in self._filled], lambda message: message[1])

    def deserialize(self, topic: Topic, raw: bytes) -> Any:
        """
        Return a message with the fields of its type; numeric arrays are read-only numpy arrays that share the memory of
        ``raw``. Raises MessageError.
        """
        try:
            return decoder(topic.type, topic.definition)(raw)
        except MessageError:
            raise
        except Exception as error:  # on broken bytes, the decoder raises anything
            raise MessageError(f'{topic.name}: {len(raw)} bytes are no {topic.type} ({error})') from error

    def _note_packed(self, topic: str, count: int, error: Exception) -> None:
        """Note messages of a topic that cannot be unpacked; the count is the maximum over all passes."""
        known = next((index for index, problem in enumerate(self.problems)
                      if problem.kind == 'packed message' and problem.text.startswith(f'{topic}: ')), None)
        if known is None:
            self.problems.append(Problem(
                'packed message', f'{topic}: messages that are compressed cannot be unpacked ({error}): they are left '
                'out, and the others read. Copy the recording again'))
        elif count > self.problems[known].count:
            self.problems[known] = replace(self.problems[known], count=count)

    def close(self) -> None:
        """Close the files."""
        self._resources.close()

    def __enter__(self) -> Bag:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_bag(path: Path | str) -> Bag:
    """
    Open a rosbag2 folder, or one .mcap or .db3 file.

    Damaged files are read as far as possible, and noted in ``Bag.problems``. Raises BagError if nothing can be read.
    """
    path, resources = Path(path), ExitStack()
    try:
        return Bag(path, find_files(path, resources), resources)
    except BaseException:
        resources.close()
        raise


def _steps_back_between(storages: list[StorageFile]) -> StepsBack:
    """Return the steps back between successive files; two without a common topic are of two recorders at the same time."""
    steps = StepsBack()
    for number, (before, after) in enumerate(pairwise(storages)):
        names, following = ({c.topic for c in storage.connections if c.msgcount} for storage in (before, after))
        if names & following and not (before.goes_back or after.goes_back):  # which their own problem tells
            steps.passed(number, before.end_ns)
            steps.passed(number, after.start_ns)
    return steps


def _topics(storages: list[StorageFile], problems: list[Problem]) -> dict[str, Topic]:
    """Return the topics of all files; if a name has two types, the one with more messages."""
    found: dict[tuple[str, str], Topic] = {}
    for connection in (c for storage in storages for c in storage.connections):
        key = connection.topic, connection.msgtype
        topic = found.get(key) or Topic(*key, 0, tuple(connection.ext.offered_qos_profiles), connection.msgdef)
        found[key] = replace(topic, count=topic.count + connection.msgcount)
    topics: dict[str, Topic] = {}
    for topic in sorted(found.values(), key=lambda t: (t.name, t.count)):
        if topic.name in topics:
            problems.append(Problem('topic', f'{topic.name} was recorded with two types, {topics[topic.name].type} and '
                                    f'{topic.type}: only the latter, of which there are more messages, is read'))
        topics[topic.name] = topic
    return topics
