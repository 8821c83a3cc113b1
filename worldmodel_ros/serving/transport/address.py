"""The server's socket: its path, who may connect, and how the socket of a dead server is recognised."""
from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import socket
import stat
import struct
import tempfile
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

AUTO = 'auto'
_NAME = 'engine.sock'
_LONGEST = 107  # bytes of a socket's path
_CREDENTIALS = struct.Struct('3i')  # pid, uid, gid
_BACKLOG = 64
_REASONS = {FileNotFoundError: 'there is no socket', ConnectionRefusedError: 'no process listens',
            TimeoutError: 'it accepts no connections', BlockingIOError: 'it accepts no connections'}

_KINDS = ((stat.S_ISSOCK, ''), (stat.S_ISREG, 'a file'), (stat.S_ISDIR, 'a folder'), (stat.S_ISLNK, 'a symbolic link'))


class AddressError(OSError):
    """A socket that cannot be used; the text says why and what to do."""


def socket_path(server: str = AUTO) -> Path:
    """
    Return the socket path of ``server``: 'auto' is this user's own, in XDG_RUNTIME_DIR or else under /tmp.

    Raises AddressError for a path that is too long for a socket.
    """
    if server == AUTO:
        runtime = os.environ.get('XDG_RUNTIME_DIR')
        folder = Path(runtime) / 'worldmodel' if runtime else Path(tempfile.gettempdir()) / f'worldmodel-{os.getuid()}'
        path = folder / _NAME
    else:
        path = Path(server).expanduser().absolute()
    if len(os.fsencode(path)) > _LONGEST:
        raise AddressError(f'the path of the socket has {len(os.fsencode(path))} bytes, {_LONGEST} are allowed: {path}')
    return path


def is_loopback(host: str) -> bool:
    """Return whether an address or name is reachable from this machine only."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host or None, 0, flags=socket.AI_PASSIVE)}
    except socket.gaierror:
        return False
    return bool(found) and all(ipaddress.ip_address(each.partition('%')[0]).is_loopback for each in found)


def is_address_or_localhost(host: str) -> bool:
    """Return whether a Host header names an IP address or localhost. A web page whose own name resolves to this machine, so
    that it could read what is served here without a password (DNS rebinding), sends that name."""
    try:
        name = urlsplit(f'//{host}').hostname or ''
        return name == 'localhost' or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


class ListeningSocket:
    """
    The server's end: only this user can connect, and only one server has it at a time.

    The lock file next to it records which socket the lock's holder has made. This tells the socket of a killed server from
    one that another program has put there, or is about to listen at.
    """

    def __init__(self, path: Path) -> None:
        """
        Claim the path. Raises AddressError if the folder is not safe, another server has the path, or something is there
        that was not left by a server.
        """
        self.path = path
        self._made: tuple[int, int] | None = None  # device and inode of the socket's file
        _private_folder(path.parent)
        _refuse_foreign(path)  # before a file is made next to it
        lock = path.with_name(path.name + '.lock')
        try:
            self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise AddressError(f'{lock} cannot be opened ({error.strerror}): give another --socket') from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise AddressError(f'another server has {path}: stop it, or give another --socket') from error
        try:
            self._is_free()
        except AddressError:
            os.close(self._lock)
            raise
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._spare: int | None = _spare()

    def listen(self) -> None:
        """Let front ends connect. Raises AddressError if something foreign has appeared at the path."""
        if not self._is_free():
            self.path.unlink(missing_ok=True)
        before = os.umask(0o177)  # mode 0600 from the start: the folder may be one that others can enter
        try:
            self._socket.bind(str(self.path))
        except OSError as error:
            raise AddressError(f'{self.path} cannot be made ({error.strerror}): give another --socket') from error
        finally:
            os.umask(before)
        made = os.lstat(self.path)
        self._made = made.st_dev, made.st_ino
        os.truncate(self._lock, 0)
        os.pwrite(self._lock, _record(made), 0)
        self._socket.listen(_BACKLOG)

    def _is_free(self) -> bool:
        """Return True if nothing is at the path, False for a dead server's socket. Raises AddressError for all else."""
        if not _refuse_foreign(self.path):
            return True
        _refuse_listener(self.path)
        if os.pread(self._lock, 2 * len(_record(os.lstat(self.path))), 0) != _record(os.lstat(self.path)):
            raise AddressError(f'the socket {self.path} was made by no server of this package, and is left as it is: give '
                               'another --socket, or remove it if no process uses it')
        return False

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> tuple[socket.socket, int] | None:
        """Return a connection of this user and its process id; None if it has gone or is another user's, or if this process can
        open no more files: then it is closed, since the socket would be readable, and a selector return at once, for ever."""
        try:
            connected, _ = self._socket.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away()
            return None
        try:
            pid, uid = _peer(connected)
        except OSError:
            uid = -1
        if uid != os.getuid():
            connected.close()
            return None
        return connected, pid

    def _turn_away(self) -> None:
        self._close_spare()
        with suppress(OSError):  # another thread may take the place of what was closed; here, too: then the next time
            self._socket.accept()[0].close()
        with suppress(OSError):
            self._spare = _spare()

    def _close_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def close(self) -> None:
        """Remove the socket and release the path."""
        self._socket.close()
        self._close_spare()
        try:
            about = os.lstat(self.path)
            if self._made == (about.st_dev, about.st_ino):  # another file may have been put there
                self.path.unlink()
        except OSError:
            pass  # it is not there any more
        os.close(self._lock)


def _spare() -> int:
    """Return an open file that is closed to accept a connection where no more files can be opened."""
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def connect(path: Path, timeout: float) -> socket.socket:
    """Return a connection to this user's server. Raises AddressError with the reason if there is none."""
    try:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:  # too many files are open
        raise AddressError(f'no connection to {path} can be made: {error.strerror}') from error
    try:
        connected.settimeout(timeout)  # for a server that hangs, with a full backlog
        connected.connect(str(path))
        _, uid = _peer(connected)
        if uid != os.getuid():
            raise AddressError(f'the server at {path} runs as user {uid}, this process as {os.getuid()}')
    except OSError as error:
        connected.close()
        if isinstance(error, AddressError):
            raise
        reason = _REASONS.get(type(error), error.strerror or str(error))
        raise AddressError(f'no server at {path}: {reason}') from error
    return connected


def _peer(connected: socket.socket) -> tuple[int, int]:
    """Return the process and user at the other end, as reported by the kernel."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return pid, uid


def _refuse_foreign(path: Path) -> bool:
    """
    Return whether a socket of this user is at a path, False for nothing; raise AddressError for anything else.
    """
    try:
        about = os.lstat(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise AddressError(f'{path} cannot be looked at ({error.strerror}): give another --socket') from error
    kind = next((name for is_kind, name in _KINDS if is_kind(about.st_mode)), 'no socket')
    if kind:
        raise AddressError(f'{path} is {kind}, and is left as it is: give another --socket')
    if about.st_uid != os.getuid():
        raise AddressError(f'the socket {path} is of user {about.st_uid}, and is left as it is: give another --socket')
    return True


def _record(about: os.stat_result) -> bytes:
    """Return an identity that tells a socket from a later one at the same path."""
    return f'{about.st_dev} {about.st_ino} {about.st_mtime_ns}'.encode()


def _refuse_listener(path: Path) -> None:
    """Raise AddressError if a process listens at a path: only a socket that refuses connections is a dead server's."""
    for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except (ConnectionRefusedError, FileNotFoundError):
                return
            except OSError as error:
                if error.errno == errno.EPROTOTYPE:  # there is a listener of another kind
                    continue
        break
    raise AddressError(f'another process listens at {path}: stop it, or give another --socket')


def _private_folder(folder: Path) -> None:
    """Make a missing folder, for this user alone; refuse one in which others could replace a socket."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = os.lstat(folder)
    if not stat.S_ISDIR(about.st_mode) or about.st_uid not in (0, os.getuid()):
        raise AddressError(f'{folder} is not a folder of this user: give another --socket')
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not about.st_mode & stat.S_ISVTX:
        raise AddressError(f'other users may write to {folder}, and replace a socket there: give another --socket, or take '
                           'that right away (chmod go-w)')
