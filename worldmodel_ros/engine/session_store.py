"""Sessions in a store: each complete slab once, and a manifest of all that makes a session, written last.

Keys of a store (``cache.stores``) are ``SESSION/slabs/GROUP/NUMBER-DIGEST`` for a slab's layer groups,
``SESSION/states/DIGEST`` for the rest of a session's state, ``SESSION/manifests/GENERATION-VERSION-DIGEST``, and
``SESSION/claims/GENERATION`` for its owners. Names of all but claims hold the SHA-256 of their content, so nothing is
ever overwritten and damage is detected. A manifest is stored after everything it names: whenever a process or its machine
dies, the last manifest in the store is complete.
"""
from __future__ import annotations

import json
import os
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future as Promise, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..cache.pool import LAYERS, OutOfPages
from ..cache.sequence import OBSERVED, PAGES, SLAB, TIER, VALID
from ..cache.slab_index import SlabIndex
from ..cache.stores.blob import Corrupt, Intact, decode, digest, encode
from ..cache.stores.protocol import AlreadyStored, NotStored, SlabStore, StoreError
from ..model.presets import Preset
from .session_file import Capture, Incoming, check_state, check_table
from .session_folder import SessionFileError

if TYPE_CHECKING:
    from .memory import Memory

Result = TypeVar('Result')
_Groups = list[dict[str, np.ndarray]]  # arrays of a slab's layer groups, in order

_PIECE = 0.001  # s on the engine's thread at a time, or the time of one slab
KEPT = 2  # manifests kept per session: the last one and the one before it
_SESSION = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]{0,63}')
_DIGEST = re.compile(r'(?:.*-)?([0-9a-f]{64})')
# One core hashes 1.7 GB/s with SHA-256, and a session of some models is 0.3 GB. A robot needs its few cores for other work.
_hashing = ThreadPoolExecutor(min(8, max(1, (os.cpu_count() or 1) // 2 - 1)), 'slabs')
# A robot that is held while its session moves waits for a slab or two. These do not queue behind other sessions' slabs.
_FEW = 2
_urgent = ThreadPoolExecutor(min(7, max(1, (os.cpu_count() or 1) // 2 - 1)), 'urgent slabs')  # besides the caller
_GROUP = 2**22    # bytes of a layer group, about: enough work for a thread to be worth waking
_MOST_GROUPS = 8
# Blobs in this process's memory are checked once, on arrival: a session that is swapped in and out is 0.3 GB each time.
_intact = Intact()


class Fenced(StoreError):
    """Another process owns the session now."""


def check_session(name: str) -> None:
    """Raise ValueError unless ``name`` is a valid session name."""
    if not _SESSION.fullmatch(name):
        raise ValueError(f'{name[:70]!r} is no name of a session: at most 64 characters of a-z, A-Z, 0-9, ".", "_" and "-", of '
                         'which the first is a letter or a digit')


@dataclass(frozen=True)
class SlabEntry:
    """A slab of a session: the first columns of its row in the table, and the keys of its layer groups."""

    number: int
    valid: int
    observed: int
    tier: int
    keys: tuple[str, ...]
    nbytes: int

    @property
    def content(self) -> tuple[str, ...]:
        """Digests of its layer groups: equal for slabs of equal content, in any session."""
        return tuple(map(_digest, self.keys))


@dataclass(frozen=True)
class Manifest:
    """A session at one of its ticks. ``generation`` rises with each owner, ``version`` with each manifest of an owner;
    ``about``: JSON values from the caller that runs the session."""

    session: str
    generation: int
    version: int
    fingerprint: str
    state: str
    state_nbytes: int
    slabs: tuple[SlabEntry, ...]
    about: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all blobs that it names."""
        return self.state_nbytes + sum(slab.nbytes for slab in self.slabs)

    @property
    def keys(self) -> set[str]:
        """Keys of all blobs that it names."""
        return {self.state, *(key for slab in self.slabs for key in slab.keys)}

    def encode(self) -> tuple[str, bytes]:
        """Return its key and its bytes."""
        text = json.dumps(asdict(self), sort_keys=True).encode()
        return f'{self.session}/manifests/{self.generation:08d}-{self.version:012d}-{digest(text)}', text

    @classmethod
    def decode(cls, key: str, blob: memoryview) -> Manifest:
        """Inverse of ``encode``. Raises Corrupt."""
        if digest(blob) != _digest(key):
            raise Corrupt(f'{key} is damaged: its SHA-256 is not the one that it was stored with')
        try:
            values = json.loads(bytes(blob))
            slabs = tuple(SlabEntry(**{**slab, 'keys': tuple(slab['keys'])}) for slab in values['slabs'])
            return cls(**{**values, 'slabs': slabs})
        except (ValueError, TypeError, KeyError) as error:
            raise Corrupt(f'{key} is no manifest of this version: {error}') from error


class SessionLog:
    """Writes one session to a store incrementally. Not thread-safe.

    ``groups``: number of layer groups of a slab, each a separate blob, which threads hash, copy and check in parallel; 0: as
    many as the size of a slab is worth. ``index`` records the content of the slabs. ``known``: the manifest that the session
    was restored from, whose slabs need not be stored again. ``history``: keep slabs that have left the window; else only what
    the last KEPT manifests name stays in the store.
    """

    def __init__(self, store: SlabStore, session: str, generation: int, groups: int = 0,
                 index: SlabIndex | None = None, known: Manifest | None = None, history: bool = False):
        check_session(session)
        self.store, self.session, self.generation = store, session, generation
        self._groups, self._index, self._history = groups, index, history
        self._version = known.version if known and known.session == session else 0
        self._written: list[tuple[str, Manifest]] = []  # newest last
        self._former_left = generation > 1  # manifests of former owners may be in the store
        self._stored: dict[int, tuple[bytes, SlabEntry]] = {}  # slab -> its pages and their use counts, and where it is stored
        # Layer groups in the manifest that the session was restored from: number of the slab and digest -> key.
        self._known = {(slab.number, _digest(key)): key for slab in known.slabs for key in slab.keys} if known else {}
        self.nbytes = 0  # stored so far

    def checkpoint(self, capture: Capture, about: Mapping[str, Any]) -> Checkpoint:
        """Return a checkpoint that stores the session as it was when ``capture`` was made."""
        return Checkpoint(self, capture, dict(about))

    def came_back(self, manifest: Manifest, uses: Mapping[int, bytes]) -> None:
        """Record that the session was restored from a manifest of this store, into pages as in ``StoredSession.uses``: slabs
        that are unchanged at the next checkpoint are not copied, hashed or stored again."""
        self._stored = {slab.number: (uses[slab.number], slab) for slab in manifest.slabs}

    def require_own(self) -> None:
        """Raise Fenced if a later generation has been claimed."""
        if self.store.head([_claim(self.session, self.generation + 1)]).result()[0] is not None:
            raise Fenced(f'session {self.session} has another owner than that of generation {self.generation}')

    def prune(self) -> None:
        """Delete what only manifests older than the last KEPT name, including those of former owners. Raises StoreError."""
        if len(self._written) < KEPT:
            return
        old, self._written = self._written[:-KEPT], self._written[-KEPT:]
        if self._former_left:
            old += self._former()
        kept = set().union(*(manifest.keys for _, manifest in self._written))
        gone = {key for _, manifest in old if manifest for key in manifest.keys} - kept
        if self._history:
            gone = {key for key in gone if '/states/' in key}
        own = {key for key in gone if key.startswith(self.session + '/')}
        # A session that loads an earlier state may have such a slab again, and must store it again.
        self._known = {slab: key for slab, key in self._known.items() if key not in own}
        self.store.delete([key for key, _ in old]).result()  # first, so that no manifest names a deleted blob
        self.store.delete(list(own)).result()
        self._former_left = False

    def _former(self) -> list[tuple[str, Manifest | None]]:
        """Return the manifests of former owners with their keys; None in place of one that is damaged."""
        folder, own = f'{self.session}/manifests', {key for key, _ in self._written}  # of an earlier generation after a reclaim
        found: list[tuple[str, Manifest | None]] = []
        for key in self.store.list(folder).result():
            if f'{folder}/0' <= key < f'{folder}/{self.generation:08d}' and key not in own:
                try:
                    blob, = self.store.get([key]).result()
                    found.append((key, Manifest.decode(key, blob)))
                except (Corrupt, NotStored):
                    found.append((key, None))
        return found

    def _find(self, row: np.ndarray, use: bytes) -> SlabEntry | None:
        """Return where a slab is stored already, if it is."""
        stored = self._stored.get(int(row[SLAB]))
        if stored and stored[0] == use and (stored[1].valid, stored[1].observed) == (row[VALID], row[OBSERVED]):
            return stored[1]
        return None

    def _bounds(self, pages: Mapping[str, np.ndarray]) -> list[tuple[int, int]]:
        """Return the layers, from and to, of each layer group of a slab."""
        layers = next(iter(pages.values())).shape[LAYERS]
        groups = self._groups or min(_MOST_GROUPS, max(1, sum(array.nbytes for array in pages.values()) // _GROUP))
        bounds = np.linspace(0, layers, min(groups, layers) + 1).astype(int).tolist()
        return list(zip(bounds, bounds[1:]))

    def _write(self, manifest: Manifest, stored: Sequence[_Stored]) -> Manifest:
        """Wait until all blobs are stored, then store the manifest."""
        wait([blob.put for blob in stored])
        for blob in stored:
            blob.put.result()
        for key, held in self.store.held([blob.key for blob in stored if blob.sound]).items():
            _intact.add(held, _digest(key))
        self._version += 1
        manifest = replace(manifest, version=self._version)
        key, text = manifest.encode()
        self.require_own()
        self.store.put([(key, (text,))]).result()
        self.nbytes += sum(blob.nbytes for blob in stored) + len(text)
        self._written.append((key, manifest))
        return manifest


@dataclass(frozen=True)
class _Stored:
    """A blob on its way into a store. ``put``: fulfilled when it is there; None if it was. ``sound``: its numbers are finite:
    it needs no check when it is read from this process's memory, or its pages are shared."""

    key: str
    nbytes: int
    put: Promise[None] | None
    sound: bool


class Checkpoint:
    """A session on its way to a store: ``pieces`` copies what is not there yet, then any thread may call ``write``."""

    def __init__(self, log: SessionLog, capture: Capture, about: dict[str, Any]):
        self._log, self._capture, self._about = log, capture, about
        self._cache = capture.cache
        self.on_host = capture.on_host  # as Capture.on_host
        self._slabs: list[tuple[np.ndarray, bytes, SlabEntry | dict[str, np.ndarray]]] = []

    def pieces(self) -> Iterator[None]:
        """Copy one slab that is not stored yet per ``next``, the last one in the call that ends the iterator, so that the
        engine's thread copies one at a time. Raises OutOfPages if memory ran so short that the fork lost its pages."""
        copied = False
        for row in self._cache.table.rows:
            pool = self._cache.pools[row[TIER]]
            use = _use(row, pool.allocator.uses(row[PAGES:]))
            found = self._log._find(row, use)
            if found is None:
                if copied:
                    yield
                dumped = pool.storage.dump(row[PAGES:])
                self._cache.require_pages()
                self._slabs.append((row, use, dumped))
                copied = True
            else:
                self._slabs.append((row, use, found))
        self._cache.close()

    def write(self, prune: bool = True) -> Manifest:
        """Store what is new, then the manifest. Raises StoreError, including Fenced. What was stored before stays, except what
        the last KEPT manifests do not name: that is deleted, now or by ``SessionLog.prune``."""
        log = self._log
        parts, name = encode({'kind': 'state'}, self._capture.state)
        state = f'{log.session}/states/{name}'
        stored = [_Stored(state, sum(map(len, parts)), log.store.put([(state, parts)]), True)]
        bounds = [[] if isinstance(pages, SlabEntry) else log._bounds(pages) for _, _, pages in self._slabs]
        groups = iter(_each(self._put, [(row, pages, group, *layers) for (row, _, pages), of_slab in zip(self._slabs, bounds)
                                        for group, layers in enumerate(of_slab)], sum(map(bool, bounds))))
        entries, sound = [], []
        for (row, _, found), of_slab in zip(self._slabs, bounds):
            own = [next(groups) for _ in of_slab]
            if own:
                found = SlabEntry(*map(int, row[:PAGES]), tuple(group.key for group in own), sum(group.nbytes for group in own))
                stored += [group for group in own if group.put]
            entries.append(found)
            sound.append(bool(own) and all(group.sound for group in own))
        manifest = log._write(Manifest(log.session, log.generation, 0, self._capture.fingerprint, state, stored[0].nbytes,
                                       tuple(entries), self._about), stored)
        for (row, use, _), entry, shareable in zip(self._slabs, entries, sound):
            if log._index and shareable and entry.valid == self._cache.layout.frames:
                log._index.add(entry.content, entry.tier, row[PAGES:], _uses(row, use))
        log._stored = {entry.number: (use, entry) for (_, use, _), entry in zip(self._slabs, entries)}
        if prune:
            log.prune()
        return manifest

    def _put(self, row: np.ndarray, pages: Mapping[str, np.ndarray], group: int, first: int, last: int) -> _Stored:
        """Hash a layer group of a slab, and start to store it unless it is known to be stored."""
        log, (number, valid, observed, tier) = self._log, map(int, row[:PAGES])
        about = {'kind': 'slab', 'fingerprint': self._capture.fingerprint, 'number': number, 'valid': valid,
                 'observed': observed, 'tier': tier, 'layers': [first, last, next(iter(pages.values())).shape[LAYERS]]}
        arrays = {name: np.ascontiguousarray(array[:, first:last]) for name, array in pages.items()}
        parts, name = encode(about, arrays)
        nbytes, known = sum(map(len, parts)), log._known.get((number, name))
        if known:
            return _Stored(known, nbytes, None, True)  # it was checked when it was read
        key = f'{log.session}/slabs/{group:02d}/{number:010d}-{name}'
        put, storage = log.store.put([(key, parts)]), self._cache.pools[tier].storage
        return _Stored(key, nbytes, put, all(storage.finite(*each) for each in arrays.items()))  # checked while it is written


class StoredSession(Incoming):
    """A session on its way from a store into an engine. ``read`` may be called again with a later manifest of the same
    session, and then reads only what is new; after ``pieces``, which fills pages, a session may take it over
    (``Session.restore``).

    ``index`` finds slabs that other sessions of the engine hold already; their pages are shared.
    """

    def __init__(self, store: SlabStore, spec: Preset, fingerprint: str, memory: Memory, index: SlabIndex | None = None):
        super().__init__(memory)
        self._store, self._spec, self._fingerprint = store, spec, fingerprint
        self._index = index
        self.state: dict[str, np.ndarray] = {}
        # slab -> content, row of the table, pages and their use counts
        self._there: dict[int, tuple[tuple[str, ...], np.ndarray, bytes]] = {}
        self._coming: list[tuple[SlabEntry, _Groups]] = []
        # Slabs that have pages, the arrays to fill these from, and what starts the copy.
        self._arriving: list[tuple[SlabEntry, _Groups, Callable[[], Callable[[], None]]]] = []
        self._settling = threading.Lock()
        self.read_nbytes = self.shared_slabs = 0  # by the last ``read``

    def read(self, manifest: Manifest) -> None:
        """Read and check all that a manifest names and that is not here yet; touch no session. Raises StoreError, and
        SessionFileError if the session is another model's."""
        if manifest.fingerprint != self._fingerprint:
            raise SessionFileError(f'session {manifest.session} is of another model than this {self._spec.name!r}, or of other '
                                   'weights: what it keeps of images means nothing here')
        self.settle()
        rows = np.array([[slab.number, slab.valid, slab.observed, slab.tier] for slab in manifest.slabs], np.int64)
        self._drop({slab.number: slab.content for slab in manifest.slabs})
        missing, self.shared_slabs = [], 0
        for slab in manifest.slabs:
            if slab.number not in self._there and not self._share(slab):
                missing.append(slab)
        keys = [manifest.state, *(key for slab in missing for key in slab.keys)]
        blobs = dict(zip(keys, self._store.get(keys).result()))
        self.read_nbytes = sum(map(len, blobs.values()))
        _, state = _decoded(blobs[manifest.state], manifest.state)
        state = {name: np.array(array) for name, array in state.items()}
        try:
            check_state(state, self._spec, self._memory)
            check_table(rows.reshape(-1, PAGES), int(state['time'][0]), self._spec, self._memory)
            groups = iter(_each(self._group, [(slab, key, blobs[key]) for slab in missing for key in slab.keys], len(missing)))
            self._coming = [(slab, self._joined(slab, [next(groups) for _ in slab.keys])) for slab in missing]
        except ValueError as error:
            raise Corrupt(f'{manifest.session} is no session of this model: {error}') from error
        self.state = state

    @property
    def left(self) -> int:
        """Number of slabs that were read and have no pages yet."""
        return len(self._coming)

    def pieces(self) -> Iterator[None]:
        """Give pages to slabs for ``_PIECE`` s per ``next``, to at least one; ``settle`` then fills them. Raises OutOfPages
        where there is no room."""
        begun = time.perf_counter()
        for slab, groups in self._coming:
            if time.perf_counter() - begun > _PIECE:
                yield
                begun = time.perf_counter()
            with self._ending:
                if self._over:
                    return
                self._make_room(slab, groups)
        self._coming = []

    def _make_room(self, slab: SlabEntry, groups: _Groups) -> None:
        pool = self._cache.pools[slab.tier]
        self._memory.before_writing()  # a pass of a branch that has released these pages may still be writing to them
        ids = self._cache.lease(slab.tier).allocate(self._memory.layout.tiles)
        self._put(slab, np.array([slab.number, slab.valid, slab.observed, slab.tier, *ids]))
        self._arriving.append((slab, groups, pool.storage.load_later(ids, groups)))

    def settle(self) -> None:
        """As ``Incoming.settle``; the device copies asynchronously, no tick waits for it. Filled slabs may then be shared."""
        with self._settling:
            arriving, self._arriving = self._arriving, []
            waits = []
            try:
                for _, _, start in arriving:
                    waits.append(start())
            finally:
                for wait in waits:
                    wait()
            for slab, *_ in arriving:
                if self._index and slab.valid == self._memory.layout.frames:  # not earlier: others would share empty pages
                    _, row, use = self._there[slab.number]
                    self._index.add(slab.content, slab.tier, row[PAGES:], _uses(row, use))

    def _stop(self) -> None:
        with self._settling:
            self._arriving = []

    @property
    def uses(self) -> dict[int, bytes]:
        """Pages and their use counts, by slab number, as ``SessionLog`` uses them to tell whether a slab has changed."""
        return {number: use for number, (_, _, use) in self._there.items()}

    def _drop(self, contents: dict[int, tuple[str, ...]]) -> None:
        """Release slabs that are not, or no longer, in the session."""
        gone = [number for number, (content, _, _) in self._there.items() if contents.get(number) != content]
        for number in gone:
            _, row, _ = self._there.pop(number)
            table = self._cache.table
            self._cache.replace(table.select(table.slabs != number))
            self._cache.lease(int(row[TIER])).release(row[PAGES:])

    def _share(self, slab: SlabEntry) -> bool:
        try:
            ids = self._index.share(slab.content, self._cache, slab.tier) if self._index else None
        except OutOfPages:  # it is read, and ``pieces`` makes room or raises
            return False
        if ids is None:
            return False
        self._put(slab, np.array([slab.number, slab.valid, slab.observed, slab.tier, *ids]))
        self.shared_slabs += 1
        return True

    def _put(self, slab: SlabEntry, row: np.ndarray) -> None:
        self._cache.replace(self._cache.table.put(row))
        uses = self._memory.pools[slab.tier].allocator.uses(row[PAGES:])
        self._there[slab.number] = slab.content, row, _use(row, uses)

    def _group(self, slab: SlabEntry, key: str, blob: memoryview) -> tuple[list[int], dict[str, np.ndarray]]:
        """Return the layers of a layer group, as in its header, and its arrays; raise Corrupt, and ValueError for those of
        another slab or shape."""
        intact = _intact.has(blob, _digest(key))
        about, arrays = _decoded(blob, key)
        told = tuple(about.get(name) for name in ('fingerprint', 'number', 'valid', 'observed', 'tier'))
        if told != (self._fingerprint, slab.number, slab.valid, slab.observed, slab.tier):
            raise ValueError(f'{key} is another slab than its manifest says')
        pool, tiles = self._memory.pools[slab.tier], self._memory.layout.tiles
        layers, pages = about.get('layers'), {}
        if not isinstance(layers, list) or [type(each) for each in layers] != [int] * 3:
            raise ValueError(f'{key} does not say which layers it has')
        first, last, all_layers = layers
        for name, ((count, *page), dtype) in pool.storage.forms().items():
            array = arrays.get(name)
            if array is None or array.dtype != dtype or (all_layers, array.shape) != (count, (tiles, last - first, *page)):
                raise ValueError(f'the pages {name} of slab {slab.number} are of another shape')
            if not intact and not pool.storage.finite(name, array):
                raise ValueError(f'slab {slab.number} has numbers that are not finite')
            pages[name] = array
        _intact.add(blob, _digest(key))
        return layers, pool.storage.staged(pages)

    def _joined(self, slab: SlabEntry, groups: Sequence[tuple[list[int], dict[str, np.ndarray]]]) -> _Groups:
        """Return the arrays of a slab's layer groups; raise ValueError unless they are all of its layers, in order."""
        ends = [0, *(last for (_, last, _), _ in groups)]
        if not groups or [first for (first, _, _), _ in groups] != ends[:-1] or ends[-1] != groups[-1][0][2]:
            raise ValueError(f'the layer groups of slab {slab.number} are not all of its layers, in order')
        return [arrays for _, arrays in groups]


def manifests(store: SlabStore, session: str) -> Iterator[Manifest | StoreError]:
    """Yield a session's manifests, newest first, and an error in place of one that is damaged or gone. Raises StoreError."""
    check_session(session)
    for key in reversed(store.list(f'{session}/manifests').result()):
        try:
            blob, = store.get([key]).result()
            yield Manifest.decode(key, blob)
        except (Corrupt, NotStored) as error:
            yield error


def read_newest(store: SlabStore, session: str, into: StoredSession,
                allow: Callable[[Manifest], None] = lambda manifest: None) -> tuple[Manifest, list[str]]:
    """Read a session's newest complete manifest; return it and what was wrong with newer ones. ``allow`` may raise an
    error to refuse a manifest. Raises NotStored if there is none, and StoreError."""
    wrong = []
    for manifest in manifests(store, session):
        try:
            if isinstance(manifest, StoreError):
                raise manifest
            allow(manifest)
            into.read(manifest)
            return manifest, wrong
        except (Corrupt, NotStored) as error:
            wrong.append(str(error))
    raise NotStored(f'session {session} is not in the store' + ''.join(f'; {reason}' for reason in wrong))


def claim(store: SlabStore, session: str, generation: int, owner: str) -> None:
    """Make ``owner`` the only owner of a generation of a session. Raises AlreadyStored for all claimants but one, and
    Fenced if a later generation is owned."""
    check_session(session)
    newest, other = owner_of(store, session)
    if newest > generation:
        raise Fenced(f'session {session} is at generation {newest}, owned by {other}')
    key, said = _claim(session, generation), json.dumps({'owner': owner, 'by': uuid.uuid4().hex}).encode()
    try:
        store.put([(key, (said,))], create=True).result()
    except AlreadyStored:
        raise
    except StoreError as error:
        # It may have been made, and its answer was lost: not to know it would fence this owner out of its own session.
        try:
            blob, = store.get([key]).result()
        except StoreError:
            raise error from None
        if bytes(blob) != said:
            raise AlreadyStored(f'{key} is there already') from None


def owner_of(store: SlabStore, session: str) -> tuple[int, str]:
    """Return the newest owned generation of a session and its owner, 'unknown' if the claim is damaged; 0 and '' if there is
    none."""
    claims = store.list(f'{session}/claims').result()
    if not claims:
        return 0, ''
    blob, = store.get([claims[-1]]).result()
    generation = int(claims[-1].rpartition('/')[2])
    try:
        return generation, str(json.loads(bytes(blob))['owner'])
    except (ValueError, TypeError, KeyError):  # the generation, which decides, is in its key
        return generation, 'unknown'


def claim_next(store: SlabStore, session: str, owner: str) -> int:
    """Claim the next generation of a session, whatever its owner, and return it. Raises StoreError."""
    while True:
        generation = owner_of(store, session)[0] + 1
        try:
            claim(store, session, generation, owner)
            return generation
        except (AlreadyStored, Fenced):
            continue  # another claimant was faster


def forget(store: SlabStore, session: str) -> None:
    """Delete all blobs of a session, manifests first. Raises StoreError."""
    check_session(session)
    for part in ('manifests', 'states', 'slabs', 'claims'):
        store.delete(store.list(f'{session}/{part}').result()).result()


def _each(function: Callable[..., Result], groups: Sequence[tuple], slabs: int) -> list[Result]:
    """Return what ``function(*group)`` returns for each layer group of so many slabs, or raise the first exception, once all
    have ended. They run in parallel, those of few slabs also in this thread."""
    if slabs > _FEW:
        promises = [_hashing.submit(function, *group) for group in groups]
    else:
        promises = [Promise() for _ in groups]
        todo = deque(zip(promises, groups))
        # This thread is awake already; helpers that have slept begin later.
        helpers = [_urgent.submit(_work, function, todo) for _ in groups[1:]]
        _work(function, todo)
        for helper in helpers:
            helper.cancel()
    wait(promises)
    return [promise.result() for promise in promises]


def _work(function: Callable[..., Result], todo: deque[tuple[Promise[Result], tuple]]) -> None:
    """Call a function for layer groups until none is left; other threads take from the same ones."""
    while True:
        try:
            promise, group = todo.popleft()
        except IndexError:
            return
        try:
            promise.set_result(function(*group))
        except BaseException as error:  # the promise must always be fulfilled
            promise.set_exception(error)


def _claim(session: str, generation: int) -> str:
    return f'{session}/claims/{generation:08d}'


def _digest(key: str) -> str:
    found = _DIGEST.fullmatch(key.rpartition('/')[2])
    if not found:
        raise Corrupt(f'{key[:200]!r} does not end in a SHA-256')
    return found[1]


def _decoded(blob: memoryview, key: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    return decode(blob, key, _digest(key), _intact.has(blob, _digest(key)))


def _use(row: np.ndarray, uses: np.ndarray) -> bytes:
    return row.tobytes() + uses.tobytes()


def _uses(row: np.ndarray, use: bytes) -> np.ndarray:
    return np.frombuffer(use, np.int64)[len(row):]
