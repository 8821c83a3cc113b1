"""Other programs that want the processor: one busy loop per core, for as long as a ``with`` block runs."""
from __future__ import annotations

import os
import subprocess
import sys
from types import TracebackType

# Ends with its parent even when that is killed: a benchmark must not leave busy loops behind.
_BURN = '''
import os, sys
parent = int(sys.argv[1])
while os.getppid() == parent:
    for _ in range(100_000):
        pass
'''


class CpuLoad:
    """Keeps every core that this process may use busy from another process."""

    def __init__(self, processes: int | None = None) -> None:
        self._count = processes or len(os.sched_getaffinity(0))
        self._processes: list[subprocess.Popen] = []

    def __enter__(self) -> CpuLoad:
        # -I -S: no site packages, so that no start-up hook of theirs runs in a loop that needs none
        command = [sys.executable, '-I', '-S', '-c', _BURN, str(os.getpid())]
        self._processes = [subprocess.Popen(command) for _ in range(self._count)]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
