"""The simulated robot's tasks: the scene of a seed, the task message, and whether the task was done."""

import json
from collections.abc import Callable

from worldmodel_ros.control.pilot import SLOTS
from worldmodel_ros.control.task import Task
from worldmodel_ros.evaluate.control.judge import Judge
from worldmodel_ros.evaluate.control.learned import slots
from worldmodel_ros.evaluate.control.tasks import TASKS
from worldmodel_ros.msg import Task as TaskMessage
from worldmodel_ros.nodes.common.tasks import AIMS, task_message
from worldmodel_ros.sim.world import World

# s without images before each episode: a world model takes a gap of more than a second in the stamps (time_jump_s) for a new
# episode.
PAUSE = 1.2


class Episodes:
    """
    Episodes of a task, each in the room of a seed, judged as in ``worldmodel evaluate control``.

    ``tell`` is called with each task message, ``judged`` with a line of JSON at the start and end of each episode: task, seed,
    target (what to touch, reach or keep a distance to), succeeded (null: not over), reason, seconds, contacts and arrivals.
    """

    def __init__(self, task: str, tell: Callable[[TaskMessage], None], judged: Callable[[str], None]) -> None:
        self._task, self._tell, self._say = TASKS[task], tell, judged

    def begin(self, world: World, seed: int) -> None:
        """Load the room of a seed and publish its task."""
        self._setup, self._world = self._task.setup(seed), world
        world.load(self._setup.scene)
        self._judge = Judge(self._setup, world)
        self._arrivals = 0
        self._tell_it()
        self._report()

    def look(self) -> bool:
        """Judge the last step of the world; return whether the episode is over."""
        self._judge.look()
        if self._judge.succeeded is not None:
            self._report()
            return True
        if self._judge.arrivals != self._arrivals:
            self._arrivals = self._judge.arrivals
            self._tell_it()
        return False

    def _tell_it(self) -> None:
        names = {name: slot.name for name, slot in zip(slots(self._setup.scene), SLOTS, strict=True) if name}
        told = task_message(Task(self._task.name, self._judge.terms), names)
        self._target = next((term.target for term in told.terms if term.kind in AIMS), '')
        self._tell(told)

    def _report(self) -> None:
        judge = self._judge
        self._say(json.dumps({
            'task': self._task.name, 'seed': self._setup.seed, 'target': self._target, 'succeeded': judge.succeeded,
            'reason': judge.reason, 'seconds': round(self._world.time, 3), 'contacts': judge.contacts,
            'arrivals': judge.arrivals}))
