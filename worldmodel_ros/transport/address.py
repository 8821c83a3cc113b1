"""Where the server's socket is, who may use it, and what a server that died leaves of it."""
from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
import tempfile
from pathlib import Path

AUTO = 'auto'
_NAME = 'engine.sock'
_LONGEST = 107  # bytes of a socket's path
_CREDENTIALS = struct.Struct('3i')  # pid, uid, gid
_BACKLOG = 64
_REASONS = {FileNotFoundError: 'there is no socket', ConnectionRefusedError: 'nobody listens',
            TimeoutError: 'it accepts no connections', BlockingIOError: 'it accepts no connections'}


class AddressError(OSError):
    """A socket that cannot be used; the text says why and what to do."""


def socket_path(server: str = AUTO) -> Path:
    """
    Return the path that `server` means: 'auto' is this user's own, in XDG_RUNTIME_DIR or else under /tmp.

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


class ListeningSocket:
    """The server's end: only this user can connect, and only one server has it at a time."""

    def __init__(self, path: Path) -> None:
        """Claim the path. Raises AddressError where the folder is not safe, or another server has it."""
        self.path = path
        _private_folder(path.parent)
        # The lock dies with its process, the socket's file does not: who has the lock may remove the file.
        self._lock = os.open(path.with_name(path.name + '.lock'), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise AddressError(f'another server has {path}: stop it, or give another --socket') from error
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)

    def listen(self) -> None:
        """Let front ends connect."""
        self.path.unlink(missing_ok=True)
        before = os.umask(0o177)  # mode 0600 from the start: the folder may be one that others can enter
        try:
            self._socket.bind(str(self.path))
        finally:
            os.umask(before)
        self._socket.listen(_BACKLOG)

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> tuple[socket.socket, int] | None:
        """Return a connection of this user's and its process id; None where it has gone or is another user's."""
        try:
            connected, _ = self._socket.accept()
        except OSError:
            return None
        try:
            pid, uid = _peer(connected)
        except OSError:
            uid = -1
        if uid != os.getuid():
            connected.close()
            return None
        return connected, pid

    def close(self) -> None:
        """Remove the socket and let go of the path."""
        self._socket.close()
        self.path.unlink(missing_ok=True)
        os.close(self._lock)


def connect(path: Path, timeout: float) -> socket.socket:
    """Return a connection to this user's server. Raises AddressError where there is none, with the reason."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connected.settimeout(timeout)  # of a server that hangs, with a full backlog
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
    """Process and user at the other end, as the kernel knows them."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return pid, uid


def _private_folder(folder: Path) -> None:
    """Make a folder where there is none, for this user alone; refuse one in which others could put a socket."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = os.lstat(folder)
    sticky_or_own = about.st_uid == os.getuid() or about.st_mode & stat.S_ISVTX
    if not stat.S_ISDIR(about.st_mode) or not sticky_or_own:
        raise AddressError(f'{folder} is not a folder of this user: give another --socket')
