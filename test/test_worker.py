"""
The worker on virtual time: who answers, what is never published late, and what the idle gaps are used for.
"""
import math
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import numpy as np
import pytest
from fake_engine import FakeClock, FakeEngine

from worldmodel_ros.control.ladder import NS, Settings, Tier, Verdict
from worldmodel_ros.control.responder import Observation, Responder
from worldmodel_ros.control.worker import Worker
from worldmodel_ros.engine.device_failure import RankFailure
from worldmodel_ros.engine.session_folder import SessionFolder
from worldmodel_ros.engine.what_if import Branch, Question, QuestionError

DEADLINE = 0.05
TINY = {'encode': 0.002, 'commit': 0.005, 'policy': 0.001, 'denoise': 0.006, 'decode': 0.005,
        'what_if': 0.006}
SLOW = {'encode': 0.08, 'commit': 0.08, 'policy': 0.08, 'denoise': 0.08}


class Rig:
    """A worker that is driven by hand, with a clock that the fake engine moves."""

    def __init__(self, **costs):
        self.clock = FakeClock()
        self.engine = FakeEngine(self.clock.sleep, **{**TINY, **costs})
        self.answers, self.predictions, self.failures, self.intervals = [], [], [], []
        self.responder = Responder(self, Settings(), 0.1, self.clock)
        self.worker = Worker(self.engine, self.executed, self.responder, self, self.clock)
        self.worker._thread.running = True
        self.sequence = 0

    def answered(self, answer):
        self.answers.append((answer, self.clock()))

    def predicted(self, prediction):
        self.predictions.append((prediction, self.clock()))

    def failed(self, reason, error, restarted):
        self.failures.append(reason)
        self.restarted = restarted

    def executed(self, start, end):
        self.intervals.append((start, end))
        return np.float32([0.1, 0.2])

    def frame(self, goal='red', episode=1, stale='', value=100, at=None):
        """Submit a frame that arrives now."""
        self.sequence += 1
        received = self.clock() if at is None else at
        observation = Observation(
            np.full((64, 64, 3), value, np.uint8), round(received * NS), received, received + DEADLINE,
            episode, self.sequence, goal, stale)
        return observation, self.worker.submit(observation)

    def run(self, until=None):
        """Work until there is nothing to do, or until the virtual time ``until``."""
        while True:
            patience = self.worker.step()
            if patience is None:
                return
            if patience > 0.0:
                if until is None or self.clock() + patience >= until:
                    return
                self.clock.sleep(patience)

    def tick(self, **kwargs):
        """One frame, its whole period; the monitor's timer goes off on time."""
        start = self.clock()
        observation, _ = self.frame(**kwargs)
        sleep = self.engine.sleep

        def interrupted(seconds):
            limit = observation.due - self.responder.settings.reserve
            before, left = self.clock(), max(0.0, limit - self.clock())
            sleep(min(left, seconds))
            if before < limit <= before + seconds:
                self.responder.overdue()
            sleep(max(0.0, seconds - left))
        self.engine.sleep = interrupted
        self.run(until=start + 0.1)
        self.engine.sleep = sleep
        self.clock.now = max(self.clock.now, start + 0.1)
        return self.answers[-1][0]


def question(rig, *names, steps=4, allowed=1e9, goal='red', stamp=0):
    branches = tuple(Branch(name, steps, None if name == 'policy' else np.zeros((steps, 2), np.float32))
                     for name in names)
    return rig.worker.ask(Question(branches, goal, rig.clock() + allowed, stamp))


def test_a_frame_is_answered_by_the_two_step_model_before_its_pictures_are_decoded():
    rig = Rig()
    rig.frame()
    rig.run()
    (answer, answered_at), (prediction, shown_at) = rig.answers[0], rig.predictions[0]
    assert (answer.tier, answer.verdict, answer.reason) == (Tier.TWO_STEP, Verdict.ON_TIME, '')
    assert answer.actions.shape == (4, 2)
    assert answer.latency == pytest.approx(0.020)
    assert answered_at < shown_at
    assert prediction.timings['decode'] == pytest.approx(0.005)
    assert prediction.timings['denoise'] == pytest.approx(0.012)
    assert prediction.future.frames.shape == (4, 64, 64, 3)


def test_the_newest_of_waiting_frames_wins_and_the_dropped_one_is_reported():
    rig = Rig()
    rig.frame(value=1)
    _, dropped = rig.frame(value=2)
    assert dropped
    rig.run()
    assert [mean for mean, _ in rig.engine.sessions[0].observed] == [2.0]
    assert [a.verdict for a, _ in rig.answers] == [Verdict.LATE, Verdict.ON_TIME]
    assert rig.answers[0][0].tier is Tier.NONE


def test_the_executed_action_is_that_between_two_committed_frames():
    rig = Rig()
    first, _ = rig.frame()
    rig.run()
    rig.clock.sleep(0.08)
    rig.frame()  # never begun: another one comes at once
    second, _ = rig.frame(at=rig.clock() + 0.001)
    rig.run()
    assert rig.intervals == [(None, first.stamp), (first.stamp, second.stamp)]


def test_what_comes_after_the_limit_is_never_published_but_its_observation_is_kept():
    rig = Rig()
    assert rig.tick().tier is Tier.TWO_STEP
    rig.engine.predicted = dict(rig.engine.costs)
    rig.engine.costs.update(SLOW)
    answer = rig.tick()
    assert (answer.tier, answer.verdict) == (Tier.LAST_PLAN, Verdict.LATE)
    assert len(answer.actions) == 3  # the first action of the plan was for the tick before
    assert answer.latency <= DEADLINE
    assert len([a for a, _ in rig.answers]) == 2
    assert len(rig.engine.sessions[0].observed) == 2


def test_a_model_that_is_suddenly_slow_is_bridged_to_the_end_of_the_plan_and_then_stopped():
    rig = Rig()
    rig.tick()
    rig.engine.predicted = dict(rig.engine.costs)
    rig.engine.costs.update(SLOW)
    tiers = []
    for _ in range(8):
        tiers.append(rig.tick().tier)
    assert tiers[0] is Tier.LAST_PLAN
    assert Tier.STOP in tiers[:5] and tiers[-1] is Tier.STOP
    for answer, at in rig.answers:
        if answer.tier in (Tier.TWO_STEP, Tier.ONE_STEP, Tier.PLAN_ONLY, Tier.LAST_PLAN):
            assert answer.latency <= DEADLINE - rig.responder.settings.reserve / 2


def test_driving_returns_after_a_slow_phase():
    rig = Rig()
    rig.tick()
    rig.engine.costs.update(SLOW)
    for _ in range(8):
        rig.tick()
    assert rig.answers[-1][0].tier is Tier.STOP
    rig.engine.costs.update(TINY)
    tiers = [rig.tick().tier for _ in range(8)]
    assert tiers[-1] is Tier.TWO_STEP
    assert tiers.count(Tier.STOP) >= 3


def test_the_monitor_falls_back_to_the_plan_of_the_same_frame_when_only_the_prediction_is_slow():
    rig = Rig()
    rig.engine.predicted = dict(rig.engine.costs)
    rig.engine.costs['denoise'] = 0.08
    answer = rig.tick()
    assert (answer.tier, answer.verdict, len(answer.actions)) == (Tier.PLAN_ONLY, Verdict.LATE, 4)


def test_when_no_prediction_fits_a_plan_that_does_is_still_made():
    rig = Rig(denoise=0.04)
    for _ in range(10):
        answer = rig.tick()
        assert (answer.tier, answer.verdict, len(answer.actions)) == (Tier.PLAN_ONLY, Verdict.DEGRADED, 4)
        assert answer.latency < 0.04


def test_below_the_one_step_tier_every_tick_still_publishes_its_prediction():
    rig = Rig(denoise=0.04)
    for _ in range(10):
        rig.tick()
    assert len(rig.predictions) == 10
    for prediction, at in rig.predictions:
        assert (prediction.tier, prediction.command_tier) == (Tier.ONE_STEP, Tier.PLAN_ONLY)
        assert 0.05 < at - prediction.observation.received < 0.1


def test_a_prediction_that_the_model_finished_too_late_for_the_command_is_published():
    rig = Rig()
    rig.engine.predicted = dict(rig.engine.costs)
    rig.engine.costs['denoise'] = 0.02
    rig.tick()
    (prediction, _), = rig.predictions
    assert (prediction.tier, prediction.command_tier) == (Tier.TWO_STEP, Tier.PLAN_ONLY)


def test_where_there_is_no_time_for_imagination_and_pictures_in_one_tick_they_take_turns():
    rig = Rig(denoise=0.07, decode=0.05)
    for _ in range(20):
        rig.tick()
    assert 8 <= len(rig.predictions) <= 12
    assert {answer.tier for answer, _ in rig.answers} == {Tier.PLAN_ONLY}


def test_pictures_that_never_fit_are_decoded_once_a_second():
    rig = Rig(decode=0.12)
    for _ in range(40):
        rig.tick()
    assert 3 <= len(rig.predictions) <= 5
    assert sum(answer.tier is Tier.TWO_STEP for answer, _ in rig.answers) >= 30


def test_without_a_goal_a_slow_model_goes_on_looking():
    rig = Rig(denoise=0.06)
    for _ in range(3):
        rig.tick(goal='')
    assert [prediction.command_tier for prediction, _ in rig.predictions] == [Tier.NONE] * 3
    assert {answer.verdict for answer, _ in rig.answers} == {Verdict.IDLE}


def test_a_fallback_that_is_itself_late_commands_nothing():
    rig = Rig()
    rig.tick()
    observation, _ = rig.frame()
    rig.clock.sleep(0.048)
    rig.responder.overdue()
    answer, _ = rig.answers[-1]
    assert (answer.tier, answer.verdict, answer.actions) == (Tier.NONE, Verdict.LATE, None)
    assert answer.counts.late == 1
    rig.run()
    assert rig.answers[-1][0] is answer
    assert rig.engine.sessions[0].observed[-1]


def test_an_observation_that_a_newer_one_overtook_unanswered_counts_as_late_once():
    rig = Rig()
    rig.tick()
    rig.frame()
    rig.clock.sleep(0.1)
    rig.frame()  # the executor was away all the time: nobody called ``overdue``
    answer, _ = rig.answers[-1]
    assert (answer.tier, answer.verdict, answer.sequence, answer.counts.late) == (Tier.NONE, Verdict.LATE, 2, 1)
    rig.run()
    assert rig.answers[-1][0].sequence == 3 and rig.responder.counts.late == 1
    rig.clock.sleep(0.1)
    rig.frame()
    rig.responder.overdue()
    assert rig.responder.counts.late == 2
    rig.clock.sleep(0.1)
    rig.frame()  # what was overdue has been answered, and counted
    assert rig.responder.counts.late == 2


def test_a_plan_that_is_not_finite_stops_the_robot_and_a_fresh_session_takes_over():
    rig = Rig()
    rig.tick()
    rig.engine.plan_value = (math.nan, 0.0)
    answer = rig.tick()
    assert (answer.tier, answer.verdict) == (Tier.STOP, Verdict.INVALID)
    assert 'not finite' in answer.reason and answer.actions is None
    rig.engine.plan_value = (0.4, 0.0)
    tiers = [rig.tick().tier for _ in range(7)]
    assert tiers == [Tier.STOP] * 3 + [Tier.ONE_STEP] * 3 + [Tier.TWO_STEP]
    assert len(rig.engine.sessions) == 2


@pytest.mark.parametrize('call', ['encode', 'policy', 'denoise'])
def test_an_exception_in_the_engine_stops_the_robot_and_is_reported(call):
    rig = Rig()
    rig.tick()
    rig.engine.failing = call
    answer = rig.tick()
    assert (answer.tier, answer.verdict) == (Tier.STOP, Verdict.INVALID)
    assert f'{call} fails' in answer.reason
    assert rig.failures == [f'RuntimeError: {call} fails'] and rig.restarted
    rig.engine.failing = ''
    assert [rig.tick().tier for _ in range(7)][-1] is Tier.TWO_STEP


def test_a_session_outlives_lost_processes_of_its_model():
    rig = Rig()
    rig.tick()
    rig.engine.failing, rig.engine.failure = 'policy', RankFailure
    answer = rig.tick()
    assert (answer.tier, answer.verdict) == (Tier.STOP, Verdict.INVALID)
    assert rig.failures == ['RankFailure: policy fails'] and not rig.restarted
    rig.engine.failing = ''
    assert [rig.tick().tier for _ in range(7)][-1] is Tier.TWO_STEP
    session, = rig.engine.sessions
    assert len(session.observed) == 9 and session.resets == 1


def test_an_exception_in_decoding_costs_the_pictures_only():
    rig = Rig()
    rig.engine.failing = 'decode'
    assert rig.tick().tier is Tier.TWO_STEP
    assert rig.tick().tier is Tier.TWO_STEP
    assert not rig.predictions and len(rig.failures) == 2 and not rig.restarted


def test_without_a_goal_frames_are_seen_and_predicted_under_zero_actions_but_nothing_is_commanded():
    rig = Rig()
    answer = rig.tick(goal='')
    assert (answer.tier, answer.verdict) == (Tier.NONE, Verdict.IDLE)
    prediction, _ = rig.predictions[0]
    assert prediction.tier is Tier.TWO_STEP
    assert not prediction.future.actions.any()
    assert rig.responder.counts.two_step == 0


def test_a_stale_observation_is_taken_in_but_commands_nothing():
    rig = Rig()
    answer = rig.tick(stale='80 ms old')
    assert (answer.tier, answer.verdict, answer.reason) == (Tier.NONE, Verdict.STALE_INPUT, '80 ms old')
    assert len(rig.engine.sessions[0].observed) == 1
    assert not rig.engine.sessions[0].imagined


def test_a_new_episode_begins_with_a_session_that_knows_nothing():
    rig = Rig()
    rig.tick()
    rig.tick()
    rig.tick(episode=2)
    assert len(rig.engine.sessions[0].observed) == 1
    assert rig.intervals[-1][0] is None


def test_a_session_that_has_missed_frames_begins_anew_when_it_is_told_to():
    rig = Rig()
    rig.tick()
    resets = rig.engine.sessions[0].resets
    rig.worker.forget()
    rig.tick()
    assert rig.engine.sessions[0].resets == resets + 1 and rig.intervals[-1][0] is None
    rig.tick()
    assert rig.engine.sessions[0].resets == resets + 1 and rig.intervals[-1][0] is not None


def test_an_observation_that_is_handed_on_to_another_engine_is_answered_once():
    rig = Rig()
    observation, _ = rig.frame()
    rig.run()
    rig.worker.submit(observation)
    rig.run()
    assert [answer.sequence for answer, _ in rig.answers] == [observation.sequence]


def test_the_answer_of_an_engine_elsewhere_is_relayed_until_the_robot_must_stand():
    rig, plan = Rig(), np.full((4, 2), 0.3, np.float32)
    observation, _ = rig.frame()
    assert rig.responder.relay(observation, Tier.SMALLER, observation.due, 'little time', plan)
    answer = rig.answers[-1][0]
    assert (answer.tier, answer.verdict, answer.reason) == (Tier.SMALLER, Verdict.DEGRADED, 'little time')
    rig.responder.fault(observation, 'broken')
    tiers = []
    for _ in range(Settings().recovery_ticks + 1):
        rig.clock.sleep(0.1)
        observation, _ = rig.frame()
        rig.responder.relay(observation, Tier.TWO_STEP, observation.due, '', plan)
        tiers.append(rig.answers[-1][0].tier)
    assert tiers == [Tier.STOP] * Settings().recovery_ticks + [Tier.TWO_STEP]


def test_a_refusal_from_elsewhere_is_bridged_while_the_last_plan_has_actions():
    rig, plan = Rig(), np.full((4, 2), 0.3, np.float32)
    observation, _ = rig.frame()
    rig.responder.relay(observation, Tier.TWO_STEP, observation.due, '', plan)
    bridged = []
    for _ in range(4):
        rig.clock.sleep(0.1)
        observation, _ = rig.frame()
        bridged.append(rig.responder.bridge(observation, observation.due, 'no time'))
    assert bridged == [True, True, True, False]
    assert [answer.tier for answer, _ in rig.answers[1:]] == [Tier.LAST_PLAN] * 3
    assert 'no time; the last plan goes on' in rig.answers[-1][0].reason


def test_a_plan_for_another_goal_is_not_followed():
    rig = Rig()
    rig.tick(goal='red')
    rig.engine.predicted = dict(rig.engine.costs)
    rig.engine.costs.update(SLOW)
    assert rig.tick(goal='blue').tier is Tier.STOP


def test_what_if_is_answered_in_the_gaps_and_delays_no_tick():
    rig = Rig()
    rig.tick()
    asked = question(rig, 'forward', 'left', 'right', steps=8)
    ticks = 0
    while not asked.done():
        assert rig.tick().latency == pytest.approx(0.020)
        ticks += 1
    assert ticks > 1
    answer = asked.result()
    assert answer.complete and [name for name, _ in answer.branches] == ['forward', 'left', 'right']
    assert len(answer.branches[0][1].actions) == 8


def test_no_idle_work_is_begun_that_would_not_be_over_before_the_next_frame():
    rig = Rig(what_if=0.05)
    rig.tick()
    asked = question(rig, 'forward', steps=20)
    for _ in range(10):
        rig.frame()
        next_frame = rig.clock() + 0.1
        rig.run(until=next_frame)
        assert rig.clock() <= next_frame
        rig.clock.now = next_frame
    assert not asked.done()


def test_between_the_images_of_a_slower_camera_longer_pieces_of_work_fit():
    rig = Rig(what_if=0.12)
    asked = None
    for frame in range(20):
        rig.frame()
        if frame == 1:
            asked = question(rig, 'forward', steps=4)
        next_frame = rig.clock() + 0.2
        rig.run(until=next_frame)
        assert rig.clock() <= next_frame
        rig.clock.now = next_frame
    assert asked.done() and asked.result().complete


def test_a_camera_that_becomes_faster_is_believed_at_once():
    rig = Rig(what_if=0.12)
    for period in (0.2, 0.2, 0.2, 0.2, 0.1):
        rig.tick()
        rig.clock.now += period - 0.1
    asked = question(rig, 'forward', steps=4)
    for _ in range(8):
        assert rig.tick().latency == pytest.approx(0.020)
    assert not asked.done()


def test_between_the_images_of_a_camera_that_loses_some_no_longer_pieces_of_work_fit():
    rig = Rig(what_if=0.12)
    rig.tick()
    question(rig, 'forward', steps=4)
    for periods in (2, 2, 2, 1, 2, 2, 2, 2, 1):
        rig.frame()
        next_frame = rig.clock() + 0.1 * periods
        rig.run(until=next_frame)
        assert rig.clock() <= next_frame
        rig.clock.now = next_frame


def test_a_unit_that_never_fits_is_answered_with_deadline_exceeded():
    rig = Rig(what_if=0.2)
    rig.tick()
    asked = question(rig, 'forward', allowed=0.35)
    for _ in range(5):
        assert rig.tick().tier is Tier.TWO_STEP
    answer = asked.result(timeout=0)
    assert not answer.complete and answer.branches == []


def test_where_only_the_median_of_a_unit_fits_one_is_done_each_second():
    rig = Rig()
    rig.engine.interruption = 0.1
    rig.tick()
    asked, seconds = question(rig, 'forward', steps=4), 0.0
    while not asked.done():
        assert rig.tick().latency == pytest.approx(0.020)
        seconds += 0.1
        assert seconds < 20.0, 'a question is never answered'
    assert asked.result().complete and seconds >= 4.0  # of four units at least


def test_questions_expire_in_any_order_also_while_ticks_leave_no_time_at_all():
    rig = Rig(encode=0.13)  # each tick takes longer than the camera's period
    rig.tick()
    later, sooner = (question(rig, 'forward', allowed=allowed) for allowed in (1.0, 0.5))
    begun, ends = rig.clock(), {}
    while len(ends) < 2:
        assert rig.clock() - begun < 2.0, 'a question is never answered'
        rig.frame()
        rig.worker.step()
        rig.frame()  # the next one has come meanwhile
        for name, asked in (('later', later), ('sooner', sooner)):
            if asked.done():
                ends.setdefault(name, rig.clock() - begun)
    assert later.result(0).branches == sooner.result(0).branches == []
    assert not later.result(0).complete
    assert ends['sooner'] == pytest.approx(0.5, abs=0.35) and ends['later'] == pytest.approx(1.0, abs=0.35)
    assert ends['sooner'] < ends['later']


def test_questions_may_be_handed_in_at_any_moment():
    rig = Rig(what_if=0.2)  # which fits into no gap
    rig.tick()
    rig.frame()
    asked = []
    asking = threading.Thread(
        target=lambda: [asked.append(question(rig, 'forward', allowed=100.0)) for _ in range(2000)])
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        asking.start()
        while asking.is_alive():
            rig.worker.step()
    finally:
        sys.setswitchinterval(interval)
        asking.join()
    rig.clock.now += 100.0
    rig.worker.step()
    assert len(asked) == 2000 and all(promise.done() for promise in asked)


def test_branches_that_were_finished_by_the_deadline_are_answered():
    rig = Rig(what_if=0.01)
    rig.tick()
    asked = question(rig, 'forward', 'left', 'right', steps=4, allowed=0.15)
    for _ in range(4):
        rig.tick()
    answer = asked.result(timeout=0)
    assert not answer.complete
    assert 1 <= len(answer.branches) < 3


def test_what_if_is_answered_at_full_speed_when_the_camera_is_silent():
    rig = Rig(what_if=0.05)
    rig.tick()
    asked = question(rig, 'forward', steps=20)
    rig.run(until=rig.clock() + 3.0)
    assert asked.result(timeout=0).complete


def test_a_policy_branch_is_the_plan_and_its_last_action_goes_on():
    rig = Rig()
    rig.tick()
    asked = question(rig, 'policy', steps=6)
    rig.run(until=rig.clock() + 0.5)
    (_, imagined), = asked.result(timeout=0).branches
    assert imagined.actions[:, 0] == pytest.approx(0.4)
    assert imagined.actions[3:, 1] == pytest.approx(0.13)


@pytest.mark.parametrize(('frames', 'changes', 'text'), [
    (0, {}, 'nothing has been observed'), (1, {'stamp': 5}, 'not the newest'), (1, {'goal': ''}, 'set goal')])
def test_questions_without_an_answer_are_refused_with_the_remedy(frames, changes, text):
    rig = Rig()
    for _ in range(frames):
        rig.tick()
    asked = question(rig, 'policy', **changes)
    rig.run(until=rig.clock() + 0.5)
    with pytest.raises(QuestionError, match=text):
        asked.result(timeout=0)


def test_an_exception_in_a_branch_ends_the_question_only():
    rig = Rig()
    rig.tick()
    rig.engine.failing = 'what_if'
    asked = question(rig, 'forward')
    assert rig.tick().tier is Tier.TWO_STEP
    with pytest.raises(RuntimeError, match='what_if fails'):
        asked.result(timeout=0)
    assert rig.tick().tier is Tier.TWO_STEP


def next_to(work, function, *arguments):
    """What a function gives that waits in another thread for what the worker does meanwhile."""
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(function, *arguments)
        while not waiting.done():
            work()
            time.sleep(0.001)
        return waiting.result()


def test_sessions_are_saved_and_loaded_between_ticks(tmp_path):
    rig, folder = Rig(), SessionFolder(tmp_path)
    with pytest.raises(ValueError, match='no frame yet'):
        next_to(rig.run, rig.worker.save, folder, 's.safetensors')
    rig.tick()
    next_to(rig.tick, rig.worker.save, folder, 's.safetensors')
    next_to(rig.tick, rig.worker.load, folder, 's.safetensors')
    assert rig.engine.sessions[0].restored == 1
    assert rig.tick().latency == pytest.approx(0.020)


def test_saving_is_given_the_time_that_was_measured_and_so_fits_next_to_long_ticks(tmp_path):
    rig = Rig(encode=0.03, commit=0.03, session=0.001)
    rig.tick()
    rig.frame()
    rig.run(until=rig.clock() + 0.09)  # 80 ms of the tick's 100
    rig.engine.recorded.clear()
    promise = rig.worker._call(lambda session: session.capture())
    assert rig.worker.step() == 0.0 and promise.done(), '20 ms are left, and it takes one'
    assert [part for part, _ in rig.engine.recorded] == ['session']
    assert rig.engine.recorded[0][1] == pytest.approx(0.001)


def test_saving_waits_where_by_what_was_measured_it_would_hold_up_the_next_tick():
    rig = Rig(encode=0.03, commit=0.03, session=0.015)
    rig.tick()
    rig.frame()
    rig.run(until=rig.clock() + 0.09)  # 80 ms of the tick's 100
    promise = rig.worker._call(lambda session: session.capture())
    assert rig.worker.step() and not promise.done(), '20 ms are left, and it may take twice 15'


def test_halt_voids_the_tick_in_progress():
    rig = Rig()
    rig.tick()
    rig.frame()
    answer = rig.answers[-1][0]
    rig.responder.halt(type(answer)(0, 1, 99, Tier.STOP, Verdict.STALE_INPUT, 'camera silent', answer.counts))
    rig.run()
    assert [a.tier for a, _ in rig.answers] == [Tier.TWO_STEP, Tier.STOP]
    assert rig.answers[-1][0].counts.stop == 1


def test_the_thread_survives_everything_and_ends_when_told(tmp_path):
    rig = Rig()
    rig.engine.sleep = lambda seconds: None
    broken = threading.Event()

    def predicted(prediction):
        broken.set()
        raise OSError('listener')
    rig.predicted = predicted
    before = set(threading.enumerate())
    rig.worker.start()
    rig.frame()
    assert broken.wait(60.0)
    broken.clear()
    rig.frame()
    assert broken.wait(60.0)
    rig.worker.stop()
    assert set(threading.enumerate()) <= before
    with pytest.raises(CancelledError):
        rig.worker.save(SessionFolder(tmp_path), 's.safetensors')


def test_a_promise_is_not_left_hanging_when_the_thread_ends():
    rig = Rig(what_if=0.05)
    rig.engine.sleep = lambda seconds: None
    rig.clock.sleep = None
    rig.frame()
    rig.worker.start()
    asked = question(rig, 'forward', steps=10**6)
    rig.worker.stop()
    assert asked.cancelled() or asked.exception(timeout=0)


def test_pictures_and_questions_are_no_urgent_work_but_what_the_ladder_is_measured_by_is():
    class Turns:
        urgent = True

    rig = Rig(denoise=0.04)
    turns = rig.worker._thread._urgency = Turns()
    urgent = {}
    sleep = rig.engine.sleep

    def noting(seconds):
        part = {value: part for part, value in rig.engine.costs.items()}[seconds]
        urgent.setdefault(part, set()).add(turns.urgent)
        sleep(seconds)
    rig.engine.sleep = noting
    rig.engine.costs.update(encode=0.002, commit=0.005, policy=0.001, denoise=0.04, decode=0.0051, what_if=0.0061)
    promise = question(rig, 'left', 'right')
    for _ in range(12):
        rig.frame()
        rig.run()
        rig.clock.sleep(0.1)
    assert promise.done() and rig.predictions
    assert {answer.tier for answer, _ in rig.answers} == {Tier.PLAN_ONLY}
    assert urgent == {'encode': {True}, 'commit': {True}, 'policy': {True}, 'denoise': {True}, 'decode': {False},
                      'what_if': {False}}
