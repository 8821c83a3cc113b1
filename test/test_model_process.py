"""The world model node as a process, with the shipped model: what eight lifecycles leave of threads and memory."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import rclpy
from rclpy.context import Context
from rclpy.node import Node

from worldmodel_ros.nodes.common.lifecycle_client import LifecycleClient

ROOT = Path(__file__).resolve().parents[1]
CYCLES = 8
SETTLED = 5  # cycles, after which caches and pools have their size
GROWTH = 4.0  # MiB of small blocks in three cycles, of which 1 is usual; the weights alone have 20
# With glibc's own thresholds, which grow as a program frees, large blocks of two cycles come to share a heap, and memory jumps
# by 10 MiB.
ALLOCATOR = {'MALLOC_MMAP_THRESHOLD_': '262144', 'MALLOC_TRIM_THRESHOLD_': '131072'}
TIMEOUT = 120.0  # s, for a transition on a busy machine

pytestmark = [pytest.mark.ros, pytest.mark.untimed, pytest.mark.slow]


@pytest.fixture
def client():
    context = Context()
    rclpy.init(args=[], context=context)
    node = Node('manager', context=context)
    yield LifecycleClient(node, '/world_model_node')
    node.destroy_node()
    rclpy.shutdown(context=context)


def usage(pid):
    """Return the number of threads and the resident memory [MiB] of a process."""
    lines = Path(f'/proc/{pid}/status').read_text().splitlines()
    fields = dict(line.split(':', 1) for line in lines if ':' in line)
    return int(fields['Threads']), int(fields['VmRSS'].split()[0]) / 1024


def test_eight_lifecycles_leave_no_thread_and_no_memory(client, tmp_path):
    log, used = tmp_path / 'log', []
    with log.open('w') as output:
        process = subprocess.Popen([sys.executable, ROOT / 'scripts' / 'world_model_node'], stdout=output, stderr=output,
                                   env=os.environ | ALLOCATOR)
    try:
        for _ in range(CYCLES):
            for state in ('inactive', 'active', 'inactive', 'unconfigured'):
                client.bring_to(state, TIMEOUT)
            used.append(usage(process.pid))
    finally:
        process.terminate()
        code = process.wait(TIMEOUT)
    assert code == 0, log.read_text()
    (threads, memory), (threads_then, memory_then) = used[SETTLED - 1], used[-1]
    assert threads_then <= threads, f'{threads} threads after {SETTLED} cycles, {threads_then} after {CYCLES}'
    grown = memory_then - memory
    assert grown <= GROWTH, f'{grown:.1f} MiB more after {CYCLES} cycles than after {SETTLED}'
