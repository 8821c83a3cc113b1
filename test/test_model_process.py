"""The world model node as a process, with the shipped model: what eight lifecycles leave of threads and memory."""
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rclpy
from rclpy.context import Context
from rclpy.node import Node

from worldmodel_ros.nodes.common.lifecycle_client import LifecycleClient

ROOT = Path(__file__).resolve().parents[1]
CYCLES = 8
SETTLED = 3  # cycles, after which caches and pools have their size
GROWTH = 1.0  # MiB in five cycles, of which 0.3 to 0.5 is usual; the weights alone have 20
LEAVING = 10.0  # s, in which threads of DDS end after a transition
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


def threads_of(pid):
    lines = Path(f'/proc/{pid}/status').read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith('Threads:'))


def test_eight_lifecycles_leave_no_thread_and_no_memory(client, tmp_path):
    log, threads, memory = tmp_path / 'log', [], []
    command = [sys.executable, ROOT / 'test' / 'memory_counter.py', ROOT / 'scripts' / 'world_model_node']
    with log.open('w') as output:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True,
                                   env=os.environ | {'PYTHONMALLOC': 'malloc'})
    try:
        for _ in range(CYCLES):
            for state in ('inactive', 'active', 'inactive', 'unconfigured'):
                client.bring_to(state, TIMEOUT)
            process.stdin.write('\n')
            process.stdin.flush()
            memory.append(float(process.stdout.readline()))
            threads.append(threads_of(process.pid))
        least, end = min(threads[:SETTLED]), time.monotonic() + LEAVING
        while threads[-1] > least and time.monotonic() < end:
            time.sleep(0.1)
            threads[-1] = threads_of(process.pid)
    finally:
        process.terminate()
        code = process.wait(TIMEOUT)
    assert code == 0, log.read_text()
    assert threads[-1] <= least, f'threads after each cycle: {threads}'
    grown = memory[-1] - memory[SETTLED - 1]
    assert grown <= GROWTH, f'{grown:.2f} MiB more after {CYCLES} cycles than after {SETTLED}: {memory}'
