"""What each robot may ask of a shared engine, on virtual time: the rest is refused, with words that say by how much."""
import numpy as np
import pytest
from small_model import SMALL
from timed_backend import Listener, Rig

from worldmodel_ros.engine.what_if import Branch, Question, QuestionError
from worldmodel_ros.serving.scheduler import Tier
from worldmodel_ros.serving.service.quotas import Quotas, TokenBuckets

TURN = np.tile(np.float32([0.2, 1.0]), (SMALL.chunk_frames, 1))


def ask(rig, session):
    return rig.service.ask(session, Question((Branch('turn', len(TURN), TURN),), 'red', rig.clock.now + 1.0))


def test_a_robot_that_ticks_too_often_is_refused_what_is_too_much_and_nothing_is_computed_for_that():
    rig = Rig(pictures=False, quotas=Quotas(ticks=20.0))
    session, listener = rig.open()
    other, honest = rig.open()
    for number in range(1, 201):  # 100 a second, for 2 s
        rig.tick(session, number, 0.09)
        if number % 10 == 0:
            rig.tick(other, number, 0.09)
        rig.run(0.01)
    rig.settle()
    tiers = [reply.tier for reply in listener.replies]
    refused = [reply for reply in listener.replies if 'may tick 20 times a second: again in' in reply.reason]
    assert len(tiers) == 200 and 145 <= len(refused) <= 155
    assert all(reply.plan is None for reply in refused)
    assert rig.service.stats()['over_rate'] == len(refused)
    assert rig.service._clients[session].models[0].session.frames_seen <= 55
    assert [reply.tier for reply in honest.replies] == [Tier.TWO_STEP] * 20 and rig.service.stats()['late'] == 0


def test_the_actions_of_ticks_that_were_too_many_are_not_lost():
    rig, seen = Rig(pictures=False, quotas=Quotas(ticks=1.0)), []
    session, _ = rig.open()
    commit = rig.backend._commit
    rig.backend._commit = lambda latents, actions, *rest: seen.append(actions[0]) or commit(latents, actions, *rest)
    rig.tick(session, 1)
    rig.run(0.5)
    rig.tick(session, 2, executed=np.array([0.1, 0.0], np.float32))  # too soon
    rig.run(0.5)
    rig.tick(session, 3, executed=np.array([0.3, 0.4], np.float32))
    rig.settle()
    np.testing.assert_allclose(seen, [[0.1, 0.2], [0.2, 0.2]], atol=1e-6)


@pytest.mark.parametrize('budget, words', [(0.0, 'due in 0.0 ms'), (-3.0, 'due in -3000.0 ms'),
                                           (0.0019, 'due in 1.9 ms')])
def test_a_tick_that_is_due_sooner_than_the_least_is_refused_by_that(budget, words):
    rig = Rig(quotas=Quotas(shortest_due=0.002))
    session, listener = rig.open()
    rig.tick(session, 1, budget)
    reply, = listener.replies
    assert reply.tier is Tier.NONE and words in reply.reason and 'at least 2 ms must be left' in reply.reason
    assert rig.service.stats()['due_too_soon'] == 1
    rig.settle()
    rig.tick(session, 2)
    rig.settle()
    assert listener.replies[-1].tier is Tier.TWO_STEP  # its tier is none the worse for it
    assert rig.service._clients[session].models[0].session.frames_seen == 2


def test_questions_beyond_the_quota_are_refused_and_those_of_others_answered():
    rig = Rig(pictures=False, quotas=Quotas(questions=2.0))
    (session, _), (other, _) = rig.open(), rig.open()
    for each in (session, other):
        rig.tick(each, 1)
    rig.settle()
    answers = [ask(rig, session) for _ in range(20)]
    honest = ask(rig, other)
    rig.run(1.0)
    refused = [each.exception() for each in answers if each.exception()]
    assert len(refused) == 12 and honest.result().complete
    assert all(isinstance(each, QuestionError) and '2 questions a second: the next one in 0.50 s' in str(each)
               for each in refused)
    assert rig.service.stats()['what_if']['over_rate'] == 12
    assert ask(rig, session).done() is False  # a second later


def test_sessions_of_one_account_share_its_quota_also_after_they_were_closed():
    rig = Rig(pictures=False, quotas=Quotas(ticks=20.0))
    refused = 0
    for number in range(1, 101):
        listener = Listener()
        session = rig.service.open(listener, account='greedy')
        rig.tick(session, 1)
        rig.service.close(session)
        refused += any('may tick' in reply.reason for reply in listener.replies)
    assert refused == 90


def test_a_bucket_is_filled_at_its_rate_and_no_further():
    buckets = TokenBuckets(10.0, 0.5)
    assert [buckets.take('a', 0.0) for _ in range(5)] == [0.0] * 5
    assert buckets.take('a', 0.0) == pytest.approx(0.1) and buckets.take('b', 0.0) == 0.0
    assert buckets.take('a', 0.05) == pytest.approx(0.05)
    assert buckets.take('a', 0.1001) == 0.0
    assert [buckets.take('a', 100.0) for _ in range(6)][-1] > 0.0
    assert buckets.take('a', 50.0) > 0.0  # a clock that goes back fills nothing
    for account in range(10_000):
        buckets.take(account, 200.0 + account)
    assert len(buckets._buckets) < 300
    assert TokenBuckets(0.0, 1.0).take('a', 0.0) == 0.0


def test_many_tokens_are_taken_together_or_not_at_all_and_more_than_a_bucket_holds_from_a_full_one():
    buckets = TokenBuckets(2.0, 2.0)
    assert buckets.take('a', 0.0, 3) == 0.0
    assert buckets.take('a', 0.0, 3) == pytest.approx(1.0) and buckets.take('a', 0.0) == 0.0
    assert buckets.take('a', 0.5, 7) == pytest.approx(1.5) and buckets.take('a', 2.0, 7) == 0.0
    assert buckets.take('a', 2.0) == pytest.approx(2.0) and buckets.take('a', 4.0) == 0.0


@pytest.mark.parametrize('values', [{'ticks': -1.0}, {'questions': float('nan')}, {'shortest_due': float('inf')}])
def test_quotas_that_make_no_sense_are_refused_by_name(values):
    with pytest.raises(ValueError, match=f'{next(iter(values))} is .*: it must be a number, 0'):
        Quotas(**values)
