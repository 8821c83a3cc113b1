"""The lifecycle client and a node that takes longer over a transition than the client waits for an answer."""

import threading
import time

import pytest
import rclpy
from lifecycle_msgs.srv import ChangeState, GetState
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.lifecycle import LifecycleNode, TransitionCallbackReturn
from rclpy.node import Node

from interrupts import interrupt, start
from worldmodel_ros.bringup.process import activation_command
from worldmodel_ros.nodes.common import lifecycle_client
from worldmodel_ros.nodes.common.lifecycle_client import LifecycleClient, LifecycleError

pytestmark = [pytest.mark.ros, pytest.mark.untimed]


class Slow(LifecycleNode):
    configured = 0
    takes = 1.0  # s, or until the test is over
    result = TransitionCallbackReturn.SUCCESS
    over: threading.Event

    def on_configure(self, state):
        self.configured += 1
        self.over.wait(self.takes)
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
    node.over = over

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


def test_a_request_that_the_node_never_gets_is_given_up_long_before_the_timeout(context, monkeypatch):
    monkeypatch.setattr(lifecycle_client, '_CHANGE_TIMEOUT', 0.2)
    monkeypatch.setattr(lifecycle_client, '_IGNORED', 1.0)
    answering, deaf = Node('deaf', context=context), Node('deaf_services', context=context)

    def unconfigured(request, response):
        response.current_state.label = 'unconfigured'
        return response

    answering.create_service(GetState, '/deaf/get_state', unconfigured)
    deaf.create_service(ChangeState, '/deaf/change_state', lambda request, response: response)  # no executor has it
    executor, over = SingleThreadedExecutor(context=context), threading.Event()
    executor.add_node(answering)

    def spin():
        while not over.is_set():
            executor.spin_once(timeout_sec=0.05)

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        began = time.monotonic()
        with pytest.raises(LifecycleError, match=r'/deaf was asked to become active and has taken no notice for 1 s '
                                                 r'\(last known state: unconfigured\)'):
            LifecycleClient(Node('client', context=context), '/deaf').bring_to('active', 60.0)
        assert time.monotonic() - began < 20.0
    finally:
        over.set()
        thread.join()


def test_a_node_that_is_silent_because_it_makes_the_transition_is_not_given_up(slow, context, monkeypatch):
    monkeypatch.setattr(lifecycle_client, '_IGNORED', 2.0)  # on busy cores nothing is heard for half a second
    slow.takes = 5.0  # much longer than what is unheard for that long
    LifecycleClient(Node('client', context=context), '/slow').bring_to('active', 20.0)
    assert slow.configured == 1


def test_its_own_node_is_in_the_namespace_of_the_node_that_it_activates(context):
    looker, process = Node('looker', context=context), start(*activation_command('/left/absent', 60.0))
    try:
        end = time.monotonic() + 60.0
        while ('lifecycle_client', '/left') not in looker.get_node_names_and_namespaces():
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.05)
    finally:
        interrupt(process)


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
