"""What the world model node hears in addition to its camera: goals of any publisher, and what the robot executes."""
import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import rclpy
from diagnostic_msgs.msg import DiagnosticStatus
from geometry_msgs.msg import Twist
from rclpy.context import Context
from rclpy.node import Node
from std_msgs.msg import String
from world_model_rig import active, rig, wait_for

pytestmark = [pytest.mark.ros, pytest.mark.untimed]


def test_goals_of_latched_and_of_ordinary_publishers_are_taken_in_their_order():
    with rig(goal='') as node:
        def drives_to(goal):
            wait_for(lambda: node.subject._goal == goal, f'the goal {goal}')

        node.goals.publish(String(data='red'))  # before anybody listens
        ordinary = node.tester.create_publisher(String, 'goal', 10)
        assert node.change('configure')
        drives_to('red')
        wait_for(ordinary.get_subscription_count, 'a match')
        ordinary.publish(String(data='blue'))
        drives_to('blue')
        node.goals.publish(String(data='green'))
        drives_to('green')
        # What both subscriptions hear counts once, and a second refusal counts as one more.
        node.goals.publish(String(data='purple'))
        wait_for(lambda: node.refused().get('goal: unknown'), 'the refusal')
        node.goals.publish(String(data='yellow'))
        drives_to('yellow')
        ordinary.publish(String(data='purple'))
        ordinary.publish(String(data='red'))
        drives_to('red')
        assert node.refused() == {'goal: unknown': 2}


@contextlib.contextmanager
def stranger(node, kind, topic):
    """Publish another type of message on a topic, as only another process can; until the end of the block."""
    context = Context()
    rclpy.init(context=context)
    try:
        publisher = Node('stranger', context=context).create_publisher(kind, topic, 10)
        wait_for(lambda: any(info.node_name == 'stranger' for info in
                             node.subject.get_publishers_info_by_topic(publisher.topic_name)), 'its discovery')
        yield
    finally:
        rclpy.shutdown(context=context)


def command(executed, start, seconds, action=(0.3, 0.0)):
    """Send commands at 10 Hz; return the time of the last one."""
    for at in start + np.arange(0.0, seconds, 0.1):
        executed.commanded(SimpleNamespace(actions=np.float32([action])), at)
    return at


def test_silence_where_commands_should_be_heard_is_told_with_its_cause():
    with rig('configure') as node:
        executed = node.subject._executed
        stopped = command(executed, 0.0, 5.0, (0.0, 0.0))
        assert not executed.degraded_reason(stopped)
        begun = command(executed, 10.0, 0.9)
        assert not executed.degraded_reason(begun)
        at = command(executed, begun, 0.5)
        assert 'none was heard on /cmd_vel (geometry_msgs/msg/TwistStamped) for 1 s' in executed.degraded_reason(at)
        assert 'its publisher is silent' in executed.degraded_reason(at)
        assert not executed.degraded_reason(at + 1.5)  # nothing is commanded any more

        node.drive(0.3)
        wait_for(lambda: not executed.degraded_reason(at), 'the executed action')
        at = command(executed, at, 1.5)
        assert executed.degraded_reason(at)
        node.drive(0.0)
        wait_for(lambda: not executed.degraded_reason(at), 'the stop')
        at = command(executed, at, 1.5)
        assert not executed.degraded_reason(at), 'a gate that has stopped the robot falls silent'

        with stranger(node, Twist, 'cmd_vel'):
            assert 'set enable_stamped_cmd_vel to false' in executed.degraded_reason(at)


def test_a_wrong_topic_of_executed_actions_is_told():
    with rig('configure', executed_action_topic='elsewhere') as node:
        executed = node.subject._executed
        at = command(executed, 0.0, 1.5)
        assert 'it has no publisher: start the gate' in executed.degraded_reason(at)
        with stranger(node, String, 'elsewhere'):
            assert 'std_msgs/msg/String is published there: set executed_action_topic' in executed.degraded_reason(at)


def test_a_topic_that_tells_changes_only_may_be_silent():
    with rig('configure', executed_timeout_s=0.0) as node:
        node.drive(0.3)
        assert not node.subject._executed.degraded_reason(command(node.subject._executed, 0.0, 1.5))


def test_a_node_that_drives_unheard_says_so_in_its_diagnostics_and_in_its_log(capfd):
    with active() as node:
        node.film(1.3)
        level, text, _ = node.subject._report()  # not the next one on the topic: it may come too late
        assert level == DiagnosticStatus.WARN and 'none was heard on /cmd_vel' in text
        assert 'commands go out, but none was heard' in capfd.readouterr().err
