"""The goal topic: whatever words come, twice or not, the goal is one of the model's, or none."""
from __future__ import annotations

from types import SimpleNamespace

from fake_engine import SPEC
from rclpy.serialization import serialize_message
from std_msgs.msg import String

from worldmodel_ros.control.task import Task
from worldmodel_ros.nodes.common.diagnostics import Refusals
from worldmodel_ros.nodes.world_model.inputs import LatchedTopic
from worldmodel_ros.nodes.world_model.node import WorldModelNode

from . import ros
from .harness import Bytes


class _Node:
    """As much of the node as goals have to do with."""

    _engine, _activation, _goal, _task, _deciding = SimpleNamespace(spec=SPEC), None, '', Task(), True
    goals_set, refusals = 0, Refusals()
    hear, _goal_refusal = WorldModelNode._on_goal, WorldModelNode._goal_refusal
    _set_goal, _take = WorldModelNode._set_goal, WorldModelNode._take

    def get_logger(self) -> SimpleNamespace:
        return SimpleNamespace(info=lambda *_, **__: None, warning=lambda *_, **__: None)

    def create_subscription(self, *_: object, **__: object) -> None:
        pass


_NODE = _Node()
_TOPIC = LatchedTopic(_NODE, String, 'goal', lambda message: _NODE.hear(message.data))


def seeds() -> list[bytes]:
    """Return the goals of a model, and what is none."""
    return [serialize_message(String(data=word)) for word in (*SPEC.goals, '', ' red ', 'the moon', 'x' * 1000)]


def judge(message: String) -> bool:
    """Hear a goal by one subscription, or by both."""
    which = len(message.data) % 3
    for heard in (which,) if which < 2 else (0, 1):
        _TOPIC._hear(heard, message)
    assert _NODE._goal in ('', *SPEC.goals)
    return _NODE._goal == message.data.strip()


TARGET = Bytes(seeds, ros.target_of(String, judge), inputs=200_000, mutate=ros.damaged(String), factor=64.0)
