"""A saved session: a safetensors file whose every byte is covered by a checksum.

Saving and loading are divided so that the thread that answers ticks does very little: it forks a session's cache, and
takes over pages that have been filled. Copying, hashing, checking and disk access are done by the thread that wants the
file (``session_transfer``).
"""
from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from ..cache import snapshot
from ..cache.sequence import OBSERVED, PAGES, SLAB, TIER, VALID, SequenceCache
from ..model.presets import Preset
from .memory import slabs_of
from .session_folder import SessionFileError

if TYPE_CHECKING:
    from .memory import Memory

FORMAT = '3'
MAX_TIME = 2**31 - 1  # frames, seven years at 10 Hz: a session's counters must not overflow
_MAX_HEADER = 2**16   # bytes; a session's header lists a dozen tensors
_PIECE = 2**20        # bytes read or written at a time
_TYPES = {'F32': np.dtype('<f4'), 'I64': np.dtype('<i8'), 'U8': np.dtype('u1')}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_BLANK = '0' * 64     # stands for the checksum while it is computed
_CHECKSUM = re.compile(rb'"sha256": ?"([0-9a-f]{64})"')


class Capture:
    """A session as it was when this was made, on its way to a file (``pieces`` copies, then ``write`` may be called) or to
    a store (``session_store``), which takes ``state`` and ``cache``."""

    def __init__(self, spec: Preset, fingerprint: Callable[[], str], state: Mapping[str, np.ndarray], cache: SequenceCache):
        """``state``: as of ``Loaded``, not modified; ``cache``: a fork of the session's."""
        self._spec, self._fingerprint = spec, fingerprint  # called when it is written, as it may take long
        self.state = {name: np.ascontiguousarray(array) for name, array in state.items()}
        self.cache, self._copy = cache, snapshot.Copy(cache)
        self.on_host = self._copy.on_host  # whether any thread may take ``pieces``; else only the engine's
        self.nbytes = _MAX_HEADER + self._copy.nbytes + sum(array.nbytes for array in self.state.values())  # at most

    @property
    def fingerprint(self) -> str:
        """``Engine.fingerprint`` of the model; may take long the first time."""
        return self._fingerprint()

    def pieces(self) -> Iterator[None]:
        """Copy a part of the pages per ``next``. Raises OutOfPages if memory ran so short that the fork lost them."""
        yield from self._copy.pieces()
        self.cache.close()

    def write(self, file: BinaryIO) -> None:
        """Write the session to an empty file. Raises OSError."""
        arrays = {**self.state, **self._copy.arrays}
        header, position = {'__metadata__': {'format': FORMAT, 'model': self._spec.name,
                                             'fingerprint': self.fingerprint, 'sha256': _BLANK}}, 0
        for name, array in arrays.items():
            header[name] = {'dtype': _NAMES[array.dtype], 'shape': array.shape,
                            'data_offsets': (position, position + array.nbytes)}
            position += array.nbytes
        text = json.dumps(header).encode()
        text += b' ' * (-len(text) % 8)
        start = len(text).to_bytes(8, 'little') + text
        digest = hashlib.sha256(start)
        file.write(start)
        for array in arrays.values():
            for piece in _pieces(array):
                digest.update(piece)
                file.write(piece)
        file.seek(start.index(_BLANK.encode()))
        file.write(digest.hexdigest().encode())


class Incoming:
    """A session's cache while it is filled, until a session takes it over or it is closed. ``on_host``: whether its pages are
    in host memory. ``epoch``: ``Backend.epoch`` when it was opened; None: none is known, it is taken over at once."""

    epoch: int | None = None

    def __init__(self, memory: Memory) -> None:
        self._memory, self._cache = memory, memory.stage()
        self._ending, self._over = threading.Lock(), False
        self.on_host = all(pool.storage.on_host for pool in memory.pools)

    def settle(self) -> None:
        """Wait until all pages are filled. For a thread that may block; otherwise ``take`` and ``close`` do it."""

    def take(self) -> SequenceCache:
        """Return the filled cache to the session that takes it over. Raises SessionFileError after ``close``."""
        self.settle()
        with self._ending:
            if self._over:
                raise SessionFileError('the session was given up while it was loaded')
            self._over = True
        return self._cache

    def close(self) -> None:
        """Release the pages unless a session has taken them over. Thread-safe."""
        with self._ending:
            given_up, self._over = not self._over, True
        if given_up:
            self._stop()
            self._cache.close()

    def _stop(self) -> None:
        """Fill no more pages and wait for the device's writes to them: another session gets these pages next."""


class Loaded(Incoming):
    """A session that was read and checked, on its way into an engine. ``pieces`` fills its pages, then a session may
    take it over.

    ``state`` has time int64 (1,) and, in float32, latent (h, w, Z), features (P, D) and encoder_state (1, C, h, w); for a
    preset with kept_frames also sink_latents (n, h, w, Z) and sink_actions (n, A); with heading_pairs, heading (1,) in rad;
    with keyframe_slabs, poses (most_slabs, 3) of the slabs in order: x, y in m, heading in rad.
    """

    def __init__(self, state: dict[str, np.ndarray], pages: dict[str, np.ndarray], memory: Memory):
        super().__init__(memory)
        self.state, self._pages = state, pages

    def pieces(self) -> Iterator[None]:
        """Fill a part of the pages per ``next``. Raises OutOfPages where there is no room."""
        # A pass of a branch that has released these pages may still be writing to them.
        self._memory.before_writing()
        for _ in snapshot.fill(self._cache, self._pages):
            yield
            if self._over:  # it was closed, and the pages may belong to another session
                return
            self._memory.before_writing()


def largest(spec: Preset, memory: Memory) -> int:
    """Return the largest size, in bytes, of the file of a session of this model."""
    return _MAX_HEADER + sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in (
        *_state_forms(spec, memory).values(), *snapshot.forms(memory.pools, memory.guaranteed_pages).values(),
        ((sum(memory.guaranteed_pages), PAGES), np.dtype(np.int64))))


def read(file: BinaryIO, size: int, spec: Preset, fingerprint: str, memory: Memory) -> Loaded:
    """Read and check the ``size`` bytes that ``Capture.write`` wrote, without touching a session.

    Reads and allocates no more than a session of this model needs. Raises SessionFileError.
    """
    try:
        return _read(file, size, spec, fingerprint, memory)
    except SessionFileError:
        raise
    except (ValueError, OSError, OverflowError, RecursionError) as error:
        raise SessionFileError(f'it is not a saved session of {spec.name!r}, or it is damaged: {error}') from error


def _read(file: BinaryIO, size: int, spec: Preset, fingerprint: str, memory: Memory) -> Loaded:
    limit = largest(spec, memory)
    if size > limit:
        raise ValueError(f'it has {size} bytes, and a session of this model at most {limit}')
    start = file.read(8)
    length = int.from_bytes(start, 'little')
    if len(start) < 8 or not 2 <= length <= min(_MAX_HEADER - 8, size - 8):
        raise ValueError(f'its header would have {length} bytes of {size}')
    text = file.read(length)
    header = json.loads(text)
    about = header.pop('__metadata__', None) if isinstance(header, dict) else None
    if not isinstance(about, dict):
        raise ValueError('its header does not say what it is')
    if about.get('format') != FORMAT:
        raise SessionFileError(
            f'it holds a session in format {str(about.get("format", "1"))[:10]}, which has no checksum, and this '
            f'version reads format {FORMAT}: load it with the version that saved it, or save a new one')
    if about.get('fingerprint') != fingerprint:
        raise SessionFileError(
            f'it holds a session of model {str(about.get("model"))[:60]!r}, which does not fit this {spec.name!r}: its '
            'preset or its weights are others, and what they keep of images means nothing here')
    arrays = _allocate(header, 8 + length, size)
    _check_forms(arrays, spec, memory)
    found = _CHECKSUM.findall(text)
    if len(found) != 1:
        raise ValueError('it has no checksum')
    digest = hashlib.sha256(start + text.replace(found[0], _BLANK.encode()))
    for array in arrays.values():
        for piece in _pieces(array):
            if file.readinto(piece) != len(piece):
                raise ValueError('it is cut off')
            digest.update(piece)
    if digest.hexdigest().encode() != found[0]:
        raise ValueError('its checksum is not that of its contents')
    state = {name: arrays.pop(name) for name in _state_forms(spec, memory) if name in arrays}
    _check_values(state, arrays, spec, memory)
    return Loaded(state, arrays, memory)


def _allocate(header: dict[str, Any], begin: int, size: int) -> dict[str, np.ndarray]:
    """Return empty arrays for the tensors that a header lists, which must fill the file from ``begin`` on without a gap."""
    arrays, position = {}, 0
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {'dtype', 'shape', 'data_offsets'}:
            raise ValueError(f'tensor {name[:40]!r} is described by {str(entry)[:80]}')
        dtype, shape = _TYPES.get(str(entry['dtype'])), entry['shape']
        # ``type(n) is int``, because bool is a subclass of int.
        if dtype is None or not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f'tensor {name[:40]!r} is described by {str(entry)[:80]}')
        nbytes = dtype.itemsize
        for count in shape:
            nbytes *= count
        if entry['data_offsets'] != [position, position + nbytes] or begin + position + nbytes > size:
            raise ValueError(f'tensor {name[:40]!r} of {nbytes} bytes lies elsewhere than its header says')
        arrays[name] = np.empty(shape, dtype)
        position += nbytes
    if begin + position != size:
        raise ValueError(f'its tensors end at {begin + position} of {size} bytes')
    return arrays


def most_slabs(spec: Preset, memory: Memory) -> int:
    """Return the largest number of slabs of a session."""
    return slabs_of(spec.window_frames, memory.layout) + spec.staying_slabs


def _state_forms(spec: Preset, memory: Memory) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return the shapes and types of ``Loaded.state``."""
    latent, number = (*spec.latent_size, spec.latent_channels), np.dtype(np.float32)
    forms = {'time': ((1,), np.dtype(np.int64)), 'features': ((spec.tokens, spec.width), number),
             'latent': (latent, number), 'encoder_state': ((1, 4 * spec.vae_width, *spec.latent_size), number)}
    if spec.heading_pairs:
        forms['heading'] = (1,), number
    if spec.keyframe_slabs:
        forms['poses'] = (most_slabs(spec, memory), 3), number
    if spec.kept_frames:
        forms |= {'sink_latents': ((spec.kept_frames, *latent), number),
                  'sink_actions': ((spec.kept_frames, spec.actions), number)}
    return forms


def _check_forms(arrays: dict[str, np.ndarray], spec: Preset, memory: Memory) -> None:
    """Raise ValueError unless the tensors have the names, shapes and types of a session's."""
    expected = _state_forms(spec, memory)
    counts = [max((len(array) for name, array in arrays.items() if name.startswith(f'{pool.name}.') and array.ndim),
                  default=0) for pool in memory.pools]
    expected |= snapshot.forms(memory.pools, counts)
    expected['slabs'] = (sum(counts) // memory.layout.tiles, PAGES), np.dtype(np.int64)
    found = {name: (array.shape, array.dtype) for name, array in arrays.items()}
    if found != expected:
        wrong = sorted(name[:40] for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise ValueError(f'tensors are missing, or are of other shapes or types: {", ".join(wrong)}')


def _check_values(state: dict[str, np.ndarray], pages: dict[str, np.ndarray], spec: Preset, memory: Memory) -> None:
    """Raise ValueError if no session could have these values."""
    _check_numbers(state)
    snapshot.check(memory, pages, [count // memory.layout.tiles for count in memory.guaranteed_pages])
    snapshot.require_finite(memory.pools, pages)
    _check_window(pages['slabs'], int(state['time'][0]), spec, memory)


def check_state(state: dict[str, np.ndarray], spec: Preset, memory: Memory) -> None:
    """Raise ValueError if no session could have this state."""
    found = {name: (array.shape, array.dtype) for name, array in state.items()}
    if found != _state_forms(spec, memory):
        raise ValueError(f'its state is {found}, and should be {_state_forms(spec, memory)}')
    _check_numbers(state)


def check_table(slabs: np.ndarray, time: int, spec: Preset, memory: Memory) -> None:
    """Raise ValueError if no session could have these slabs, int64 (n, PAGES), at frame ``time``."""
    snapshot.check_slabs(memory, slabs, [count // memory.layout.tiles for count in memory.guaranteed_pages])
    _check_window(slabs, time, spec, memory)


def _check_numbers(state: dict[str, np.ndarray]) -> None:
    time = int(state['time'][0])
    if not 0 <= time <= MAX_TIME:
        raise ValueError(f'its newest frame has the number {time}: 0 to {MAX_TIME} are possible')
    for name, array in state.items():
        if not np.isfinite(array).all():
            raise ValueError(f'{name} has numbers that are not finite')


def _check_window(slabs: np.ndarray, time: int, spec: Preset, memory: Memory) -> None:
    frames = memory.layout.frames
    number, valid, observed, tier = (slabs[:, column] for column in (SLAB, VALID, OBSERVED, TIER))
    whole = np.full(len(slabs), frames)
    whole[-1:] = time % frames + 1
    if not len(slabs) or number[-1] != time // frames or (valid != whole).any() or (observed != whole).any():
        raise ValueError(f'its table of slabs is not that of frames up to number {time}')
    others = number[spec.sink_slabs:]  # sinks and keyframes may be older than the window
    rolling = (others + 1) * frames > time + 1 - spec.window_frames
    if (np.diff(others[rolling]) != 1).any() or (~rolling).sum() > spec.keyframe_slabs:
        raise ValueError(f'its table of slabs is not the window of frame {time}')
    if (np.diff(tier[spec.sink_slabs:]) > 0).any():
        raise ValueError('its older slabs lie in the pool of newer ones')


def _pieces(array: np.ndarray) -> Iterator[memoryview]:
    """Yield the bytes of a contiguous array in pieces."""
    flat = memoryview(array.reshape(-1).view(np.uint8))
    return (flat[first:first + _PIECE] for first in range(0, len(flat), _PIECE))
