"""Decisions on a forecast of the scene: rungs, vetoes, delay, and that the command leaves before the images are made."""
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fake_engine import FakeClock, FakeEngine

from worldmodel_ros.control import pilot
from worldmodel_ros.control.deciding_worker import DecidingWorker
from worldmodel_ros.control.deliberation import (
    CANDIDATES, FEWEST, Candidate, Deliberation, Effort, Settings, Veto, candidates_by_worth)
from worldmodel_ros.control.ladder import NS, Settings as LadderSettings, Tier, Verdict
from worldmodel_ros.control.pilot import COUNTS, DECIDING, SLOTS, Odometry, Pilot, comparing, deciding, deciding_times
from worldmodel_ros.control.responder import Observation, Responder
from worldmodel_ros.control.scene_view import Seen, View, corners
from worldmodel_ros.control.task import Task, TaskError, Told, in_words, task_of, to_goal, to_place
from worldmodel_ros.control.terms import (
    ROBOT_RADIUS, Avoid, Clearance, KeepDistance, PassBehind, Reach, StayIn, Thing, Time, Touch)
from worldmodel_ros.inputs.odometry import Reading, WheelReadings
from worldmodel_ros.inputs.ticks import ExecutedActions
from worldmodel_ros.motion import LIMITS, PERIOD, Limits
from worldmodel_ros.parameters.command_gate import PARAMETERS as GATE_PARAMETERS
from worldmodel_ros.sim import world as sim
from worldmodel_ros.sim.scene import COLOURS

DEADLINE = 0.05
THINGS = {slot.name: slot.colour for slot in SLOTS}
NOWHERE = np.zeros((0, 3))
SLOT = {slot.name: number for number, slot in enumerate(SLOTS)}


def view_of(planner, delay, **things):
    """A view from the origin, of things by name: (x, y, vx, vy)."""
    times = planner.times(delay)
    return View(np.zeros(3), np.zeros(2), {
        name: Thing(np.array([x, y]) + times[:, None] * np.array([vx, vy]), 0.15, 'violet', True)
        for name, (x, y, vx, vy) in things.items()}, NOWHERE)


def test_the_robot_plans_within_the_limits_of_the_gate_and_of_the_simulator():
    axes = sim.LIMITS.axes()
    assert (axes.low, axes.high, axes.rate) == (LIMITS.low, LIMITS.high, LIMITS.rate)
    gate = {param.name: param.default for param in GATE_PARAMETERS}
    assert (gate['linear.x.min_velocity'], -gate['angular.z.max_velocity']) == LIMITS.low
    assert (gate['linear.x.max_acceleration'], gate['angular.z.max_acceleration']) == LIMITS.rate


def test_a_base_that_brakes_gently_is_warned_as_far_ahead_as_it_needs_to_stop():
    assert deciding() == replace(DECIDING, veto=Veto(within=deciding().veto.within))
    assert deciding().veto.within == pytest.approx(DECIDING.veto.within) == 0.6  # the default base needs just that
    assert deciding(replace(LIMITS, rate=(0.25, 6.0))).horizon == pytest.approx(2.6)  # as far as the veto looks
    assert deciding(replace(LIMITS, rate=(0.001, 6.0))).horizon == DECIDING.far_horizon  # all that is forecast
    gentle = deciding(replace(LIMITS, rate=(0.4, 6.0)))
    assert gentle.veto.within == pytest.approx(0.2 + 0.6 / 0.4)
    moving = np.array([0.6, 0.0])
    # 0.31 m are the radii: at 0.6 m/s it is touched after 1.2 s.
    for settings, warned in ((deciding(), False), (gentle, True)):
        planner = Deliberation(settings)
        view = view_of(planner, 0.03, goal=(4.0, 0.0, 0.0, 0.0), mover=(1.03, 0.0, 0.0, 0.0))
        view = View(view.pose, moving, view.things, view.walls)
        ahead = replace(next(c for c in CANDIDATES if c.name == 'ahead 0.8 s'), steps=20)
        vetoed = planner.choose((Reach('goal'),), view, [(0.03, moving)], moving, (ahead,)).vetoed
        assert ('mover' in vetoed.values()) is warned


def test_slots_begin_with_the_goal_objects_and_names_differ():
    assert tuple(slot.name for slot in SLOTS[:len(COLOURS)]) == COLOURS
    assert len(THINGS) == len(SLOTS)


def test_a_contact_that_is_foreseen_vetoes_candidates_and_a_stop_is_what_is_left():
    reach = (Reach('goal'),)
    planner = Deliberation(Settings(veto=Veto()))
    moving, sent = np.array([0.5, 0.0]), [(0.03, np.array([0.5, 0.0]))]
    # 0.16 m and 0.15 m are the radii: something that comes across, too near for whoever goes on.
    view = view_of(planner, 0.03, goal=(2.0, 0.0, 0.0, 0.0), mover=(0.55, 0.0, 0.0, 0.0))
    view = View(view.pose, moving, view.things, view.walls)
    decision = planner.choose(reach, view, sent, moving)
    assert decision.vetoed['ahead 0.8 s'] == 'mover' and decision.name not in decision.vetoed
    unbound = Deliberation(Settings()).choose(reach, view, sent, moving)
    assert unbound.vetoed == {} and unbound.scores == decision.scores
    # A ball that will roll into the robot whatever it does.
    view = view_of(planner, 0.03, goal=(2.0, 0.0, 0.0, 0.0), mover=(0.45, 0.0, -1.5, 0.0))
    decision = Deliberation(Settings(veto=Veto())).choose(reach, view, [(0.03, moving)], moving)
    assert decision.name == 'veto' and len(decision.vetoed) == len(CANDIDATES)
    assert decision.command[0] == pytest.approx(0.5 - LIMITS.rate[0] * PERIOD) and decision.commands[-1].tolist() == [0.0, 0.0]


def test_a_veto_names_what_would_be_touched():
    planner = Deliberation(Settings(veto=Veto()))
    moving, sent = np.array([0.5, 0.0]), [(0.03, np.array([0.5, 0.0]))]
    view = view_of(planner, 0.03, goal=(2.0, 0.0, 0.0, 0.0))
    view = View(view.pose, moving, view.things, np.array([[1.0, 0.0, 0.30]]))
    decision = planner.choose((Reach('goal'),), view, sent, moving)
    assert set(decision.vetoed.values()) == {'wall'} and 'ahead 0.8 s' in decision.vetoed


def test_corners_are_where_walls_meet():
    room = np.array([[1.0, 0.0, 2.0], [0.0, 1.0, 1.0], [-1.0, 0.0, 3.0], [0.0, -1.0, 1.5]])
    np.testing.assert_allclose(corners(room), [[2.0, 1.0], [-3.0, 1.0], [-3.0, -1.5], [2.0, -1.5]])


def test_what_is_wanted_touched_and_what_is_hardly_there_vetoes_nothing():
    veto = Veto()
    planner = Deliberation(Settings(veto=veto))
    moving, sent = np.array([0.6, 0.0]), [(0.03, np.array([0.6, 0.0]))]
    view = view_of(planner, 0.03, ball=(0.5, 0.0, 0.0, 0.0))
    assert planner.choose((Touch('ball'),), view, sent, moving).vetoed == {}
    ghost = Thing(view.things['ball'].path, 0.15, 'violet', True, presence=0.6)
    goal = Thing(np.tile((2.0, 0.0), (len(ghost.path), 1)), 0.1, 'red')
    view = View(view.pose, moving, {'goal': goal, 'ghost': ghost}, NOWHERE)
    assert planner.choose((Reach('goal'),), view, sent, moving).vetoed == {}


def test_a_robot_that_touches_something_may_leave_it():
    planner = Deliberation(Settings(veto=Veto()))
    view = view_of(planner, 0.03, goal=(-2.0, 0.0, 0.0, 0.0), mover=(0.22, 0.0, 0.0, 0.0))
    assert 'back 0.8 s' not in planner.choose((Reach('goal'),), view, [(0.03, np.zeros(2))], np.zeros(2)).vetoed


def test_few_candidates_are_of_all_kinds():
    few = candidates_by_worth(FEWEST)
    assert len(few) == FEWEST and {c.name.split()[0] for c in few} == {'policy', 'lead', 'stop', 'back'}
    assert candidates_by_worth(100) == candidates_by_worth(len(CANDIDATES)) == CANDIDATES


def test_a_reaction_takes_things_to_stay_where_they_are_and_goes_on_for_as_many_steps():
    planner = Deliberation()
    crossing = view_of(planner, 0.0, ball=(1.0, 1.0, 0.0, -0.8))
    standing = view_of(planner, 0.0, ball=(1.0, 1.0, 0.0, 0.0))
    reaction = planner.react((Touch('ball'),), crossing, np.zeros(2), 4)
    assert reaction.commands.shape == (4, 2) and reaction.scores == {}
    np.testing.assert_array_equal(reaction.commands, planner.react((Touch('ball'),), standing, np.zeros(2), 4).commands)
    assert reaction.command[1] == pytest.approx(LIMITS.rate[1] * PERIOD)


TOUCH = Task('touch red', (Touch('red'),))


class FakeForecast:
    """A stream that takes what a pass costs, and that sees ``places`` by name: (x, y, vx, vy) in base_link."""

    times = np.array([0.0, 0.2, 0.4, 0.8, 1.6, 3.2])

    def __init__(self, rig):
        self.rig, self.told = rig, []

    def observe(self, image, executed, measured, passes):
        self.told.append((float(image.mean()), executed.tolist(), np.asarray(measured).tolist(), passes))
        self.rig.clock.sleep(self.rig.costs[passes])
        presence, places = np.zeros(len(SLOTS)), np.zeros((len(self.times), len(SLOTS), 2))
        for name, (x, y, vx, vy) in self.rig.places.items():
            presence[SLOT[name]] = 1.0
            places[:, SLOT[name]] = np.array([x, y]) + self.times[:, None] * np.array([vx, vy])
        return presence * self.rig.nan, places, np.array([1.0, 0.0, 5.0, 5.0, 5.0, 5.0])


class Rig:
    """A deciding worker that is driven by hand. ``costs``: s, of the image alone, of a forecast, and of that and a second
    step."""

    class Worker(DecidingWorker):
        """Whose second step takes what it costs."""

        def __init__(self, rig, *args):
            self._rig = rig
            super().__init__(*args)

        def _new_pilot(self):
            new = super()._new_pilot()
            choose = new._deliberation.choose

            def slowly(*args):
                self._rig.clock.sleep(self._rig.costs[2] - self._rig.costs[1] if args[-1] is not Effort.ONE_ROUND else 0.0)
                return choose(*args)
            new._deliberation.choose = slowly
            return new

    def __init__(self, costs=(0.004, 0.010, 0.016), warm=True, delay=0.0, rounds=2, shared=None, candidates=16, period=0.1):
        self.clock, self.costs, self.nan = FakeClock(), list(costs), 1.0
        self.engine = FakeEngine(self.clock.sleep, encode=0.002, commit=0.005, denoise=0.006, decode=0.005)
        self.engine.spec = SimpleNamespace(**{**vars(self.engine.spec), 'step_period': period})
        self.places = {'red': (2.0, 0.0, 0.0, 0.0)}
        self.answers, self.predictions, self.failures, self.decisions, self.streams = [], [], [], [], []
        self.responder = Responder(self, LadderSettings(), 0.1, self.clock)
        self.executed, self.times, self.reading = ExecutedActions(2, 0.1), deciding_times(), None
        if warm:
            for passes, part in enumerate(pilot.SEEING):
                self.times.record(part, costs[passes])
            self.times.record('react', 0.0)
            for count in COUNTS:
                self.times.record(comparing(count), 0.0)
                for effort in (Effort.THREE_ROUNDS, Effort.FARTHER):
                    self.times.record(comparing(count, effort), costs[2] - costs[1])
        self.worker = self.Worker(self, self.engine, self.executed, self.responder, self, self.open, self.times,
                                     lambda stamp: self.reading, delay, self.clock, rounds, shared, candidates)
        self.worker._thread.running = True
        self.sequence = 0

    def open(self):
        self.streams.append(FakeForecast(self))
        return self.streams[-1]

    def answered(self, answer):
        self.answers.append((answer, self.clock()))

    def predicted(self, prediction):
        self.predictions.append((prediction, self.clock()))

    def decided(self, decided):
        self.decisions.append((decided, self.clock()))

    def failed(self, reason, error, restarted):
        self.failures.append(reason)

    def frame(self, task=to_goal('red'), episode=1, age=0.004):
        self.sequence += 1
        now = self.clock()
        self.worker.submit(Observation(np.full((64, 64, 3), self.sequence % 256, np.uint8), round((now - age) * NS), now,
                                       now - age + DEADLINE, episode, self.sequence, '', '', task, age))

    def run(self):
        while self.worker.step() == 0.0:
            pass

    def tick(self, **kwargs):
        start = self.clock()
        self.frame(**kwargs)
        self.run()
        self.clock.now = max(self.clock.now, start + 0.1)
        return self.answers[-1][0]


def test_candidates_are_imagined_within_the_limits_of_the_base_which_may_change():
    rig = Rig()
    rig.places['red'] = (3.0, 1.0, 0.0, 0.0)
    for limits in (LIMITS, Limits(low=(-0.1, -0.4), high=(0.2, 0.4), rate=(0.5, 1.0)), LIMITS):
        rig.worker.limits = limits
        for _ in range(8):
            rig.tick(task=TOUCH)
        choice = rig.decisions[-1][0].choice
        fastest = np.diff(choice.poses[:, 1:], axis=1) / PERIOD
        assert np.hypot(*fastest[..., :2].T).max() == pytest.approx(limits.high[0], abs=0.01)
        assert np.abs(fastest[..., 2]).max() <= limits.high[1] + 1e-9
        steps = np.diff(choice.commands, axis=0)
        assert (np.abs(steps) <= np.array(limits.rate) * PERIOD + 1e-9).all()
        low, high = np.array(limits.low) - 1e-9, np.array(limits.high) + 1e-9
        assert ((low <= choice.commands) & (choice.commands <= high)).all()


def test_the_command_is_out_before_the_world_model_sees_the_frame_and_images_come_after_it():
    rig = Rig()
    assert rig.tick(task=TOUCH).tier is Tier.ONE_STEP  # the first one of an episode: no plan to go on with if it is late
    answer = rig.tick(task=TOUCH)
    assert (answer.tier, answer.verdict) == (Tier.TWO_STEP, Verdict.ON_TIME)
    assert answer.latency == pytest.approx(rig.costs[2])  # neither encoding nor imagining is in it
    (decided, _), (prediction, shown_at) = rig.decisions[1], rig.predictions[1]
    assert shown_at > rig.answers[1][1] and prediction.future.frames.shape == (4, 64, 64, 3)
    np.testing.assert_array_equal(prediction.future.actions, answer.actions)
    assert decided.passes == 3 and len(decided.choice.scores) == 1 + len(CANDIDATES) + 32
    np.testing.assert_allclose(answer.actions, decided.choice.commands[:4], atol=1e-6)
    assert answer.actions[0, 0] > 0.1  # the goal is ahead


def test_rungs_go_down_with_the_time_that_passes_take_and_are_found_again():
    rig = Rig()
    assert [rig.tick(task=TOUCH).tier for _ in range(2)] == [Tier.ONE_STEP, Tier.TWO_STEP]
    rig.costs[:] = 0.004, 0.025, 0.060
    for _ in range(80):
        rig.tick(task=TOUCH)
    assert rig.tick(task=TOUCH).tier is Tier.ONE_STEP
    rig.costs[:] = 0.004, 0.060, 0.060
    for _ in range(80):
        rig.tick(task=TOUCH)
    assert rig.tick(task=TOUCH).tier is Tier.STOP
    rig.costs[:] = 0.004, 0.010, 0.016
    tiers = [rig.tick(task=TOUCH).tier for _ in range(150)]
    assert tiers[-1] is Tier.ONE_STEP or tiers[-1] is Tier.TWO_STEP


def test_more_rounds_are_for_what_is_to_be_touched_alone():
    rig = Rig()
    for task, passes in ((TOUCH, 1), (TOUCH, 3), (to_goal('red'), 1)):
        rig.tick(task=task)
        assert rig.decisions[-1][0].passes == passes
    assert rig.answers[-1][0].tier is Tier.TWO_STEP


def test_where_nothing_is_to_be_touched_the_second_step_looks_farther_ahead():
    rig, told = Rig(), []
    for _ in range(2):
        rig.tick(task=to_goal('red'))
        decided = rig.decisions[-1][0]
        told.append((decided.tier, round(float(decided.choice.times[-1] - decided.choice.times[1]), 6), decided.passes))
    assert told == [(Tier.ONE_STEP, 2.0, 1), (Tier.TWO_STEP, 3.0, 1)]
    assert rig.decisions[-1][0].choice.poses.shape[1] == len(rig.decisions[-1][0].choice.times)
    assert Effort.of((Reach('red'), Avoid('blue', 0.25)), 2) is Effort.ONE_ROUND


def test_a_contact_after_the_horizon_of_one_step_is_seen_by_two():
    times, path = Deliberation().times(0.0, Effort.FARTHER), np.tile((2.6, 0.0), (32, 1))
    ball = Thing(np.column_stack([np.full(32, 1.35), 2.7 - 1.0 * times]), 0.135, 'violet', True)
    worth = []
    for effort in (Effort.ONE_ROUND, Effort.FARTHER):
        deliberation = Deliberation()
        count = len(deliberation.times(0.0, effort))
        things = {'red': Thing(path[:count], 0.16, 'red'), 'mover': replace(ball, path=ball.path[:count])}
        view = View(np.zeros(3), np.zeros(2), things, np.zeros((0, 3)))
        decision = deliberation.choose((Clearance(0.12, 1.0, ('red',)), Reach('red')), view, [(0.0, np.zeros(2))], np.zeros(2),
                                       [Candidate('ahead', 0.0, (0.5, 0.0), 40)], effort)
        worth.append(float(decision.utilities[0, 0]))
    assert worth[0] == 0.0 and worth[1] < -1.0


def test_no_more_candidates_are_compared_than_are_wanted():
    for candidates in (4, 10, 16):
        rig = Rig(rounds=1, candidates=candidates)
        for _ in range(2):
            rig.tick(task=TOUCH)
        assert len(rig.decisions[-1][0].choice.scores) == 1 + candidates  # and what is followed


def test_a_faster_camera_is_decided_for_at_each_image_and_plans_are_told_at_its_pace():
    rig = Rig(period=0.05)
    for _ in range(2):
        answer = rig.tick(task=TOUCH)
    commands = rig.decisions[-1][0].choice.commands
    np.testing.assert_allclose(answer.actions, commands[[0, 0, 1, 1]], atol=1e-6)  # a PERIOD apart
    assert np.abs(commands[0] - commands[1]).max() > 0.01
    planner = Deliberation(Settings(period=0.05))
    view = rig.worker._pilot.known.view(planner.times(0.0))
    held = Candidate('back', 0.0, (-0.3, 0.0), 4)
    for _ in range(4):
        planner.choose(TOUCH.terms, view, [(0.0, np.zeros(2))], np.zeros(2), [held])
    assert planner._last.steps == 2.5  # of 0.4 s, three ticks are over


def test_a_second_round_that_is_not_wanted_is_left_out():
    rig = Rig(rounds=1)
    for _ in range(3):
        answer = rig.tick(task=TOUCH)
    assert (answer.tier, answer.reason, rig.decisions[-1][0].passes) == (Tier.ONE_STEP, 'candidate_rounds is 1', 1)
    rig = Rig(rounds=0)
    for _ in range(3):
        answer = rig.tick(task=TOUCH)
    assert answer.tier is Tier.PLAN_ONLY and answer.reason.startswith('candidate_rounds is 0')
    assert rig.decisions[-1][0].choice.scores == {}


class FakeShared:
    """A world model elsewhere."""

    here, backend, degraded_reason, image_size = True, 'fake of the server', '', (128, 128)

    def __init__(self):
        self.kept, self.shown, self.asked = [], [], []

    def keep(self, observation):
        self.kept.append(observation)
        return observation

    def show(self, observation, plan, decided):
        self.shown += [(observation, plan, decided)] * self.here
        return self.here

    def ask(self, question):
        self.asked.append(question)


def test_a_world_model_elsewhere_imagines_what_was_decided_and_the_own_one_steps_in():
    shared = FakeShared()
    rig = Rig(shared=shared)
    session = rig.engine.sessions[0]
    assert (rig.worker.image_size, rig.worker.backend) == ((128, 128), 'fake of the server')
    for number in range(1, 4):
        answer = rig.tick(task=TOUCH)
        observation, plan, decided = shared.shown[-1]
        assert observation.sequence == number == len(shared.shown) and decided is rig.decisions[-1][0]
        np.testing.assert_array_equal(plan, answer.actions)
    assert not session.observed and not rig.predictions
    rig.worker.ask('question')
    assert shared.asked == ['question']
    shared.here = False
    tiers = [rig.tick(task=TOUCH).tier for _ in range(3)]
    assert tiers == [Tier.TWO_STEP] * 3, 'its loss is none to those who decide'
    assert [mean for mean, _ in session.observed] == [4.0, 5.0, 6.0] and len(rig.predictions) == 3 == len(shared.shown)
    resets = session.resets
    shared.here = True
    for _ in range(2):
        rig.tick(task=TOUCH)
    assert (session.resets, len(session.observed), len(shared.shown)) == (resets + 1, 0, 5)
    shared.here = False
    rig.tick(task=TOUCH)
    assert len(session.observed) == 1 and len(rig.streams) == 2, 'what was seen of the scene was forgotten'


def test_what_wants_no_answer_is_taken_in_elsewhere_and_nothing_is_imagined_of_it():
    shared = FakeShared()
    rig = Rig(shared=shared)
    rig.tick(task=TOUCH)
    rig.worker.submit(replace(shared.kept[-1], sequence=9, stale='too old'))
    rig.run()
    assert [plan is None for _, plan, _ in shared.shown] == [False, True]


def test_a_second_round_that_does_not_fit_after_the_forecast_is_left_out():
    rig = Rig()
    rig.tick(task=TOUCH)
    rig.costs[:] = 0.004, 0.030, 0.045
    for _ in range(100):
        rig.times.record(comparing(FEWEST, Effort.THREE_ROUNDS), 0.020)
    answer = rig.tick(task=TOUCH)
    assert answer.tier is Tier.ONE_STEP and answer.verdict is Verdict.DEGRADED
    assert rig.decisions[-1][0].passes == 1 and 'more than one round' in answer.reason


def test_a_second_step_is_expected_to_take_what_the_task_has_it_do():
    rig = Rig()
    for _ in range(100):  # no time for three rounds, and plenty for one that looks farther
        rig.times.record(comparing(FEWEST, Effort.THREE_ROUNDS), 0.060)
        rig.times.record(comparing(FEWEST, Effort.FARTHER), 0.001)
    rig.tick()
    assert rig.tick().tier is Tier.TWO_STEP
    assert rig.tick(task=TOUCH).tier is Tier.ONE_STEP


def test_more_rounds_add_candidates_the_same_each_time_and_find_better_ones():
    gained = []
    for y, vy in ((0.9, -0.6), (-0.7, 0.4), (0.5, 0.5), (0.0, -0.7), (1.2, -0.3), (-1.0, 0.7)):
        rig = Rig()
        rig.places = {'red': (1.6, y, 0.0, vy)}
        rig.tick(task=TOUCH)
        view = rig.worker._pilot.known.view(Deliberation().times(0.0))
        one, three, again = (Deliberation().choose(TOUCH.terms, view, [(0.0, np.zeros(2))], np.zeros(2), None, effort)
                           for effort in (Effort.ONE_ROUND, Effort.THREE_ROUNDS, Effort.THREE_ROUNDS))
        assert three.scores == again.scores and len(three.scores) == len(one.scores) + 32
        assert {name: three.scores[name] for name in one.scores} == pytest.approx(one.scores)
        gained.append(max(three.scores.values()) - max(one.scores.values()))
    assert max(gained) > 0.01


def test_after_the_forecast_candidates_are_compared_where_the_time_that_is_left_suffices_for_it():
    rig = Rig()
    for _ in range(100):  # a forecast that takes long at times, and comparing
        rig.times.record_tick(rig.costs[1] + 0.028, Effort.ONE_ROUND)
        rig.times.record(f'compare {FEWEST}', 0.005)
        rig.times.record('compare 8', 0.050)
        rig.times.record('compare 16', 0.100)
    rig.costs[:] = 0.004, 0.010, 0.016
    assert rig.tick().tier is Tier.ONE_STEP  # by its typical time: a late one would be answered with the last plan
    assert rig.decisions[-1][0].passes == 1 and rig.decisions[-1][0].choice.scores
    for _ in range(100):
        rig.times.record('forecast', 0.040)
    answer = rig.tick()
    assert answer.tier is Tier.ONE_STEP and 'it took less' in answer.reason  # though it was expected to be late
    assert rig.decisions[-1][0].choice.scores
    # The forecast is so late that comparing is not likely to fit any more.
    rig.costs[:] = 0.004, 0.031, 0.031
    answer = rig.tick()
    assert answer.tier is Tier.PLAN_ONLY and answer.latency == pytest.approx(0.031)
    assert rig.decisions[-1][0].passes == 0 and rig.decisions[-1][0].choice.scores == {}


def test_more_candidates_do_not_count_as_a_forecast_that_took_longer():
    rig = Rig()
    for _ in range(100):
        rig.times.record(f'compare {FEWEST}', 0.002)
        rig.times.record('compare 16', 0.008)
    before = rig.times.predict(Effort.THREE_ROUNDS)
    decide = rig.worker._pilot.decide

    def slowly(*args):
        choice = decide(*args)
        rig.worker._pilot.last[f'compare {len(args[-1])}'] = 0.008
        rig.clock.sleep(0.008)
        return choice
    rig.worker._pilot.decide = slowly
    for _ in range(20):
        rig.tick()
    assert len(rig.decisions[-1][0].choice.scores) > 8
    assert rig.times.predict(Effort.THREE_ROUNDS) == pytest.approx(before, abs=0.001)


def test_what_is_not_decided_in_time_is_answered_with_the_rest_of_what_was_chosen_last():
    rig = Rig()
    first = rig.tick(task=TOUCH)
    rig.costs[2] = 0.2
    rig.frame(task=TOUCH)
    limit = rig.clock() - 0.004 + DEADLINE - rig.responder.settings.reserve
    sleep, rig.clock.sleep = rig.clock.sleep, None

    def slowly(seconds):
        before = rig.clock()
        sleep(seconds)
        if before < limit <= rig.clock():
            after, rig.clock.now = rig.clock.now, limit
            rig.responder.overdue()
            rig.clock.now = after
    rig.clock.sleep = slowly
    rig.run()
    answer = rig.answers[-1][0]
    assert answer.tier is Tier.LAST_PLAN
    np.testing.assert_array_equal(answer.actions, first.actions[1:])


def test_candidates_adapt_to_the_time_that_comparing_takes():
    rig = Rig()
    for count, seconds in zip(COUNTS, (0.002, 0.015, 0.060)):
        for _ in range(100):
            rig.times.record(f'compare {count}', seconds)
            rig.times.record(f'compare {count} farther', seconds)
    rig.costs[:] = 0.004, 0.010, 0.012
    rig.tick()
    assert len(rig.decisions[-1][0].choice.scores) == 8
    for _ in range(100):
        rig.times.record('compare 8 farther', 0.050)
    rig.tick()
    assert len([name for name in rig.decisions[-1][0].choice.scores if name != 'followed']) == FEWEST


def test_robot_and_scene_are_rolled_forward_by_the_expected_delay_under_what_was_sent():
    rig = Rig(delay=0.2)
    now = round(rig.clock() * NS)
    rig.executed.add(now - round(0.5 * NS), (0.2, 0.0))
    rig.executed.add(now - round(0.05 * NS), (0.4, 0.0))
    rig.reading = np.array([1.0, 2.0, 0.0]), np.array([0.2, 0.0])
    rig.tick()
    choice = rig.decisions[0][0].choice
    # From the observation, 4 ms ago, 10 ms of forecasting, 2 ms of the gate, 200 ms of the base.
    delay = 0.004 + rig.costs[1] + 0.002 + 0.2
    assert rig.decisions[0][0].delay == pytest.approx(delay)
    assert choice.times[1] == pytest.approx(delay)
    start, at_effect = choice.poses[0, 0], choice.poses[0, 1]
    assert start.tolist() == [1.0, 2.0, 0.0]
    # 0.2 m/s until 150 ms after the newer command was heard took 0.4 m/s into force.
    in_force = 0.2 - 0.05 + 0.004
    assert at_effect[0] - 1.0 == pytest.approx(0.2 * in_force + 0.4 * (delay - in_force), abs=0.01)
    assert choice.command[0] >= 0.4 - LIMITS.rate[0] * PERIOD - 1e-6


def test_the_wheels_are_heard_and_executed_commands_stand_in_where_they_are_not():
    rig = Rig()
    rig.executed.add(round((rig.clock() - 0.2) * NS), (0.3, 0.5))
    rig.tick()
    assert rig.streams[-1].told[0][1] == [0.3, 0.5]
    assert rig.streams[-1].told[0][2] == pytest.approx([0.3, 0.5]) and not rig.worker.measures_odometry
    rig.reading = np.array([1.0, 2.0, 3.0]), np.array([0.25, 0.45])
    rig.tick()
    assert rig.streams[-1].told[1][2] == [0.25, 0.45] and rig.worker.measures_odometry
    assert rig.worker._pilot.odometry.pose.tolist() == [1.0, 2.0, 3.0]


def test_executed_commands_are_integrated_along_their_arc():
    odometry = Odometry()
    for _ in range(10):
        odometry.executed(np.array([0.5, math.pi / 2]), 0.1)
    radius = 0.5 / (math.pi / 2)
    assert odometry.pose == pytest.approx([radius, radius, math.pi / 2])


def test_without_a_task_nothing_is_commanded_and_images_are_made_all_the_same():
    rig = Rig()
    rig.tick(task=Task())
    assert rig.answers[-1][0].verdict is Verdict.IDLE and not rig.decisions
    assert len(rig.predictions) == 1 and not rig.predictions[0][0].future.actions.any()


def test_another_episode_begins_with_a_stream_that_knows_nothing():
    rig = Rig()
    rig.tick()
    before = len(rig.streams)
    rig.tick(episode=2)
    assert len(rig.streams) == before + 1 and len(rig.streams[-1].told) == 1


def test_a_forecast_that_is_not_finite_stops_the_robot_and_begins_again():
    rig = Rig()
    rig.tick()
    rig.places = {'red': (math.nan, 0.0, 0.0, 0.0)}
    answer = rig.tick()
    assert answer.tier is Tier.STOP and 'not finite' in rig.failures[0]
    rig.places = {'red': (2.0, 0.0, 0.0, 0.0)}
    for _ in range(4):
        rig.tick()
    assert rig.answers[-1][0].tier in (Tier.ONE_STEP, Tier.TWO_STEP)


def test_a_world_model_that_fails_stops_nothing_and_shows_images_again_once_it_works(monkeypatch):
    def fail(*_):
        raise RuntimeError('no memory')
    rig = Rig()
    rig.tick(task=TOUCH)
    streams, shown = len(rig.streams), len(rig.predictions)
    with monkeypatch.context() as broken:
        broken.setattr('fake_engine.FakeSession.observe', fail)
        answers = [rig.tick(task=TOUCH) for _ in range(5)]
    assert all(answer.tier is Tier.TWO_STEP and answer.verdict is Verdict.ON_TIME for answer in answers)
    assert rig.failures == ['imagining: RuntimeError: no memory'] * 5
    assert len(rig.streams) == streams and len(rig.predictions) == shown
    rig.tick(task=TOUCH)
    assert len(rig.predictions) == shown + 1 and len(rig.failures) == 5


def test_a_target_that_is_not_seen_is_looked_for():
    rig = Rig()
    rig.places = {}
    rig.tick()
    assert rig.decisions[0][0].choice.name == 'search'
    turning = [0.0, 1.0]  # from 0, by no more than the base can
    assert rig.answers[-1][0].actions.tolist() == [pytest.approx([0.0, LIMITS.rate[1] * PERIOD]), turning, turning, turning]


def test_a_search_keeps_the_limits_of_the_base_and_turns_as_far_as_at_full_speed():
    for limits in (LIMITS, replace(LIMITS, low=(-0.1, -0.25), high=(0.2, 0.25))):
        planner, previous, turned, spins = Deliberation(deciding(limits)), np.zeros(2), 0.0, True
        for _ in range(400):
            decision = planner.choose((Reach('red'),), view_of(planner, 0.03), [(0.03, previous)], previous)
            assert decision.name == 'search'
            steps = np.diff(np.vstack([previous, decision.commands]), axis=0)
            assert (np.abs(steps) <= np.array(limits.rate) * PERIOD + 1e-9).all()
            assert (np.abs(decision.commands) <= np.array(limits.high) + 1e-9).all()
            previous = decision.command
            spins &= planner._search._place is None
            turned += previous[1] * PERIOD * spins
        assert not spins and turned == pytest.approx(7.0, abs=0.1)


def test_a_search_avoids_things_where_they_are_and_not_where_they_will_be():
    def speed(leaves):
        planner = Deliberation(deciding())
        planner._search._ticks = round(planner._search.SPIN_S / PERIOD)  # it drives now
        planner._search._place = np.array([2.0, 0.0])
        view = view_of(planner, 0.03, mover=(0.40, 0.0, 0.0, 0.0))
        if leaves:
            view.things['mover'].path[2:] = 9.0
        return planner.choose((Reach('red'),), view, [(0.03, np.zeros(2))], np.zeros(2)).commands[-1, 0]
    assert speed(leaves=True) == speed(leaves=False) < 0.2


def test_neither_a_search_nor_what_was_followed_goes_on_in_another_task():
    rig = Rig()
    rig.places = {}
    for _ in range(80):
        rig.tick()
    assert rig.decisions[-1][0].choice.commands[-1].tolist() != [0.0, 1.0]  # it has turned, and drives elsewhere
    rig.tick(task=to_goal('blue'))
    rig.tick(task=to_goal('blue'))
    assert rig.decisions[-1][0].choice.name == 'search' and rig.decisions[-1][0].choice.commands[-1].tolist() == [0.0, 1.0]
    rig.places = {'red': (2.0, 0.5, 0.0, 0.0), 'green': (2.0, -0.5, 0.0, 0.0)}
    for _ in range(4):
        rig.tick(task=to_goal('red'))
    assert 'followed' in rig.decisions[-1][0].choice.scores
    rig.tick(task=to_goal('green'))
    assert 'followed' not in rig.decisions[-1][0].choice.scores


def test_a_chunk_longer_than_the_horizon_ends_with_its_last_command():
    rig = Rig()
    rig.engine.spec.chunk_frames = 40
    plan = rig.worker._plan_of(SimpleNamespace(commands=np.arange(40.0).reshape(20, 2)))
    assert plan.shape == (40, 2) and plan[0].tolist() == [0.0, 1.0] and plan[19:].tolist() == [[38.0, 39.0]] * 21


def test_actions_are_scored_by_the_terms_from_the_frame_that_they_begin_at():
    rig = Rig()
    rig.frame()
    stamp = rig.worker._slot.stamp
    rig.run()
    ahead, away = np.tile((0.5, 0.0), (16, 1)), np.tile((-0.2, 0.0), (16, 1))
    found = [rig.worker.utilities(to_goal('red'), actions, stamp) for actions in (ahead, away)]
    assert all(each.shape == (len(to_goal('red').terms),) for each in found)
    assert found[0][0] > found[1][0] + 0.5 and found[0][1] == found[1][1] == 0.0  # nearer; no contact either way
    assert not len(rig.worker.utilities(to_goal('red'), ahead, stamp + 1))
    assert not len(rig.worker.utilities(Task(), ahead, stamp))


def test_a_candidate_and_the_same_commands_as_a_question_get_the_same_from_each_term():
    rig = Rig()
    rig.places = {'red': (2.0, 0.0, 0.0, 0.0), 'magenta ball': (0.9, -0.5, 0.0, 0.3)}
    terms = to_goal('red').terms
    rig.tick()
    known, planner = rig.worker._pilot.known, Deliberation()
    # Without a delay: a question's actions are those from the observation on.
    decision = planner.choose(terms, known.view(planner.times(0.0)), [(0.0, np.zeros(2))], np.zeros(2))
    best = decision.utilities[:, list(decision.scores).index(decision.name)]
    np.testing.assert_allclose(known.utilities(terms, decision.commands), best, atol=0.02)
    assert best.sum() == pytest.approx(decision.scores[decision.name])


def test_images_are_published_with_what_their_actions_were_decided_by():
    rig = Rig()
    rig.tick()
    (prediction, _), (decided, _) = rig.predictions[0], rig.decisions[0]
    assert prediction.decided is decided
    rig.tick(task=Task())
    assert rig.predictions[-1][0].decided is None


def test_all_rungs_are_measured_at_warm_up():
    times, opened = deciding_times(), []
    rig = SimpleNamespace(clock=FakeClock(), costs=[0.0] * 3, nan=1.0, places={})

    def stream():
        opened.append(FakeForecast(rig))
        return opened[-1]
    pilot.warm_up(stream, (64, 64), times, ticks=2)
    compared = [comparing(count, effort) for count in COUNTS for effort in Effort]
    assert all(times.typical(part) > 0.0 for part in (*pilot.SEEING, 'react', *compared))
    assert {told[-1] for told in opened[-1].told} == {0, 1}


def test_things_that_look_alike_are_named_by_how_near_they_are():
    presence, places = np.zeros(len(SLOTS)), np.zeros((2, len(SLOTS), 2))
    for slot, x in (('mover', 3.0), ('mover 3', 1.0), ('red', 2.0)):
        presence[SLOT[slot]], places[:, SLOT[slot], 0] = 1.0, x
    seen = Seen(presence, places, np.array([1.0, 0.0, 4.0, 4.0, 4.0, 4.0]), np.array([0.0, 1.0]))
    things = seen.view(SLOTS, np.array([5.0, 0.0, 0.0]), np.zeros(2), np.zeros(1)).things
    assert {name: thing.path[0, 0] for name, thing in things.items()} == {'mover': 6.0, 'mover 2': 8.0, 'red': 7.0}


def test_a_forecast_of_a_still_scene_leaves_everything_where_it_is():
    rig = SimpleNamespace(clock=FakeClock(), costs=[0.0] * 3, nan=1.0, places={'red': (1.0, 0.0, 0.5, 0.0)})
    decider = Pilot(FakeForecast(rig))
    decider.observe(np.zeros((64, 64, 3), np.uint8), np.zeros(2), 1)
    times = np.array([0.0, 1.0])
    assert decider.known.view(times).things['red'].path[1].tolist() == pytest.approx([1.5, 0.0])
    assert decider.known.view(times, still=True).things['red'].path[1].tolist() == pytest.approx([1.0, 0.0])


@pytest.mark.parametrize('told, term', [
    (Told('touch', 'magenta ball'), Touch('magenta ball')), (Told('reach', 'red', 2.0), Reach('red', 2.0)),
    (Told('keep_distance', 'mover', distance=1.0), KeepDistance('mover', 1.0)), (Told('time', 'red'), Time('red')),
    (Told('pass_behind', 'mover', 3.0), PassBehind('mover', 3.0)),
    (Told('avoid', 'violet', distance=0.3), Avoid('violet', 0.3)), (Told('avoid', 'red ball'), Avoid('red ball')),
    (Told('clearance', distance=0.12, but=('red',)), Clearance(0.12, but=('red',))),
    (Told('clearance', distance=0.12, but=('red', 'blue') * 1000), Clearance(0.12, but=('red', 'blue'))),
    (Told('stay_in', region=(-1.0, 1.0, -2.0, 2.0)), StayIn(-1.0, 1.0, -2.0, 2.0))])
def test_terms_are_told_by_plain_names_and_numbers(told, term):
    task = task_of('', (told, Told('reach', 'red')), THINGS)
    assert task.terms == (term, Reach('red'))
    assert in_words(task)


@pytest.mark.parametrize('told, complaint', [
    (Told('fly'), 'unknown kind'), (Told(''), 'unknown kind'), (Told('reach', 'purple'), 'unknown thing'),
    (Told('avoid', 'purple'), 'unknown thing'), (Told('reach', 'red', -1.0), 'weight'),
    (Told('reach', 'red', math.nan), 'weight'), (Told('reach', 'red', 101.0), 'weight'),
    (Told('keep_distance', 'red', distance=0.1), 'distance'),
    (Told('keep_distance', 'red', distance=math.inf), 'distance'), (Told('clearance', distance=-0.1), 'distance'),
    (Told('clearance', but=('nothing',)), 'unknown thing'), (Told('stay_in'), 'region'),
    (Told('stay_in', region=(1.0, 0.0, 0.0, 1.0)), 'below'), (Told('stay_in', region=(0.0, 1.0, 0.0, math.nan)), 'region')])
def test_a_term_that_cannot_be_driven_is_refused_with_what_to_do(told, complaint):
    with pytest.raises(TaskError, match=rf'term 2 of 2.*{complaint}'):
        task_of('', (Told('reach', 'red'), told), THINGS)


def test_a_task_needs_something_to_drive_to_and_has_bounds():
    with pytest.raises(TaskError, match='drive to'):
        task_of('', (Told('clearance', distance=0.1),), THINGS)
    with pytest.raises(TaskError, match='at most 16'):
        task_of('', (Told('reach', 'red'),) * 17, THINGS)
    with pytest.raises(TaskError, match='at most 100 characters, not 101'):
        task_of('x' * 101, (Told('reach', 'red'),), THINGS)
    assert task_of('', (), THINGS).terms == ()


def test_commands_that_hold_are_told_with_their_times_and_end_with_the_time_out():
    executed = ExecutedActions(2, 0.1, timeout=0.5)
    executed.add(1 * NS, (0.1, 0.0))
    executed.add(int(1.3 * NS), (0.2, 0.0))

    def held(start, end):
        return [(round(seconds, 6), action.tolist()) for seconds, action in executed.held(round(start * NS), round(end * NS))]
    assert held(1.1, 1.4) == [(0.2, [0.1, 0.0]), (0.1, [0.2, 0.0])]
    assert held(0.9, 1.1) == [(0.1, [0.0, 0.0]), (0.1, [0.1, 0.0])]
    assert held(1.7, 2.0) == [(0.1, [0.2, 0.0]), (0.2, [0.0, 0.0])]
    assert held(5.0, 5.1) == [(0.1, [0.0, 0.0])]
    (seconds, action), = ExecutedActions(2, 0.1).held(0, NS)
    assert seconds == 1.0 and not action.any()


@pytest.mark.parametrize('delay, expected', [(0.0, [[0.2, 0.0], [0.3, 0.6]]), (0.1, [[0.1, 0.0], [0.2, 0.0]])])
def test_the_robot_is_located_by_the_commands_that_its_base_followed(delay, expected):
    rig, told = Rig(delay=delay), []
    rig.tick()  # begins the episode, and with it a pilot
    moved = rig.worker._pilot.localiser.moved

    def note(odometry, seconds, commanded):
        told.append((seconds, commanded.tolist()))
        moved(odometry, seconds, commanded)
    rig.worker._pilot.localiser.moved = note
    for command in ((0.1, 0.0), (0.2, 0.0), (0.3, 0.6)):
        rig.executed.add(round((rig.clock() - 0.004 - PERIOD) * NS), command)
        rig.tick()
    assert [seconds for seconds, _ in told] == pytest.approx([PERIOD] * 3)
    np.testing.assert_allclose([commanded for _, commanded in told[1:]], expected, atol=1e-6)


def test_wheel_readings_are_brought_to_the_moment_of_a_frame():
    readings = WheelReadings(0.1)
    assert readings.at(NS) is None
    for k in range(5):
        assert readings.add(Reading(round((1.0 + 0.05 * k) * NS), (0.02 * k, 0.0, 0.0), (0.4 + 0.1 * (k % 2), 0.0)))
    pose, twist = readings.at(round(1.23 * NS))
    assert pose == pytest.approx([0.08 + 0.4 * 0.03, 0.0, 0.0]) and twist == pytest.approx([0.45, 0.0])
    pose, twist = readings.at(round(1.1 * NS))  # later ones are of another moment
    assert pose[0] == pytest.approx(0.04)
    assert readings.at(round(1.6 * NS)) is None
    assert readings.add(Reading(round(1.2 * NS), (0.08, 0.0, 0.0), (0.4, 0.0)))  # published twice
    assert readings.at(round(1.23 * NS))[1] == pytest.approx([0.45, 0.0])
    assert not readings.add(Reading(2 * NS, (math.nan, 0.0, 0.0), (0.0, 0.0)))


@pytest.mark.parametrize('rate', [20, 200, 1000])
def test_wheel_readings_are_those_of_the_period_before_a_frame_at_any_rate(rate):
    readings = WheelReadings(0.1)
    for k in range(2 * rate):  # the last of them half a second after the frame
        readings.add(Reading(k * NS // rate, (k / rate, 0.0, 0.0), (k / rate, 0.0)))
    pose, twist = readings.at(round(1.5 * NS))
    lately = [k / rate for k in range(2 * rate) if 1.4 + 1e-6 < k / rate < 1.5 + 1e-6]
    assert pose[0] == pytest.approx(1.5) and twist[0] == pytest.approx(np.mean(lately))


def test_a_place_is_told_by_its_coordinates_and_is_no_obstacle():
    told = Told('reach', place=(1.5, 0.0)), Told('clearance', distance=0.3, weight=5.0), Told('time', place=(1.5, 0.0))
    task = task_of('there', told, THINGS)
    reach, _, soon = task.terms
    assert reach.place == soon.place == (1.5, 0.0) and reach.target == soon.target == '(1.500, 0.000)'
    assert 'reach (1.500, 0.000)' in in_words(task)
    planner, sent = Deliberation(Settings(veto=Veto())), [(0.03, np.zeros(2))]
    nothing = View(np.zeros(3), np.zeros(2), {}, np.zeros((0, 3)))
    decision = planner.choose(task.terms, nothing, sent, np.zeros(2))
    assert decision.command[0] > 0.1 and not decision.vetoed and decision.name != 'search'
    at = View(np.array([1.47, 0.01, 0.0]), np.zeros(2), {}, np.zeros((0, 3)))
    arrived = Deliberation(Settings(veto=Veto())).choose(task.terms, at, sent, np.zeros(2))
    assert not arrived.vetoed and np.abs(arrived.command).max() < 0.05  # nor does it turn to what it stands on
    assert planner.react(task.terms, nothing, np.zeros(2), 4).command[0] > 0.1


@pytest.mark.parametrize('told, complaint', [
    (Told('reach', place=(1.0,)), 'x and y'), (Told('reach', place=(math.nan, 0.0)), 'x and y'),
    (Told('reach', place=(1e9, 0.0)), 'within 100 m'), (Told('touch', place=(1.0, 0.0)), 'no target of touch'),
    (Told('avoid', place=(1.0, 0.0)), 'no target of avoid')])
def test_a_place_that_cannot_be_driven_to_is_refused(told, complaint):
    with pytest.raises(TaskError, match=complaint):
        task_of('', (Told('reach', 'red'), told), THINGS)


def test_a_wall_beyond_a_place_and_a_thing_on_the_way_are_kept_clear_of():
    task, sent = to_place((2.0, 0.0)), [(0.03, np.zeros(2))]
    things = {'red': Thing(np.tile((1.0, 0.02), (22, 1)), 0.16, 'red')}
    view = View(np.zeros(3), np.zeros(2), things, np.zeros((0, 3)))
    decision = Deliberation(Settings(veto=Veto())).choose(task.terms, view, sent, np.zeros(2))
    row = list(decision.scores).index(decision.name)
    away = np.hypot(*(decision.poses[row, :, :2] - (1.0, 0.02)).T)
    assert away.min() > 0.16 + ROBOT_RADIUS
