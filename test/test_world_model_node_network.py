"""A simulated robot whose engine is behind a gateway with TLS: it drives by it, goes on when it is killed, and returns."""
import os
import signal
import subprocess
import sys
import time

import pytest
import rclpy
import trustme
from diagnostic_msgs.msg import DiagnosticArray
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from fake_service import FakeService, Serving
from test_gateway_process import Process
from test_gateway_security import write

from worldmodel_ros.bringup.environment import free_domain_id
from worldmodel_ros.msg import ActionChunk, DeadlineStatus
from worldmodel_ros.nodes.common.qos import STATUS
from worldmodel_ros.serving.gateway.accounts import digest
from worldmodel_ros.serving.service.quotas import TokenBuckets

pytestmark = [pytest.mark.ros, pytest.mark.untimed]
START = 120.0  # s
MOTION = (ActionChunk.TIER_TWO_STEP, ActionChunk.TIER_ONE_STEP, ActionChunk.TIER_PLAN_ONLY, ActionChunk.TIER_LAST_PLAN)


class Onlooker:
    """What a robot says about its ticks and its back end."""

    def __init__(self, domain):
        self.context = Context()
        rclpy.init(context=self.context, domain_id=domain)
        self.node = rclpy.create_node('onlooker', context=self.context)
        self.executor = SingleThreadedExecutor(context=self.context)
        self.executor.add_node(self.node)
        self.ticks, self.backend, self.reason = [], '', ''
        self.node.create_subscription(DeadlineStatus, 'deadline_status', self._tick, STATUS)
        self.node.create_subscription(DiagnosticArray, '/diagnostics', self._diagnose, STATUS)

    def _tick(self, message):
        self.ticks.append((time.monotonic(), message.tier))

    def _diagnose(self, message):
        for status in message.status:
            for value in status.values:
                if value.key == 'backend':
                    self.backend, self.reason = value.value, status.message

    def until(self, condition, timeout=START):
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, (self.backend, self.reason, len(self.ticks))
            self.executor.spin_once(timeout_sec=0.05)

    def close(self):
        self.executor.shutdown()
        self.node.destroy_node()
        self.context.shutdown()


def test_a_robot_drives_by_an_engine_elsewhere_and_survives_the_gateway(tmp_path):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / 'ca.pem')
    certificate, key = write(authority.issue_cert('127.0.0.1'), tmp_path, 'host')
    (tmp_path / 'token').write_text('of the robot')
    (tmp_path / 'accounts.yaml').write_text(f'accounts:\n  - {{name: robot, sha256: {digest("of the robot")}}}\n')
    options = ('--socket', tmp_path / 'engine.sock', '--certificate', certificate, '--key', key, '--accounts',
               tmp_path / 'accounts.yaml')
    domain = free_domain_id()
    environment = {**os.environ, 'ROS_DOMAIN_ID': str(domain), 'ROS_AUTOMATIC_DISCOVERY_RANGE': 'LOCALHOST'}
    # Time enough for a busy machine: here a server is to be found, lost and found again, not to be quick.
    (tmp_path / 'slow.yaml').write_text('/world_model_node:\n  ros__parameters: {deadline_s: 0.4, reserve_s: 0.02}\n')
    engine = Serving(tmp_path / 'engine.sock', FakeService(sessions=4))
    engine.server._hellos = TokenBuckets(0.0, 1.0)
    door = Process('--port', 0, *options)
    settings = (f'server:=wss://127.0.0.1:{door.port}', f'server_token_file:={tmp_path / "token"}',
                f'server_ca_file:={tmp_path / "ca.pem"}', 'goal:=red')
    up = subprocess.Popen([sys.executable, '-m', 'worldmodel_ros.cli', 'up', '--logs', str(tmp_path / 'log'), '--parameters',
                           str(tmp_path / 'slow.yaml'), '--set', *settings],
                          env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    robot = Onlooker(domain)
    try:
        robot.until(lambda: robot.backend.endswith('of the server'))
        robot.until(lambda: [tier for _, tier in robot.ticks if tier in MOTION])
        door.process.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        robot.until(lambda: robot.backend and 'of the server' not in robot.backend)
        def own():
            return [tier for at, tier in robot.ticks if at > killed][-10:]
        robot.until(lambda: len(own()) == 10 and all(tier in MOTION for tier in own()))  # it drives on with its own model
        door.process.communicate()
        door = Process('--port', door.port, *options)
        robot.until(lambda: robot.backend.endswith('of the server'))
    finally:
        robot.close()
        up.send_signal(signal.SIGINT)
        up.wait(60)
        door.end()
        engine.stop()
        engine.service.stop()
