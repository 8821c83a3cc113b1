"""
Runs a target in a process of its own, which may die of an input, and judges it: crashes, hangs, memory.

A target of bytes is fed by atheris (coverage-guided) where it is installed, else by the mutations alone; one of states
is a state machine of hypothesis.
"""
from __future__ import annotations

import json
import mmap
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import tracemalloc
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random

from . import mutate

MIB = 2 ** 20
MAX_INPUT = 4 * MIB
PATIENCE = 60.0        # s of a processor for one input, or for one run of a state machine; more is a hang
_STANDSTILL = 600.0    # s in which there is no other input, on a machine that may be busy with others
GROWTH = 64.0          # MiB that a target may grow by from its first tenth to its end
_ADDRESSES = 8 * 2 ** 30  # bytes of address space, beyond which an allocation fails
_RESTARTS = 20         # of a process that an input has killed
_STATE = struct.Struct('<QQQQ')  # inputs, accepted, peak of one input [bytes], length of the input that is running
_BATCH = 200           # runs of a state machine by one seed
_BLOCK = 1000          # inputs whose allocations are counted in a row


@dataclass(frozen=True)
class Bytes:
    """
    A target that takes bytes.

    ``run`` returns whether they were accepted, and lets any exception out that is not documented. ``seeds`` are made by the
    project's own encoders. An input of n bytes may take ``factor`` * n + ``constant`` bytes at a time: of allocations that
    Python knows, or, if ``resident``, of memory that is really used, that of native libraries too.
    """

    seeds: Callable[[], list[bytes]]
    run: Callable[[bytes], bool]
    inputs: int
    mutate: mutate.Mutation = mutate.havoc
    factor: float = 4.0
    constant: int = 64 * 1024
    resident: bool = False
    measured: int = 1  # allocations of one input of so many: to count them takes longer than a small target


@dataclass(frozen=True)
class States:
    """A target that is a state machine of hypothesis; ``inputs`` counts its runs."""

    machine: type
    inputs: int
    steps: int = 20


class TooMuchMemory(AssertionError):
    """An input took more memory than its size allows."""


class State:
    """What a process tells its parent: how far it is, and the input that it may die of. Shared memory in a file."""

    def __init__(self, path: Path, create: bool = False) -> None:
        if create:
            with path.open('wb') as file:
                file.truncate(_STATE.size + MAX_INPUT)
        with path.open('r+b') as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.inputs, self.accepted, self.peak, _ = _STATE.unpack_from(self._map)

    def running(self, data: bytes) -> None:
        """Note an input before it is run."""
        self._map[_STATE.size:_STATE.size + len(data)] = data
        self.write(len(data))

    def write(self, length: int = 0) -> None:
        """Note the numbers."""
        _STATE.pack_into(self._map, 0, self.inputs, self.accepted, self.peak, length)

    def read(self) -> tuple[int, int, int, bytes]:
        """Return inputs, accepted, peak, and the input that is running."""
        inputs, accepted, peak, length = _STATE.unpack_from(self._map)
        return inputs, accepted, peak, self._map[_STATE.size:_STATE.size + length]


class _Allocated:
    """Allocations of a share of the inputs, in blocks: to begin and end counting has a cost, and leaves some bytes."""

    def __init__(self, every: int) -> None:
        self._every, self._count = every, 0

    def reset(self) -> None:
        if self._count % (_BLOCK * self._every) == 0:
            tracemalloc.start()
        elif self._count % (_BLOCK * self._every) == _BLOCK:
            tracemalloc.stop()
        self._count += 1
        if tracemalloc.is_tracing():
            tracemalloc.reset_peak()
            self._before, _ = tracemalloc.get_traced_memory()

    def taken(self) -> int:
        return tracemalloc.get_traced_memory()[1] - self._before if tracemalloc.is_tracing() else 0

    def close(self) -> None:
        tracemalloc.stop()


class _Resident:
    def close(self) -> None:
        pass

    def reset(self) -> None:
        Path('/proc/self/clear_refs').write_text('5')  # the peak, to what there is now
        self._before = resident() * MIB

    def taken(self) -> int:
        line, = [line for line in Path('/proc/self/status').read_text().splitlines() if line.startswith('VmHWM')]
        return max(0, int(line.split()[1]) * 1024 - int(self._before))


class Runner:
    """Feeds inputs of bytes to a target; keeps the first input of each kind of crash in ``folder``."""

    def __init__(self, target: Bytes, state: State, folder: Path) -> None:
        self._target, self._state, self._folder = target, state, folder
        self.crashes: Counter[str] = Counter()
        self._memory = _Resident() if target.resident else _Allocated(target.measured)

    def __call__(self, data: bytes) -> None:
        """Run one input."""
        data = data[:MAX_INPUT]
        target, state = self._target, self._state
        state.running(data)
        self._memory.reset()
        try:
            state.accepted += bool(target.run(data))
            taken = self._memory.taken()
            state.peak = max(state.peak, taken)
            if taken > target.factor * len(data) + target.constant:
                raise TooMuchMemory(f'{len(data)} bytes made the target take {taken}')
        except Exception as error:
            self._keep(data, error)
        state.inputs += 1
        state.write()

    def close(self) -> None:
        """Measure no more."""
        self._memory.close()

    def _keep(self, data: bytes, error: Exception) -> None:
        kind = kind_of(error)
        self.crashes[kind] += 1
        if self.crashes[kind] == 1:
            keep(self._folder, kind, data, ''.join(traceback.format_exception(error)))


def kind_of(error: BaseException) -> str:
    """Return a name for all errors of a type from one place in the project."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if 'worldmodel_ros' in Path(f.filename).parts] or frames
    return f'{type(error).__name__}-{Path(own[-1].filename).stem}-{own[-1].lineno}'


def keep(folder: Path, kind: str, data: bytes, text: str) -> None:
    """Write a crash's input and its story into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f'{kind}.input').write_bytes(data)
    (folder / f'{kind}.txt').write_text(text)


def resident() -> float:
    """Return the memory of this process [MiB]."""
    pages = int(Path('/proc/self/statm').read_text().split()[1])
    return pages * resource.getpagesize() / MIB


def inputs_of(target: Bytes, seed: int) -> Callable[[], bytes]:
    """Return a source of inputs: each seed as it is, then damaged ones; an accepted one of a run is no seed."""
    random, corpus = Random(seed), target.seeds()
    first = list(corpus)

    def following() -> bytes:
        if first:
            return first.pop()
        return target.mutate(corpus[int(random.random() * len(corpus))], random, corpus)
    return following


def try_some(target: Bytes, inputs: int, folder: Path) -> Counter[str]:
    """Run a few inputs in this process, always the same ones; return what crashed."""
    following = inputs_of(target, seed=0)
    target.run(target.seeds()[0])  # what is imported and set up at the first time is no input's
    runner = Runner(target, State(folder / 'state', create=True), folder)
    try:
        for _ in range(inputs):
            runner(following())
    finally:
        runner.close()
    return runner.crashes


# --- in the process of a target ---

class _Progress:
    """Ends a process after so many inputs or seconds; notes the memory after a tenth and at the end."""

    def __init__(self, inputs: int, seconds: float) -> None:
        self.inputs, self._end, self._tenth = inputs, time.monotonic() + seconds, max(1, inputs // 10)
        self._begun = time.monotonic()
        self.first: float | None = None

    def passed(self, inputs: int) -> bool:
        now = time.monotonic()
        if self.first is None and (inputs >= self._tenth or now - self._begun > 0.1 * (self._end - self._begun)):
            self.first = resident()
        return inputs >= self.inputs or now > self._end


# Whose branches guide atheris.
_GUIDES = ['worldmodel_ros.serving.transport', 'worldmodel_ros.serving.gateway', 'worldmodel_ros.evaluate',
           'worldmodel_ros.inputs', 'worldmodel_ros.cache', 'worldmodel_ros.engine.session_file',
           'worldmodel_ros.engine.what_if', 'worldmodel_ros.model', 'worldmodel_ros.nodes', 'worldmodel_ros.safety']


def child(load: Callable[[], Bytes | States], inputs: int | None, seconds: float, seed: int, folder: Path,
          guided: bool) -> None:
    """Run a target, told by its parent; leave ``result.json`` in the folder. Does not return."""
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESSES, _ADDRESSES))
    state = State(folder / 'state')
    if guided:
        import atheris
        with atheris.instrument_imports(include=_GUIDES, enable_loader_override=False):
            target = load()
    else:
        target = load()
    progress = _Progress(inputs or target.inputs, seconds)

    def finish() -> None:
        now = resident()
        (folder / 'result.json').write_text(json.dumps(
            {'rss': now, 'rss_growth': now - (now if progress.first is None else progress.first)}))
        sys.stdout.flush()
        os._exit(0)  # not by an exception, which libFuzzer would take for a crash

    if isinstance(target, States):
        _states(target, state, progress, seed, folder)
        finish()
    runner = Runner(target, state, folder)

    def one(data: bytes) -> None:
        runner(data)
        if progress.passed(state.inputs):
            finish()

    if not guided:
        following = inputs_of(target, seed)
        while True:
            one(following())
    corpus = target.seeds()
    (folder / 'corpus').mkdir(exist_ok=True)
    for number, data in enumerate(corpus):
        (folder / 'corpus' / str(number)).write_bytes(data)

    def mutated(data: bytes, size: int, seed: int) -> bytes:
        random = Random(seed)
        choice = random.random()
        if choice < 0.3:
            return atheris.Mutate(data, size)
        return target.mutate(random.choice(corpus) if choice < 0.4 else data, random, corpus)[:size]

    longest = min(MAX_INPUT, 2 * max(map(len, corpus)) + 4096)
    # Memory is bounded here, time by the parent; a signal is to kill the process, for the parent to see.
    off = [f'-handle_{signal}=0' for signal in ('segv', 'abrt', 'bus', 'ill', 'fpe')]
    atheris.Setup([sys.argv[0], f'-seed={seed}', f'-max_len={longest}', '-len_control=0', '-rss_limit_mb=0',
                   '-malloc_limit_mb=0', '-timeout=1000000', '-verbosity=0', *off, str(folder / 'corpus')],
                  one, custom_mutator=mutated)
    atheris.Fuzz()
    raise RuntimeError('libFuzzer ended by itself')


def _states(target: States, state: State, progress: _Progress, seed: int, folder: Path) -> None:
    from hypothesis import HealthCheck, Phase, seed as seeded, settings
    from hypothesis.stateful import run_state_machine_as_test

    class Counted(target.machine):
        def __init__(self) -> None:
            super().__init__()
            state.inputs += 1
            state.running(b'run %d of the seeds from %d' % (state.inputs, seed))

    # Not shrunk: a story of a few steps is short enough.
    chosen = settings(max_examples=min(_BATCH, progress.inputs), stateful_step_count=target.steps, deadline=None, database=None,
                      suppress_health_check=list(HealthCheck), print_blob=False, phases=(Phase.generate,))
    while not progress.passed(state.inputs):
        before, seed = state.inputs, seed + 1
        try:
            run_state_machine_as_test(seeded(seed)(Counted), settings=chosen)
        except Exception as error:  # of which hypothesis says how to come to it
            keep(folder, kind_of(error), str(seed).encode(), ''.join(traceback.format_exception(error)))
        state.accepted += state.inputs - before
        state.write()


# --- the parent ---

def has_atheris() -> bool:
    """Whether inputs of bytes can be guided by what they reach."""
    return find_spec('atheris') is not None


def fuzz(name: str, script: Path, inputs: int | None, seconds: float, seed: int, out: Path, guided: bool) -> dict:
    """
    Run a target by ``script``, which hands ``--child`` on to ``child``; return its row of the result.

    What it crashes of is kept in ``out``/name.
    """
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shared = State(folder / 'state', create=True)
    begun, growth, rss = time.monotonic(), 0.0, 0.0
    for attempt in range(_RESTARTS):
        left = seconds - (time.monotonic() - begun)
        command = [sys.executable, str(script), '--child', name, '--seconds', str(left),
                   '--seed', str(seed + 1000 * attempt), '--folder', str(folder), *([f'--inputs={inputs}'] if inputs else []),
                   *(['--guided'] if guided else [])]
        with tempfile.TemporaryFile() as log:
            code = _watch(subprocess.Popen(command, stdout=log, stderr=log), shared)
            log.seek(0)
            said = log.read()[-10_000:].decode(errors='replace')
        result = folder / 'result.json'
        if code == 0 and result.exists():
            told = json.loads(result.read_text())
            growth, rss = told['rss_growth'], told['rss']
            break
        how = 'hang' if code is None else signal.Signals(-code).name if code < 0 else f'exit-{code}'
        done, *_, data = shared.read()
        keep(folder, f'{how}-{attempt}', data, f'after {done} inputs\n{said}')
        if (code is not None and code > 0) or left < 0:
            break  # it cannot run at all
        result.unlink(missing_ok=True)
    done, accepted, peak, _ = shared.read()
    if growth > GROWTH:
        keep(folder, 'memory-grows', b'', f'by {growth} MiB')
    kinds = sorted(path.stem for path in folder.glob('*.txt'))
    (folder / 'state').unlink()
    shutil.rmtree(folder / 'corpus', ignore_errors=True)
    (folder / 'result.json').unlink(missing_ok=True)
    return {'target': name, 'inputs': done, 'accepted': accepted, 'crashes': len(kinds), 'rss_growth': round(growth, 1),
            'rss': round(rss, 1), 'peak_of_one_input': peak, 'seconds': round(time.monotonic() - begun, 1),
            'kinds': kinds}


def _watch(process: subprocess.Popen, shared: State) -> int | None:
    """Return the exit code of a process, None for one that hung and was killed."""
    seen, since, used = -1, 0.0, 0.0
    while True:
        try:
            return process.wait(0.2)
        except subprocess.TimeoutExpired:
            pass
        except BaseException:
            process.kill()
            process.wait()
            raise
        now, done, cpu = time.monotonic(), shared.read()[0], _processor_time(process.pid)
        if done != seen:
            seen, since, used = done, now, cpu
        elif cpu - used > PATIENCE or now - since > _STANDSTILL:
            process.kill()
            process.wait()
            return None


def _processor_time(pid: int) -> float:
    """Return the time that a process has used [s]."""
    try:
        after_name = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
    except OSError:  # it has just ended
        return 0.0
    return sum(map(int, after_name[11:13])) / os.sysconf('SC_CLK_TCK')
