"""The service under whatever cameras, slow steps, questions and resets come, at any moment, also while a network runs."""
import gc
import random
from unittest import mock
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from happenings import Happenings
from hypothesis import given, settings
from hypothesis import strategies as st
from small_model import SMALL
from timed_backend import Rig

from worldmodel_ros.engine.what_if import Branch, Question, QuestionError
from worldmodel_ros.serving.scheduler import Tier
from worldmodel_ros.serving.service.client import ModelSession
from worldmodel_ros.serving.service.messages import ServiceFull, SessionError

SECONDS = 4.0
SMALLER = {'encode': 0.001, 'commit': 0.001, 'policy': 0.0005, 'denoise': 0.001}


class World(Happenings):
    """Robots at a service: what they do has its time, and happens also while the service's thread is at work."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        chance = self.random.choice
        self.rig = Rig(sizes=chance([(1,), (1, 2, 4)]), smaller=chance([None, SMALLER]), pictures=chance([True, False]))
        super().__init__(self.rig.clock)
        self.clock.sleep, self.end = self.sleep, self.clock.now + SECONDS
        self.taken = WeakKeyDictionary()  # model's session -> stamps of the frames that it was given
        self.promises, self.robots, self.left = [], [], []
        for _ in range(self.random.randint(1, 6)):
            self.join()
        for _ in range(self.random.randint(0, 12)):
            begin, factor = self.random.uniform(0, SECONDS), self.random.uniform(1.5, 20.0)
            self.at(begin, lambda factor=factor: setattr(self, 'slow', factor))
            self.at(begin + self.random.choice([0.03, 0.1, 1.0]), lambda: setattr(self, 'slow', 1.0))

    def join(self):
        robot = Robot(self)
        self.robots.append(robot)
        self.at(self.random.uniform(0, 0.1), robot.tick)


class Robot:
    def __init__(self, world):
        self.world = world
        self.session, self.listener = world.rig.open()
        self.period = world.random.choice([0.1, 0.1, 0.12, 0.2, 0.05])
        self.budget = world.random.choice([0.05, 0.03, 0.015])
        self.sequence = self.episode = 0
        self.asked, self.whole = [], True  # whole: it is there, so that each tick is replied to

    def tick(self):
        world, chance = self.world, self.world.random.random
        self.sequence += 1
        answer = chance() > 0.05
        if chance() < 0.02:
            self.episode += 1
        self.asked.append(self.sequence)
        world.rig.tick(self.session, self.sequence, budget=self.budget, episode=self.episode, answer=answer,
                       executed=np.array([0.1, 0.01 * self.sequence], np.float32))
        if chance() < 0.1:
            self.ask()
        if chance() < 0.02:
            world.rig.service.reset(self.session)
        if chance() < 0.02:
            return self.leave()
        if world.clock.now < world.end:
            world.at(self.period * world.random.choice([0.97, 1.0, 1.0, 1.03, 2.0, 0.3]), self.tick)

    def ask(self):
        actions = np.zeros((4, SMALL.actions), np.float32)
        try:
            self.world.promises.append(self.world.rig.service.ask(self.session, Question(
                tuple(Branch(f'{k}', len(actions), actions) for k in range(3)), 'red', self.world.clock.now + 0.3)))
        except (SessionError, QuestionError):
            pass  # it has no frame yet, or asks too much

    def leave(self):
        self.whole = False
        self.world.rig.service.close(self.session)
        self.world.robots.remove(self)
        self.world.left.append(self)
        try:
            self.world.join()
        except ServiceFull:
            pass


@pytest.mark.filterwarnings('error')
@given(st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_whatever_comes_each_frame_is_taken_in_once_in_order_and_each_tick_answered_once(seed):
    gc.disable()  # pages come back without it
    try:
        play(World(seed))
    finally:
        gc.enable()


def play(world):
    observed, executed = ModelSession.observed, ModelSession.executed

    def observing(model, total, stamp):
        stamps = world.taken.setdefault(model, [])
        assert not stamps or stamp > stamps[-1], f'frame {stamp} after {stamps[-1]}'
        stamps.append(stamp)
        observed(model, total, stamp)

    def acting(model, newest, total):
        mean = executed(model, newest, total)
        assert np.isfinite(mean).all() and mean[0] == pytest.approx(0.1)
        return mean

    with mock.patch.object(ModelSession, 'observed', observing), mock.patch.object(ModelSession, 'executed', acting):
        world.play(world.rig.service.step)
    assert world.taken
    for robot in [*world.robots, *world.left]:
        assert not robot.listener.failures
        replied = [reply.sequence for reply in robot.listener.replies]
        assert len(set(replied)) == len(replied) and set(replied) <= set(robot.asked)
        assert not robot.whole or sorted(replied) == robot.asked
        assert all(reply.plan is not None or reply.tier is Tier.NONE for reply in robot.listener.replies)
    assert all(promise.done() and isinstance(promise.exception(), QuestionError | SessionError | None)
               for promise in world.promises)
    world.promises.clear()  # an answer keeps the pages of its branches
    for robot in world.robots:
        world.rig.service.close(robot.session)
    world.rig.settle()
    assert world.rig.service.stats()['pages']['used'] == 0
