"""Rewrites a bag's messages as MCAP, in forms that rosbag2 and others produce: chunks, compression, indexes."""
from __future__ import annotations

from pathlib import Path

from mcap.writer import CompressionType, IndexType, Writer

from worldmodel_ros.bags.source import open_bag

_NO_SUMMARY = dict(index_types=IndexType.NONE, repeat_channels=False, repeat_schemas=False, use_statistics=False,
                   use_summary_offsets=False)
CHUNK = 16_000  # bytes, so that a short bag has several
FORMS = {
    'plain chunks': dict(compression=CompressionType.NONE),
    'zstd chunks': dict(compression=CompressionType.ZSTD),
    'lz4 chunks': dict(compression=CompressionType.LZ4),
    'no chunks': dict(use_chunking=False),
    'no index': dict(compression=CompressionType.ZSTD, **_NO_SUMMARY),
    'no index, no chunks': dict(use_chunking=False, **_NO_SUMMARY),
    'another profile': dict(compression=CompressionType.ZSTD, profile=''),
}


def write_mcap(path: Path, bag: Path, form: str) -> Path:
    """Write the messages of ``bag`` into the file ``path``, in one of FORMS, and return its path."""
    options = {'profile': 'ros2', **FORMS[form]}
    profile = options.pop('profile')
    with open_bag(bag) as source, path.open('wb') as stream:
        writer = Writer(stream, chunk_size=CHUNK, **options)
        writer.start(profile=profile)
        channels = {}
        for topic, raw, log in source.messages():
            if topic.name not in channels:
                schema = writer.register_schema(topic.type, 'ros2msg', topic.definition.data.encode())
                channels[topic.name] = writer.register_channel(topic.name, 'cdr', schema)
            writer.add_message(channels[topic.name], log, raw, log)
        writer.finish()
    return path
