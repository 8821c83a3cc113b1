"""Drives to goals by the action drive_to in a running system: feedback rate, time to stop after a cancel, pre-emption.

    python benchmarks/drive_to.py --repeats 25 --json benchmarks/results/drive_to_<machine>.json

`worldmodel up` runs as a user starts it: simulated robot, world model with a forecast, and gate, in processes of their own.
This process is a client of the action and listens to the robot, all over DDS. A robot stands when its wheels say so, within
0.03 m/s and 0.1 rad/s; they report every 50 ms. A goal takes effect at the next tick if it decides each image with a stamp
after its acceptance; an earlier image may still be in work then.
"""
from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from result_file import ROOT, provenance, write_result

sys.path.insert(0, str(ROOT / 'test'))
COLOURS = ('red', 'green', 'blue', 'yellow')
STANDS = 0.03, 0.1    # m/s, rad/s; the encoders' resolution is a third of the latter, and nav2 takes 0.25 of both for standing
MOVES = 0.15, 0.3     # m/s, rad/s: one of them, before a goal is cancelled
LISTENS = 1.5         # s, to the feedback of a goal
PATIENCE = 30.0       # s


class Client:
    """A client of the action, and what it receives, with the time of receipt [s, steady]."""

    def __init__(self) -> None:
        import rclpy
        from geometry_msgs.msg import TwistStamped
        from nav_msgs.msg import Odometry
        from rclpy.action import ActionClient
        from rclpy.executors import SingleThreadedExecutor

        from worldmodel_ros.action import DriveTo
        from worldmodel_ros.msg import Decision
        from worldmodel_ros.nodes.common.qos import COMMAND, ODOMETRY, STATUS
        rclpy.init()
        self.node = rclpy.create_node('drive_to_benchmark')
        self.goal = DriveTo.Goal
        self.wheels: list[tuple[float, float, float]] = []
        self.commands: list[tuple[float, float, float]] = []
        self.decisions: list[tuple[float, int, str]] = []  # receipt, stamp [ns], task
        self.feedback: list[tuple[float, str]] = []
        self.node.create_subscription(Odometry, 'odom', lambda m: self.wheels.append(
            (time.monotonic(), m.twist.twist.linear.x, m.twist.twist.angular.z)), ODOMETRY)
        self.node.create_subscription(TwistStamped, 'cmd_vel', lambda m: self.commands.append(
            (time.monotonic(), m.twist.linear.x, m.twist.angular.z)), COMMAND)
        self.node.create_subscription(Decision, 'decision', lambda m: self.decisions.append(
            (time.monotonic(), m.header.stamp.sec * 10 ** 9 + m.header.stamp.nanosec, m.task)), STATUS)
        self.action = ActionClient(self.node, DriveTo, 'drive_to')
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(self.node)
        threading.Thread(target=self._executor.spin, daemon=True).start()

    def accepted(self, colour: str):
        """Send a goal; return its handle and when it was accepted [s, steady; ns, ROS]."""
        sent = self.action.send_goal_async(self.goal(goal=colour), feedback_callback=lambda m: self.feedback.append(
            (time.monotonic(), m.feedback.chosen)))
        wait(sent.done, 'the answer to a goal', 0.001)
        handle = sent.result()
        if not handle.accepted:
            raise RuntimeError(f'{colour} was refused')
        return handle, time.monotonic(), self.node.get_clock().now().nanoseconds

    def end(self, handle) -> None:
        """Cancel a goal, and wait until the robot stands."""
        handle.cancel_goal_async()
        wait(handle.get_result_async().done, 'the result')
        time.sleep(0.3)
        wait(lambda: self.stands(self.wheels[-1]), 'the robot to stand')

    @staticmethod
    def stands(row: tuple[float, float, float]) -> bool:
        return abs(row[1]) < STANDS[0] and abs(row[2]) < STANDS[1]


def wait(condition: Callable[[], object], what: str, period: float = 0.005) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f'{what} did not come within {PATIENCE:g} s')
        time.sleep(period)


def feedback_rate(client: Client, colour: str) -> dict:
    """Return messages a second and the longest gap [ms], from the first message until the goal ends or LISTENS is over."""
    del client.feedback[:]
    handle, *_ = client.accepted(colour)
    ended = handle.get_result_async()
    wait(lambda: client.feedback or ended.done(), 'feedback')
    begun = time.monotonic()
    while time.monotonic() < begun + LISTENS and not ended.done():
        time.sleep(0.01)
    times = np.array([at for at, _ in client.feedback])
    client.end(handle)
    return {'hz': round((len(times) - 1) / (times[-1] - times[0]), 2), 'longest_ms': round(float(np.diff(times).max()) * 1e3, 1)
            } if len(times) > 5 else {}


def cancel(client: Client, colour: str) -> dict:
    """Return milliseconds from the cancellation, with the robot moving, to the stop command and to standstill."""
    handle, *_ = client.accepted(colour)
    ended = handle.get_result_async()
    wait(lambda: moves(client) or ended.done(), 'the robot to move')
    if ended.done():
        return {}
    time.sleep(np.random.default_rng(len(client.wheels)).uniform(0.0, 0.1))  # at any phase of a tick
    speed, asked = client.wheels[-1][1:], time.monotonic()
    handle.cancel_goal_async()
    wait(ended.done, 'the result')
    wait(lambda: [row for row in client.wheels if row[0] > asked and client.stands(row)], 'the robot to stand', 0.001)
    stands = next(row[0] for row in client.wheels if row[0] > asked and client.stands(row))
    told = next(row[0] for row in client.commands if row[0] > asked and not any(row[1:]))
    time.sleep(0.3)
    moved = [row for row in client.wheels if row[0] > stands + 0.1 and not client.stands(row)]
    return {'stop_commanded_ms': round((told - asked) * 1e3, 1), 'standing_ms': round((stands - asked) * 1e3, 1),
            'from_m_s': round(speed[0], 2), 'from_rad_s': round(speed[1], 2), 'moved_again': bool(moved)}


def moves(client: Client) -> bool:
    return bool(client.wheels) and any(abs(value) > least for value, least in zip(client.wheels[-1][1:], MOVES, strict=True))


def pre_empt(client: Client, colour: str, other: str) -> dict:
    """Return which goal decides images after a goal has replaced another."""
    former, *_ = client.accepted(colour)
    begun = len(client.decisions)
    wait(lambda: any(task == colour for *_, task in client.decisions[begun:]), 'a decision for the first goal')
    time.sleep(np.random.default_rng(len(client.wheels)).uniform(0.0, 0.1))
    asked = time.monotonic()
    handle, accepted, stamp = client.accepted(other)
    time.sleep(0.5)
    after = client.decisions[begun:]
    first = next(at for at, _, task in after if task == other)
    stale = sum(task == colour for _, at, task in after if at > stamp)
    ended = former.get_result_async()
    wait(ended.done, 'the result of the first goal')
    client.end(handle)
    return {'accepted_ms': round((accepted - asked) * 1e3, 1), 'first_decision_ms': round((first - accepted) * 1e3, 1),
            'images_decided_by_the_old_goal': stale, 'former_ended': ended.result().result.reason}


def quantiles(rows: list[dict], key: str) -> dict:
    values = sorted(row[key] for row in rows)
    return {'p50': values[len(values) // 2], 'max': values[-1], 'min': values[0]}


def run(client: Client, repeats: int) -> dict:
    """Repeat each measurement; goals change, so that the robot never already stands at the next one."""
    wait(lambda: client.wheels, 'odometry')
    feedback, cancelled, pre_empted, number = [], [], [], 0
    while min(len(feedback), len(cancelled), len(pre_empted)) < repeats and number < 4 * repeats:
        colours = [COLOURS[(number + k) % len(COLOURS)] for k in range(4)]
        number += 1
        for rows, call in ((feedback, lambda: feedback_rate(client, colours[0])),
                           (cancelled, lambda: cancel(client, colours[1])),
                           (pre_empted, lambda: pre_empt(client, colours[2], colours[3]))):
            if len(rows) < repeats and (row := call()):
                rows.append(row)
    return {'repeats': [len(feedback), len(cancelled), len(pre_empted)],
            'feedback': {'hz': quantiles(feedback, 'hz'), 'longest_ms': quantiles(feedback, 'longest_ms')},
            'cancel': {**{key: quantiles(cancelled, key) for key in ('stop_commanded_ms', 'standing_ms')},
                       'moved_again': sum(row['moved_again'] for row in cancelled), 'rows': cancelled},
            'pre_empted': {**{key: quantiles(pre_empted, key) for key in ('accepted_ms', 'first_decision_ms')},
                           'images_decided_by_the_old_goal': sum(row['images_decided_by_the_old_goal'] for row in pre_empted),
                           'rows': pre_empted}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--repeats', type=int, default=25)
    parser.add_argument('--json', type=Path, metavar='FILE')
    chosen = parser.parse_args()
    os.environ.setdefault('ROS_AUTOMATIC_DISCOVERY_RANGE', 'LOCALHOST')
    os.environ.setdefault('AMENT_PREFIX_PATH', sys.prefix)

    from scenarios.speed import product_seconds

    from worldmodel_ros.bringup.environment import free_domain_id
    os.environ.setdefault('ROS_DOMAIN_ID', str(free_domain_id()))
    products = [product_seconds()]
    with tempfile.TemporaryDirectory() as logs:
        system = subprocess.Popen([sys.executable, '-m', 'worldmodel_ros.cli', 'up', '--set', 'forecast:=tiny', '--logs', logs],
                                  stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            client = Client()
            if not client.action.wait_for_server(120.0):
                raise TimeoutError('no action drive_to')
            time.sleep(5.0)
            result = run(client, chosen.repeats)
        finally:
            system.send_signal(signal.SIGINT)
            system.wait(30.0)
    products.append(product_seconds())
    load = os.getloadavg()
    write_result({**provenance(), 'product_ms': [round(each * 1e3, 2) for each in products],
                  'load': [round(each, 2) for each in load], **result}, chosen.json, show=True)
    return 0


if __name__ == '__main__':
    sys.exit(main())
