"""What is heard on the topic of executed actions, and what the model is told of it: finite numbers, whatever comes."""
from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
from geometry_msgs.msg import TwistStamped
from rclpy.serialization import serialize_message

from worldmodel_ros.nodes.common.diagnostics import Refusals
from worldmodel_ros.nodes.world_model.inputs import ExecutedTopic

from . import ros
from .harness import Bytes

_SETTINGS = {'executed_timeout_s': 0.5, 'enable_stamped_cmd_vel': True, 'executed_action_topic': 'cmd_vel'}


class _Clock:
    nanoseconds = 10 ** 18

    def now(self) -> _Clock:
        return self


_CLOCK, _LOG = _Clock(), logging.getLogger('fuzz')
_NODE = SimpleNamespace(
    resolve_topic_name=lambda name: f'/{name}', create_subscription=lambda *_: None, get_clock=lambda: _CLOCK,
    get_logger=lambda: SimpleNamespace(warning=lambda *_, **__: None))


def seeds() -> list[bytes]:
    """Return a few commands."""
    found = []
    for v, w in ((0.0, 0.0), (0.3, -1.0)):
        message = TwistStamped()
        message.twist.linear.x, message.twist.angular.z = v, w
        found.append(serialize_message(message))
    return found


_SPEC = SimpleNamespace(action_names=('linear.x', 'angular.z'), step_period=0.1)
_TOPIC = ExecutedTopic(_NODE, _SPEC, _SETTINGS, Refusals())


def judge(message: TwistStamped) -> bool:
    """Hear a command; ask what was executed since the one before."""
    _CLOCK.nanoseconds += (int(message.header.stamp.sec) % 1000) * 10 ** 6
    _TOPIC._hear(message.twist)
    mean = _TOPIC.actions.mean(None, _CLOCK.nanoseconds + 10 ** 8)
    assert mean.shape == (2,) and np.isfinite(mean).all()
    return bool(mean.any())


TARGET = Bytes(seeds, ros.target_of(TwistStamped, judge), inputs=200_000, mutate=ros.damaged(TwistStamped), factor=64.0)
