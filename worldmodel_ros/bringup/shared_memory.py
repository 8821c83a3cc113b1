"""Removes the shared-memory segments that a killed process of Fast DDS leaves behind."""
import fcntl
import os
import re
from pathlib import Path

# A participant holds an exclusive lock on a file of this name for each of its segments. The identity is random and never
# reused; ports (fastrtps_port<number>) are taken over by the next participant and must stay.
_LOCK = re.compile(r'/dev/shm/fastrtps_[0-9a-f]{16}_el')


def owned_segments(pid: int) -> list[Path]:
    """Return the lock files of the segments that a running process owns; none if it has ended."""
    owned = []
    try:
        descriptors = list(Path(f'/proc/{pid}/fd').iterdir())
    except OSError:
        return owned
    for descriptor in descriptors:
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if _LOCK.fullmatch(target):
            owned.append(Path(target))
    return owned


def remove_segments(locks: list[Path]) -> int:
    """Remove the segments whose owner has died, that is, whose lock is free; return their number."""
    removed = 0
    for lock in locks:
        try:
            with lock.open('rb') as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                lock.with_name(lock.name.removesuffix('_el')).unlink(missing_ok=True)
                lock.unlink(missing_ok=True)
        except OSError:
            continue
        removed += 1
    return removed
