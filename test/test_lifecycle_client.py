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
from worldmodel_ros.nodes.lifecycle_client import LifecycleClient, LifecycleError

pytestmark = pytest.mark.ros


class Slow(LifecycleNode):
    configured = 0
    result = TransitionCallbackReturn.SUCCESS

    def on_configure(self, state):
        self.configured += 1
        time.sleep(1.0)
        return self.result


@pytest.fixture
def context():
    context = Context()
    rclpy.init(args=[], context=context)
    yield context
    rclpy.shutdown(context=context)


@pytest.fixture
def slow(context, monkeypatch):
    """A node that takes longer to configure than the client waits for an answer, spun by a thread."""
    monkeypatch.setattr(lifecycle_client, '_CHANGE_TIMEOUT', 0.3)
    monkeypatch.setattr(lifecycle_client, '_QUERY_TIMEOUT', 0.2)
    monkeypatch.setattr(lifecycle_client, '_PROGRESS', 0.5)
    node = Slow('slow', context=context)
    executor = SingleThreadedExecutor(context=context)
    executor.add_node(node)
    failures, over = [], threading.Event()

    def spin():
        while not over.is_set():
            try:
                executor.spin_once(timeout_sec=0.05)
            except Exception as error:
                failures.append(error)

    thread = threading.Thread(target=spin)
    thread.start()
    yield node
    over.set()
    thread.join()
    assert failures == []


def test_a_transition_that_takes_long_is_waited_for_and_not_asked_for_twice(slow, context, capsys):
    client = LifecycleClient(Node('client', context=context), '/slow')
    client.bring_to('active', 20.0)
    assert client.state(5.0) == 'active'
    assert slow.configured == 1
    assert '/slow is not active yet after 1 s' in capsys.readouterr().err


def test_a_transition_that_takes_long_and_fails_is_not_tried_again(slow, context):
    slow.result = TransitionCallbackReturn.FAILURE
    with pytest.raises(LifecycleError, match='/slow refused or failed the transition from unconfigured'):
        LifecycleClient(Node('client', context=context), '/slow').bring_to('active', 20.0)
    assert slow.configured == 1
