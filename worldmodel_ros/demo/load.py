"""CPU load by other processes: one busy loop per core, for the duration of a ``with`` block."""
from __future__ import annotations

import os
import subprocess
import sys
from types import TracebackType

# Ends with its parent even if that is killed, so that no busy loops are left behind.
_BURN = '''
import os, sys
parent = int(sys.argv[1])
while os.getppid() == parent:
    for _ in range(100_000):
        pass
'''


class CpuLoad:
    """Keeps every core that this process may use busy, from other processes."""

    def __init__(self, processes: int | None = None) -> None:
        self._count = processes or len(os.sched_getaffinity(0))
        self._processes: list[subprocess.Popen] = []

    def __enter__(self) -> CpuLoad:
        # -I -S: no site packages, so that their start-up hooks do not run
        command = [sys.executable, '-I', '-S', '-c', _BURN, str(os.getpid())]
        self._processes = [subprocess.Popen(command) for _ in range(self._count)]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
