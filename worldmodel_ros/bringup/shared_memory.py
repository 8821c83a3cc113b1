"""Removes the shared-memory segments that a killed process of Fast DDS leaves behind."""
import fcntl
import os
import re
from pathlib import Path

# A participant keeps, for each of its segments, an exclusive lock on a file of this name. The identity is
# random and never used again; ports (fastrtps_port<number>) are taken over by the next participant and must
# stay.
_LOCK = re.compile(r'/dev/shm/fastrtps_[0-9a-f]{16}_el')


def owned_segments(pid: int) -> list[Path]:
    """Return the lock files of the segments that a running process owns; none if it has gone."""
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
    """Remove those segments whose owner has died, known by its lock being free, and return how many."""
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
