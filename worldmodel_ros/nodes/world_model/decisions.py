"""Conversion of a tick's decision to a message and to markers."""

import math
from collections import Counter

import numpy as np
from geometry_msgs.msg import Point
from rclpy.duration import Duration
from std_msgs.msg import ColorRGBA
from visualization_msgs.msg import Marker, MarkerArray

from worldmodel_ros.control.deciding_worker import Decided
from worldmodel_ros.control.pilot import REACTING
from worldmodel_ros.control.scene_view import corners
from worldmodel_ros.control.task import term_in_words
from worldmodel_ros.msg import Candidate, Decision, ForecastThing
from worldmodel_ros.nodes.common.messages import float32s, header

_SHOWN = 0.3  # s, lifetime of markers
_CHOSEN, _REJECTED, _VETOED = (0.1, 0.9, 0.2, 1.0), (0.9, 0.3, 0.2, 0.35), (0.9, 0.0, 0.0, 0.9)
_THING, _WALL, _TEXT = (0.5, 0.2, 0.9, 0.6), (0.4, 0.4, 0.4, 0.8), (0.1, 0.1, 0.1, 1.0)
_LETTERS = 0.12  # m, text height


def decision(decided: Decided, frame_id: str) -> Decision:
    """Return the candidates compared and the choice; paths in ``frame_id``, the base at the observation."""
    observation, choice, view = decided.observation, decided.choice, decided.view
    return Decision(
        header=header(observation.stamp, frame_id), episode_id=observation.episode, sequence=observation.sequence,
        tier=int(decided.tier), passes=decided.passes, task=observation.task.name,
        terms=[term_in_words(term) for term in observation.task.terms], chosen=choice.name, delay=decided.delay,
        times=float32s(choice.times if len(choice.times) else np.zeros(1)),
        candidates=[Candidate(name=name, score=score, terms=float32s(terms), vetoed=name in choice.vetoed,
                              contact=choice.vetoed.get(name, ''), x=float32s(x), y=float32s(y))
                    for (name, score), terms, (x, y) in zip(choice.scores.items(), choice.utilities.T,
                                                            map(np.transpose, paths(decided)), strict=True)],
        things=[ForecastThing(name=name, colour=thing.colour, presence=thing.presence, radius=thing.radius, x=float32s(x),
                              y=float32s(y))
                for name, thing in view.things.items() for x, y in [_in_base(thing.path, view.pose).T]],
        walls=float32s(_walls(decided)),
        forecast_time=sum(seconds for part, seconds in decided.timings.items() if not _is_comparing(part)),
        decision_time=sum(seconds for part, seconds in decided.timings.items() if _is_comparing(part)))


def markers(decided: Decided, frame_id: str) -> MarkerArray:
    """
    Return the path of each candidate and the estimated scene, in ``frame_id``, the base at the observation.

    Namespace ``candidates``: lines, the chosen one wide and green, vetoed ones strong red, the others pale red. ``things``:
    lines as wide as each moving object, from its current to its forecast positions. ``walls``: the room's outline.
    ``decision``: what was chosen, and of how many, in words.
    """
    choice, view = decided.choice, decided.view
    made = MarkerArray()

    def add(kind: str, shape: int, colour: tuple[float, float, float, float], **fields: object) -> Marker:
        marker = Marker(header=header(decided.observation.stamp, frame_id), ns=kind, id=len(made.markers), type=shape,
                        action=Marker.ADD, lifetime=Duration(seconds=_SHOWN).to_msg(),
                        color=ColorRGBA(**dict(zip('rgba', colour))), **fields)
        marker.pose.orientation.w = 1.0
        made.markers.append(marker)
        return marker

    def line(kind: str, points: np.ndarray, colour: tuple[float, float, float, float], width: float) -> None:
        marker = add(kind, Marker.LINE_STRIP, colour, points=[Point(x=float(x), y=float(y)) for x, y in points])
        marker.scale.x = width

    for name, path in zip(choice.scores, paths(decided), strict=True):
        chosen = name == choice.name
        colour = _CHOSEN if chosen else _VETOED if name in choice.vetoed else _REJECTED
        line('candidates', path, colour, 0.04 if chosen else 0.015)
    for thing in view.things.values():
        if thing.moves and len(thing.path) > 1:
            line('things', _in_base(thing.path, view.pose), _THING, 2.0 * thing.radius)
    if len(view.walls):
        around = corners(_walls(decided))
        line('walls', np.concatenate([around, around[:1]]), _WALL, 0.03)
    label = add('decision', Marker.TEXT_VIEW_FACING, _TEXT, text=in_words(decided))
    label.pose.position.z, label.scale.z = 3 * _LETTERS, _LETTERS
    return made


def in_words(decided: Decided) -> str:
    """Return what was chosen, of how many, and what the vetoed ones would have touched."""
    choice = decided.choice
    if not choice.scores:
        return choice.name
    text = f'{choice.name}, of {len(choice.scores)}'
    contacts = Counter(choice.vetoed.values())
    return text + ''.join(f'; {count} would touch {name}' for name, count in contacts.most_common())


def paths(decided: Decided) -> np.ndarray:
    """Return the path of each candidate, (C, T, 2), in the base at the observation."""
    return _in_base(decided.choice.poses[..., :2], decided.view.pose)


def _walls(decided: Decided) -> np.ndarray:
    """Return rows of unit normal and offset, (W, 3), in the base at the observation."""
    walls, (x, y, yaw) = decided.view.walls, decided.view.pose
    if not len(walls):
        return walls
    return np.column_stack([_in_base(walls[:, :2], np.array([0.0, 0.0, yaw])), walls[:, 2] - walls[:, :2] @ (x, y)])


def _in_base(places: np.ndarray, pose: np.ndarray) -> np.ndarray:
    cos, sin = math.cos(pose[2]), math.sin(pose[2])
    return (places - pose[:2]) @ np.array([[cos, -sin], [sin, cos]])


def _is_comparing(part: str) -> bool:
    return part == REACTING or part.startswith('compare')
