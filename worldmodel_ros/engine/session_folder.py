"""The one folder that sessions are saved to and loaded from, by plain names that may come from untrusted peers."""
from __future__ import annotations

import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

SUFFIX = '.safetensors'
LONGEST = 100                 # characters of a name
MAX_FILES, MAX_MB = 32, 4096  # of a folder, by default
_NAME = re.compile(rf'[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST - len(SUFFIX) - 1}}}{re.escape(SUFFIX)}')
_PART = '.part'
_ABANDONED = 600.0            # s, after which the writer of an unfinished file is taken to be gone
_MB = 10**6

Result = TypeVar('Result')


class SessionFileError(ValueError):
    """A session that cannot be saved or loaded; the text says why and what to do. Nothing was changed."""


def default_folder() -> Path:
    """``worldmodel_sessions`` in $ROS_HOME or ~/.ros."""
    return Path(os.environ.get('ROS_HOME') or Path.home() / '.ros') / 'worldmodel_sessions'


def check_name(name: str) -> None:
    """Raise SessionFileError unless ``name`` is a plain file name of a session."""
    if not _NAME.fullmatch(name):
        shown = name if len(name) <= LONGEST else f'{name[:LONGEST]}...'
        raise SessionFileError(
            f'{shown!r} is no name of a session: give a file name without a folder, at most {LONGEST} characters of '
            f'a-z, A-Z, 0-9, ".", "_" and "-", which begins with a letter or a digit and ends in {SUFFIX}; where the '
            'file lies is decided by session_directory')


@dataclass(frozen=True)
class SessionFolder:
    """A folder with at most ``max_files`` sessions of ``max_mb`` MB (10^6 bytes) together; both limits are checked when one
    is saved. The folder is created when it is needed.

    Files are opened relative to the open folder and links are not followed, so nothing outside of it is read or written.
    Thread-safe.
    """

    path: Path
    max_files: int = MAX_FILES
    max_mb: float = MAX_MB

    def __post_init__(self) -> None:
        """Raise ValueError for limits that make no sense."""
        if self.max_files < 1 or not 0.0 < self.max_mb < math.inf:
            raise ValueError(f'{self.max_files} sessions of {self.max_mb} MB: at least one, and more than 0 MB')

    def save(self, name: str, nbytes: int, write: Callable[[BinaryIO], None]) -> int:
        """Write a file of at most ``nbytes`` with ``write``, atomically and durably, also across a power failure; return
        its size in bytes. Raises SessionFileError."""
        check_name(name)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SessionFileError(f'session_directory cannot be made: {error}') from error
        with self._opened() as folder:
            self._require_room(folder, name, nbytes)
            part = f'.{name}.{os.getpid()}.{time.monotonic_ns()}{_PART}'
            try:
                return _write(folder, part, name, write)
            except OSError as error:
                raise SessionFileError(f'{name} cannot be written: {error}; the former one, if there was any, is as '
                                       'it was') from error
            finally:
                with suppress(OSError):
                    os.unlink(part, dir_fd=folder)

    def load(self, name: str, read: Callable[[BinaryIO, int], Result]) -> Result:
        """Return what ``read`` makes of the open file and its size in bytes. Raises SessionFileError, and what ``read``
        raises."""
        check_name(name)
        with self._opened() as folder:
            try:
                # Non-blocking, as opening a pipe would wait for a writer.
                descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            except FileNotFoundError:
                raise SessionFileError(f'there is no session {name}: give the name that ~/save_session answered'
                                       ) from None
            except OSError as error:
                raise SessionFileError(f'{name} cannot be opened ({error.strerror}); links are not followed') from error
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                os.close(descriptor)
                raise SessionFileError(f'{name} is no file')
            with os.fdopen(descriptor, 'rb') as file:
                return read(file, about.st_size)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise SessionFileError('session_directory does not exist yet: save a session first') from None
        except OSError as error:
            raise SessionFileError(f'session_directory cannot be opened: {error.strerror}') from error
        try:
            yield folder
        finally:
            os.close(folder)

    def _require_room(self, folder: int, name: str, nbytes: int) -> None:
        """Raise SessionFileError if saving ``nbytes`` under ``name`` would exceed a limit."""
        count = used = 0
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.endswith((SUFFIX, _PART)):
                    continue
                try:
                    about = os.stat(entry.name, dir_fd=folder, follow_symlinks=False)
                except FileNotFoundError:  # another process has removed it
                    continue
                if entry.name == name:
                    if not stat.S_ISREG(about.st_mode):
                        raise SessionFileError(f'{name} is there, and is no file but a link or a folder: remove it, or '
                                               'choose another name')
                    continue
                if entry.name.endswith(_PART) and time.time() - about.st_mtime > _ABANDONED:
                    with suppress(OSError):
                        os.unlink(entry.name, dir_fd=folder)
                    continue
                count += entry.name.endswith(SUFFIX)
                used += about.st_size
        if count >= self.max_files:
            raise SessionFileError(f'session_directory has {count} sessions, and session_files_max is '
                                   f'{self.max_files}: remove some, or save under the name of one that is there')
        if used + nbytes > self.max_mb * _MB:
            raise SessionFileError(
                f'the session has up to {nbytes / _MB:.1f} MB, others in session_directory have {used / _MB:.1f} MB, '
                f'and session_disk_mb is {self.max_mb:g}: remove some')


def _write(folder: int, part: str, name: str, write: Callable[[BinaryIO], None]) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(part, flags, 0o644, dir_fd=folder), 'wb') as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
        nbytes = os.fstat(file.fileno()).st_size
    os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
    os.fsync(folder)
    return nbytes
