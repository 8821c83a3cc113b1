"""Runs one node as a process: signals, executor, exception containment and orderly shutdown; and its slow services."""

import gc
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future as Promise

import rclpy
from rclpy.executors import Executor, ExternalShutdownException, SingleThreadedExecutor
from rclpy.lifecycle import LifecycleNode
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions

from worldmodel_ros import dds_security, interrupts
from worldmodel_ros.clocks import wall_minus_steady
from worldmodel_ros.exit_codes import BAD_CONFIGURATION
from worldmodel_ros.nodes.common.parameters import ParameterError

EXECUTOR_VARIABLE = 'WORLDMODEL_EXECUTOR'
EXECUTORS = ('events', 'single')
_LOG_INTERVAL = 5.0  # s, between two reports of the same exception
_GUARD_PERIOD = 0.02  # s, between two checks of the wall clock
_SET_BACK = 5_000_000  # ns; a slewed clock differs by less between two checks
_POLL_PERIOD = 0.1  # s, upper bound for noticing a signal while no callback runs

_of_services: set[Executor] = set()  # executors of this process's ServiceThreads


class _Contained:
    """Logs uncaught exceptions of callbacks: each place at once, then at most every few seconds."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._reported: dict[str, float] = {}

    def report(self, error: Exception) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        place = f'{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}' if frames else 'unknown place'
        kind = f'{type(error).__name__} in {place}'
        refusals = getattr(self._node, 'refusals', None)
        if refusals is not None:
            refusals.count(f'exception: {kind}')
        now = time.monotonic()
        if now - self._reported.get(kind, -_LOG_INTERVAL) >= _LOG_INTERVAL:
            self._reported[kind] = now
            story = ''.join(traceback.format_exception(error))
            self._node.get_logger().error(f'a callback failed and was abandoned, the node goes on:\n{story}')


class _ClockGuard:
    """
    Detects, by the steady clock, that the machine's wall clock was set back; then sets ``set_back``, and wakes the executor and
    those of the services.

    The rclpy and rmw wheels are built for an old C library, which implements a timed wait as a wait until a wall-clock time. If
    the clock is set back by an hour, a wait in progress lasts for an hour: no timer runs, not even the gate's watchdog, and no
    signal is handled. Only a newly created executor is free of such waits in its threads; one without threads of its own, as
    that of services, only needs to be woken.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor, self.set_back, self._over = executor, False, False
        self._thread = threading.Thread(target=self._watch, name='clock guard', daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._over = True
        self._thread.join()

    def _watch(self) -> None:
        before = wall_minus_steady()
        while not self._over:
            time.sleep(_GUARD_PERIOD)
            now = wall_minus_steady()
            if now < before - _SET_BACK:
                self.set_back = True
                for executor in tuple(_of_services):
                    executor.wake()
            if self.set_back:  # until it is handled
                self.executor.wake()
            before = now


class ServiceThread:
    """
    Serves slow requests for a node, with a separate ``node``, executor and thread.

    rclpy has no deferred responses: on the owner's executor a request would hold up its messages.
    """

    def __init__(self, owner: Node, name: str, thread_name: str, prepare: Callable[[], object] = lambda: None) -> None:
        """``name``: of the node that has the services, in the namespace of ``owner``. ``prepare`` runs first in the thread."""
        # Without the global arguments: they would give it the owner's name.
        self.node = Node(name, namespace=owner.get_namespace(), context=owner.context, use_global_arguments=False,
                         enable_rosout=False, start_parameter_services=False)
        self._executor = SingleThreadedExecutor(context=owner.context)
        self._executor.add_node(self.node)
        _of_services.add(self._executor)
        self._prepare, self._prepared = prepare, Promise()
        self._errors = _Contained(owner)
        self._thread = threading.Thread(target=self._serve, name=thread_name, daemon=True)

    def start(self) -> None:
        """Start serving; return when ``prepare`` has run, or raise its exception."""
        self._thread.start()
        self._prepared.result()

    def stop(self) -> None:
        """Finish the request in progress and end."""
        _of_services.discard(self._executor)
        self._executor.shutdown()
        self._thread.join()
        self.node.destroy_node()

    def _serve(self) -> None:
        try:
            self._prepare()
        except Exception as error:
            self._prepared.set_exception(error)
            return
        self._prepared.set_result(None)
        while True:
            try:
                self._executor.spin()
                return
            except ExternalShutdownException:
                return
            except Exception as error:  # of one callback; the others must still be served
                self._errors.report(error)


def make_executor(kind: str | None = None) -> Executor:
    """
    Return the executor ``kind``, by default the one that the environment names, else 'events'.

    The events executor does not rebuild a wait set for each callback: a node with two fast timers takes a third of the
    processor time. Falls back to 'single' if this rclpy has no events executor. Raises ParameterError for an unknown kind.
    """
    kind = kind or os.environ.get(EXECUTOR_VARIABLE) or 'events'
    if kind not in EXECUTORS:
        raise ParameterError(
            f'unknown executor {kind!r}: set {EXECUTOR_VARIABLE} to one of: {", ".join(EXECUTORS)}')
    if kind == 'events':
        try:
            from rclpy.experimental.events_executor import EventsExecutor
        except ImportError:  # rclpy before 7.1.4
            return SingleThreadedExecutor()
        return EventsExecutor()
    return SingleThreadedExecutor()


def run(factory: Callable[[], Node], *, executor: str | None = None, args: list[str] | None = None) -> int:
    """
    Build a node and run it until SIGINT or SIGTERM; return the exit code of the process.

    The code is 0 after a signal, whenever it came; BAD_CONFIGURATION if a parameter is refused, or if the environment asks for
    DDS security and there is none; 1 if the node could not be built for another reason. An exception in a callback is logged
    and counted (in ``node.refusals``, if present), and the node goes on. At the end, while publishing is still possible, a
    lifecycle node makes its shutdown transition; of any other node, ``on_shutdown()`` is called, if it has one. Call this from
    the main thread, as the last action of a process: both signals are ignored afterwards.
    """
    node = None
    try:
        # rclpy's own handlers shut the context down at once, so that a final stop command could not be published.
        interrupts.raise_interrupted()
        _require_security(sys.argv if args is None else args)
        _init(args)
        node = factory()
        end = interrupts.End()
        # What exists now lives to the end. Traversing it in a later collection took the simulated robot 105 ms on a slow
        # machine, half a minute after its start, and made a command late.
        gc.collect()
        gc.freeze()
        _spin(node, make_executor(executor), end)
        return 0
    except interrupts.Interrupted:
        # Tearing down a half-built node, with rclpy's C++ objects, has ended in SIGSEGV.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    except ParameterError as error:
        print(f'cannot start: {error}', file=sys.stderr)
        return BAD_CONFIGURATION
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        # A terminal and a launcher both send SIGINT: the second may come while the interpreter shuts down, when Python
        # handlers are gone and the default one would turn a clean exit into a failure.
        interrupts.ignore()
        if node is not None:
            node.destroy_node()
        rclpy.try_shutdown()


def _init(arguments: list[str] | None) -> None:
    """Initialise rclpy; raise ParameterError if it cannot read an argument or a parameter file."""
    try:
        rclpy.init(args=arguments, signal_handler_options=SignalHandlerOptions.NO)
    except RuntimeError as error:
        if "Couldn't parse" not in str(error):  # another start may succeed
            raise
        raise ParameterError(re.sub(r', at /\S+?:\d+', '', str(error))) from error


def _require_security(arguments: list[str]) -> None:
    """Raise ParameterError if DDS security is requested but not available."""
    if dds_security.is_asked_for(os.environ):
        rclpy.get_rmw_implementation_identifier()  # loads it
        refusal = dds_security.refusal(arguments, os.environ, dds_security.loaded_library())
        if refusal:
            raise ParameterError(refusal)


def _spin(node: Node, executor: Executor, end: interrupts.End) -> None:
    contained = _Contained(node)
    guard = _ClockGuard(executor)
    executor.add_node(node)
    try:
        # One callback at a time, so that an exception ends neither the loop nor the callbacks queued behind it.
        while not end.asked and rclpy.ok():
            if guard.set_back:
                guard.executor = executor = _replaced(executor, node)
                guard.set_back = False
            try:
                executor.spin_once(timeout_sec=_POLL_PERIOD)
            except Exception as error:
                contained.report(error)
        if rclpy.ok():
            try:
                _say_goodbye(node)
            except Exception as error:
                contained.report(error)
    finally:
        guard.stop()
        executor.remove_node(node)
        executor.shutdown()


def _replaced(executor: Executor, node: Node) -> Executor:
    executor.remove_node(node)
    executor.shutdown()
    replacement = SingleThreadedExecutor() if isinstance(executor, SingleThreadedExecutor) else make_executor('events')
    replacement.add_node(node)
    node.get_logger().warning('the wall clock of this machine was set back: timers go on by the steady clock')
    return replacement


def _say_goodbye(node: Node) -> None:
    if isinstance(node, LifecycleNode):
        # Not on_shutdown(state) directly: the transition calls it and also records the state.
        node.trigger_shutdown()
    elif hasattr(node, 'on_shutdown'):
        node.on_shutdown()
