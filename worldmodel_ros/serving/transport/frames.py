"""
Frames for the server in shared memory: slots, each owned by one side at a time.

The front end writes into a slot that it owns and hands it over by a message; the server copies the frame and gives
the slot back with the answer. The number of the tick is written before and after the frame, so that a front end that
breaks the rule is detected, and a torn or stale frame is never used.
"""
from __future__ import annotations

import os

import numpy as np

from . import memory
from .codec import MessageError

SLOTS = 8  # frames in flight: a server that owes more answers is not worth waiting for
_ALIGNMENT = 64  # bytes, a cache line
_MARK = np.dtype('<u8')


class FrameSlots:
    """Memory for ``SLOTS`` frames, uint8 (H, W, 3). Made by the server, mapped by both."""

    def __init__(self, descriptor: int, size: tuple[int, int], count: int = SLOTS, writable: bool = False) -> None:
        """``size``: (H, W) in pixels. Takes ownership of the descriptor. Raises MessageError if the memory does not fit."""
        shape = (*size, 3)
        pixels = int(np.prod(shape))
        stride = _stride(size)
        try:
            whole = memory.mapped(descriptor, count * stride, writable)
        finally:
            os.close(descriptor)
        self._shape = shape
        self._begun, self._frames, self._ended = [], [], []
        for k in range(count):
            slot = whole[k * stride:(k + 1) * stride]
            self._begun.append(slot[:_ALIGNMENT].view(_MARK))
            self._frames.append(slot[_ALIGNMENT:_ALIGNMENT + pixels].reshape(shape))
            self._ended.append(slot[-_ALIGNMENT:].view(_MARK))

    def __len__(self) -> int:
        return len(self._frames)

    def write(self, slot: int, number: int, frame: np.ndarray) -> None:
        """Write the frame of tick ``number`` into a slot that the caller owns. Raises ValueError for another shape."""
        if frame.shape != self._shape or frame.dtype != np.uint8:
            raise ValueError(f'the frame is {frame.dtype} {frame.shape}, and the server takes uint8 {self._shape}')
        self._begun[slot][0] = number
        self._frames[slot][...] = frame
        self._ended[slot][0] = number

    def read(self, slot: int, number: int) -> np.ndarray:
        """Return a copy of the frame of tick ``number``. Raises MessageError if the slot does not hold it."""
        if slot >= len(self):
            raise MessageError(f'there is no slot {slot}: there are {len(self)}')
        ended = int(self._ended[slot][0])
        frame = self._frames[slot].copy()
        begun = int(self._begun[slot][0])
        if not ended == begun == number:
            raise MessageError(f'slot {slot} should hold the frame of tick {number}; it was begun for {begun} and '
                               f'ended for {ended}: torn, or stale')
        return frame


def make_memory(size: tuple[int, int]) -> int:
    """Return the descriptor of new memory for the slots of frames of ``size`` (H, W)."""
    return memory.make('worldmodel frames', SLOTS * _stride(size))


def _stride(size: tuple[int, int]) -> int:
    pixels = size[0] * size[1] * 3
    return 2 * _ALIGNMENT + -(-pixels // _ALIGNMENT) * _ALIGNMENT
