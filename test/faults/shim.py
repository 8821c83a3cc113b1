"""Faults of the C library in one process: its wall clock jumps, its fsync fails (shim.c, by LD_PRELOAD)."""

import functools
import mmap
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path


@functools.cache
def _library() -> Path:
    folder = Path(tempfile.mkdtemp(prefix='faults_shim_'))
    source = Path(__file__).with_name('shim.c')
    subprocess.run(['gcc', '-shared', '-fPIC', '-O2', '-o', str(folder / 'shim.so'), str(source), '-ldl'], check=True)
    return folder / 'shim.so'


def no_compiler() -> str:
    """Return why there can be no shim; '' where there can."""
    return '' if shutil.which('gcc') else 'gcc is not installed'


class Shim:
    """The faults of one process, which is started with ``environment``."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(16))
        with path.open('r+b') as file:
            self._memory = mmap.mmap(file.fileno(), 16)
        self.environment = {'LD_PRELOAD': str(_library()), 'FAULT_SHIM': str(path)}

    def clear(self) -> None:
        """Have no fault."""
        self.set_wall_clock(0.0)
        self.fail_fsync(False)

    def set_wall_clock(self, offset: float) -> None:
        """Have the process's wall clock differ by so much [s]; its steady clock stays."""
        self._memory[0:8] = struct.pack('=q', round(offset * 1e9))

    def fail_fsync(self, fails: bool = True) -> None:
        """Have every fsync of the process fail with EIO."""
        self._memory[8:16] = struct.pack('=q', int(fails))

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()
