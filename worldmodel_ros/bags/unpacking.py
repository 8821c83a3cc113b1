"""Unpacks what is compressed in bags, within bounds: a hundred kilobytes may stand for a gigabyte, or say so."""
from __future__ import annotations

import shutil
from io import BytesIO
from pathlib import Path

import lz4.frame
import zstandard

LARGEST_CHUNK = 2**28    # bytes of a chunk, unpacked or packed; rosbag2 writes about 2**20
LARGEST_MESSAGE = 2**27  # bytes of a message that is compressed by itself
FILE_BASE, FILE_RATIO = 2**28, 64  # bytes that any file may have unpacked, and how many times more than packed
DISK_LEFT = 2**28        # bytes that an unpacked file leaves of its disk
_PIECE = 2**20
_WINDOW = 2**27          # bytes that a zstd frame may ask to be kept


class TooLarge(ValueError):
    """What would come of unpacking is more than is allowed, or more than was said."""


def unpack(data: bytes, compression: str, limit: int) -> bytes:
    """
    Return what 'zstd', 'lz4' or '' packed, as far as it goes where that is cut off.

    Raises TooLarge for more than ``limit`` bytes, before there is memory for more, and what the libraries raise for
    data that is damaged.
    """
    if compression == 'zstd':
        with zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(data, read_across_frames=True) as reader:
            whole = BytesIO()  # which gives its memory away without a copy
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
    """Return a message that zstd packed by itself; raises as ``unpack``, and where it is cut off and its size is
    known."""
    size = zstandard.frame_content_size(data)
    if size > LARGEST_MESSAGE:
        raise TooLarge(f'{len(data)} bytes unpack to more than {LARGEST_MESSAGE}')
    unpacked = unpack(data, 'zstd', LARGEST_MESSAGE)
    if size >= 0 and len(unpacked) != size:
        raise zstandard.ZstdError(f'{len(unpacked)} of {size} bytes are there')
    return unpacked


def unpack_chunk(data: bytes, compression: str, size: int) -> bytes:
    """Return the contents of a chunk of an MCAP file, which says that they have ``size`` bytes; raises as ``unpack``."""
    if size > LARGEST_CHUNK:
        raise TooLarge(f'a chunk of {size} bytes: at most {LARGEST_CHUNK} are unpacked')
    return unpack(data, compression, size)


def unpack_file(source: Path, target: Path) -> None:
    """
    Unpack a file that zstd packed as a whole. Where it raises, ``target`` has what comes before.

    Raises TooLarge, and ZstdError for one that is damaged.
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
