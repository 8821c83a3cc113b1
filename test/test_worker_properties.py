"""The worker under whatever images, slow steps, faults, questions and goals come, at any moment, also while a network runs."""
import itertools
import random

import numpy as np
from fake_engine import FakeClock, FakeEngine
from happenings import Happenings
from hypothesis import given, settings
from hypothesis import strategies as st

from worldmodel_ros.control.ladder import NS, Settings, Tier, Verdict
from worldmodel_ros.control.responder import Observation, Responder
from worldmodel_ros.control.worker import Worker
from worldmodel_ros.engine.what_if import Branch, Question, QuestionError

SECONDS, DEADLINE = 6.0, 0.05
COSTS = {'encode': 0.002, 'commit': 0.005, 'policy': 0.001, 'denoise': 0.006, 'decode': 0.005, 'what_if': 0.006}


class Robot(Happenings):
    """What reaches a worker has its time, and does so also while the worker's thread is at work."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        super().__init__(FakeClock())
        scale = self.random.choice([0.5, 1.0, 1.0, 2.0, 4.0])
        self.engine = FakeEngine(self.sleep, **{part: scale * cost for part, cost in COSTS.items()})
        self.responder = Responder(self, Settings(), 0.1, self.clock)
        self.worker = Worker(self.engine, self.executed, self.responder, self, self.clock)
        self.worker._thread.running = True
        self.sequence, self.episode, self.goal = 0, 1, 'red'
        self.wanted, self.answers, self.predictions, self.intervals, self.promises = [], [], [], [], []
        self.faults = 0
        self.period = self.random.choice([0.1, 0.1, 0.1, 0.2, 0.05])
        self.end = self.clock.now + SECONDS
        for _ in range(self.random.randint(0, 8)):
            begin = self.random.uniform(0, SECONDS)
            self.at(begin, lambda factor=self.random.uniform(1.5, 20.0): setattr(self, 'slow', factor))
            self.at(begin + self.random.choice([0.03, 0.1, 1.0]), lambda: setattr(self, 'slow', 1.0))
        for _ in range(self.random.choice([0, 0, 0, 2])):
            self.at(self.random.uniform(0, SECONDS), lambda: setattr(
                self.engine, 'failing', self.random.choice(['encode', 'commit', 'policy', 'denoise'])))
        self.at(0.0, self.image)

    # --- what comes ---

    def image(self):
        chance = self.random.random
        if chance() < 0.02:
            self.episode += 1
        if chance() < 0.03:
            self.goal = self.random.choice(['', 'red', 'green'])
        self.sequence += 1
        received = self.clock.now
        observation = Observation(
            np.full((64, 64, 3), self.sequence % 256, np.uint8), round(received * NS), received, received + DEADLINE,
            self.episode, self.sequence, self.goal, 'too old' if chance() < 0.05 else '')
        if observation.wants_answer:
            self.wanted.append(observation)
            late = self.random.choice([0.0, 0.0, 0.001, 0.02])  # by which the timer's thread comes to it
            self.at(DEADLINE - self.responder.settings.reserve + late, self.responder.overdue)
        self.worker.submit(observation)
        if chance() < 0.02:
            self.worker.forget()
        if chance() < 0.1:
            actions = np.zeros((4, 2), np.float32)
            due = self.clock.now + self.random.choice([0.05, 0.5, 2.0])
            self.promises.append(self.worker.ask(Question((Branch('a', 4, actions), Branch('b', 4, None)), 'red', due, 0)))
        if self.clock.now < self.end:
            self.at(self.period * self.random.choice([0.97, 1.0, 1.0, 1.03, 2.0, 0.3]), self.image)

    # --- what comes of it ---

    def executed(self, start, end):
        self.intervals.append((start, end))
        return np.float32([0.1, 0.2])

    def answered(self, answer):
        self.answers.append((answer, self.clock.now))

    def predicted(self, prediction):
        self.predictions.append((prediction, self.clock.now))

    def failed(self, reason, error, restarted):
        self.faults += 1
        self.engine.failing = ''


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_whatever_comes_each_observation_is_answered_once_and_no_command_is_late(seed):
    robot = Robot(seed)
    robot.play(robot.worker.step)
    # That the model failed on one is said also where it had been answered.
    answered = [(answer.episode, answer.sequence) for answer, _ in robot.answers if answer.verdict is not Verdict.INVALID]
    assert len(set(answered)) == len(answered), 'one was answered twice'
    assert {each.number for each in robot.wanted} <= {(answer.episode, answer.sequence) for answer, _ in robot.answers}
    assert len(robot.answers) - len(answered) <= robot.faults
    due = {each.number: each.due for each in robot.wanted}
    for answer, at in robot.answers:
        if answer.actions is not None:
            assert answer.tier not in (Tier.STOP, Tier.NONE) and np.isfinite(answer.actions).all() and len(answer.actions)
            assert at <= due[answer.episode, answer.sequence] - robot.responder.settings.reserve / 2
        if answer.verdict is Verdict.ON_TIME:
            assert answer.tier is Tier.TWO_STEP
    shown = [prediction.observation.number for prediction, _ in robot.predictions]
    assert shown == sorted(set(shown)) and all(prediction.future.frames is not None for prediction, _ in robot.predictions)
    for (_, end), (start, later) in itertools.pairwise(robot.intervals):
        assert start in (None, end) and end < later
    counts = robot.responder.counts
    assert counts.late == sum(answer.verdict is Verdict.LATE for answer, _ in robot.answers)
    for promise in robot.promises:
        try:
            answer = promise.result(timeout=0)
        except (QuestionError, RuntimeError):  # the latter is what the model failed with
            continue
        assert len(answer.branches) <= 2 and answer.complete == (len(answer.branches) == 2)
