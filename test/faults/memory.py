"""A process that has no more memory, by a control group: the kernel ends it, as it does on a machine without any left."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from rcl_interfaces.srv import SetParameters
from rclpy.parameter import Parameter

from faults.systems import Running
from scenarios.rig import MODEL, NODES, Rig
from worldmodel_ros.srv import WhatIf

_PATIENCE = 20.0  # s, until the process asks for memory that it does not have yet
_LARGE = 4_000_000
_V1 = Path('/sys/fs/cgroup/memory')
_V2 = Path('/sys/fs/cgroup')


def cannot_limit() -> str:
    """Return why no process can be limited here; '' where one can."""
    try:
        with _group():
            return ''
    except OSError as error:
        return f'control groups for memory cannot be used here: {error}'


def starve(pid: int, name: str, ask: Callable[[], object] = lambda: None) -> float:
    """Leave a process without memory that it does not have yet; return when the kernel ended it (steady, s). ``ask`` has it
    want some."""
    with _group() as (group, limit):
        (group / limit).write_text('65536')
        (group / 'cgroup.procs').write_text(str(pid))
        end = time.monotonic() + _PATIENCE
        ask()
        while _lives(pid):
            assert time.monotonic() < end, f'{name} asked for no memory within {_PATIENCE:.0f} s'
            time.sleep(0.0005)
        return time.monotonic()


def out_of_memory(running: Running, name: str) -> float:
    """
    Leave a node without memory that it does not have yet; return when the kernel ended it (steady, s).

    A node that has what it needs may need no more for long: one of the first robot's is sent a large request. At once, as
    long as the robot is no faster than in other rows: where it has driven for a second more, it has hardly come to rest when a
    gate that was killed is back.
    """
    process, ask = running.processes, _large_request(running.rig, name)
    pid, ended = process.pid(name), len(process.exit_codes(name))
    at = starve(pid, name, ask)
    while len(process.exit_codes(name)) == ended and time.monotonic() < at + _PATIENCE:
        time.sleep(0.001)
    code = process.exit_codes(name)[-1]
    assert code == -9, f'{name} ended with {code}, and not by the kernel'
    return at


def _large_request(rig: Rig, name: str) -> Callable[[], object]:
    """Return what has a node take in some megabytes, and does not wait for the answer."""
    if name.rpartition('/')[2] in NODES:
        kind, service = SetParameters, f'{name}/set_parameters'
        value = Parameter('large', value='x' * _LARGE).to_parameter_msg()
        request: object = SetParameters.Request(parameters=[value])
    else:  # a shared engine is asked by way of a robot
        kind, service, request = WhatIf, f'{MODEL}/what_if', WhatIf.Request(names=['left', 'right', 'stop'], horizon=4.0)
    client = rig.observer.node.create_client(kind, service)
    assert client.wait_for_service(_PATIENCE), f'{name} takes no requests'
    return partial(client.call_async, request)


@contextlib.contextmanager
def _group() -> Iterator[tuple[Path, str]]:
    """Have a control group of this process's own; yields its folder, and the name of its limit."""
    v1 = (_V1 / 'memory.limit_in_bytes').exists()
    group = (_V1 if v1 else _V2) / f'worldmodel_faults_{os.getpid()}'
    group.mkdir()
    try:
        limit = 'memory.limit_in_bytes' if v1 else 'memory.max'
        if not (group / limit).exists():
            raise OSError(f'{group} has no {limit}')
        yield group, limit
    finally:
        for pid in (group / 'cgroup.procs').read_text().split():  # a failed case leaves its process there
            with contextlib.suppress(OSError):
                (group.parent / 'cgroup.procs').write_text(pid)
        end = time.monotonic() + 2.0
        while True:
            try:
                group.rmdir()
                break
            except OSError:  # until the last process in it has gone
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)


def _lives(pid: int) -> bool:
    """Whether a process runs: one that has ended and was not waited for does not."""
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] not in 'ZX'
    except OSError:
        return False
