"""The process of one described node: starts it, activates a lifecycle node, respawns it, ends it."""
from __future__ import annotations

import functools
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from collections.abc import Callable, Mapping

from worldmodel_ros import dds_security
from worldmodel_ros.bringup.defaults import ACTIVATION_TIMEOUT
from worldmodel_ros.bringup.description import NodeDescription
from worldmodel_ros.bringup.shared_memory import owned_segments, remove_segments
from worldmodel_ros.exit_codes import BAD_CONFIGURATION
from worldmodel_ros.paths import find_executable

_log = logging.getLogger(__name__)

_AGAIN = 1.0              # s, at least, between two attempts to start a process that the system could not start
_PROGRESS_PERIOD = 30.0  # s, between two reports that something is still waited for

# So that the nodes shut down cleanly however the supervisor ends. (In util-linux since 2.33; without it, the nodes outlive a
# killed supervisor.)
_DIE_WITH_PARENT = ['setpriv', '--pdeathsig', 'INT', '--'] if shutil.which('setpriv') else []
# A shell makes a background command ignore SIGINT, and a node would inherit that until it installs its own handler. (Without
# this option, a node that is stopped while it starts is killed after the grace time.)
_HEED_INTERRUPT = '--default-signal=INT'
# SIGINT stays pending until the process unblocks it; otherwise one during interpreter start-up would print a traceback.
HOLD_INTERRUPT = '--block-signal=INT'


@functools.cache
def signal_prefix(option: str) -> list[str]:
    """Return the prefix that starts a command with that option of ``env``; empty before coreutils 8.31."""
    prefix = ['env', option]
    try:
        works = subprocess.run([*prefix, 'true'], stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        works = False
    return prefix if works else []


def activation_command(node: str, timeout: float) -> list[str]:
    """
    Return the command that activates the lifecycle node of that full name within ``timeout`` seconds; if DDS security is
    requested, from the enclave ``operator`` of the node's namespace.
    """
    enclave = ['--enclave', f'{node.rpartition("/")[0]}/operator'] if dds_security.is_asked_for(os.environ) else []
    return [sys.executable, '-m', 'worldmodel_ros.nodes.common.lifecycle_client', node, 'active', '--timeout', str(timeout),
            *enclave]


class NodeProcess:
    """
    The process of one node, over all its runs.

    ``name`` is the node's full name, ``log_file`` has the output of all runs, and ``exit_codes`` the code of each finished
    run, oldest first (-N: ended by signal N). After a run that ends with BAD_CONFIGURATION there is no respawn, whatever the
    description says.
    """

    def __init__(self, node: NodeDescription, namespace: str, environment: Mapping[str, str],
                 log_directory: Path, activation_timeout: float = ACTIVATION_TIMEOUT) -> None:
        self.name = node.full_name(namespace)
        self.log_file = log_directory / (self.name.strip('/').replace('/', '.') + '.log')
        self.exit_codes: list[int] = []
        self.required, self.grace = node.required, node.grace
        self._node = node
        self._command = [sys.executable, str(find_executable(node.package, node.executable)),
                         *node.command_line(namespace)]
        self._environment = dict(environment)
        self._activation_timeout = activation_timeout
        self._lock = threading.Lock()  # for starting and signalling
        self._stopping = threading.Event()
        self._changed = threading.Condition()  # of ``ready`` and ``failure``
        self._ready = False
        self._failure = ''
        self._child: subprocess.Popen | None = None
        self._watcher: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the current run; None if there is none."""
        child = self._child
        return child.pid if child is not None and child.poll() is None else None

    @property
    def failure(self) -> str:
        """Why the process has ended for good, or its lifecycle node could not be activated; '' if neither."""
        return self._failure

    def start(self) -> None:
        """Start the process, and activate a lifecycle node once it answers; no-op while it runs."""
        with self._lock:
            if self._watcher is not None and self._watcher.is_alive():
                return
            self._stopping.clear()
            self._report(ready=False)
            spawned = threading.Event()
            self._watcher = threading.Thread(target=self._watch, args=(spawned,), name=f'watch {self.name}',
                                             daemon=True)
            self._watcher.start()
            spawned.wait()

    def wait_ready(self, timeout: float, progress: Callable[[str], None] = lambda text: None) -> None:
        """
        Wait until the process runs and, if it is a lifecycle node, is active.

        :param progress: called from time to time with a message while waiting.
        :raises RuntimeError: if it fails or takes longer, with the end of its log.
        """
        began = time.monotonic()
        with self._changed:
            while (left := began + timeout - time.monotonic()) > 0:
                if self._changed.wait_for(lambda: self._ready or self._failure, min(_PROGRESS_PERIOD, left)):
                    break
                progress(f'{self.name} is not active yet after {time.monotonic() - began:.0f} s. The first start of a '
                         f'model on a machine can take minutes. Its log: {self.log_file}')
            if self._ready:
                return
            problem = self._failure or f'not ready after {timeout:.0f} s'
        raise RuntimeError(f'{self.name}: {problem}. The end of {self.log_file}:\n{self._log_tail()}')

    def stop(self, grace: float) -> None:
        """Interrupt the process and wait for its end; kill it after ``grace`` seconds."""
        with self._lock:
            self._stopping.set()
            self._signal(signal.SIGINT)
            watcher = self._watcher
        if watcher is None:
            return
        watcher.join(grace)
        if watcher.is_alive():
            _log.error('%s did not end within %.1f s of SIGINT: killing it', self.name, grace)
            self.kill()
            watcher.join()

    def kill(self) -> None:
        """Kill the process by SIGKILL; it comes back if it is to respawn."""
        with self._lock:
            if self.pid is None:
                return
            _kill(self._child)
            self._report(ready=False)  # from here on wait_ready waits for the next run

    def _signal(self, number: int) -> None:
        if self.pid is not None:
            self._child.send_signal(number)

    def _popen(self, command: list[str]) -> subprocess.Popen:
        self.log_file.parent.mkdir(parents=True, exist_ok=True)  # somebody may have tidied up
        with self.log_file.open('ab') as log:
            # In a new session, so that Ctrl-C reaches only the supervisor, which stops the nodes in order.
            return subprocess.Popen(
                [*signal_prefix(_HEED_INTERRUPT), *_DIE_WITH_PARENT, *command], env=self._environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def _watch(self, spawned: threading.Event) -> None:
        # Start processes in this thread: for pdeathsig, the kernel takes the end of the starting thread for that of the parent.
        try:
            started = self._spawn()
        finally:
            spawned.set()
        if started and self._stopping.is_set():
            # Ctrl-C has ended ``start``, and ``stop`` may have come before there was a process to interrupt.
            self._signal(signal.SIGINT)
        while started:
            code = self._supervise_run()
            self._report(ready=False)
            self.exit_codes.append(code)
            if self._stopping.is_set():
                return
            refused = code == BAD_CONFIGURATION
            if refused:
                _log.error('%s refuses its configuration (exit code %d) and is not started again. The end of %s:\n%s',
                           self.name, code, self.log_file, self._log_tail())
            elif code or not self.required:
                _log.warning('%s ended with exit code %d, see %s', self.name, code, self.log_file)
            if refused or not self._node.respawn:
                self._report(ready=False, failure='refuses its configuration' if refused
                             else f'ended with exit code {code}')
                return
            started, delay = False, self._node.respawn_delay
            while not started:
                if self._stopping.wait(delay):
                    return
                with self._lock:
                    if self._stopping.is_set():
                        return
                    started, delay = self._spawn(), max(delay, _AGAIN)

    def _spawn(self) -> bool:
        """Start the process; return False, and report why, if the system cannot."""
        try:
            self._child = self._popen(self._command)
            return True
        except OSError as error:  # out of processes or memory, or the log cannot be written
            _log.error('%s cannot be started: %s', self.name, error)
            self._report(ready=False, failure=f'cannot be started: {error}')
            return False

    def _supervise_run(self) -> int:
        child = self._child
        if not self._node.lifecycle:
            self._report(ready=True)
            return child.wait()
        # A separate process rather than a client here: this one stays free of ROS, and a new participant cannot confuse the
        # services of a killed run with those of the current one.
        try:
            client = self._popen(activation_command(self.name, self._activation_timeout))
        except OSError as error:
            _log.error('%s cannot be brought to active: %s', self.name, error)
            _kill(child)  # it is started again
            return child.returncode
        watcher = threading.Thread(target=self._watch_activation, args=(child, client), daemon=True)
        watcher.start()
        code = child.wait()
        _kill(client)
        watcher.join()
        return code

    def _watch_activation(self, child: subprocess.Popen, client: subprocess.Popen) -> None:
        code = client.wait()
        if child.poll() is not None or self._stopping.is_set():
            return
        if code == 0:
            self._report(ready=True)
        else:
            _log.error('%s could not be brought to active, see %s', self.name, self.log_file)
            self._report(ready=False, failure='could not be brought to active')

    def _report(self, ready: bool, failure: str = '') -> None:
        with self._changed:
            self._ready, self._failure = ready, failure
            self._changed.notify_all()

    def _log_tail(self, lines: int = 15) -> str:
        text = self.log_file.read_text(errors='replace') if self.log_file.is_file() else ''
        return '\n'.join(text.splitlines()[-lines:])


def _kill(child: subprocess.Popen) -> None:
    """Kill a process, wait for its end, and remove its shared-memory segments."""
    segments = owned_segments(child.pid)
    child.kill()
    child.wait()
    remove_segments(segments)
