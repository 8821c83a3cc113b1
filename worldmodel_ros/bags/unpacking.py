"""Decompresses data in bags, within bounds: a hundred kilobytes may unpack to a gigabyte, or claim to."""
from __future__ import annotations

import shutil
from io import BytesIO
from pathlib import Path

import lz4.frame
import zstandard

LARGEST_CHUNK = 2**28    # bytes of a chunk, unpacked or packed; rosbag2 writes about 2**20
LARGEST_MESSAGE = 2**27  # bytes of an individually compressed message
FILE_BASE, FILE_RATIO = 2**28, 64  # a file may unpack to FILE_BASE bytes plus FILE_RATIO times its packed size
DISK_LEFT = 2**28        # bytes that unpacking a file must leave free on the disk
_PIECE = 2**20
_WINDOW = 2**27          # maximum window of a zstd frame, bytes


class TooLarge(ValueError):
    """The unpacked data would be larger than allowed, or than stated."""


def unpack(data: bytes, compression: str, limit: int) -> bytes:
    """
    Return data unpacked from 'zstd', 'lz4' or '' (uncompressed); if truncated, as far as it goes.

    Raises TooLarge for more than ``limit`` bytes, before allocating more, and the libraries' exceptions for damaged data.
    """
    if compression == 'zstd':
        with zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(data, read_across_frames=True) as reader:
            whole = BytesIO()  # getvalue() does not copy
            while whole.tell() <= limit and (piece := reader.read(min(_PIECE, limit + 1 - whole.tell()))):
                whole.write(piece)
        unpacked = whole.getvalue()
    elif compression == 'lz4':
        unpacked = lz4.frame.LZ4FrameDecompressor().decompress(data, max_length=limit + 1)
    elif compression:
        raise KeyError(compression)
    else:
        unpacked = data
    if len(unpacked) > limit:
        raise TooLarge(f'{len(data)} bytes unpack to more than {limit}')
    return unpacked


def unpack_message(data: bytes) -> bytes:
    """Return an individually zstd-compressed message; raises like ``unpack``, and if it is truncated and its size known."""
    size = zstandard.frame_content_size(data)
    if size > LARGEST_MESSAGE:
        raise TooLarge(f'{len(data)} bytes unpack to more than {LARGEST_MESSAGE}')
    unpacked = unpack(data, 'zstd', LARGEST_MESSAGE)
    if size >= 0 and len(unpacked) != size:
        raise zstandard.ZstdError(f'{len(unpacked)} of {size} bytes are there')
    return unpacked


def unpack_chunk(data: bytes, compression: str, size: int) -> bytes:
    """Return the contents of a chunk of an MCAP file, of at most the stated ``size`` bytes; raises like ``unpack``."""
    if size > LARGEST_CHUNK:
        raise TooLarge(f'a chunk of {size} bytes: at most {LARGEST_CHUNK} are unpacked')
    return unpack(data, compression, size)


def unpack_file(source: Path, target: Path) -> None:
    """
    Unpack a zstd-compressed file. On an error, ``target`` has what comes before.

    Raises TooLarge, and ZstdError for a damaged file.
    """
    left = limit = FILE_BASE + FILE_RATIO * source.stat().st_size
    room = shutil.disk_usage(target.parent).free - DISK_LEFT
    with source.open('rb') as packed, target.open('wb') as unpacked:
        reader = zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(packed, read_across_frames=True)
        while piece := reader.read(_PIECE):
            if len(piece) > left:
                raise TooLarge(f'it unpacks to more than {limit} bytes, which is more than {FILE_RATIO} times its own')
            if len(piece) > room:
                raise TooLarge(f'there is no room for it on the disk of {target.parent}')
            unpacked.write(piece)
            left, room = left - len(piece), room - len(piece)
