"""
Messages between a robot's node and the gateway, over a WebSocket. A binary frame holds an envelope with the times from which
the node estimates the other machine's clock, then one message of this protocol, then its pixels.
"""
from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from .codec import MAX_MESSAGE, MessageError, pack, unpack

PATH = '/v1/realtime/robot/node'
# When this frame was sent, and when the newest one of the other side was sent and received; the length of the message.
_ENVELOPE = struct.Struct('<dddI')
_SHAPE = struct.Struct('<III')  # T, H, W of the images
_SAMPLES = 64   # exchanges for the estimate of the clock
_JITTER = 0.9   # quantile of the round trips that is allowed for


@dataclass(frozen=True)
class Stamps:
    """Steady times [s]: ``sent`` by the sender's clock; ``echo_sent`` by the receiver's, ``echo_received`` by the sender's."""

    sent: float
    echo_sent: float = 0.0
    echo_received: float = 0.0


def wrap(message: Any | None, stamps: Stamps, pixels: np.ndarray | None = None) -> bytes:
    """Return the frame of a message (None: only the times), with images, uint8 (T, H, W, 3), if any."""
    packed = pack(message) if message is not None else b''
    head = _ENVELOPE.pack(stamps.sent, stamps.echo_sent, stamps.echo_received, len(packed))
    if pixels is None:
        return head + packed
    return b''.join((head, packed, _SHAPE.pack(*pixels.shape[:3]), np.ascontiguousarray(pixels, np.uint8).data))


def unwrap(data: bytes) -> tuple[Any | None, Stamps, np.ndarray | None]:
    """Return what ``wrap`` was given; the images share the memory of ``data``. Raises MessageError."""
    if len(data) < _ENVELOPE.size:
        raise MessageError(f'{len(data)} bytes are no frame of this protocol')
    *times, length = _ENVELOPE.unpack_from(data)
    end = _ENVELOPE.size + length
    if length > MAX_MESSAGE or end > len(data):
        raise MessageError(f'a message of {length} bytes in a frame of {len(data)}')
    if not np.isfinite(times).all():
        raise MessageError('the times of a frame are not finite')
    message = unpack(data[_ENVELOPE.size:end]) if length else None
    if end == len(data):
        return message, Stamps(*times), None
    if len(data) - end < _SHAPE.size:
        raise MessageError('pictures without a shape')
    shape = (*_SHAPE.unpack_from(data, end), 3)
    count = 1
    for size in shape:  # in Python integers, which do not wrap around
        count *= size
    if not count or count != len(data) - end - _SHAPE.size:
        raise MessageError(f'{len(data) - end - _SHAPE.size} bytes are no pictures of the shape {shape}')
    return message, Stamps(*times), np.frombuffer(data, np.uint8, count, end + _SHAPE.size).reshape(shape)


class RemoteClock:
    """
    Another machine's steady clock, from exchanges of messages (as in NTP, RFC 5905, 8), and the latency of the way back.

    The offset is that of the recent exchange with the shortest round trip: the others took longer because they waited
    somewhere. No wall clock is used. The error of the offset is at most half of that round trip.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)  # round trip, offset
        self.offset = 0.0     # s, the other clock minus this one
        self.round_trip = 0.0  # s, the shortest recent one
        self.back = 0.0       # s that an answer takes on its way, at the quantile _JITTER

    def take(self, stamps: Stamps, received: float) -> None:
        """Take the times of a frame that was received at ``received`` [s, steady]."""
        if not stamps.echo_sent:
            return
        there = stamps.echo_received - stamps.echo_sent
        here = received - stamps.sent
        self._samples.append((there + here, 0.5 * (there - here)))  # offset: (there - here) / 2
        self.round_trip, self.offset = min(self._samples)
        trips = sorted(trip for trip, _ in self._samples)
        usual = trips[min(len(trips) - 1, int(_JITTER * len(trips)))]
        self.back = 0.5 * self.round_trip + usual - self.round_trip

    def there(self, time: float) -> float:
        """Convert a time of this clock to the other one [s]."""
        return time + self.offset

    def here(self, time: float) -> float:
        """Convert a time of the other clock to this one [s]."""
        return time - self.offset
