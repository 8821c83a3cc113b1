"""Slabs as files in a folder: on NVMe, or in shared memory for the processes of one machine."""
from __future__ import annotations

import os
import stat
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future as Promise
from contextlib import suppress
from pathlib import Path

from .protocol import AlreadyStored, Blob, NotStored, StoreError, Threads, check_key

_PARTS = '.parts'    # subfolder of unfinished files; no key begins with a dot
_MOST_PARTS = 1000   # parts of a blob written at a time; Linux takes 1024
_ABANDONED = 600.0   # s, after which the writer of such a file is taken to be gone


class FileStore:
    """A ``SlabStore`` in a folder of this user, which any number of processes may share.

    A blob is written to a temporary file and renamed. ``durable``: it is also flushed to the disk before its promise is
    fulfilled, and so is its folder; useless for a folder in memory (tmpfs).
    """

    def __init__(self, path: Path, durable: bool = True, threads: int = 8):
        """Raise StoreError if the folder cannot be made."""
        self.path, self._durable = Path(path), durable
        self._parts = self.path / _PARTS
        try:
            self._parts.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f'the store {path} cannot be made: {error}') from error
        self._remove_abandoned()
        self._threads = Threads('files', threads)

    def put(self, items: Sequence[tuple[str, Sequence[Blob]]], create: bool = False) -> Promise[None]:
        for key, _ in items:
            check_key(key)
        folders: set[Path] = set()
        lock = threading.Lock()

        def put(key: str, parts: Sequence[Blob]) -> None:
            made = self._put(key, parts, create)
            with lock:
                folders.update(made)

        def flush() -> None:
            try:
                for folder in folders if self._durable else ():
                    _sync(folder)
            except OSError as error:
                raise StoreError(f'{items[0][0]} cannot be flushed to the disk: {error}') from error
        return self._threads.each(put, items, flush)

    def get(self, keys: Sequence[str]) -> Promise[list[memoryview]]:
        return self._threads.each(self._get, [(key,) for key in keys])

    def delete(self, keys: Sequence[str]) -> Promise[None]:
        return self._threads.each(self._delete, [(key,) for key in keys])

    def list(self, prefix: str) -> Promise[list[str]]:
        check_key(prefix)
        return self._threads.submit(self._list, prefix)

    def head(self, keys: Sequence[str]) -> Promise[list[int | None]]:
        return self._threads.each(self._head, [(key,) for key in keys])

    def held(self, keys: Sequence[str]) -> dict[str, memoryview]:
        return {}

    def close(self) -> None:
        self._threads.close()

    def _put(self, key: str, parts: Sequence[Blob], create: bool) -> list[Path]:
        """Write a blob; return the folders that have changed."""
        place, part = self.path / key, self._parts / uuid.uuid4().hex
        if create and place.exists():
            raise AlreadyStored(f'{key} is there already')
        try:
            with open(part, 'xb', buffering=0, opener=_private) as file:
                _write(file.fileno(), parts)
                if self._durable:
                    os.fsync(file.fileno())
            return self._move(part, place, create)
        except FileExistsError:
            raise AlreadyStored(f'{key} is there already') from None
        except OSError as error:
            raise StoreError(f'{key} cannot be written: {error}') from error
        finally:
            with suppress(OSError):
                os.unlink(part)

    def _move(self, part: Path, place: Path, create: bool) -> list[Path]:
        made = [place.parent]
        for _ in range(100):  # an empty folder may be removed concurrently
            try:
                (os.link if create else os.replace)(part, place)
                return made
            except FileNotFoundError:
                above = place.parent
                made = [above]
                while not above.exists() and above != self.path:
                    above = above.parent
                    made.append(above)
                place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        raise StoreError(f'{place.parent} is removed again and again')

    def _get(self, key: str) -> memoryview:
        check_key(key)
        try:
            with open(self.path / key, 'rb', buffering=0, opener=_no_links) as file:
                about = os.fstat(file.fileno())
                if not stat.S_ISREG(about.st_mode):
                    raise NotStored(f'{key} is no blob')
                data = bytearray(about.st_size)
                view, at = memoryview(data), 0
                while at < len(data):
                    count = file.readinto(view[at:])
                    if not count:
                        raise StoreError(f'{key} is cut off')
                    at += count
                return view
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            if not self._parts.is_dir():
                raise StoreError(f'the store {self.path} is not there, or is another one') from None
            raise NotStored(f'{key} is not there') from None
        except OSError as error:
            raise StoreError(f'{key} cannot be read: {error}') from error

    def _delete(self, key: str) -> None:
        check_key(key)
        place = self.path / key
        try:
            with suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(place)
        except OSError as error:
            raise StoreError(f'{key} cannot be deleted: {error}') from error
        with suppress(OSError):  # a folder that is not empty stays
            while place.parent != self.path:
                place = place.parent
                os.rmdir(place)

    def _list(self, prefix: str) -> list[str]:
        found = []
        for folder, _, files in os.walk(self.path / prefix):
            relative = Path(folder).relative_to(self.path)
            found += [(relative / name).as_posix() for name in files]
        return sorted(found)

    def _head(self, key: str) -> int | None:
        check_key(key)
        try:
            about = os.stat(self.path / key, follow_symlinks=False)
        except OSError:
            return None
        return about.st_size if stat.S_ISREG(about.st_mode) else None

    def _remove_abandoned(self) -> None:
        for part in self._parts.iterdir():
            with suppress(OSError):
                if time.time() - part.stat().st_mtime > _ABANDONED:
                    part.unlink()


def in_memory(path: Path) -> bool:
    """Return whether a folder, which need not exist yet, is in memory (tmpfs), where flushing is useless."""
    path = Path(path).absolute()
    while not path.exists():
        path = path.parent
    device = os.stat(path).st_dev
    with open('/proc/self/mountinfo') as mounts:
        for line in mounts:
            fields = line.split()
            major, minor = map(int, fields[2].split(':'))
            if os.makedev(major, minor) == device:
                return fields[fields.index('-') + 1] in ('tmpfs', 'ramfs')
    return False


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _write(descriptor: int, parts: Sequence[Blob]) -> None:
    """Write all parts, mostly in one call: after each one, a thread of a busy process waits for the GIL."""
    left = [memoryview(part) for part in parts]
    while left:
        count = os.writev(descriptor, left[:_MOST_PARTS])
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]


def _no_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)


def _sync(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # it became empty and was removed
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
