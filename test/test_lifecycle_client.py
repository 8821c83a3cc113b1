"""The lifecycle client and a node that takes longer over a transition than the client waits for an answer."""

import threading
import time

import pytest
import rclpy
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.lifecycle import LifecycleNode, TransitionCallbackReturn
from rclpy.node import Node

from interrupts import interrupt, start
from worldmodel_ros.bringup.process import activation_command
from worldmodel_ros.nodes.common import lifecycle_client
from worldmodel_ros.nodes.common.lifecycle_client import LifecycleClient, LifecycleError

pytestmark = pytest.mark.ros


class Slow(LifecycleNode):
    configured = 0
    takes = 1.0  # s
    result = TransitionCallbackReturn.SUCCESS

    def on_configure(self, state):
        self.configured += 1
        time.sleep(self.takes)
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


@pytest.mark.parametrize('options, code', [((), 130), (('--zero-when-interrupted',), 0)])
def test_an_interrupt_is_a_clean_end_whenever_it_comes(options, code):
    # From before there is an interpreter, over the imports, until it waits for a node that is not there.
    for moment in (0.0, 0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.7, 1.0, 2.0):
        process = start(*activation_command('/nobody', 60.0), *options)
        time.sleep(moment)
        returned, words, took = interrupt(process)
        assert (returned, words) == (code, ''), f'interrupted after {moment} s'
        assert took < 5.0  # launch and the supervisor wait for as long


def test_an_interrupt_ends_the_wait_for_a_transition(slow):
    slow.takes = 8.0
    process = start(*activation_command('/slow', 60.0), '--zero-when-interrupted')
    while not slow.configured:
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)
    returned, words, took = interrupt(process)
    assert (returned, words) == (0, '') and took < 5.0
