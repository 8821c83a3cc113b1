"""A question is counted before anything of it is made, and answered in pieces that a tick can come between."""
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from fake_engine import FakeClock, FakeEngine
from small_model import SMALL, small_checkpoint
from timed_backend import COSTS, Rig

from worldmodel_ros.control.worker import BackgroundWork
from worldmodel_ros.engine import load
from worldmodel_ros.engine.futures import OwnPlan
from worldmodel_ros.engine.what_if import Branch, Inquiry, Question, QuestionError
from worldmodel_ros.evaluate.quality.horizons import finish

ALL = 32
LATER = 1e9  # s
MANY = tuple(Branch('policy', 6) for _ in range(ALL))


@pytest.fixture(scope='module')
def engine(tmp_path_factory):
    return load(str(small_checkpoint(tmp_path_factory.mktemp('model'))), 'torch', sessions=4)


def driven(engine, count=8):
    session = engine.open_session()
    for frame in np.random.default_rng(0).integers(0, 256, (count, *SMALL.image_size, 3), dtype=np.uint8):
        session.observe(frame, np.array([0.1, 0.2]))
    return session


def test_every_piece_is_one_network_call_at_most_and_a_plan_is_made_once(engine, monkeypatch):
    calls, run = [], engine.backend.run

    def noting(network, batch):
        calls.append(network)
        return run(network, batch)
    session = driven(engine)
    monkeypatch.setattr(engine.backend, 'run', noting)
    inquiry = Inquiry(Question((Branch('left', 4, np.zeros((4, 2), np.float32)), *MANY), 'red', LATER), session, 1)
    assert not calls, 'it has begun to compute before its turn'
    counts = []
    while not inquiry.advance():
        counts.append(Counter(calls))
        calls.clear()
    # The last step of a chunk reads its outcomes, too.
    assert all(sum(count.values()) - count['outcomes'] <= 1 for count in counts)
    assert sum(count['policy'] for count in counts) == 1
    assert sum(count['denoise'] for count in counts) == 2 * (1 + 2), 'one chunk to the left, two of the plan'
    names, futures = zip(*inquiry.answer.branches)
    assert names == ('left', *['policy'] * ALL) and len({id(future) for future in futures[1:]}) == 1


def test_a_plan_is_of_the_observation_that_was_asked_about_though_ticks_come_between(engine):
    asked, still = driven(engine), driven(engine)
    upcoming = iter(np.random.default_rng(7).integers(0, 256, (50, *SMALL.image_size, 3), dtype=np.uint8))
    inquiry = Inquiry(Question(MANY[:1], 'red', LATER), asked, 1)
    while not inquiry.advance():
        asked.observe(next(upcoming), np.zeros(2))
    (_, future), = inquiry.answer.branches
    plan = still.plan('red')
    np.testing.assert_array_equal(future.actions, np.concatenate([plan, plan[-1:], plan[-1:]]))
    np.testing.assert_array_equal(future.latents, finish(still.what_if(OwnPlan('red', 6))).latents)


def test_32_plans_do_not_hold_up_a_tick():
    clock = FakeClock()
    engine = FakeEngine(clock.sleep, policy=0.004, what_if=0.006)
    session = engine.open_session()
    session.observe(np.zeros((64, 64, 3), np.uint8), (0.0, 0.0))
    spare = BackgroundWork(engine, 0.1, SimpleNamespace(), clock)
    promise = spare.ask(Question(MANY, 'red', LATER))
    longest = 0.0
    while not promise.done():
        start = clock()
        spare.step(session, 1, None)
        longest = max(longest, clock() - start)
    assert len(promise.result().branches) == ALL
    assert longest == pytest.approx(0.006), 'all plans were made in one piece'


def test_32_plans_do_not_hold_up_a_tick_of_the_shared_engine():
    rig = Rig({'policy': 0.004}, pictures=False)
    session, listener = rig.open()
    for sequence in range(3):
        rig.tick(session, sequence)
        rig.settle()
    rig.backend.batches.clear()
    promise = rig.service.ask(session, Question(MANY, 'red', rig.clock.now + 5.0))
    longest = 0.0
    while not promise.done():
        start = rig.clock.now
        patience = rig.service.step()
        longest = max(longest, rig.clock.now - start)
        rig.clock.now += min(patience or 0.01, 0.01)
    answer = promise.result(0)
    assert answer.complete and [name for name, _ in answer.branches] == ['policy'] * ALL
    assert Counter(network for network, _ in rig.backend.batches)['policy'] == 1
    assert longest <= max({**COSTS, 'policy': 0.004}.values()) + 1e-9


@pytest.mark.parametrize('goal, match', [('', 'set goal'), ('purple', 'red, green, blue, yellow')])
def test_a_plan_without_a_known_goal_is_refused_before_the_network_sees_it(goal, match, engine):
    with pytest.raises(QuestionError, match=match):
        Inquiry(Question(MANY, goal, LATER), driven(engine), 1)
    rig = Rig(pictures=False)
    session, listener = rig.open()
    rig.tick(session, 0)
    rig.settle()
    promise = rig.service.ask(session, Question(MANY, goal, rig.clock.now + 5.0))
    rig.run(1.0)
    with pytest.raises(QuestionError, match=match):
        promise.result(0)
    assert not listener.failures


@pytest.mark.ros
@pytest.mark.untimed
class TestRequests:
    """What a request of the service becomes."""

    @pytest.fixture
    def branches(self, monkeypatch):
        from worldmodel_ros.nodes.common import what_if_request
        made = []
        monkeypatch.setattr(what_if_request, 'maneuver', lambda name, steps: made.append(name))
        spec = SimpleNamespace(step_period=0.1, action_names=('linear.x', 'angular.z'), action_low=(-0.3, -1.5),
                               action_high=(0.6, 1.5), goals=('red',), max_steps=200, horizon=1.6,
                               max_branches=ALL)

        def read(**fields):
            return what_if_request.branches(
                SimpleNamespace(**{'names': [], 'actions': [], 'horizon': 0.0, **fields}), spec)
        read.made = made
        return read

    @staticmethod
    def chunk(steps, names=('linear.x', 'angular.z')):
        return SimpleNamespace(names=list(names), step_period=0.1, values=np.zeros(2 * steps, np.float32).tobytes())

    @pytest.mark.parametrize('names, actions', [(ALL + 1, 0), (0, ALL + 1), (ALL, 1), (10**6, 0)])
    def test_branches_are_counted_before_one_is_made(self, names, actions, branches):
        from worldmodel_ros.nodes.common.what_if_request import RequestError
        with pytest.raises(RequestError, match=f'too long: {names + actions} branches, and at most {ALL}'):
            branches(names=['left'] * names, actions=[self.chunk(1)] * actions)
        assert not branches.made
        assert len(branches(names=['left'] * (ALL - 1), actions=[self.chunk(1)])) == ALL

    def test_steps_are_counted_before_they_are_looked_at(self, branches):
        from worldmodel_ros.nodes.common.what_if_request import RequestError
        with pytest.raises(RequestError, match='too long: actions.0. has 201 steps, and at most 200'):
            branches(actions=[self.chunk(201)])
        assert branches(actions=[self.chunk(100_000)], horizon=0.4)[0].steps == 4

    def test_an_error_does_not_send_back_all_that_came(self, branches):
        from worldmodel_ros.nodes.common.what_if_request import RequestError
        for fields in ({'names': ['x' * 10**6]}, {'actions': [self.chunk(1, ['y' * 10**6] * 1000)]}):
            with pytest.raises(RequestError) as refused:
                branches(**fields)
            assert len(str(refused.value)) < 1000
