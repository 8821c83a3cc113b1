"""
A network link between two network namespaces that does to packets what ``tc netem`` does, in user space.

    python link.py NAMESPACE NAMESPACE

Not every kernel has netem, while tap devices are nearly everywhere. Each line on the standard input is a JSON object of
what is to be done from then on, to each direction by itself: ``loss``, ``duplicate`` and ``corrupt`` are parts of the packets,
``delay`` and ``jitter`` (standard deviation) are in s, ``rate`` in bytes/s, of which 50 packets may wait.
"""

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time

DEVICE = 'wire'
_TUNSETIFF, _TAP_WITHOUT_INFORMATION = 0x400454CA, 0x0002 | 0x1000
_CLONE_NEWNET = 0x40000000
_LONGEST = 2048  # bytes of a frame
_WAITING = 50


class Link:
    """The two ends, and what is on its way: (when, number, end, frame)."""

    def __init__(self, ends: list[int], seed: int = 0) -> None:
        self.does: dict[str, float] = {}
        self._ends = ends
        self._random = random.Random(seed)
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._number = 0
        self._free = [0.0, 0.0]  # when an end of limited rate can send again

    def take(self, source: int, frame: bytes, now: float) -> None:
        """Take a frame in at one end."""
        does, draw = self.does, self._random.random
        if draw() < does.get('loss', 0.0):
            return
        if draw() < does.get('corrupt', 0.0):
            place = self._random.randrange(14, len(frame))  # behind the addresses
            frame = frame[:place] + bytes([frame[place] ^ 1 << self._random.randrange(8)]) + frame[place + 1:]
        at = now + max(0.0, self._random.gauss(does.get('delay', 0.0), does.get('jitter', 0.0)))
        if rate := does.get('rate'):
            at = max(at, self._free[source])
            if at - now > _WAITING * _LONGEST / rate:
                return
            self._free[source] = at = at + len(frame) / rate
        for _ in range(2 if draw() < does.get('duplicate', 0.0) else 1):
            self._number += 1
            heapq.heappush(self._waiting, (at, self._number, 1 - source, frame))

    def deliver(self, now: float) -> float | None:
        """Put out what is due; return how long until the next frame is [s], None where none waits."""
        while self._waiting and self._waiting[0][0] <= now:
            _, _, end, frame = heapq.heappop(self._waiting)
            try:
                os.write(self._ends[end], frame)
            except OSError:
                pass  # the device is down, or full: the frame is lost
        return self._waiting[0][0] - now if self._waiting else None


def _tap(namespace: str) -> int:
    with open(f'/var/run/netns/{namespace}') as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f'the network namespace {namespace} cannot be entered')
    tap = os.open('/dev/net/tun', os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack('16sH22x', DEVICE.encode(), _TAP_WITHOUT_INFORMATION))
    return tap


def main() -> None:
    """Carry frames until the standard input ends."""
    ends = [_tap(namespace) for namespace in sys.argv[1:3]]
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(35))  # no part of the machine's load
    except PermissionError:
        pass
    print('up', flush=True)
    link, wait = Link(ends), None
    while True:
        ready, _, _ = select.select([0, *ends], [], [], wait)
        if 0 in ready:
            line = os.read(0, 4096)
            if not line:
                return
            link.does = json.loads(line.splitlines()[-1])
        now = time.monotonic()
        for source, end in enumerate(ends):
            if end in ready:
                try:
                    while True:
                        link.take(source, os.read(end, _LONGEST), now)
                except BlockingIOError:
                    pass
        wait = link.deliver(time.monotonic())
        wait = None if wait is None else max(0.0, wait)


if __name__ == '__main__':
    main()
