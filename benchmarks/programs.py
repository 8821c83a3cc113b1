"""Programs started by a benchmark, each with a limit of seconds, an environment and a log."""
from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
# For programs that use GPUs: not every machine has multicast over NVLink.
ENVIRONMENT = {'NCCL_NVLS_ENABLE': '0', 'TORCH_SYMM_MEM_DISABLE_MULTICAST': '1', 'OMP_NUM_THREADS': '1',
               'PYTHONUNBUFFERED': '1'}


class Program:
    """A Python command, in a session of its own: ``arguments`` follow the interpreter. ``gpus``: those that it sees, all
    if none is named; ``environment``: additions to this process's; ``cold``: with empty compilation caches."""

    def __init__(self, name: str, limit: float, *arguments: str, environment: Mapping[str, str], cold: bool = False,
                 gpus: Sequence[int] = ()):
        self.name, self._limit, self._cold, self._told = name, limit, cold, False
        self._command = [sys.executable, *arguments]
        self._environment = {**os.environ, **environment}
        if gpus:  # indices among those visible to this process, which may not be all of the machine's
            seen = [each.strip() for each in os.environ.get('CUDA_VISIBLE_DEVICES', '').split(',') if each.strip()]
            self._environment['CUDA_VISIBLE_DEVICES'] = ','.join(seen[gpu] if seen else str(gpu) for gpu in gpus)

    def begin(self, folder: Path) -> None:
        """Start it, with its output in a log in the folder."""
        print(f'{self.name} ...', file=sys.stderr, flush=True)
        self._cache = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        caches = {'TRITON_CACHE_DIR': f'{self._cache.name}/triton', 'TORCHINDUCTOR_CACHE_DIR': f'{self._cache.name}/inductor'} \
            if self._cold else {}
        self._start = time.monotonic()
        with (folder / f'{self.name}.log').open('w') as log:
            self._child = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                                           env={**self._environment, **caches})

    @property
    def over(self) -> bool:
        """Return whether it has ended, or its limit is reached."""
        return self._child.poll() is not None or time.monotonic() > self._start + self._limit

    def tell(self) -> None:
        """Ask it, once, to save and end, as Ctrl-C would."""
        if not self._told:
            self._told = True
            self._child.send_signal(signal.SIGINT)

    def end(self, left: float) -> dict:
        """Wait for its end, at most to its limit and for ``left`` s, then kill what is left of it. Return its outcome for the
        record; without an exit status if time was up."""
        try:
            code = self._child.wait(max(1.0, min(self._start + self._limit - time.monotonic(), left)))
        except subprocess.TimeoutExpired:
            code = None
        self.kill()
        command = shlex.join(['python', *map(_from_here, self._command[1:])])
        found = {'program': self.name, 'command': command, 'cold': self._cold,
                 'seconds': round(time.monotonic() - self._start, 1), 'exit_status': code}
        print(json.dumps(found), file=sys.stderr, flush=True)
        return found

    def kill(self) -> None:
        """Kill it and what it has started."""
        try:
            os.killpg(self._child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._child.wait()
        self._cache.cleanup()


def _from_here(argument: str) -> str:
    """Return the argument as one would give it in the repository."""
    return str(argument).removeprefix(f'{HERE.parent}{os.sep}')


def script(name: str, *arguments: str) -> tuple[str, ...]:
    """Return arguments of the interpreter for a benchmark of this folder."""
    return str(HERE / name), *arguments
