"""The goals of a recording, however they were given, as named in its decisions."""
from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from worldmodel_ros.inputs.images import ImageError, to_rgb
from .problems import MessageError
from .source import Bag

NS = 1_000_000_000
_DECISION, _IMAGE = 'worldmodel_ros/msg/Decision', 'sensor_msgs/msg/Image'
_TOPIC = 'goal_image'
_LONGEST = 1.0   # s without a decision, after which the same goal counts as given again
_EARLIER = 2.0   # s, by which a goal image may precede the first decision on it


@dataclass(frozen=True, eq=False)
class Driven:
    """
    A goal or task by the ``name`` in its decisions; ``start``: first decision, from the beginning of the recording [s];
    ``seconds``: from first to last decision; ``decisions``: their number; ``vetoed``: number of decisions with a vetoed
    candidate. ``image`` uint8 (H, W, 3): of a goal image given on its topic; None for other goals, and for images given by the
    action, which bags do not contain.
    """

    name: str
    terms: tuple[str, ...]
    start: float
    seconds: float
    decisions: int
    vetoed: int
    image: np.ndarray | None = None

    def to_dict(self) -> dict:
        """Return the goal for JSON, without the image."""
        return {'name': self.name, 'terms': list(self.terms), 'start_s': round(self.start, 3),
                'seconds': round(self.seconds, 3), 'decisions': self.decisions, 'with_a_veto': self.vetoed,
                'image': self.image is not None}


def read_goals(bag: Bag) -> list[Driven]:
    """Return the goals in order; none if no decisions were recorded."""
    decisions = [name for name, topic in bag.topics.items() if topic.type == _DECISION]
    images = [name for name, topic in bag.topics.items() if topic.type == _IMAGE and name.split('/')[-1] == _TOPIC]
    found: list[Driven] = []
    given: tuple[float, np.ndarray] | None = None
    for record in bag.messages([*decisions[:1], *images]) if decisions else ():
        at = (record.log_ns - bag.start_ns) / NS
        try:
            message = bag.deserialize(record.topic, record.raw)
            if record.topic.type == _IMAGE:
                given = at, to_rgb(message, (message.height, message.width))
                continue
        except (MessageError, ImageError):
            continue
        terms, vetoed = tuple(message.terms), any(each.vetoed for each in message.candidates)
        last = found[-1] if found else None
        if last and (last.name, last.terms) == (message.task, terms) and at - last.start - last.seconds < _LONGEST and (
                given is None or given[1] is last.image or given[0] < last.start):
            found[-1] = replace(last, seconds=at - last.start, decisions=last.decisions + 1, vetoed=last.vetoed + vetoed)
        else:
            shown = given[1] if given and message.task == 'image' and at - given[0] < _EARLIER else None
            found.append(Driven(message.task, terms, at, 0.0, 1, int(vetoed), shown))
    return found
