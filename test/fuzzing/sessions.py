"""
Sessions and their files: frames are observed, sessions saved, loaded, loaded from damaged files, and given up.

A session is at any time what it was told last: by the frames it has seen, or by the file that it took over. What fails
changes nothing; names lead nowhere else; and every page is given back.
"""
from __future__ import annotations

import os
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from worldmodel_ros.cache import snapshot
from worldmodel_ros.engine.session_file import Capture, read
from worldmodel_ros.engine.session_folder import SessionFileError, SessionFolder

from . import session_files
from .harness import States
from .session_files import FINGERPRINT, SPEC, observe

_NAMES = ('a.safetensors', 'b.safetensors', 'c.safetensors')
_HOSTILE = ('../x.safetensors', '/etc/passwd', '~/x.safetensors', '.safetensors', '', 'a', 'a/b.safetensors',
            'link.safetensors',
            'folder.safetensors', 'pipe.safetensors', 'x' * 300 + '.safetensors', 'a\0.safetensors', '..', 'ä.safetensors')
_KEPT = 3  # files that the folder may have


class SessionMachine(RuleBasedStateMachine):
    """Two sessions of one engine, and a folder of files."""

    def __init__(self) -> None:
        super().__init__()
        self.temporary = TemporaryDirectory(prefix='worldmodel_fuzz_', dir='/dev/shm' if Path('/dev/shm').is_dir() else None)
        self.root = root = Path(self.temporary.name)
        (root / 'in' / 'folder.safetensors').mkdir(parents=True)
        (root / 'outside').write_bytes(b'untouched')
        (root / 'in' / 'link.safetensors').symlink_to('../outside')
        os.mkfifo(root / 'in' / 'pipe.safetensors')
        self.folder = SessionFolder(root / 'in', max_files=_KEPT + 3)
        self.values = np.random.default_rng(0)
        self.memory = session_files.memory(sessions=2)
        self.caches = [self.memory.open() for _ in range(2)]
        self.states: list[dict | None] = [None, None]
        self.expected = [self.contents(which) for which in range(2)]  # what each cache holds
        self.files: dict[str, tuple[dict, dict]] = {}  # of each good file: state, and what the cache held

    @rule(which=st.integers(0, 1), count=st.integers(1, 9))
    def frames_come(self, which, count):
        for _ in range(count):
            state = self.states[which]
            time = 0 if state is None else int(state['time'][0]) + 1
            self.states[which] = observe(self.memory, self.caches[which], time, self.values)
        self.expected[which] = self.contents(which)

    @precondition(lambda self: any(self.states))
    @rule(which=st.integers(0, 1), name=st.sampled_from(_NAMES))
    def a_session_is_saved(self, which, name):
        if self.states[which] is None:
            return
        capture = self.captured(which)
        self.folder.save(name, capture.nbytes, capture.write)
        self.files[name] = dict(self.states[which]), self.expected[which]

    @precondition(lambda self: any(self.states))
    @rule(which=st.integers(0, 1), name=st.sampled_from(_NAMES), after=st.integers(0, 3))
    def a_disk_fails_while_it_is_saved(self, which, name, after):
        if self.states[which] is None:
            return
        capture = self.captured(which)

        def write(file):
            for _ in range(after):
                file.write(b'x' * 1000)
            raise OSError(28, 'No space left on device')
        try:
            self.folder.save(name, capture.nbytes, write)
        except SessionFileError:
            return
        raise AssertionError('a disk that is full was not noticed')

    @rule(which=st.integers(0, 1), name=st.sampled_from(_NAMES), give_up=st.integers(0, 3))
    def a_session_is_loaded(self, which, name, give_up):
        try:
            loaded = self.folder.load(name, lambda file, size: read(file, size, SPEC, FINGERPRINT, self.memory))
        except SessionFileError:
            assert name not in self.files, 'a good file was refused'
            return
        assert name in self.files, 'a damaged file was taken for a good one'
        pieces = loaded.pieces()
        if give_up == 3:  # nobody waits for it any more
            next(pieces, None)
            loaded.close()
            for _ in pieces:
                pass
            return
        for _ in pieces:
            pass
        cache = loaded.take()
        self.caches[which].adopt(cache)
        cache.close()
        self.states[which], self.expected[which] = dict(loaded.state), self.files[name][1]
        for key, array in self.files[name][0].items():
            np.testing.assert_array_equal(self.states[which][key], array)

    @precondition(lambda self: self.files)
    @rule(name=st.sampled_from(_NAMES), seed=st.integers(0, 2 ** 32))
    def a_file_is_damaged(self, name, seed):
        path = self.folder.path / name
        if name not in self.files:
            return
        data = path.read_bytes()
        random = Random(seed)
        broken = bytearray(data)
        broken[random.randrange(len(broken))] ^= 1 << random.getrandbits(3)
        path.write_bytes(broken if random.random() < 0.7 else broken[:random.randrange(len(broken))])
        del self.files[name]

    @precondition(lambda self: any(self.states))
    @rule(which=st.integers(0, 1), name=st.sampled_from(_HOSTILE), load=st.booleans())
    def a_hostile_name(self, which, name, load):
        if self.states[which] is None:
            return
        try:
            if load:
                self.folder.load(name, lambda file, size: file.read())
            else:
                capture = self.captured(which)
                self.folder.save(name, capture.nbytes, capture.write)
        except SessionFileError:
            return
        raise AssertionError(f'{name!r} was taken')

    @rule(which=st.integers(0, 1))
    def a_session_ends(self, which):
        self.caches[which].close()
        self.caches[which], self.states[which] = self.memory.open(), None
        self.expected[which] = self.contents(which)

    @invariant()
    def sessions_are_what_they_were_told(self):
        for which in range(2):
            found = self.contents(which)
            assert found.keys() == self.expected[which].keys()
            for name, array in found.items():
                assert np.array_equal(array, self.expected[which][name])

    @invariant()
    def nothing_lies_outside_or_is_left(self):
        assert (self.root / 'outside').read_bytes() == b'untouched'
        assert sorted(os.listdir(self.root)) == ['in', 'outside']
        assert not [name for name in os.listdir(self.folder.path) if name.startswith('.')]

    def captured(self, which: int) -> Capture:
        capture = Capture(SPEC, lambda: FINGERPRINT, self.states[which], self.caches[which].fork())
        for _ in capture.pieces():
            pass
        return capture

    def contents(self, which: int) -> dict[str, np.ndarray]:
        return snapshot.save(self.caches[which])

    def teardown(self) -> None:
        self.temporary.cleanup()
        for cache in self.caches:
            cache.close()
        assert not any(session_files.used(self.memory)), 'pages were lost'


TARGET = States(SessionMachine, inputs=3000)
