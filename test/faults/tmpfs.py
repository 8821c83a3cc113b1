"""A small disk that can be full."""

import os
import shutil
import subprocess
from pathlib import Path

_FILLER = 'filler'


class SmallDisk:
    """A folder that is a tmpfs of its own where that is permitted (``is_small``), and else just a folder."""

    def __init__(self, path: Path, mebibytes: int) -> None:
        self.path = path
        path.mkdir(parents=True)
        command = ['mount', '-t', 'tmpfs', '-o', f'size={mebibytes}m,mode=700', 'tmpfs', str(path)]
        self.is_small = _works(command)

    def fill(self) -> None:
        """Leave no block free."""
        filler = (self.path / _FILLER).open('ab', buffering=0)
        with filler:
            try:
                while True:
                    filler.write(bytes(64 * 1024))
            except OSError:
                pass

    def empty(self) -> None:
        """Give the room back."""
        (self.path / _FILLER).unlink(missing_ok=True)

    def clear(self) -> None:
        """Leave nothing on it."""
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def close(self) -> None:
        """Unmount it."""
        if self.is_small:
            _works(['umount', '--lazy', str(self.path)])
            self.is_small = False


def cannot_mount() -> str:
    """Return why there can be no small disk here; '' where there can."""
    if os.geteuid():
        return 'a small disk is mounted by root alone'
    probe = Path(f'/tmp/faults-mount-{os.getpid()}')
    disk = SmallDisk(probe, 1)
    works = disk.is_small
    disk.close()
    probe.rmdir()
    return '' if works else 'mount is not permitted here'


def _works(command: list[str]) -> bool:
    try:
        return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False
