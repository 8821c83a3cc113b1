"""The front end: the server drives while it can be had, the robot's own engine whenever it cannot."""
import contextlib
import os
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from fake_engine import FakeEngine
from fake_service import PLAN, FakeService, serving, wait_for

from worldmodel_ros.control.ladder import NS, Settings, Tier, Verdict
from worldmodel_ros.control.responder import Observation, Responder
from worldmodel_ros.control.worker import Worker
from worldmodel_ros.engine.session_folder import SessionFileError, SessionFolder
from worldmodel_ros.engine.what_if import Branch, Question, QuestionError
from worldmodel_ros.model.presets import TINY
from worldmodel_ros.serving.client import worker as client_worker
from worldmodel_ros.serving.client.failover import TRIALS, FailoverWorker
from worldmodel_ros.serving.client.link import STORE_TIMEOUT
from worldmodel_ros.serving.client.worker import PATIENCE
from worldmodel_ros.serving.server import server as server_module
from worldmodel_ros.serving.server.server import Limits

pytestmark = pytest.mark.waiting(seconds=0.3)

PERIOD = 0.1
DEADLINE = 0.4  # s; longer than a robot's, for a busy machine, where a test is not about being late
SHORT = 0.15
# s; half of it is for the timer, which is a thread of the test here: with a robot's 5 ms, other programs made it late.
RESERVE = 0.1
OWN, SERVER = float(np.float32(0.4)), float(PLAN[0, 0])  # what their plans begin with


class Robot:
    """The part of a node that matters here: a camera, a timer, a listener."""

    def __init__(self, path, earlier=lambda seconds: None):
        self.answers, self.predictions, self.said, self.failures = [], [], [], []
        self.engine = FakeEngine(time.sleep, encode=0.001)
        self.responder = Responder(self, Settings(reserve=RESERVE), PERIOD)
        self.intervals = []
        own = Worker(self.engine, self.executed, self.responder, self)
        self.worker = FailoverWorker(path, '/robot', own, TINY, self.executed, self.responder, self, self.said.append,
                                     earlier)
        self.sequence, self.stamp, self.size = 0, 0, (64, 64)
        self.worker.start()

    def answered(self, answer):
        self.answers.append(answer)

    def predicted(self, prediction):
        self.predictions.append(prediction)

    def failed(self, reason, error, restarted):
        self.failures.append(reason)

    def executed(self, start, end):
        self.intervals.append((start, end))
        return np.float32([0.1, 0.2])

    def see(self, goal='red', stale='', deadline=DEADLINE, **facts):
        """Take in a frame that comes now, one period after the last one by its stamp."""
        self.sequence += 1
        self.stamp += round(PERIOD * NS)
        now = time.monotonic()
        observation = Observation(np.full((*self.size, 3), self.sequence % 256, np.uint8), self.stamp, now,
                                  now + deadline, 1, self.sequence, goal, stale, **facts)
        self.worker.submit(observation)
        return observation

    def tick(self, **options):
        """See a frame, and return its answer, by the timer if nobody else gives it."""
        observation = self.see(**options)
        end = observation.due - self.responder.settings.reserve
        while not (found := [a for a in self.answers if a.sequence == observation.sequence]):
            if time.monotonic() > end:
                self.responder.overdue()
            time.sleep(0.0005)
        assert len(found) == 1, 'answered twice'
        return found[0]

    def drive_with_server(self):
        wait_for(lambda: not self.worker.degraded_reason)
        for _ in range(2):
            assert by(self.tick()) == SERVER


def by(answer):
    """Whose plan an answer is: OWN or SERVER."""
    return float(answer.actions[0, 0])


@contextlib.contextmanager
def robot_at(path):
    robot = Robot(path)
    try:
        yield robot
    finally:
        robot.worker.stop()
    assert not robot.failures, robot.failures


@pytest.fixture
def path(tmp_path):
    return tmp_path / 'engine.sock'


@pytest.fixture
def served(path):
    with serving(path) as running:
        yield running


@pytest.fixture
def robot(path, served):
    with robot_at(path) as robot:
        yield robot


def test_the_server_drives_and_its_answers_go_through_the_responder(robot, served):
    robot.drive_with_server()
    answer = robot.tick()
    assert (answer.tier, answer.verdict, answer.reason) == (Tier.TWO_STEP, Verdict.ON_TIME, '')
    assert np.array_equal(answer.actions, PLAN) and 0.0 < answer.latency < answer.budget
    prediction = wait_for(lambda: robot.predictions and robot.predictions[-1])
    assert prediction.future.frames.shape == (4, 64, 64, 3) and prediction.observation.goal == 'red'
    assert prediction.timings['denoise'] == pytest.approx(0.004) and prediction.timings['total'] > 0.0
    assert robot.engine.sessions[0].observed == [], 'the own engine has worked too'
    assert robot.worker.degraded_reason == '' and robot.worker.backend == 'fake of the server'


def test_the_server_is_told_what_was_executed_since_the_frame_before(robot, served):
    robot.drive_with_server()
    assert robot.intervals[0] == (None, robot.stamp - NS // 10) and robot.intervals[1] == (
        robot.stamp - NS // 10, robot.stamp)
    assert served.service.ticks[0].executed == pytest.approx([0.1, 0.2])


def test_a_stale_frame_and_a_missing_goal_command_nothing(robot, served):
    robot.drive_with_server()
    assert robot.tick(stale='200 ms old').verdict is Verdict.STALE_INPUT
    idle = robot.tick(goal='')
    assert (idle.verdict, idle.tier, idle.actions) == (Verdict.IDLE, Tier.NONE, None)
    wait_for(lambda: len(served.service.ticks) == 4)
    assert [(tick.answer, tick.goal) for tick in served.service.ticks[-2:]] == [(False, 'red'), (True, '')]


def test_a_lower_tier_is_served_as_what_it_is(robot, served):
    from worldmodel_ros.serving import scheduler as scheduling
    served.service.tier = scheduling.Tier.SMALLER
    wait_for(lambda: not robot.worker.degraded_reason)
    answer = robot.tick()
    assert (answer.tier, answer.verdict, answer.reason) == (Tier.SMALLER, Verdict.DEGRADED, 'little time')
    assert answer.counts.smaller == 1 and by(answer) == SERVER


def test_when_the_server_dies_not_a_tick_is_missed(robot, served):
    robot.drive_with_server()
    served.stop()
    answers = [robot.tick() for _ in range(6)]
    assert all(answer.tier in (Tier.TWO_STEP, Tier.ONE_STEP, Tier.PLAN_ONLY, Tier.LAST_PLAN) for answer in answers)
    assert by(answers[-1]) == OWN and 'is not used' in robot.worker.degraded_reason
    assert sum('driving with the own model' in said for said in robot.said) == 1, robot.said
    served.start()


def test_the_observation_that_the_server_took_to_its_grave_is_answered_by_the_own_engine(robot, served):
    robot.drive_with_server()
    served.service.answer = 'nothing'
    observation = robot.see(deadline=1.0)
    wait_for(lambda: len(served.service.ticks) == 3)
    served.stop()
    answer = wait_for(lambda: next((a for a in robot.answers if a.sequence == observation.sequence), None))
    assert answer.tier is Tier.TWO_STEP and by(answer) == OWN
    assert robot.engine.sessions[0].observed == [(observation.sequence, pytest.approx((0.1, 0.2)))]
    served.start()


def test_a_server_that_hangs_is_left_after_two_ticks_which_the_last_plan_bridges(robot, served):
    robot.drive_with_server()
    served.hang()
    tiers, start = [], time.monotonic()
    for k in range(6):
        answer = robot.tick(deadline=SHORT if k < 2 else DEADLINE)
        tiers.append(answer.tier)
        time.sleep(max(0.0, start + (k + 1) * PERIOD - time.monotonic()))
    # On a busy machine the second tick may come after the patience has ended.
    assert tiers[0] is Tier.LAST_PLAN and Tier.STOP not in tiers and by(answer) == OWN
    patience = SHORT + client_worker._OVERDUE
    assert patience > PATIENCE and any(f'not answered for {patience * 1e3:.0f} ms' in said for said in robot.said), robot.said


def test_a_refusal_is_bridged_by_the_last_plan_and_then_by_the_own_engine(robot, served):
    robot.drive_with_server()
    served.service.answer = 'refusal'
    for _ in range(3):
        answer = robot.tick()
        assert (answer.tier, answer.verdict) == (Tier.LAST_PLAN, Verdict.DEGRADED)
        assert 'the server refuses: two steps would finish 12.3 ms late; the last plan goes on' in answer.reason
    answer = robot.tick()
    assert by(answer) == OWN and answer.tier in (Tier.ONE_STEP, Tier.TWO_STEP)


@pytest.mark.parametrize('fault', ['failure', 'nan'])
def test_a_failure_of_the_servers_model_does_not_stop_the_robot(robot, served, fault):
    robot.drive_with_server()
    served.service.answer = fault
    answer = robot.tick()
    assert by(answer) == OWN and answer.tier is Tier.TWO_STEP
    assert 'failed' in robot.said[-1] or 'plan is none' in robot.said[-1]


def test_late_answers_are_never_published_and_a_slow_server_is_left(robot, served):
    robot.drive_with_server()
    served.service.delay = SHORT - RESERVE + 0.01
    tiers = []
    for k in range(6):
        tiers.append(robot.tick(deadline=SHORT if k < 3 else DEADLINE).tier)
        time.sleep(0.06)
    assert tiers[:3] == [Tier.LAST_PLAN] * 3 and Tier.STOP not in tiers
    assert robot.worker.backend == 'fake'
    assert not [a for a in robot.answers if a.budget < DEADLINE / 2 and a.latency > SHORT]


def test_a_server_that_comes_back_drives_again_after_its_trials_in_a_new_session(robot, served):
    robot.drive_with_server()
    served.stop()
    wait_for(lambda: robot.worker.degraded_reason)
    served.start()
    sessions = len(served.service.closed)
    wait_for(lambda: served.service.listeners)
    used = []
    for _ in range(3 * TRIALS):
        used.append(by(robot.tick()))
        if used[-1] == SERVER:
            break
        time.sleep(0.005)  # for the answer to the trial
    assert TRIALS <= used.count(OWN) < 2 * TRIALS and used[-1] == SERVER
    assert used == sorted(used), 'the two took turns'
    assert len(served.service.closed) == sessions and len(served.service.listeners) == 1
    assert 'drives' in robot.said[-1] and robot.worker.degraded_reason == ''


def test_trials_that_fail_do_not_bring_the_server_back(robot, served):
    robot.drive_with_server()
    served.stop()
    served.service.answer = 'refusal'
    served.start()
    wait_for(lambda: served.service.listeners)
    for _ in range(2 * TRIALS):
        assert by(robot.tick()) == OWN
    assert len(served.service.ticks) > TRIALS, 'nothing was tried'


def test_without_a_server_the_own_engine_drives_from_the_start_and_says_why(path):
    with robot_at(path) as robot:
        wait_for(lambda: 'no socket' in robot.worker.degraded_reason)
        assert by(robot.tick()) == OWN
        time.sleep(0.6)
        assert len(robot.said) == 1, 'the same trouble is said again and again'


def test_a_server_of_another_robot_is_not_used(path):
    with serving(path, FakeService(replace(TINY, step_period=0.2))), robot_at(path) as robot:
        wait_for(lambda: 'another robot: step_period' in robot.worker.degraded_reason)
        assert by(robot.tick()) == OWN


def test_a_server_that_reads_the_session_from_a_slow_store_is_waited_for(path):
    service = FakeService()
    opened = service.open
    service.open = lambda *arguments, **options: time.sleep(0.8) or opened(*arguments, **options)
    with serving(path, service), robot_at(path) as robot:
        wait_for(lambda: robot.said)
        assert not robot.worker.degraded_reason and by(robot.tick()) == SERVER


def test_a_robot_that_stops_does_not_wait_for_a_server_that_hangs(path, served):
    served.hang()
    with robot_at(path) as robot:
        time.sleep(0.1)
        start = time.monotonic()
    assert time.monotonic() - start < 2.0 < STORE_TIMEOUT
    wait_for(lambda: not robot.worker._remote._thread.is_alive())
    assert not robot.said


def test_a_larger_model_gets_larger_pictures_and_the_own_one_its_own(path):
    with serving(path, FakeService(replace(TINY, name='large', image_size=(128, 128)))) as served, \
            robot_at(path) as robot:
        wait_for(lambda: not robot.worker.degraded_reason)
        robot.size = robot.worker.image_size
        assert robot.size == (128, 128)
        robot.drive_with_server()
        assert served.service.ticks[-1].image.shape == (128, 128, 3)
        served.stop()
        wait_for(lambda: robot.worker.degraded_reason)
        assert by(robot.tick()) == OWN
        served.start()


def test_questions_and_files_go_to_whoever_drives(robot, served, tmp_path):
    robot.drive_with_server()
    question = Question((Branch('left', 3, np.float32([[0.3, 1.0]] * 3)), Branch('policy', 8)), 'red',
                        time.monotonic() + 5.0)
    answer = robot.worker.ask(question).result(5.0)
    assert answer.complete and [(name, len(f.frames)) for name, f in answer.branches] == [('left', 3), ('policy', 8)]
    assert answer.stamp == 77 and answer.branches[0][1].progress['red'] == pytest.approx(0.15)
    assert robot.worker.ask(replace(question, denoising_steps=1)).result(5.0).complete
    assert [asked.denoising_steps for asked in served.service.questions] == [2, 1]
    own, name = SessionFolder(tmp_path / 'own'), 'session.safetensors'
    robot.worker.save(own, name)
    robot.worker.load(own, name)
    assert not own.path.exists(), 'the server has a folder of its own'
    (served.path.parent / 'sessions' / name).write_bytes(b'nonsense')
    with pytest.raises(SessionFileError, match='is not a saved session'):
        robot.worker.load(own, name)
    with pytest.raises(QuestionError, match='not kept'):
        robot.worker.ask(replace(question, stamp=-1)).result(5.0)
    served.stop()
    wait_for(lambda: robot.worker.degraded_reason)
    robot.tick()
    assert robot.worker.ask(question).result(5.0).complete, 'the own engine does not answer'
    served.start()


def test_a_question_that_the_server_took_to_its_grave_is_refused(robot, served):
    robot.drive_with_server()
    served.service._thread.submit(time.sleep, 0.2)
    branch = Branch('left', 1, np.zeros((1, 2), np.float32))
    promise = robot.worker.ask(Question((branch,), 'red', time.monotonic() + 5.0))
    served.stop()
    with pytest.raises(QuestionError, match='was lost'):
        promise.result(5.0)
    served.start()


def test_stopping_leaves_no_thread_and_no_descriptor(path, served):
    def state():
        return threading.active_count(), len(os.listdir('/proc/self/fd'))

    for round_ in range(4):
        with robot_at(path) as robot:
            robot.drive_with_server()
        wait_for(lambda: not served.service.listeners)
        del robot
        if round_ == 0:
            before = state()
    wait_for(lambda: state() <= before)


def test_a_paused_robot_is_told_leaves_its_place_and_is_served_again_when_it_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, '_LOOK', 0.02)
    path = tmp_path / 'engine.sock'
    with serving(path, FakeService(sessions=1), Limits(idle=0.4)) as running, robot_at(path) as robot:
        robot.drive_with_server()
        wait_for(lambda: not running.service.listeners)
        time.sleep(1.0)  # four times the pause before another attempt
        assert not running.service.listeners and len(running.service.closed) == 1
        assert any('nothing has come for 0.4 s' in text for text in robot.said)
        assert by(robot.tick()) == OWN  # who connects now has no session yet
        wait_for(lambda: not robot.worker.degraded_reason)
        assert by(robot.tick()) == SERVER  # without trials: it has done nothing wrong


def only_robot(running):
    """The server's side of the one robot that is connected."""
    return wait_for(lambda: next((peer.robot for peer in running.server._peers.values() if peer.robot), None))


def test_a_robot_follows_its_session_to_another_server_with_what_is_not_answered(robot, served, tmp_path):
    robot.drive_with_server()
    said = list(robot.said)
    with serving(tmp_path / 'other.sock') as other:
        served.service.answer = 'nothing'
        waiting = robot.see(deadline=5.0)
        wait_for(lambda: served.service.ticks and served.service.ticks[-1].sequence == 3)
        only_robot(served).send_to(str(other.path), 0)
        wait_for(lambda: [answer for answer in robot.answers if answer.sequence == waiting.sequence])
        taken = other.service.ticks[0]
        assert (taken.stamp, taken.sequence) == (waiting.stamp, 3) and (taken.image == waiting.image).all()
        for _ in range(3):
            assert by(robot.tick()) == SERVER
        assert len(other.service.ticks) == 4 and len(served.service.ticks) == 3
        assert robot.said == said
        wait_for(lambda: served.service.closed)


def test_a_server_that_has_lost_its_store_serves_a_new_session_of_the_robot(robot, served, monkeypatch):
    monkeypatch.setattr(client_worker, '_RETRY', (0.02, 0.02))
    robot.drive_with_server()
    remote = robot.worker._remote
    session, remote._generation = remote._session, 2  # as a server with a store has told
    served.stop()
    wait_for(lambda: 'no server' in robot.worker.degraded_reason)
    assert remote._generation == 2
    served.start()
    wait_for(lambda: any('of generation 0, and 2 is owned' in said for said in robot.said))
    wait_for(lambda: 'it is back' in robot.worker.degraded_reason)
    assert remote._session != session


def test_a_server_that_takes_long_to_open_a_session_that_has_moved_there_has_its_time_to_answer(robot, served, tmp_path):
    robot.drive_with_server()
    said = list(robot.said)
    with serving(tmp_path / 'other.sock') as other:
        opened, other.service.delay = other.service.open, 0.1
        other.service.open = lambda *arguments, **options: time.sleep(0.4) or opened(*arguments, **options)
        served.service.answer = 'nothing'
        robot.see()
        wait_for(lambda: served.service.ticks and served.service.ticks[-1].sequence == 3)
        only_robot(served).send_to(str(other.path), 0)
        wait_for(lambda: other.service.ticks)
        time.sleep(0.2)
        assert robot.said == said and by(robot.tick()) == SERVER


def test_a_session_that_moves_to_a_server_with_too_few_slots_is_closed_there(robot, served, tmp_path, monkeypatch):
    robot.drive_with_server()
    with serving(tmp_path / 'other.sock') as other:
        served.service.answer = 'nothing'
        robot.see(deadline=5.0)
        wait_for(lambda: served.service.ticks and served.service.ticks[-1].sequence == 3)
        opened, links = client_worker.open_link, []

        def without_slots(*arguments, **options):
            links.append(replace(opened(*arguments, **options), slots=[]))
            return links[-1]
        with monkeypatch.context() as patch:
            patch.setattr(client_worker, 'open_link', without_slots)
            only_robot(served).send_to(str(other.path), 0)
            wait_for(lambda: other.service.closed)
        assert links  # held here: it was closed, and not only forgotten
        wait_for(lambda: robot.failures == ['IndexError: pop from empty list'])
        robot.failures.clear()


def test_a_robot_that_cannot_follow_drives_by_itself_and_returns_to_the_server_that_it_knows(robot, served, tmp_path):
    robot.drive_with_server()
    only_robot(served).send_to(str(tmp_path / 'absent.sock'), 0)
    wait_for(lambda: 'cannot be reached there' in robot.worker.degraded_reason)
    assert by(robot.tick()) == OWN
    wait_for(lambda: 'it is back' in robot.worker.degraded_reason)
