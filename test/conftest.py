"""
Gives the tests a private ROS 2: an unused domain, on this machine only, and no display.

Also provides what tools/run_tests.py (``make test``) needs: the phase of each test, and a report, written line by line, so
that it survives a run that dies.
"""
import faulthandler
import gc
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from functools import cache
from itertools import zip_longest
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PHASE, REPORT, ONLY, FILES = (
    os.environ.get(f'WORLDMODEL_TEST_{name}', '') for name in ('PHASE', 'REPORT', 'ONLY', 'FILES'))

# s, after which a test's process is ended if pytest-timeout (`timeout` of pyproject.toml) could not interrupt it.
HUNG = float(os.environ.get('WORLDMODEL_HUNG_TEST_S', '360'))

BUILD_BYTES = 2 * 2**30  # of free memory for a build, which needs an eighth of it

USUAL_WAIT = 1.5  # s, roughly for a test of the waiting phase that does not declare its time

_state_directory = _stderr = _file = None


def _unused_domain() -> int:
    """
    Return a domain id in which no process of this machine takes part; each worker has its own ids.

    The ids are above Linux's ephemeral ports, since processes of tests use those below (bringup/environment.py). The last one,
    and those in which a process was killed, are avoided if possible: their shared-memory ports stay, with mutexes.
    """
    left = {int(re.search(r'\d+', file.name)[0]) for file in Path('/dev/shm').glob('fastrtps_port[0-9]*')}
    workers = int(os.environ.get('PYTEST_XDIST_WORKER_COUNT', '1'))
    mine = range(215 + int(os.environ.get('PYTEST_XDIST_WORKER', 'gw0').removeprefix('gw')) % workers, 233, workers)
    candidates = random.SystemRandom().sample(mine, len(mine))
    last = os.environ.get('ROS_DOMAIN_ID')
    candidates.sort(key=lambda domain: (any(port in left for port in range(7400 + 250 * domain, 7650 + 250 * domain)),
                                        str(domain) == last))
    for domain in candidates:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                # The first participant of a domain uses this port for discovery.
                probe.bind(('', 7400 + 250 * domain + 10))
                return domain
            except OSError:
                continue
    return candidates[0]


def pytest_configure(config):
    """Set the environment before any test module is imported; the processes that tests start inherit it."""
    global _state_directory, _stderr
    if _state_directory is not None:
        return
    _stderr = os.dup(2)  # before pytest captures it
    if PHASE and hasattr(config, 'workerinput'):
        _stderr = open(_stacks(config.workerinput['workerid']), 'w')  # for the table at the end of all phases
    if REPORT and not hasattr(config, 'workerinput'):
        config.pluginmanager.register(Reporter(config))
    if hasattr(config, 'workerinput') or not config.getoption('numprocesses', None):
        os.environ.pop('WORLDMODEL_TEST_REPORT', None)  # a pytest started by a test is no phase, and must not report as one
    if config.pluginmanager.hasplugin('hypothesispytest') and not config.getoption('--hypothesis-profile') and (
            hasattr(config, 'workerinput') or not config.getoption('numprocesses', None)):
        # Before any test is decorated. On a busy core, an example that stalls for 0.2 s is no failure.
        from hypothesis import HealthCheck, settings
        settings.register_profile('busy cores', deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile('busy cores')
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A background process of a shell without job control ignores SIGINT, and so would all that tests start and interrupt.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _state_directory = Path(tempfile.mkdtemp(prefix='worldmodel_ros_test_'))
    os.environ.update({
        'ROS_DOMAIN_ID': str(_unused_domain()),
        'ROS_AUTOMATIC_DISCOVERY_RANGE': 'LOCALHOST',
        'ROS_HOME': str(_state_directory / 'ros'),
        'ROS_LOG_DIR': str(_state_directory / 'ros' / 'log'),
        'FASTRTPS_DEFAULT_PROFILES_FILE': str(ROOT / 'config' / 'fastdds_large_images.xml'),
        'MPLBACKEND': 'agg',
        # Results that are slow to make and shared by phases and processes: tools/run_tests.py has a folder for all of them.
        'WORLDMODEL_TEST_SHARED': os.environ.get('WORLDMODEL_TEST_SHARED') or str(_state_directory / 'shared'),
        # Triton decides on import: its kernels are interpreted on the CPU, unless only a GPU's tests run.
        'TRITON_INTERPRET': str(int(not _for_gpu(config))),
    })
    os.environ.setdefault('MUJOCO_GL', 'osmesa')
    # The ROS 2 wheels do not set their location. A sourced distribution sets its own, and may lack sys.prefix.
    prefixes = [p for p in os.environ.get('AMENT_PREFIX_PATH', '').split(os.pathsep) if p]
    if sys.prefix not in prefixes and (Path(sys.prefix) / 'share' / 'ament_index').is_dir():
        os.environ['AMENT_PREFIX_PATH'] = os.pathsep.join([sys.prefix, *prefixes])


def _for_gpu(config) -> bool:
    return config.option.markexpr.strip() == 'gpu'


PHASES = ('parallel', 'waiting', 'real time')


def phase_of(item) -> str:
    """Return which of PHASES a test belongs to, by what may run concurrently."""
    def marked(name: str) -> bool:
        return item.get_closest_marker(name) is not None

    if marked('realtime'):
        return 'real time'
    if marked('waiting'):
        return 'waiting'
    return 'real time' if marked('ros') and not marked('build') and not marked('untimed') else 'parallel'


def pytest_ignore_collect(collection_path):
    """Skip files in which the first phase found nothing for this one, since importing all takes a quarter of a minute."""
    if FILES and collection_path.suffix == '.py' and str(collection_path) not in json.loads(FILES):
        return True
    return None


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector):
    """
    Start each worker of a phase at a different file when collecting.

    A fresh clone has no bytecode, and compiling all files takes one process 7 s; this way the workers share that work.
    """
    report = (yield).get_result()
    if PHASE and 'PYTEST_XDIST_WORKER' in os.environ and report.passed and len(report.result) > 1:
        number, count = int(os.environ['PYTEST_XDIST_WORKER'].removeprefix('gw')), int(os.environ['PYTEST_XDIST_WORKER_COUNT'])
        if collector.path == Path(__file__).parent:
            first = len(report.result) * number // count
            report.result = report.result[first:] + report.result[:first]


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config, items):
    """Keep a phase's tests; of those that run in parallel, files with slow ones go first."""
    for_gpu = [item for item in items if item.get_closest_marker('gpu')]
    if for_gpu and (reason := _gpu_reason(config)):
        for item in for_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))
    if not PHASE:
        return
    items.sort(key=lambda item: item.path)  # in an order that all workers agree on, see pytest_make_collect_report
    only = json.loads(ONLY) if ONLY else None  # tests to run once more
    files = {phase: sorted({str(item.path) for item in items if phase_of(item) == phase}) for phase in PHASES}
    kept = [item for item in items if (phase_of(item) == PHASE if only is None else item.nodeid in only)]
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    if PHASE == 'parallel':
        # A slow file must not be the last one; and files that wait for processes alternate with those that compute, or all
        # workers would first wait and later compute.
        slow, waits = ({item.path for item in kept if item.get_closest_marker(mark)} for mark in ('slow', 'untimed'))
        paths = dict.fromkeys(item.path for item in kept)
        long = [path for path in paths if path in slow]
        rest = [path for path in paths if path not in slow]
        turns = zip_longest([path for path in rest if path in waits], [path for path in rest if path not in waits])
        order = {path: k for k, path in enumerate([*long, *(path for pair in turns for path in pair)])}
        kept.sort(key=lambda item: order[item.path])
    if PHASE == 'waiting':
        # The slowest files first, or the last one would keep one worker busy for long.
        seconds = Counter()
        for item in kept:
            marker = item.get_closest_marker('waiting')
            seconds[item.path] += (marker and marker.kwargs.get('seconds')) or USUAL_WAIT
        kept.sort(key=lambda item: (-seconds[item.path], item.path))
    items[:] = kept
    _tell(config, event='selected', count=len(kept), files=files)


def pytest_sessionstart():
    faulthandler.enable(_stderr)  # after pytest has


@pytest.hookimpl(hookwrapper=True)
def pytest_collection():
    """Disable garbage collection, since collected tests stay; it would take a sixth of the time."""
    gc.disable()
    yield
    gc.enable()


def pytest_collection_finish(session):
    """Exempt collected tests from garbage collection, which would pause this process for a quarter of a second each time."""
    gc.freeze()
    interpreter = sys.modules.get('triton.runtime.interpreter')
    if all(hasattr(interpreter, name) for name in ('_patch_lang', '_LangPatchScope')):  # not part of Triton's interface
        _patch_language_once(interpreter)
    if hasattr(interpreter, '_get_np_dtype'):
        _know_types(interpreter)


def _patch_language_once(interpreter):
    """
    Have Triton's interpreter patch its language once, and not in each call of a kernel's functions.

    A kernel's end undoes only patches that the kernel itself made, and calls of its functions leave them in place; all
    kernels of this process are interpreted.
    """
    patch, language, done = interpreter._patch_lang, interpreter.tl, set()

    def patch_once(function):
        kinds = frozenset(kind for kind in (language, language.core) if any(
            value is kind for value in function.__globals__.values()))
        if not kinds or kinds not in done:
            patch(function)
            done.add(kinds)
        return interpreter._LangPatchScope()
    interpreter._patch_lang = patch_once


def _know_types(interpreter):
    """Cache the interpreter's mapping of Triton types to NumPy types, which otherwise builds a table in each of 100,000s of
    calls."""
    language, known = interpreter.tl, cache(interpreter._get_np_dtype)

    def numpy_type(kind):
        element = kind.element_ty if isinstance(kind, language.block_type) else kind
        return known.__wrapped__(kind) if isinstance(element, language.pointer_type) else known(element)
    interpreter._get_np_dtype = numpy_type


def _gpu_reason(config) -> str:
    """Return why tests for a GPU do not run here, or ''."""
    import torch
    if not torch.cuda.is_available():
        return 'needs a CUDA GPU'
    return '' if _for_gpu(config) else 'Triton interprets its kernels in this run: make test-gpu runs what is for a GPU'


def _stacks(worker: str) -> Path:
    """Return the file to which a worker of a phase dumps its threads' stacks when it dies."""
    return Path(os.environ['WORLDMODEL_TEST_SHARED']) / f'{PHASE}.{worker}.stacks'


def _tell(config, **event):
    # With xdist every worker gets the hooks of its own tests, and the controller those of all.
    if REPORT and (event['event'] == 'selected' or not hasattr(config, 'workerinput')):
        with open(REPORT, 'a') as file:
            file.write(json.dumps(event) + '\n')


def _reason(report) -> str:
    """Return why a test, or a file of tests, was skipped or has failed, in one line; '' if it passed."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix('Skipped: ')
    crash = getattr(report.longrepr, 'reprcrash', None)
    return ' '.join((crash.message if crash else str(report.longrepr or '')).split())


class Reporter:
    """Writes the outcome of each test into the report."""

    def __init__(self, config):
        self._config = config
        self._watch, self._begun, self._stacks = None, {}, ''

    def pytest_sessionstart(self):
        if PHASE in ('waiting', 'real time'):
            from scenarios.stalls import watching
            self._watch = watching()

    def pytest_runtest_logstart(self, nodeid):
        self._begun[nodeid] = time.monotonic()
        _tell(self._config, event='start', test=nodeid)

    def pytest_runtest_logfinish(self, nodeid):
        _tell(self._config, event='end', test=nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        stacks = _stacks(node.gateway.id)
        if error and stacks.exists():  # it may have died before it began
            self._stacks = stacks.read_text()
            print(self._stacks, file=sys.stderr)

    def pytest_runtest_logreport(self, report):
        _tell(self._config, event='took', test=report.nodeid, seconds=report.duration)
        outcome = 'error' if report.failed and report.when != 'call' else report.outcome
        if outcome == 'passed' and report.when != 'call':
            return
        # A violated invariant is final (scenarios/stalls.py): such a test is never run again.
        final = report.failed and 'InvariantViolation' in str(report.longrepr)
        begun = self._begun.get(report.nodeid, 0.0)
        stall = self._watch.longest(begun, time.monotonic()) if report.failed and self._watch else 0.0
        _tell(self._config, event='outcome', test=report.nodeid, outcome=outcome, reason=_reason(report), final=final,
              stall=stall, stacks=self._stacks if report.when == '???' else '')  # what xdist has for one whose process ended
        for name, why in report.user_properties if report.when == 'call' else ():
            if name == 'played again':
                _tell(self._config, event='replay', test=report.nodeid, reason=why)

    def pytest_collectreport(self, report):
        if not report.passed:
            outcome = 'error' if report.failed else 'skipped'
            _tell(self._config, event='outcome', test=report.nodeid, outcome=outcome, reason=_reason(report))

    def pytest_sessionfinish(self, session):
        allowed = self._config.option.maxfail
        if allowed and session.testsfailed >= allowed:
            _tell(self._config, event='gave up')


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Record why the test was played again, in its process: xdist carries it from a worker to the report."""
    replays = getattr(sys.modules.get('scenarios.stalls'), 'REPLAYS', [])
    report = (yield).get_result()
    if call.when == 'call':
        report.user_properties += [('played again', replay.reason) for replay in replays]
        replays.clear()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """
    End the process of a hung test that no exception can reach, and dump each thread's stack.

    Each file has its own domain, since nodes killed by an earlier one count as alive there for another 20 s.
    """
    global _file
    if item.path != _file:
        _file = item.path
        os.environ['ROS_DOMAIN_ID'] = str(_unused_domain())
    faulthandler.dump_traceback_later(HUNG, exit=True, file=_stderr)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """
    Recover when a test process dies: the scheduler of xdist 3.8 may otherwise hang, or run the same test again.

    It reassigns files that the process had finished, which return no results, and gives the replacement process only
    one file, whose last test waits for a next one (xdist's issues 1327 and 1378).
    """
    if config.getvalue('dist') != 'loadfile':
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def remove_node(self, node):
            work = self.assigned_work[node]
            crashed = next((test for tests in work.values() for test, done in tests.items() if not done), None)
            for scope, tests in list(work.items()):
                if crashed in tests:
                    tests[crashed] = True
                if all(tests.values()):
                    del work[scope]
            super().remove_node(node)
            return crashed

        def schedule(self):
            super().schedule()
            for node in self.nodes:
                self._reschedule(node)

    return Scheduling(config, log)


def pytest_unconfigure(config):
    if _state_directory is not None:
        shutil.rmtree(_state_directory, ignore_errors=True)


@pytest.fixture
def build_folder(tmp_path, monkeypatch):
    """
    A folder for a build and its temporary files.

    In memory, if there is room and programs may run there: writing so many files to a disk took half as long as making them.
    """
    memory, folder = Path('/dev/shm'), tmp_path
    if memory.is_dir() and not os.statvfs(memory).f_flag & os.ST_NOEXEC and shutil.disk_usage(memory).free > BUILD_BYTES:
        folder = Path(tempfile.mkdtemp(prefix='worldmodel_ros_build_', dir=memory))
    (folder / 'tmp').mkdir()
    monkeypatch.setenv('TMPDIR', str(folder / 'tmp'))
    yield folder
    if folder != tmp_path:
        shutil.rmtree(folder)


@pytest.fixture(scope='module')
def one_thread():
    """Run PyTorch on one thread: sums have one order, and networks as small as the tests' gain nothing from a second one."""
    import torch
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope='module')
def tiny_world(tmp_path_factory):
    """Return the folder of an open world model, not to be written to; needs diffusers."""
    import open_world
    return open_world.write(tmp_path_factory.mktemp('worlds') / 'tiny_world')
