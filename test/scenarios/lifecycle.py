"""The lifecycle of the world model, again and again."""

import time
from pathlib import Path

from scenarios.checks import drives_on, stays_stopped, stopped_within
from scenarios.rig import MODEL, Rig

CYCLES = 20
SETTLED = 5  # cycles, after which caches and pools have their size
GROWTH = 32.0  # MiB that may be lost to fragmentation after that
RECOVERY = 10.0  # s


def twenty_lifecycle_cycles(rig: Rig) -> None:
    rig.drive()
    start = time.monotonic()
    rig.bring_model_to('inactive')
    stop = stopped_within(rig, start, 1.0)
    used = []
    for _ in range(CYCLES):
        rig.bring_model_to('unconfigured', 'inactive', 'active', 'inactive')
        used.append(_usage(rig.processes.pid(rig.full_name(MODEL))))
    stays_stopped(rig, stop + 0.05)
    rig.bring_model_to('active')
    drives_on(rig, RECOVERY)
    (threads, memory), (threads_then, memory_then) = used[SETTLED - 1], used[-1]
    assert threads_then <= threads, f'{threads} threads after {SETTLED} cycles, {threads_then} after {CYCLES}'
    grown = memory_then - memory
    assert grown <= GROWTH, f'{grown:.0f} MiB more after {CYCLES} cycles than after {SETTLED}'


def _usage(pid: int) -> tuple[int, float]:
    """Return the number of threads and the resident memory [MiB] of a process."""
    fields = dict(
        line.split(':', 1) for line in Path(f'/proc/{pid}/status').read_text().splitlines() if ':' in line
    )
    return int(fields['Threads']), int(fields['VmRSS'].split()[0]) / 1024
