"""The wall clock of the machine is set back while a node waits: by its library's clock, since the real one is everybody's."""
import os
import subprocess
import sys
import threading
import time

import pytest
import rclpy
from faults.shim import Shim, no_compiler
from rclpy.qos import QoSProfile

from worldmodel_ros.msg import CommandStatus
from worldmodel_ros.nodes.common.spin import EXECUTOR_VARIABLE, EXECUTORS
from worldmodel_ros.paths import config_directory, find_executable

HOUR = 3600.0  # s
PERIOD = 0.1   # s, of the gate's status, by a timer on the steady clock
PATIENCE = 60.0  # s, for the gate to start on a busy machine

SLOW_SERVICES = f'''
import sys
from rclpy.clock import Clock, ClockType
from rclpy.node import Node
from worldmodel_ros.nodes.common.spin import ServiceThread, run

class Owner(Node):
    def __init__(self):
        super().__init__('owner')
        self.slow = ServiceThread(self, 'owner_slow', 'slow')
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        self.slow.node.create_timer({PERIOD}, lambda: print('tick', flush=True), clock=steady)
        self.slow.start()

    def on_shutdown(self):
        self.slow.stop()

sys.exit(run(Owner))
'''

pytestmark = [pytest.mark.ros, pytest.mark.waiting,
              pytest.mark.skipif(bool(no_compiler()), reason=no_compiler() or 'gcc is there')]


@pytest.fixture
def heard():
    """Spins for a while; returns how many statuses of the gate came."""
    context = rclpy.Context()
    rclpy.init(context=context)
    node, received = rclpy.create_node('listener', context=context), []
    node.create_subscription(CommandStatus, 'command_status', received.append, QoSProfile(depth=100))
    executor = rclpy.executors.SingleThreadedExecutor(context=context)
    executor.add_node(node)

    def during(seconds):
        received.clear()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            executor.spin_once(timeout_sec=0.02)
        return len(received)
    yield during
    executor.shutdown()
    node.destroy_node()
    rclpy.shutdown(context=context)


@pytest.mark.parametrize('executor', EXECUTORS)
@pytest.mark.parametrize('offset', [HOUR, -HOUR], ids=['ahead', 'back'])
def test_the_gates_timers_go_on(heard, tmp_path, executor, offset):
    shim = Shim(tmp_path / 'shim')
    gate = subprocess.Popen(
        [sys.executable, find_executable('worldmodel_ros', 'command_gate'), '--ros-args', '--params-file',
         config_directory() / 'command_gate.yaml', '-p', 'realtime_priority:=0'],
        env={**os.environ, **shim.environment, EXECUTOR_VARIABLE: executor})
    try:
        end = time.monotonic() + PATIENCE
        while not heard(0.5):
            assert time.monotonic() < end, 'the gate was not heard'
        shim.set_wall_clock(offset)
        assert heard(1.5) >= 0.5 * 1.5 / PERIOD, 'the timers have stopped with the wall clock'
        gate.terminate()
        assert gate.wait(10.0) == 0
    finally:
        gate.kill()
        gate.wait()
        shim.close()


@pytest.mark.parametrize('offset', [HOUR, -HOUR], ids=['ahead', 'back'])
def test_the_timers_of_slow_services_go_on(tmp_path, offset):
    shim, ticks = Shim(tmp_path / 'shim'), []
    process = subprocess.Popen([sys.executable, '-c', SLOW_SERVICES], env={**os.environ, **shim.environment},
                               stdout=subprocess.PIPE, text=True)
    reader = threading.Thread(target=lambda: ticks.extend(process.stdout), daemon=True)
    reader.start()
    try:
        end = time.monotonic() + PATIENCE
        while not ticks:
            assert time.monotonic() < end and process.poll() is None, 'the timer never ran'
            time.sleep(0.05)
        shim.set_wall_clock(offset)
        before = len(ticks)
        time.sleep(1.5)
        assert len(ticks) - before >= 0.5 * 1.5 / PERIOD, 'the timer has stopped with the wall clock'
        process.terminate()
        assert process.wait(10.0) == 0
    finally:
        process.kill()
        process.wait()
        reader.join()
        shim.close()
