"""
Slows this machine down for a while, to test the package on a slower one.

    python test/slow_host.py 1.7 -- make demo

A process on each core, with a higher real-time priority than everything measured, takes a share of every millisecond, so that
the rest is a core slower by the factor, for all programs alike. The machine recovers when the command ends,
or after --at-most seconds (then the command is interrupted, and the exit code is 124, as timeout's). It needs permission for
SCHED_FIFO, as root and after ``ulimit -r 99``.

Unlike on a slow machine, its share counts as real-time work, and Linux stops all real-time threads of a
core for 50 ms in each second in which they want more than 95 % of it (kernel.sched_rt_runtime_us; ``dmesg`` reports it once).
With a factor of 1.7 that happens once the nodes want 54 % of a core, and a stop or a command is then late by as much.

``python test/slow_host.py 1.7`` alone measures the matrix product by which the suite judges the machine's speed
(scenarios/speed.py), without and with it. On two cores of an AMD EPYC: 1.24 ms, and 2.18 to 2.21 with 1.7, which is 1.76 to
1.77 times as much, since every millisecond also costs two context switches; next to other programs, 1.44 ms and 2.6 to 2.9.
"""
from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from types import TracebackType

PERIOD = 0.001   # s; short, so that no core appears to stand still
PRIORITY = 45    # above the nodes (20 to 30), the observer (35), and the detector of a stalled machine (40)
_TIMED_OUT = 124
SLOWED = 'WORLDMODEL_SLOWED'  # in the command's environment: by how much its machine is slower

# Ends with its parent even if that is killed, and at a given time even if that is stopped.
_BURN = '''
import os, sys, time
parent, core, priority = (int(word) for word in sys.argv[1:4])
share, period, life = (float(word) for word in sys.argv[4:])
os.sched_setaffinity(0, {core})
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
print('slow', flush=True)
now = time.monotonic
end = now() + life
while os.getppid() == parent and now() < end:
    # On all cores at the same time: else a thread would flee from one core to the other.
    start = now() // period * period
    while now() < start + share * period:
        pass
    time.sleep(max(0.0, start + period - now()))
'''


class SlowHost:
    """
    Context manager that slows the cores of this process by a factor, for at most ``at_most`` seconds.

    :raises PermissionError: on entering, where SCHED_FIFO is not permitted.
    """

    def __init__(self, factor: float, at_most: float = 300.0) -> None:
        if not 1.0 < factor <= 10.0:
            raise ValueError(f'factor {factor}: must be above 1 and at most 10')
        self._options = [str(PRIORITY), str(1.0 - 1.0 / factor), str(PERIOD), str(at_most)]
        self._processes: list[subprocess.Popen] = []

    def __enter__(self) -> SlowHost:
        try:
            for core in sorted(os.sched_getaffinity(0)):
                command = [sys.executable, '-I', '-S', '-c', _BURN, str(os.getpid()), str(core), *self._options]
                self._processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
            if not all(process.stdout.readline() for process in self._processes):
                raise PermissionError('SCHED_FIFO is not permitted here: run as root, or allow it by `ulimit -r 99`')
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            process.stdout.close()
        self._processes.clear()


def run(factor: float, command: list[str], at_most: float) -> int:
    """Run a command on a machine slower by ``factor``, for ``at_most`` seconds; return its exit code."""
    with SlowHost(factor, at_most + 30.0), subprocess.Popen(command, env={**os.environ, SLOWED: str(factor)}) as child:
        # Ctrl-C reaches both; the command decides when it ends.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda number, frame: child.send_signal(number))
        try:
            return child.wait(at_most)
        except subprocess.TimeoutExpired:
            print(f'{" ".join(command)} has not ended within {at_most:g} s: interrupting it', file=sys.stderr)
            child.send_signal(signal.SIGINT)
            try:
                child.wait(30.0)
            except subprocess.TimeoutExpired:
                child.kill()
            return _TIMED_OUT


def measure(factor: float) -> None:
    """Print the duration of the suite's matrix product, without and with a machine slower by ``factor``."""
    from scenarios.speed import as_the_nodes_run, product_seconds
    with as_the_nodes_run():
        before = product_seconds()
        with SlowHost(factor, at_most=60.0):
            slower = product_seconds()
        after = product_seconds()
    usual = min(before, after)
    print(f'a product of two 384 x 384 float32 matrices by one thread: {usual * 1e3:.2f} ms, slowed {slower * 1e3:.2f} ms, '
          f'{slower / usual:.2f} times')


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog='slow_host', description='Run a command as on a slower machine.')
    parser.add_argument('factor', type=float, help='by which the machine is to be slower, such as 1.7')
    parser.add_argument('--at-most', type=float, default=300.0, metavar='S', help='seconds (default: %(default)s)')
    parser.epilog = 'After `--`: the command. Without one, the slowness is measured.'
    words = sys.argv[1:] if arguments is None else arguments
    end = words.index('--') if '--' in words else len(words)  # argparse itself would refuse options before it
    own, command = words[:end], words[end + 1:]
    options = parser.parse_args(own)
    try:
        if command:
            return run(options.factor, command, options.at_most)
        measure(options.factor)
        return 0
    except (PermissionError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == '__main__':
    sys.exit(main())
