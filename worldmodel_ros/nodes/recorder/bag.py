"""Writes rosbag2 folders of MCAP files, split by size, which ``ros2 bag`` and Foxglove can open."""
from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import yaml
from mcap.writer import CompressionType, Writer

_VERSION = 9  # of rosbag2's metadata, as Jazzy writes it
_CHUNK = 256 * 1024  # bytes; a killed recorder loses at most one chunk


@dataclass(frozen=True)
class TopicDescription:
    """What a bag stores about a topic: its type with the full ``definition``, and the offered QoS."""

    name: str
    type: str
    definition: str
    type_hash: str = ''                                        # RIHS01_..., if known
    qos: tuple[dict[str, Any], ...] = ()                       # as in metadata.yaml


@dataclass(eq=False)
class _File:
    """One MCAP file of the bag."""

    path: Path
    stream: BinaryIO
    writer: Writer
    channels: dict[str, int] = field(default_factory=dict)     # topic -> channel
    schemas: dict[str, int] = field(default_factory=dict)      # type -> schema
    messages: Counter = field(default_factory=Counter)         # topic -> count
    first: int = 0                                             # ns, log time
    last: int = 0
    size: int = 0                                              # bytes, once ended

    def information(self) -> dict[str, Any]:
        return {'path': self.path.name, 'starting_time': {'nanoseconds_since_epoch': self.first},
                'duration': {'nanoseconds': self.last - self.first}, 'message_count': self.messages.total()}


class BagWriter:
    """
    A bag being written. Not thread-safe, except ``add_topic``.

    Every file but the current one is complete at any time, so a crash costs at most a chunk of messages, the index of one
    file (``mcap recover`` restores it) and metadata.yaml (``ros2 bag reindex`` restores it). A thread waits until the file
    before it is on the disk, too: with a large file that takes longer than messages can wait.
    """

    def __init__(self, folder: Path, max_file_bytes: int = 0) -> None:
        """
        :param folder: created; files are named after it.
        :param max_file_bytes: size at which the next file is begun; 0: a single file.
        :raises FileExistsError: if the folder is not empty.
        """
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileExistsError(f'{folder} exists already: a recording never overwrites another, name a new folder')
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._max = folder, max_file_bytes
        self._topics: dict[str, TopicDescription] = {}
        self._files: list[_File] = []
        self._disk = ThreadPoolExecutor(1, 'to disk')
        self._disk.submit(bool)  # starts the thread now: at a split, the system might have none left
        self._on_disk: list[Future[None]] = []  # of each ended file
        self._closed = False
        self._begin()

    @property
    def counts(self) -> Counter:
        """Messages written so far, by topic."""
        return sum((file.messages for file in self._files), Counter())

    @property
    def bytes_written(self) -> int:
        """Size of all files [bytes], without the chunk being filled."""
        return sum(file.size or file.stream.tell() for file in self._files)  # an ended file may have been moved away

    def add_topic(self, topic: TopicDescription) -> None:
        """Add a topic; has no effect if it was added before. Thread-safe."""
        self._topics.setdefault(topic.name, topic)

    def write(self, topic: str, time: int, data: bytes) -> None:
        """Write one serialised message (CDR) of an added topic, received at ``time`` [ns, ROS time]."""
        if self._max and self._files[-1].stream.tell() >= self._max:
            self._wait_for_disk()  # so that one file at most is not there yet, and its failure ends the recording
            self._end()
            self._begin()
        file = self._files[-1]
        channel = file.channels.get(topic) or self._open_channel(self._topics[topic])
        file.first = min(file.first, time) if file.messages else time
        file.last = max(file.last, time)
        file.messages[topic] += 1
        file.writer.add_message(channel, time, data, time)

    def close(self) -> None:
        """Complete the last file and write metadata.yaml; a second call has no effect."""
        if self._closed:
            return
        self._closed = True
        if not self._files[-1].size:  # else the next one could not be begun
            self._end()
        self._disk.shutdown()
        self._wait_for_disk()
        part = self._folder / 'metadata.yaml.part'
        part.write_text(yaml.safe_dump(
            {'rosbag2_bagfile_information': self._information(self._files)}, sort_keys=False))
        os.replace(part, self._folder / 'metadata.yaml')

    def _begin(self) -> None:
        path = self._folder / f'{self._folder.name}_{len(self._files)}.mcap'
        stream = path.open('wb')
        # No compression, like rosbag2 by default: cores are for the robot, and JPEG does not get smaller.
        writer = Writer(stream, chunk_size=_CHUNK, compression=CompressionType.NONE)
        writer.start(profile='ros2', library='worldmodel_ros')
        self._files.append(_File(path, stream, writer))

    def _end(self) -> None:
        file = self._files[-1]
        # So that ``ros2 bag`` can open this file alone.
        own = yaml.safe_dump(self._information([file]), sort_keys=False)
        file.writer.add_metadata('rosbag2', {'serialized_metadata': own})
        file.writer.finish()
        file.stream.flush()
        file.size = file.stream.tell()
        self._on_disk.append(self._disk.submit(_put_on_disk, file.stream))

    def _wait_for_disk(self) -> None:
        """Wait until all ended files are on the disk. Raises OSError if one of them is not."""
        for file in self._on_disk:
            file.result()

    def _open_channel(self, topic: TopicDescription) -> int:
        file = self._files[-1]
        if topic.type not in file.schemas:
            file.schemas[topic.type] = file.writer.register_schema(topic.type, 'ros2msg', topic.definition.encode())
        file.channels[topic.name] = file.writer.register_channel(
            topic.name, 'cdr', file.schemas[topic.type], {
                'offered_qos_profiles': yaml.safe_dump(list(topic.qos), sort_keys=False),
                'topic_type_hash': topic.type_hash})
        return file.channels[topic.name]

    def _information(self, files: list[_File]) -> dict[str, Any]:
        counts = sum((file.messages for file in files), Counter())
        filled = [file for file in files if file.messages]
        first, last = min((f.first for f in filled), default=0), max((f.last for f in filled), default=0)
        return {
            'version': _VERSION, 'storage_identifier': 'mcap',
            'duration': {'nanoseconds': last - first}, 'starting_time': {'nanoseconds_since_epoch': first},
            'message_count': counts.total(),
            'topics_with_message_count': [
                {'topic_metadata': {
                    'name': topic.name, 'type': topic.type, 'serialization_format': 'cdr',
                    'offered_qos_profiles': [dict(profile) for profile in topic.qos],
                    'type_description_hash': topic.type_hash},
                 'message_count': counts[topic.name]} for topic in list(self._topics.values())],
            'compression_format': '', 'compression_mode': '',
            'relative_file_paths': [file.path.name for file in files],
            'files': [file.information() for file in files],
            'custom_data': None, 'ros_distro': os.environ.get('ROS_DISTRO', 'jazzy')}


def _put_on_disk(stream: BinaryIO) -> None:
    """Close a file once it is on the disk: it counts as complete only there, and a disk failure is reported here or never."""
    with stream:
        os.fsync(stream.fileno())
