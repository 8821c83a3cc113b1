"""Conversion between tasks and messages."""

from collections.abc import Mapping

from worldmodel_ros.control.pilot import SLOTS
from worldmodel_ros.control.task import Task, Told, task_of
from worldmodel_ros.control.terms import Avoid, Clearance, KeepDistance, PassBehind, Reach, StayIn, Term, Time, Touch
from worldmodel_ros.msg import Task as TaskMessage, Term as TermMessage

_KINDS = {Touch: TermMessage.TOUCH, Reach: TermMessage.REACH, KeepDistance: TermMessage.KEEP_DISTANCE,
          PassBehind: TermMessage.PASS_BEHIND, Avoid: TermMessage.AVOID, Clearance: TermMessage.CLEARANCE,
          Time: TermMessage.TIME, StayIn: TermMessage.STAY_IN}

AIMS = (TermMessage.TOUCH, TermMessage.REACH, TermMessage.KEEP_DISTANCE)  # kinds of terms that name what to drive to


def read_task(message: TaskMessage) -> Task:
    """Return the task of a message, whose targets must be objects that the robot knows. Raises TaskError."""
    told = [Told(term.kind, term.target, term.weight, term.distance, tuple(term.but), tuple(term.region),
                 tuple(term.place))
            for term in message.terms]
    return task_of(message.name or 'task', told, {slot.name: slot.colour for slot in SLOTS})


def task_message(task: Task, names: Mapping[str, str]) -> TaskMessage:
    """Return a task as a message; ``names`` maps objects to their names in it, where they differ."""
    return TaskMessage(name=task.name, terms=[_term(term, names) for term in task.terms])


def _term(term: Term, names: Mapping[str, str]) -> TermMessage:
    message = TermMessage(kind=_KINDS[type(term)], weight=float(term.weight))
    match term:
        case Avoid():
            message.target, message.distance = names.get(term.what, term.what), term.clearance
        case Clearance():
            message.distance, message.but = term.margin, [names.get(name, name) for name in term.but]
        case StayIn():
            message.region = [term.x_min, term.x_max, term.y_min, term.y_max]
        case Reach() | KeepDistance() | Time() if term.place is not None:
            message.place = list(term.place)
        case _:
            message.target = names.get(term.target, term.target)
    if isinstance(term, KeepDistance):
        message.distance = term.distance
    return message
