"""The lifecycle client and a node that takes longer over a transition than the client waits for an answer."""

import threading
import time

import pytest
import rclpy
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.lifecycle import LifecycleNode, TransitionCallbackReturn
from rclpy.node import Node

from worldmodel_ros.nodes import lifecycle_client
from worldmodel_ros.nodes.lifecycle_client import LifecycleClient

pytestmark = pytest.mark.ros


class Slow(LifecycleNode):
    configured = 0

    def on_configure(self, state):
        self.configured += 1
        time.sleep(1.0)
        return TransitionCallbackReturn.SUCCESS


@pytest.fixture
def context():
    context = Context()
    rclpy.init(args=[], context=context)
    yield context
    rclpy.shutdown(context=context)


def test_a_transition_that_takes_long_is_not_asked_for_twice(context, monkeypatch):
    monkeypatch.setattr(lifecycle_client, '_CHANGE_TIMEOUT', 0.3)
    monkeypatch.setattr(lifecycle_client, '_QUERY_TIMEOUT', 0.2)
    slow = Slow('slow', context=context)
    executor = SingleThreadedExecutor(context=context)
    executor.add_node(slow)
    failures, over = [], threading.Event()

    def spin():
        while not over.is_set():
            try:
                executor.spin_once(timeout_sec=0.05)
            except Exception as error:
                failures.append(error)

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        client = LifecycleClient(Node('client', context=context), '/slow')
        client.bring_to('active', 20.0)
        assert client.state(5.0) == 'active'
    finally:
        over.set()
        thread.join()
    assert slow.configured == 1
    assert failures == []
