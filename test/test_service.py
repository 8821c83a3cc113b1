"""The service of many sessions: what becomes of ticks, questions, failures and what is stale, on virtual time."""
import gc
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from small_model import SMALL
from timed_backend import COSTS, Rig

from worldmodel_ros.engine.sampler import Noise
from worldmodel_ros.engine.session_file import Incoming
from worldmodel_ros.engine.session_folder import SessionFileError, SessionFolder
from worldmodel_ros.engine.session_transfer import wait
from worldmodel_ros.engine.what_if import Branch, Question, QuestionError
from worldmodel_ros.serving.scheduler import FIFO, Tier
from worldmodel_ros.serving.service.client import TickTiming
from worldmodel_ros.serving.service.messages import ServiceFull, SessionError
from worldmodel_ros.serving.service.quotas import Quotas
from worldmodel_ros.serving.service.states import TRANSITIONS, Event, State, after

TWO_STEPS = sum(COSTS[name] for name in ('encode', 'commit', 'policy', 'outcomes')) + 2 * COSTS['denoise']
TURN = np.tile(np.float32([0.2, 1.0]), (2 * SMALL.chunk_frames, 1))


def question(rig, branches=2, within=1.0, **values):
    return Question(tuple(Branch(f'b{index}', len(TURN), TURN) for index in range(branches)), 'red',
                    rig.clock.now + within, **values)


def test_a_tick_is_answered_with_a_plan_its_outcome_and_later_its_pictures():
    rig = Rig()
    session, listener = rig.open()
    begun = rig.clock.now
    rig.tick(session, 1)
    rig.settle()
    reply, = listener.replies
    assert (reply.session, reply.sequence, reply.stamp, reply.tier, reply.reason) == (session, 1, 1, Tier.TWO_STEP, '')
    np.testing.assert_array_equal(reply.plan, np.full((SMALL.chunk_frames, 2), rig.backend.plan))
    np.testing.assert_allclose(reply.collision_risk, 0.5)
    assert set(reply.progress) == set(SMALL.goals)
    assert reply.finish - begun == pytest.approx(TWO_STEPS) and reply.predicted == pytest.approx(reply.finish, abs=1e-6)
    assert reply.timings['total'] == pytest.approx(TWO_STEPS)
    picture, = listener.pictures
    assert picture.reply is reply and picture.future.frames.shape == (SMALL.chunk_frames, *SMALL.image_size, 3)
    assert picture.seconds == pytest.approx(COSTS['decode'])


@pytest.mark.parametrize('robots', [1, 2])
def test_robots_whose_ticks_leave_no_gap_that_is_long_enough_see_what_their_answers_lead_to_all_the_same(robots):
    # Ticks come evenly, and leave 10 ms to the next one: decoding takes 14.
    apart = SMALL.step_period / robots
    rig = Rig({'decode': 0.014, 'denoise': COSTS['denoise'] + (apart - 0.01 - TWO_STEPS) / 2})
    clients = [rig.open() for _ in range(robots)]
    seconds, begun = 10, rig.clock.now
    for number in range(round(seconds / apart)):
        rig.tick(clients[number % robots][0], 1 + number // robots, budget=apart)
        rig.run(begun + (number + 1) * apart - rig.clock.now)
    for _, listener in clients:
        assert all(reply.tier is Tier.TWO_STEP and reply.timings['total'] < apart for reply in listener.replies)
        assert len(listener.pictures) >= seconds / robots - 2


def test_a_tick_that_is_given_up_while_its_frame_is_taken_in_has_it_taken_in_once():
    rig = Rig()
    (one, first), (two, _) = rig.open(), rig.open()
    rig.tick(one, 1)
    rig.settle()
    taken = []
    commit = rig.backend._commit
    rig.backend._commit = lambda latents, actions, *rest: (taken.append(np.array(actions)), commit(latents, actions, *rest))[1]

    def interrupted():
        rig.clock.sleep(0.1)
        rig.tick(two, 1)  # at whose arrival the plan is looked through
    rig.tick(one, 2)
    rig.backend.meanwhile = interrupted
    rig.run(0.5)
    assert first.replies[1].tier is Tier.NONE and 'others took longer' in first.replies[1].reason
    assert not first.failures and rig.service.stats()['given_up'] == 1
    assert len(taken) == 2 and all(np.isfinite(actions).all() for actions in taken)  # of one, and of two
    rig.tick(one, 3)
    rig.settle()
    assert first.replies[2].tier is not Tier.NONE and np.isfinite(taken[2]).all()


@pytest.mark.parametrize('pictures', [True, False])
def test_frames_that_want_no_answer_are_taken_in_each_second_where_no_gap_is_long_enough_for_them(pictures):
    # Two other robots leave 10 ms in each 50: a frame takes 15.
    period, seconds = SMALL.step_period, 10
    observe = COSTS['encode'] + 0.012 + COSTS['policy']
    rig = Rig({'decode': 0.014, 'commit': 0.012, 'denoise': (period / 2 - 0.01 - observe) / 2}, pictures=pictures)
    watching, *driving = (rig.open() for _ in range(3))
    begun = rig.clock.now
    for number in range(round(seconds / period)):
        for (session, _), part, answer in ((driving[0], 0.0, True), (watching, 0.25, False), (driving[1], 0.5, True)):
            rig.run(begun + (number + part) * period - rig.clock.now)
            rig.tick(session, 1 + number, budget=period / 2, answer=answer)
    rig.settle()
    for _, listener in driving:
        assert sum(reply.tier is Tier.TWO_STEP for reply in listener.replies) > 0.85 * seconds / period
        assert not pictures or len(listener.pictures) >= 2 * seconds
    assert rig.service.stats()['frames_taken_in_later'] >= seconds - 1


def test_what_the_robot_has_decided_is_imagined_in_place_of_a_plan():
    rig = Rig()
    session, listener = rig.open()
    decided = np.linspace(-0.2, 0.5, SMALL.chunk_frames * 2).reshape(-1, 2).astype(np.float32)
    for sequence, plan in ((1, decided), (2, None)):
        rig.tick(session, sequence, plan=plan)
        rig.settle()
    mine, planned = listener.replies
    np.testing.assert_array_equal(mine.plan, decided)
    np.testing.assert_array_equal(listener.pictures[0].future.actions, decided)
    assert not np.array_equal(planned.plan, decided)
    assert [name for name, _ in rig.backend.batches].count('policy') == 1, 'the decided one was planned, too'


def test_ticks_of_many_sessions_share_batches():
    rig = Rig(sizes=(1, 2, 4), pictures=False)
    clients = [rig.open() for _ in range(4)]
    for session, _ in clients:
        rig.tick(session, 1)
    rig.settle()
    assert [listener.replies[0].tier for _, listener in clients] == [Tier.TWO_STEP] * 4
    assert rig.backend.batches.count(('denoise', 4)) == 2 and rig.backend.batches.count(('encode', 4)) == 1


def test_a_tick_too_tight_for_two_steps_gets_one_and_one_for_which_nothing_fits_is_refused_at_once():
    rig = Rig()
    session, listener = rig.open()
    rig.tick(session, 1, budget=TWO_STEPS - 0.003)
    rig.settle()
    assert listener.replies[0].tier is Tier.ONE_STEP and 'two steps' in listener.replies[0].reason
    rig.tick(session, 2, budget=0.005)
    assert len(listener.replies) == 2  # before anything was run
    refusal = listener.replies[1]
    assert refusal.tier is Tier.NONE and refusal.plan is None and 'ms' in refusal.reason
    assert rig.service.stats()['refused_at_arrival'] == 1


def test_the_frame_of_a_refused_tick_is_taken_in_when_there_is_time():
    rig = Rig()
    session, listener = rig.open()
    for sequence, budget in ((1, 0.05), (2, 0.005), (3, 0.05)):
        rig.tick(session, sequence, budget)
        rig.run(0.1)
    assert [reply.tier is Tier.NONE for reply in listener.replies] == [False, True, False]
    assert rig.backend.batches.count(('encode', 1)) == 3 and rig.service.stats()['frames_taken_in_later'] == 1
    assert rig.service._clients[session].models[0].session.frames_seen == 3


def test_a_frame_that_was_never_taken_in_leaves_its_action_in_the_mean():
    rig, seen = Rig(), []
    session, _ = rig.open()
    commit = rig.backend._commit
    rig.backend._commit = lambda latents, actions, *rest: seen.append(actions[0]) or commit(latents, actions, *rest)
    rig.tick(session, 1)
    rig.settle()
    rig.tick(session, 2, budget=0.001, executed=np.array([0.1, 0.0], np.float32))
    rig.tick(session, 3, executed=np.array([0.3, 0.4], np.float32))
    rig.settle()
    np.testing.assert_allclose(seen, [[0.1, 0.2], [0.2, 0.2]], atol=1e-6)


def test_without_a_ladder_everything_is_served_however_late_and_counted():
    rig = Rig(policy=FIFO, pictures=False)
    clients = [rig.open() for _ in range(4)]
    for session, _ in clients:
        rig.tick(session, 1)
    rig.settle()
    replies = [listener.replies[0] for _, listener in clients]
    assert [reply.tier for reply in replies] == [Tier.TWO_STEP] * 4
    late = sum(index * TWO_STEPS > 0.05 for index in range(1, 5))
    assert rig.service.stats()['late'] == late > 0


def test_the_smaller_model_steps_in_and_sees_whole_runs_only():
    """Its session begins again after a gap: it never takes two frames for neighbours that are not."""
    tight = TWO_STEPS - COSTS['denoise'] - 0.003
    rig = Rig(smaller={name: cost / 3 for name, cost in COSTS.items()}, pictures=False)
    session, listener = rig.open()
    smaller = rig.service._clients[session].models[1]
    frames = []
    for sequence, budget in enumerate((0.05, tight, tight, 0.05, tight), 1):
        rig.tick(session, sequence, budget)
        rig.run(0.1)
        frames.append(smaller.session.frames_seen)
    assert [reply.tier for reply in listener.replies[1:3]] == [Tier.SMALLER] * 2
    assert frames[:3] == [0, 1, 2]
    # The recovery goes by the smaller model until it is safe again: a run without a gap.
    assert listener.replies[3].tier is Tier.SMALLER and frames[3:] == [3, 4]
    # Meanwhile the best model takes in the frames, too, in idle time: its session stays whole, its step times fresh.
    assert rig.service._clients[session].models[0].session.frames_seen == 5
    for sequence in range(6, 14):
        rig.tick(session, sequence, 0.06)
        rig.run(0.1)
    assert listener.replies[-1].tier is Tier.TWO_STEP
    seen = smaller.session.frames_seen
    rig.tick(session, 14, tight)
    rig.run(0.1)
    assert listener.replies[-1].tier is Tier.SMALLER and smaller.session.frames_seen == 1 < seen


def test_a_newer_tick_supersedes_one_that_was_not_begun():
    rig = Rig(pictures=False)
    (session, listener), (other, _) = rig.open(), rig.open()
    rig.tick(other, 1)
    rig.service.step()  # the device is busy with the other
    rig.tick(session, 1)
    rig.tick(session, 2)
    rig.settle()
    assert [(reply.sequence, reply.tier) for reply in listener.replies] == [(1, Tier.NONE), (2, Tier.TWO_STEP)]
    assert 'newer' in listener.replies[0].reason or 'before' in listener.replies[0].reason


def test_a_sequence_that_is_not_newer_is_refused_and_changes_nothing():
    rig = Rig(pictures=False)
    session, listener = rig.open()
    rig.tick(session, 5)
    rig.settle()
    rig.tick(session, 5)
    assert listener.replies[-1].tier is Tier.NONE and 'sequence 5' in listener.replies[-1].reason
    rig.settle()
    assert rig.service._clients[session].models[0].session.frames_seen == 1


@pytest.mark.parametrize('how', ['reset', 'episode'])
def test_what_a_reset_left_behind_is_dropped_and_counted_and_who_waits_for_it_is_told(how):
    rig = Rig(pictures=False)
    session, listener = rig.open()

    def begin_anew():
        if how == 'reset':
            rig.service.reset(session)
            rig.tick(session, 1)
        else:
            rig.tick(session, 1, episode=1)
    rig.tick(session, 7)
    rig.backend.meanwhile = begin_anew  # while the first unit of 7 runs
    rig.settle()
    assert [(reply.sequence, reply.tier) for reply in listener.replies] == [(7, Tier.NONE), (1, Tier.TWO_STEP)]
    assert listener.replies[0].reason == {'reset': 'the session was reset', 'episode': 'a new episode has begun'}[how]
    assert rig.service._clients[session].models[0].session.frames_seen == 1
    assert rig.service.stats()['stale_dropped'] == 1


def test_who_waits_for_what_is_done_between_two_batches_is_told_when_the_service_stops():
    rig = Rig()
    session, _ = rig.open()
    rig.tick(session, 1)
    rig.settle()
    promises = [rig.service.captured(session, lambda *both: both), rig.service.leave(session, 1)]
    rig.service.stop()
    for promise in promises:
        with pytest.raises(QuestionError, match='was stopped'):
            promise.result(0.0)


def test_a_device_that_fails_while_it_is_waited_for_fails_the_batch_and_not_the_service():
    rig = Rig()
    (session, listener), (other, heard) = rig.open(), rig.open()

    def fails():
        del rig.backend.settle
        raise RuntimeError('out of memory')
    rig.backend.settle = fails
    rig.tick(session, 1)
    rig.run(0.1)
    reply, = listener.replies
    assert reply.failed and 'out of memory' in reply.reason and listener.failures == ['RuntimeError: out of memory']
    rig.tick(session, 2)
    rig.tick(other, 1)
    rig.run(0.1)
    assert [each.replies[-1].tier for each in (listener, heard)] == [Tier.TWO_STEP] * 2


def test_nothing_is_called_after_a_close():
    rig = Rig()
    session, listener = rig.open()
    rig.tick(session, 1)
    rig.backend.meanwhile = lambda: rig.service.close(session)
    rig.settle()
    assert not listener.replies and not listener.pictures
    with pytest.raises(SessionError, match='not open'):
        rig.tick(session, 2)


def test_a_closed_session_makes_room_for_another():
    rig = Rig(sessions=3)
    numbers = [rig.open()[0] for _ in range(3)]
    with pytest.raises(ServiceFull, match='close one'):
        rig.open()
    rig.service.close(numbers[1])
    assert rig.open()[0] not in numbers


@pytest.mark.parametrize('network', ['encode', 'commit', 'policy', 'denoise', 'outcomes'])
def test_a_failed_tick_is_replied_to_and_the_next_frame_works(network):
    rig = Rig(pictures=False)
    session, listener = rig.open()
    rig.tick(session, 1)
    rig.settle()
    rig.backend.broken[network] = RuntimeError('out of memory')
    rig.tick(session, 2)
    rig.settle()
    assert listener.replies[1].failed and listener.replies[1].tier is Tier.NONE
    assert 'out of memory' in listener.replies[1].reason and 'out of memory' in listener.failures[0]
    rig.backend.broken.clear()
    rig.tick(session, 3)
    rig.settle()
    assert listener.replies[2].tier is Tier.TWO_STEP and len(listener.replies) == 3
    assert rig.service._clients[session].models[0].session.frames_seen == 1
    stats = rig.service.stats()
    assert stats['failed'] == 1 and stats['stale_dropped'] == 0


@pytest.mark.parametrize('closed', [False, True])
def test_the_pages_of_a_session_that_failed_are_free_before_any_garbage_is_collected(closed):
    """It fails between two networks, and the traceback holds the session. ``closed``: its robot has left meanwhile."""
    rig = Rig(pictures=False)
    memory = rig.service._engines[0].memory

    def no_window(*_):
        raise RuntimeError('no window')
    memory.window = no_window
    gc.collect()
    gc.disable()
    try:
        for sequence in range(1, 4):
            if sequence == 1 or closed:
                session, listener = rig.open()
            rig.backend.meanwhile = (lambda left=session: rig.service.close(left)) if closed else None
            rig.tick(session, sequence)
            rig.settle()
            assert len(listener.replies) == (0 if closed else sequence)
            assert memory.pool.allocator.usage().guaranteed == 0
    finally:
        gc.enable()


def test_a_session_whose_store_was_given_up_before_its_turn_came_holds_no_pages():
    """Who waited for it has closed what was read, as it does when the device is busy for longer than it waits."""
    rig = Rig(pictures=False)
    session, _ = rig.open()
    memory, model = rig.service._engines[0].memory, rig.service._clients[session].models[0]
    given_up = Incoming(memory)
    model.leave()
    given_up.close()
    with pytest.raises(SessionFileError, match='given up') as error:
        model.come_back(given_up)
    assert memory.pool.allocator.usage().guaranteed == 0, error  # which holds the traceback, as a promise does
    model.come_back(None)
    assert memory.pool.allocator.usage().guaranteed == memory.guaranteed_pages[0] and model.session.frames_seen == 0


def test_room_for_a_session_that_comes_is_made_between_the_batches_of_a_tick_a_piece_at_a_time():
    """It waits for no idle moment; and a tick waits for one piece at most before its next batch."""
    rig = Rig(pictures=False)
    session, listener = rig.open()
    before = []

    def pieces():
        for _ in range(3):
            before.append(len(rig.backend.batches))
            yield
    rig.tick(session, 1)
    with ThreadPoolExecutor(1) as threads:
        filling = threads.submit(rig.service.run_pieces, None, pieces(), False, 30.0)
        end = time.monotonic() + 30.0
        while not filling.done() and time.monotonic() < end:
            if rig.service._border:
                rig.service.step()
    filling.result(0.0)
    assert sorted(set(before)) == before and len(before) == 3
    rig.settle()
    assert listener.replies[0].tier is Tier.TWO_STEP


def test_pieces_of_a_session_that_comes_are_given_up_where_the_thread_has_no_time_for_them():
    rig, begun = Rig(), []
    with pytest.raises(SessionFileError, match='has not begun'):
        rig.service.run_pieces(None, (begun.append(1) for _ in range(1)), False, 0.01)
    rig.settle()
    assert not begun


def test_a_session_that_was_not_in_time_to_leave_its_pages_keeps_them():
    """Its keeper has been told that it stays: who took it from its pages later would have it begin again."""
    rig = Rig(pictures=False)
    session, _ = rig.open()
    rig.tick(session, 1)
    rig.settle()
    leaves = rig.service.leave(session, 1)
    with pytest.raises(SessionFileError, match='has not begun'):
        wait(leaves, 0.01)
    rig.settle()
    assert rig.service.frames_seen(session) == 1
    leaves = rig.service.leave(session, 1)
    rig.settle()
    assert leaves.result(0.0) and rig.service.frames_seen(session) == 0


def test_a_session_that_fails_leaves_its_neighbours_in_the_batch_alone():
    rig = Rig(sizes=(1, 2), pictures=False)
    (good, fine), (bad, poor) = rig.open(), rig.open()
    rig.backend._policy = lambda features, noise, *rest: np.full(noise.shape, next(plans), np.float32)
    plans = iter((0.1, np.nan))
    rig.tick(good, 1)
    rig.tick(bad, 1)
    rig.settle()
    assert fine.replies[0].tier is Tier.TWO_STEP
    assert poor.replies[0].failed and 'not finite' in poor.replies[0].reason


def test_a_question_is_answered_branch_by_branch_in_its_order():
    rig = Rig(sizes=(1, 2, 4, 8))
    session, _ = rig.open()
    rig.tick(session, 1)
    rig.settle()
    promise = rig.service.ask(session, question(rig, branches=8))
    rig.settle()
    answer = promise.result(0)
    assert answer.complete and [name for name, _ in answer.branches] == [f'b{index}' for index in range(8)]
    assert all(len(future.frames) == len(TURN) for _, future in answer.branches)
    assert ('denoise', 8) in rig.backend.batches


def test_a_branch_that_is_kept_is_gone_on_from_until_the_next_frame():
    rig = Rig(sizes=(1, 2, 4, 8))
    session, _ = rig.open()
    rig.tick(session, 1)
    rig.settle()

    def asked(turn, **values):
        promise = rig.service.ask(session, Question((Branch('b', len(turn), turn),), '', rig.clock.now + 3.0, **values))
        rig.run(2.0)  # it may have to wait for a tick that is expected
        (_, future), = promise.result(0).branches
        return future.frames
    with pytest.raises(QuestionError, match='no branch was kept'):
        asked(TURN, onward=True)
    whole = asked(np.concatenate([TURN, TURN]))
    first, second = asked(TURN, keep=True), asked(TURN, keep=True, onward=True)
    assert np.array_equal(np.concatenate([first, second]), whole)
    with pytest.raises(QuestionError, match='whole chunks'):
        asked(TURN[:3], keep=True)
    rig.tick(session, 2)
    rig.settle()
    with pytest.raises(QuestionError, match='no branch was kept'):
        asked(TURN, onward=True)
    with pytest.raises(QuestionError, match='only one branch'):
        question(rig, keep=True)


def test_a_question_too_many_says_when_it_can_be_asked_again():
    rig = Rig(quotas=Quotas(questions=2.0))
    session, _ = rig.open()
    rig.tick(session, 1)
    rig.settle()
    asked = [rig.service.ask(session, question(rig)) for _ in range(9)]
    assert 0.0 < asked[-1].exception(0).again <= 0.5


def test_a_question_whose_time_is_over_is_answered_with_what_there_is():
    rig = Rig(pictures=False)
    session, _ = rig.open()
    rig.tick(session, 1)
    rig.settle()
    chunk = 2 * COSTS['denoise'] + COSTS['outcomes'] + COSTS['decode']
    promise = rig.service.ask(session, question(rig, 3, within=2 * chunk + COSTS['commit'] + 0.001))
    rig.run(1.0)
    answer = promise.result(0)
    assert not answer.complete and len(answer.branches) < 3
    assert rig.service.stats()['what_if']['incomplete'] == 1


def test_questions_that_ticks_leave_no_time_for_are_answered_when_their_time_is_over():
    rig = Rig(pictures=False)
    sessions = [rig.open()[0] for _ in range(2)]
    for session in sessions:
        rig.tick(session, 1)
    rig.settle()
    promise = rig.service.ask(sessions[0], question(rig, within=0.3))
    due, sequence = rig.clock.now + 0.3, 2
    while rig.clock.now < due + TWO_STEPS:  # there is always a tick that waits
        for session in sessions:
            rig.tick(session, sequence, budget=1.0)
        sequence += 1
        rig.service.step()
    answer = promise.result(0)
    assert not answer.complete and answer.branches == []
    assert rig.service.stats()['what_if']['incomplete'] == 1


def test_a_question_that_the_networks_fail_on_is_refused_and_nobody_waits_for_ever():
    rig = Rig()
    session, _ = rig.open()
    rig.tick(session, 1)
    rig.settle()
    rig.backend.broken['policy'] = RuntimeError('no texture')
    promise = rig.service.ask(session, Question((Branch('policy', 4),), 'red', rig.clock.now + 1.0))
    rig.settle()
    with pytest.raises(QuestionError, match='could not be imagined: RuntimeError: no texture'):
        promise.result(0)
    assert rig.service._clients[session].state is State.READY


def test_a_question_that_cannot_be_scheduled_leaves_its_session_as_it_was():
    rig = Rig(pictures=False)
    session, _ = rig.open()
    rig.tick(session, 1)
    rig.settle()
    for cells in (rig.service.table._cells, rig.service.table._curves):
        cells.pop(f'{SMALL.name}/decode', None)
    promise = rig.service.ask(session, question(rig))
    rig.run(0.1)
    with pytest.raises(QuestionError, match='no time of network'):
        promise.result(0)
    client = rig.service._clients[session]
    assert client.state is State.READY and client.questions == 0 and rig.service.stats()['waiting'] == 0


def test_a_question_that_was_not_begun_is_refused_when_the_service_stops():
    rig = Rig()
    session, _ = rig.open()
    promise = rig.service.ask(session, question(rig))
    rig.service.stop()
    with pytest.raises(QuestionError, match='stopped'):
        promise.result(0)


@pytest.mark.parametrize('prepare, match', [
    (lambda rig, session: None, 'observed'),
    (lambda rig, session: (rig.tick(session, 1), rig.settle(), rig.service.reset(session)), 'observed'),
    (lambda rig, session: (rig.tick(session, 1), rig.settle()), 'not the newest observation'),
])
def test_a_question_about_nothing_or_about_what_is_gone_says_so(prepare, match):
    rig = Rig()
    session, _ = rig.open()
    prepare(rig, session)
    promise = rig.service.ask(session, question(rig, stamp=99))
    rig.settle()
    with pytest.raises(QuestionError, match=match):
        promise.result(0)


def test_a_question_under_way_when_the_session_begins_anew_is_told_why():
    rig = Rig()
    session, _ = rig.open()
    rig.tick(session, 1)
    rig.settle()
    promise = rig.service.ask(session, question(rig))
    rig.service.step()
    rig.service.reset(session)
    rig.settle()
    with pytest.raises(QuestionError, match='reset'):
        promise.result(0)
    assert rig.backend.batches.count(('decode', 1)) == 1  # the reply's; branches were not gone on with


def test_a_branch_that_fails_fails_its_question_and_not_the_session():
    rig = Rig()
    session, listener = rig.open()
    rig.tick(session, 1)
    rig.settle()
    rig.backend.broken['decode'] = RuntimeError('no texture')
    promise = rig.service.ask(session, question(rig))
    rig.settle()
    with pytest.raises(QuestionError, match='no texture'):
        promise.result(0)
    rig.backend.broken.clear()
    rig.tick(session, 2)
    rig.settle()
    assert listener.replies[-1].tier is Tier.TWO_STEP
    assert rig.service._clients[session].models[0].session.frames_seen == 2


def test_branches_all_the_time_delay_a_tick_by_no_more_than_is_allowed():
    """Pre-empted between units: a tick that comes when it was expected waits for ``blocking`` at most."""
    def longest(asking):
        rig = Rig(pictures=False)
        session, listener = rig.open()
        promise = None
        for sequence in range(1, 30):
            rig.tick(session, sequence)
            if asking and (promise is None or promise.done()):
                promise = rig.service.ask(session, question(rig, 16, within=5.0))
            rig.run(0.1)
        return max(reply.timings['total'] for reply in listener.replies[3:]), rig.service.stats()['what_if']
    alone, _ = longest(False)
    together, counts = longest(True)
    assert counts['complete'] >= 1
    assert together <= 1.1 * alone


def test_a_session_is_saved_and_loaded_in_idle_time(tmp_path):
    rig = Rig(pictures=False)
    (session, _), (other, _) = rig.open(), rig.open()
    folder = SessionFolder(tmp_path)

    def next_to(function, *arguments):
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(function, *arguments)
            while not waiting.done():
                rig.run(0.1)
                time.sleep(0.001)
            return waiting.result()
    with pytest.raises(ValueError, match='no frame yet'):
        next_to(rig.service.save, other, folder, 'nothing.safetensors')
    for sequence in (1, 2):
        rig.tick(session, sequence)
        rig.settle()
    took = next_to(rig.service.save, session, folder, 'session.safetensors')
    assert (tmp_path / 'session.safetensors').is_file() and 'of the engine\'s thread' in took
    for name, match in (('absent.safetensors', 'there is no session'), ('../session.safetensors', 'without a folder')):
        with pytest.raises(SessionFileError, match=match):
            next_to(rig.service.load, other, folder, name)


@pytest.mark.parametrize('values, match', [
    ({'goal': 'purple'}, 'red, green, blue, yellow'), ({'executed': np.array([np.nan, 0.0])}, 'finite'),
    ({'prefix': np.zeros((SMALL.chunk_frames, 2))}, 'prefix'), ({'plan': np.zeros((1, 2))}, 'plan'),
    ({'plan': np.full((SMALL.chunk_frames, 2), np.nan)}, 'plan'), ({'budget': np.inf}, 'due'),
])
def test_a_tick_that_does_not_fit_the_model_is_refused_with_the_reason(values, match):
    rig = Rig()
    session, _ = rig.open()
    with pytest.raises(ValueError, match=match):
        rig.tick(session, 1, **values)
    rig.tick(session, 1)


def test_every_transition_is_in_the_table_and_every_other_one_raises():
    legal = 0
    for state in State:
        for event in Event:
            if event in TRANSITIONS[state]:
                assert after(1, state, event) is TRANSITIONS[state][event]
                legal += 1
            else:
                with pytest.raises(SessionError, match='it cannot'):
                    after(1, state, event)
    assert legal == sum(map(len, TRANSITIONS.values()))
    # From everywhere but the end a session can begin again, and end.
    for state in set(State) - {State.CLOSED}:
        assert {Event.RESET: State.EMPTY, Event.FAIL: State.EMPTY, Event.CLOSE: State.CLOSED}.items() <= TRANSITIONS[
            state].items()


def test_states_follow_what_is_under_way():
    rig = Rig(pictures=False)
    session, _ = rig.open()
    client = rig.service._clients[session]
    states = [client.state]
    rig.tick(session, 1)
    states.append(client.state)
    rig.service.step()
    states.append(client.state)
    rig.settle()
    states.append(client.state)
    rig.service.ask(session, question(rig))
    rig.service.step()
    states.append(client.state)
    rig.tick(session, 2)
    states.append(client.state)
    rig.run(0.5)
    states.append(client.state)
    rig.service.reset(session)
    states.append(client.state)
    rig.service.close(session)
    states.append(client.state)
    assert states == [State.EMPTY, State.STARTING, State.TICKING, State.READY, State.ASKING, State.BUSY, State.READY,
                      State.EMPTY, State.CLOSED]


def test_a_tick_is_expected_as_early_as_the_last_ones_came():
    timing = TickTiming(0.1)
    assert timing.ticked(1.0) == pytest.approx(1.1)
    assert timing.ticked(1.105) == pytest.approx(1.205)  # a late one says nothing about early ones
    assert timing.ticked(1.2) == pytest.approx(1.295)    # 5 ms before it was due
    assert timing.ticked(1.21) == pytest.approx(1.285)   # a stray one: no more than a quarter of the period


def test_of_a_camera_that_is_slower_than_the_model_the_next_tick_is_expected_when_it_comes():
    timing = TickTiming(0.1)
    for k in range(10):
        expected = timing.ticked(1.0 + 0.133 * k)
    assert expected == pytest.approx(1.0 + 0.133 * 10)
    assert timing.ticked(1.0 + 0.133 * 12) == pytest.approx(1.0 + 0.133 * 13)  # an image was lost
    for k in range(1, 10):  # and as fast as the model again: never expected before the model's period is over, but soon
        expected = timing.ticked(1.0 + 0.133 * 12 + 0.1 * k)
        assert 0.07 < expected - (1.0 + 0.133 * 12 + 0.1 * k) < 0.134
    assert expected == pytest.approx(1.0 + 0.133 * 12 + 1.0, abs=0.026)


@pytest.mark.parametrize('periods', [(1, 2), (2, 2, 1), (1, 2, 3, 2, 2)])
def test_of_a_camera_that_loses_images_the_next_tick_is_expected_as_early_as_it_may_come(periods):
    timing, now = TickTiming(0.1), 1.0
    for k in range(60):
        expected = timing.ticked(now)
        now += 0.1 * periods[k % len(periods)]
        assert expected <= now + 1e-9


def test_noise_is_of_its_moment_however_it_was_drawn():
    ahead, plain = Noise(7, (4, 2)), Noise(7, (4, 2))
    for moment in range(10):
        ahead.draw_ahead(moment)
        ahead.draw_ahead(moment + 1)
        np.testing.assert_array_equal(ahead.draw(moment), plain.draw(moment))
    assert np.abs(plain.draw(1) - plain.draw(2)).min() > 0
    assert np.abs(plain.draw(1) - Noise(8, (4, 2)).draw(1)).min() > 0
