"""How a tick's command was decided, as a message and as markers."""

import math

import numpy as np
from geometry_msgs.msg import Point
from rclpy.duration import Duration
from std_msgs.msg import ColorRGBA
from visualization_msgs.msg import Marker, MarkerArray

from worldmodel_ros.control.deciding_worker import Decided
from worldmodel_ros.msg import Candidate, Decision, ForecastThing
from worldmodel_ros.nodes.common.messages import float32s, header

_SHOWN = 0.3  # s, that markers stay
_CHOSEN, _OTHER, _VETOED, _THING = (0.1, 0.9, 0.2, 1.0), (0.6, 0.6, 0.6, 0.5), (0.9, 0.1, 0.1, 0.7), (0.5, 0.2, 0.9, 0.8)


def decision(decided: Decided, frame_id: str) -> Decision:
    """Return what was compared and chosen; paths in ``frame_id``, the base at the observation."""
    observation, choice = decided.observation, decided.choice
    return Decision(
        header=header(observation.stamp, frame_id), episode_id=observation.episode, sequence=observation.sequence,
        tier=int(decided.tier), passes=decided.passes, task=observation.task.name, chosen=choice.name, delay=decided.delay,
        times=float32s(choice.times if len(choice.times) else np.zeros(1)),
        candidates=[Candidate(name=name, score=score, vetoed=name in choice.vetoed, x=float32s(x), y=float32s(y))
                    for (name, score), (x, y) in zip(choice.scores.items(), map(np.transpose, paths(decided)), strict=True)],
        things=[ForecastThing(name=name, colour=thing.colour, presence=thing.presence, radius=thing.radius, x=float32s(x),
                              y=float32s(y))
                for name, thing in decided.view.things.items() for x, y in [_in_base(thing.path, decided.view.pose).T]],
        forecast_time=sum(seconds for part, seconds in decided.timings.items() if not _is_comparing(part)),
        decision_time=sum(seconds for part, seconds in decided.timings.items() if _is_comparing(part)))


def markers(decided: Decided, frame_id: str) -> MarkerArray:
    """Return where each candidate leads (green: chosen; grey: rejected; red: vetoed), and where what moves will be."""
    choice, view = decided.choice, decided.view
    made = MarkerArray()

    def line(kind: str, points: np.ndarray, colour: tuple[float, float, float, float], width: float) -> None:
        marker = Marker(header=header(decided.observation.stamp, frame_id), ns=kind, id=len(made.markers),
                        type=Marker.LINE_STRIP, action=Marker.ADD, lifetime=Duration(seconds=_SHOWN).to_msg())
        marker.pose.orientation.w, marker.scale.x = 1.0, width
        marker.color = ColorRGBA(**dict(zip('rgba', colour)))
        marker.points = [Point(x=float(x), y=float(y)) for x, y in points]
        made.markers.append(marker)

    for name, path in zip(choice.scores, paths(decided), strict=True):
        chosen = name == choice.name
        line('candidates', path, _CHOSEN if chosen else _VETOED if name in choice.vetoed else _OTHER, 0.04 if chosen else 0.015)
    for thing in view.things.values():
        if thing.moves and len(thing.path) > 1:
            line('things', _in_base(thing.path, view.pose), _THING, 2.0 * thing.radius)
    return made


def paths(decided: Decided) -> np.ndarray:
    """Return where each candidate leads, (C, T, 2), in the base at the observation."""
    return _in_base(decided.choice.poses[..., :2], decided.view.pose)


def _in_base(places: np.ndarray, pose: np.ndarray) -> np.ndarray:
    cos, sin = math.cos(pose[2]), math.sin(pose[2])
    return (places - pose[:2]) @ np.array([[cos, -sin], [sin, cos]])


def _is_comparing(part: str) -> bool:
    return part == 'react' or part.startswith('compare')
