"""
An engine without a model: the calls of ``worldmodel_ros.engine``, with times and faults chosen by a test.
"""
import functools
from types import SimpleNamespace

import numpy as np

from worldmodel_ros.engine.backends.protocol import Backend
from worldmodel_ros.engine.futures import OwnPlan
from worldmodel_ros.engine.session import NothingObserved
from worldmodel_ros.engine.session_folder import SessionFileError

SPEC = SimpleNamespace(
    name='fake', image_size=(64, 64), camera=None, step_period=0.1, chunk_frames=4, actions=2,
    action_names=('linear.x', 'angular.z'), action_low=(-0.3, -1.5), action_high=(0.6, 1.5),
    goals=('red', 'green', 'blue', 'yellow'))


class FakeClock:
    """A steady clock that moves only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeEngine:
    """
    ``costs`` [s] by part: encode, commit, policy, denoise (a step), decode, what_if (a unit). They pass by
    ``sleep``, and are what ``step_times`` predicts unless ``predicted`` is set.
    """

    def __init__(self, sleep=lambda seconds: None, **costs: float) -> None:
        self.spec = SPEC
        self.sleep = sleep
        self.costs = dict.fromkeys(('encode', 'commit', 'policy', 'denoise', 'decode', 'what_if', 'session'), 0.0)
        self.costs.update(costs)
        self.predicted = None
        self.interruption = 0.0  # s by which the high quantile of a unit exceeds its median
        self.sessions = []
        self.step_times = self
        self.recorded = []
        self.fingerprint = 'fake'
        self.failing = ''  # name of the call that raises
        self.failure = RuntimeError  # what it raises
        self.plan_value = (0.4, 0.1)
        self.warmed_up = 0
        self.degraded_reason = ''
        self.closed = 0
        self.backend = FakeBackend(self)

    def close(self) -> None:
        self.closed += 1

    def warm_up(self) -> None:
        self.warmed_up += 1

    def open_session(self) -> 'FakeSession':
        self.sessions.append(FakeSession(self))
        return self.sessions[-1]

    def prediction_rate(self, step_period: float) -> float:
        return 1.0 / max(step_period, self.predict(1) + self.costs['decode'])

    def predict(self, steps: int) -> float:
        costs = self.predicted or self.costs
        return costs['encode'] + costs['commit'] + costs['policy'] + steps * costs['denoise']

    def quantile(self, part: str) -> float:
        return self.costs[part]

    def typical(self, part: str) -> float:
        return self.costs[part]

    def record(self, part: str, seconds: float) -> None:
        self.recorded.append((part, seconds))

    def read_session(self, file, size):
        if file.read() != b'session':
            raise SessionFileError('it is not a saved session')
        return SimpleNamespace(on_host=True, pieces=lambda: iter(()), close=lambda: None)

    def unit(self) -> float:
        return self.typical_unit() + self.interruption

    def typical_unit(self) -> float:
        return max(self.costs.values())

    def spend(self, part: str) -> None:
        if self.costs[part]:
            self.sleep(self.costs[part])
        if part == self.failing:
            raise self.failure(f'{part} fails')


class FakeBackend(Backend):
    """The network calls; a wrapper around them affects every session."""

    name = 'fake'
    preset = SPEC

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine

    def storage(self, layout, pages):
        raise NotImplementedError('a fake session keeps no pages')

    def run(self, network, batch):
        self.engine.spend(network)
        return [self._plan() if network == 'policy' else None for _ in batch]

    def host(self, array):
        return array

    def stack(self, arrays):
        return np.stack(arrays)

    def _plan(self):
        # Distinguishable rows: the second column grows with the steps of the plan.
        plan = np.tile(np.float32(self.engine.plan_value), (SPEC.chunk_frames, 1))
        plan[:, 1] += np.arange(SPEC.chunk_frames) / 100
        return plan


class FakeSession:
    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.timings = {}
        self.spec = SPEC
        self.observed = []   # (mean of the frame, executed)
        self.imagined = []   # (actions, steps)
        self.asked = []      # steps of each branch
        self.resets = self.restored = 0
        self.overlaps = self.busy = False

    def _run(self, network):
        return self.engine.backend.run(network, [()])[0]

    def reset(self) -> None:
        self.resets += 1
        self.observed.clear()

    def observe(self, frame, executed) -> None:
        assert frame.shape == (*SPEC.image_size, 3) and frame.dtype == np.uint8
        self._run('encode')
        self._run('commit')
        self.observed.append((float(frame.mean()), tuple(executed)))

    def plan(self, goal):
        return self._run('policy')

    def imagine(self, actions, steps=2):
        for _ in range(steps):
            self._run('denoise')
        self.imagined.append((actions, steps))
        return future(actions)

    def look_ahead(self, goal, steps=2):
        plan = functools.cache(lambda: self.plan(goal))
        return SimpleNamespace(plan=plan, future=lambda: self.imagine(plan(), steps))

    def decode(self, future):
        self._run('decode')
        future.frames = np.full((len(future.actions), *SPEC.image_size, 3), 128, np.uint8)
        return future.frames

    def moment(self):
        return len(self.observed)

    def what_if(self, actions, steps=2, moment=None):
        self.asked.append(steps)
        yield
        if isinstance(actions, OwnPlan):
            actions = actions.actions(self._run('policy'))
            yield
        for _ in range(len(actions)):
            self._run('what_if')
            yield
        result = future(actions)
        self.decode(result)
        return result

    def capture(self):
        if not self.observed:
            raise NothingObserved('the session has seen no frame yet: call observe first')
        self._run('session')
        return SimpleNamespace(on_host=True, nbytes=7, pieces=lambda: iter(()), write=lambda file: file.write(b'session'))

    def restore(self, loaded) -> None:
        self._run('session')
        self.restored += 1


def future(actions):
    count = len(actions)
    return SimpleNamespace(actions=actions, latents=None, collision_risk=np.full(count, 0.1, np.float32),
                           progress=dict.fromkeys(SPEC.goals, 0.05 * count), frames=None)
