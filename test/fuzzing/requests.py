"""What-if requests with any fields: answered with RequestError in words, or questions that the engine takes."""
from __future__ import annotations

from types import SimpleNamespace
from pathlib import Path

import numpy as np
from fake_engine import SPEC
from rclpy.serialization import serialize_message

from worldmodel_ros.engine.what_if import MAX_BRANCHES, MAX_STEPS, QuestionError
from worldmodel_ros.msg import ActionChunk
from worldmodel_ros.nodes.common.what_if_request import RequestError
from worldmodel_ros.nodes.world_model.services import Context, to_question
from worldmodel_ros.srv import WhatIf

from . import ros
from .harness import Bytes

_INTAKE = SimpleNamespace(goal='red', camera_frame='camera')
_CONTEXT = Context(SimpleNamespace(), _INTAKE, SPEC, 'base_link', 0.8, 1.0, 2, Path('/nowhere'))


def seeds() -> list[bytes]:
    """Return requests of named branches and of explicit ones."""
    chunk = ActionChunk(names=list(SPEC.action_names), step_period=SPEC.step_period, values=[0.1, 0.2] * 4)
    return [serialize_message(request) for request in (
        WhatIf.Request(names=['forward', 'left', 'policy']), WhatIf.Request(actions=[chunk, chunk], horizon=0.4),
        WhatIf.Request(names=['stop'], actions=[chunk], goal='blue'))]


def judge(request: WhatIf.Request) -> bool:
    """Make a question of a request; what it holds is bounded."""
    try:
        question = to_question(_CONTEXT, request, 100.0)
    except (RequestError, QuestionError):
        return False
    assert 0 < len(question.branches) <= MAX_BRANCHES and np.isfinite(question.due)
    for branch in question.branches:
        assert 0 < branch.steps <= MAX_STEPS
        assert branch.actions is None or (branch.actions.shape == (branch.steps, SPEC.actions)
                                          and np.isfinite(branch.actions).all())
    return True


TARGET = Bytes(seeds, ros.target_of(WhatIf.Request, judge), inputs=200_000, mutate=ros.damaged(WhatIf.Request), factor=32.0)
