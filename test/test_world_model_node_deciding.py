"""The world model node with a forecast of the scene: tasks, odometry, and what it tells of its decisions."""
import math
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from fake_engine import SPEC
from nav_msgs.msg import Odometry
from rclpy.parameter import Parameter
from visualization_msgs.msg import MarkerArray
from world_model_rig import MOTION, active, rig, stamp_of, wait_for

from worldmodel_ros.control.pilot import SLOTS
from worldmodel_ros.control.task import term_in_words, to_goal
from worldmodel_ros.engine.forecast.loading import Forecasts
from worldmodel_ros.msg import DeadlineStatus, Decision, Task, Term
from worldmodel_ros.nodes.common.messages import time_message
from worldmodel_ros.nodes.common.qos import LATCHED, ODOMETRY, STATUS
from worldmodel_ros.srv import SetTask, WhatIf

pytestmark = [pytest.mark.ros, pytest.mark.waiting]
SLOT = {slot.name: number for number, slot in enumerate(SLOTS)}
PLACES = {'red': (2.0, 0.3, 0.0, 0.0), 'magenta ball': (1.2, 0.8, 0.0, -0.4)}  # x, y, m, and their change, m/s


class Stream:
    """Sees PLACES in base_link, whatever the image shows."""

    times = np.array([0.0, 0.2, 0.4, 0.8, 1.6, 3.2])
    measured: ClassVar[list] = []

    def observe(self, image, executed, measured, passes):
        self.measured.append(measured.tolist())
        presence, places = np.zeros(len(SLOTS)), np.zeros((len(self.times), len(SLOTS), 2))
        for name, (x, y, vx, vy) in PLACES.items():
            presence[SLOT[name]] = 0.9
            places[:, SLOT[name]] = np.array([x, y]) + self.times[:, None] * np.array([vx, vy])
        return presence, places, np.array([1.0, 0.0, 4.0, 4.0, 4.0, 4.0])


def forecasts(name, backend, threads):
    assert (name, threads) == ('some forecast', 1)
    return Forecasts('some forecast', backend, (64, 64), 0.1, Stream)


@pytest.fixture(scope='module')
def node():
    with active(goal='red', load_forecast=forecasts, forecast='some forecast', deadline_s=0.3) as subject:
        subject.decisions = []
        subject.tester.create_subscription(Decision, 'decision', subject.decisions.append, STATUS)
        subject.tasks = subject.tester.create_publisher(Task, 'task', LATCHED)
        subject.odometry = subject.tester.create_publisher(Odometry, 'odom', ODOMETRY)
        subject.film(0.5)
        wait_for(lambda: subject.decisions, 'a decision')
        yield subject


def set_task(node, *terms, name='test'):
    return node.call(SetTask, 'set_task', SetTask.Request(task=Task(name=name, terms=terms)))


def newest(messages, matches):
    """Return the newest of some messages that matches, or None."""
    return next((each for each in reversed(messages) if matches(each)), None)


def test_commands_are_those_of_the_candidate_that_was_chosen_and_all_others_are_told(node):
    node.film(0.5)
    decision = node.decisions[-1]
    # Messages of two topics are heard in any order.
    chunk = wait_for(lambda: newest(node.messages(), lambda each: each.sequence == decision.sequence), 'its command')
    assert chunk.tier in MOTION and decision.tier == chunk.tier and stamp_of(chunk) == stamp_of(decision)
    assert decision.task == 'red' and {thing.name for thing in decision.things} == set(PLACES)
    compared = wait_for(lambda: newest(node.decisions, lambda each: each.candidates) or node.film(0.1), 'a comparison')
    names = [candidate.name for candidate in compared.candidates]
    assert compared.chosen in names and len(names) >= 4 and compared.passes in (1, 3)
    best = max(c.score for c in compared.candidates if not c.vetoed)
    chosen = compared.candidates[names.index(compared.chosen)]
    assert chosen.score >= best - 0.0201  # what is followed is kept for a little less
    for candidate in compared.candidates:
        assert len(candidate.x) == len(candidate.y) == len(compared.times)
        assert (candidate.x[0], candidate.y[0]) == pytest.approx((0.0, 0.0), abs=1e-5)
    ball = next(thing for thing in compared.things if thing.name == 'magenta ball')
    assert (ball.x[0], ball.y[0]) == pytest.approx((1.2, 0.8), abs=1e-5)
    assert ball.y[-1] == pytest.approx(0.8 - 0.4 * compared.times[-1], abs=1e-4) and ball.colour == 'magenta'
    assert 0.0 < compared.delay < 0.3 and compared.decision_time > 0.0


def test_candidates_are_imagined_within_the_limits_of_the_base_from_the_next_decision_on(node):
    def fastest():
        """Return the highest speed that any candidate of a new decision ends with."""
        begun = len(node.decisions)
        decision = wait_for(
            lambda: newest(node.decisions[begun:], lambda each: each.candidates) or node.film(0.1), 'a comparison')
        x, y = (np.array([getattr(candidate, axis)[-6:] for candidate in decision.candidates]) for axis in 'xy')
        return (np.hypot(np.diff(x), np.diff(y)) / np.diff(decision.times)[-5:]).max()

    assert fastest() > 0.4
    name = 'linear.x.max_velocity'
    assert node.subject.set_parameters_atomically([Parameter(name, value=0.2)]).successful
    try:
        node.film(0.3)  # images on their way may be decided on by the limits before
        assert fastest() <= 0.201
    finally:
        node.subject.set_parameters_atomically([Parameter(name, value=0.6)])
    node.film(0.3)
    assert fastest() > 0.4


def test_what_each_term_gives_a_candidate_is_told_and_sums_up_to_its_score(node):
    node.film(0.3)
    compared = next(each for each in reversed(node.decisions) if each.candidates)
    assert compared.terms == [term_in_words(term) for term in to_goal('red').terms]
    for candidate in compared.candidates:
        assert sum(candidate.terms) == pytest.approx(candidate.score, abs=1e-5)
        assert bool(candidate.contact) == candidate.vetoed
    walls = np.reshape(compared.walls, (-1, 3))
    assert walls.shape == (4, 3) and walls[:, 2] == pytest.approx([4.0] * 4)
    assert np.hypot(*walls[:, :2].T) == pytest.approx([1.0] * 4)


def test_pictures_of_what_was_chosen_come_all_the_same(node):
    node.film(1.0)
    chunks = {each.sequence: each for each in node.messages()}
    future = wait_for(lambda: newest(node.messages('predicted_future'), lambda each: each.sequence in chunks), 'a prediction')
    assert list(future.actions.values) == list(chunks[future.sequence].values)
    decision = next(each for each in reversed(node.decisions) if each.sequence == future.sequence)
    assert future.decision == decision and decision.chosen


def test_markers_show_the_chosen_candidate_in_green_the_others_in_red_and_what_is_there(node):
    drawn = []
    subscription = node.tester.create_subscription(MarkerArray, 'decision_paths', drawn.append, STATUS)
    wait_for(lambda: (node.film(0.2), drawn)[1], 'markers')
    node.forget(subscription)
    candidates = [marker for marker in drawn[-1].markers if marker.ns == 'candidates']
    green = [marker for marker in candidates if marker.color.g > 0.5]
    others = [marker for marker in candidates if marker not in green]
    assert len(others) >= 3 and len(green) == 1 and all(marker.color.r > 0.5 for marker in others)
    assert green[0].scale.x > max(marker.scale.x for marker in others)
    room, = (marker for marker in drawn[-1].markers if marker.ns == 'walls')
    assert len(room.points) == 5 and max(abs(point.x) for point in room.points) == pytest.approx(4.0, abs=1e-4)
    label, = (marker for marker in drawn[-1].markers if marker.ns == 'decision')
    assert f'of {len(candidates)}' in label.text


def test_a_task_is_told_by_service_and_answered_in_words(node):
    answer = set_task(node, Term(kind=Term.TOUCH, target='magenta ball'), Term(kind=Term.AVOID, target='red', distance=0.3))
    assert answer.success and answer.message == \
        'touch magenta ball (weight 1); keep 0.3 m to red (weight 1)'
    node.film(0.4)
    assert node.decisions[-1].task == 'test' and 'touch magenta ball' in node.report()[2]['task']
    assert node.report()[2]['goal'] == ''
    assert set_task(node, Term(kind=Term.REACH, target='red')).success
    assert node.report()[2]['goal'] == 'red'


@pytest.mark.parametrize('terms, complaint', [
    ([Term(kind='fly')], 'unknown kind'), ([Term(kind='reach', target='purple')], "unknown thing 'purple'"),
    ([Term(kind='reach', target='red', weight=math.nan)], 'weight'), ([Term(kind='clearance', distance=0.1)], 'drive to'),
    ([Term(kind='stay_in', region=[1.0])], 'region'), ([Term(kind='reach', target='red')] * 17, 'at most 16')])
def test_a_task_that_cannot_be_driven_is_refused_and_nothing_changes(node, terms, complaint):
    assert set_task(node, Term(kind=Term.REACH, target='red'), name='before').success
    answer = set_task(node, *terms)
    assert not answer.success and complaint in answer.message
    node.film(0.3)
    assert node.decisions[-1].task == 'before'


def test_a_task_comes_by_topic_too_and_an_empty_one_stops(node):
    node.tasks.publish(Task(name='by topic', terms=[Term(kind=Term.KEEP_DISTANCE, target='magenta ball', distance=1.0)]))
    wait_for(lambda: 'stay 1 m' in node.report()[2]['task'], 'the task')
    node.film(0.3)
    assert node.decisions[-1].task == 'by topic'
    assert set_task(node).success
    before = len(node.decisions)
    node.film(0.4)
    assert len(node.decisions) <= before + 1 and 'stand still' in node.report()[2]['task']
    node.set_goal('red')
    node.film(0.3)
    assert node.decisions[-1].task == 'red'


def test_a_task_comes_from_ordinary_publishers_as_from_latched_ones(node):
    ordinary = node.tester.create_publisher(Task, 'task', 10)
    wait_for(ordinary.get_subscription_count, 'a subscription')
    before = node.subject.goals_set
    ordinary.publish(Task(name='ordinary', terms=[Term(kind=Term.REACH, target='red', weight=0.5)]))
    wait_for(lambda: node.subject._task.name == 'ordinary', 'the task')
    node.tasks.publish(Task(name='latched', terms=[Term(kind=Term.REACH, target='red', weight=0.25)]))
    wait_for(lambda: node.subject._task.name == 'latched', 'the task')
    node.film(0.3)
    assert node.subject.goals_set == before + 2
    node.set_goal('red')


def test_answers_of_what_if_carry_what_each_term_of_the_task_gives(node):
    assert set_task(node, Term(kind=Term.REACH, target='red'), Term(kind=Term.TIME, target='red', weight=0.5)).success
    node.film(0.3)
    answer = node.call(WhatIf, 'what_if', WhatIf.Request(names=['forward', 'backward'], horizon=0.8))
    assert answer.terms == ['reach red (weight 1)', 'be soon at red (weight 0.5)']
    forward, backward = answer.branches
    assert forward.terms[0] > backward.terms[0] + 0.3 and forward.terms[1] == pytest.approx(-0.5)
    for branch in (forward, backward):
        assert branch.score == pytest.approx(sum(branch.terms), abs=1e-5)
    assert set_task(node).success
    node.film(0.3)
    answer = node.call(WhatIf, 'what_if', WhatIf.Request(names=['forward'], horizon=0.8))
    assert math.isnan(answer.branches[0].score) and not answer.terms and not len(answer.branches[0].terms)


def test_the_wheels_are_heard_and_it_is_said_where_they_are_not(node):
    node.film(0.3)
    assert 'stand in: none is heard on odom' in node.report()[2]['odometry']

    def publish(ahead=0):
        message = Odometry()
        message.header.stamp = time_message(node.now() + ahead)
        message.twist.twist.linear.x, message.twist.twist.angular.z = 0.25, -0.5
        message.pose.pose.orientation.w = 1.0
        node.odometry.publish(message)
    for _ in range(6):
        publish()
        node.film(0.1)
    assert [0.25, -0.5] in [pytest.approx(each) for each in Stream.measured[-6:]]
    wait_for(lambda: node.report()[2]['odometry'] == 'measured' or (publish(), node.film(0.1)), 'the wheels to be reported')
    assert node.subject._deciding.odometry.frame == 'odom'  # it names none
    for ahead, words in ((-5_000_000_000, 's before ROS time'), (5_000_000_000, 's ahead of ROS time')):
        wait_for(lambda: words in node.report()[2]['odometry'] or (publish(ahead), node.film(0.1)), 'the wrong stamps')
        region = Term(kind=Term.STAY_IN, region=[-1.0, 1.0, -1.0, 1.0])
        for terms in ((Term(kind=Term.REACH, place=[1.0, 0.0]),), (Term(kind=Term.REACH, target='red'), region)):
            answer = set_task(node, *terms)
            assert not answer.success and words in answer.message and 'synchronise the clocks' in answer.message


def test_without_a_forecast_tasks_are_refused_with_the_remedy():
    with active(namespace='alone') as subject:  # the other node answers by its own name
        answer = subject.call(SetTask, 'set_task', SetTask.Request(task=Task(terms=[Term(kind='reach', target='red')])))
        assert not answer.success and 'parameter forecast' in answer.message


def configure_again(subject, forecast):
    assert subject.change('deactivate', 'cleanup')
    assert subject.subject.set_parameters_atomically([Parameter('forecast', value=forecast)]).successful
    assert subject.change('configure', 'activate')


def test_a_task_outlasts_a_new_configuration_and_is_dropped_by_one_that_cannot_decide():
    with active(goal='', namespace='again', load_forecast=forecasts, forecast='some forecast', deadline_s=0.3) as subject:
        terms = Term(kind=Term.REACH, target='red'), Term(kind=Term.AVOID, target='blue', distance=0.3)
        assert set_task(subject, *terms).success
        task = subject.subject._task
        configure_again(subject, 'some forecast')
        assert subject.subject._task == task and subject.subject._goal == 'red'
        configure_again(subject, '')
        assert subject.subject._goal == '' and not subject.subject._task.terms
        subject.film(0.5)
        assert {status.verdict for status in subject.statuses[-3:]} == {DeadlineStatus.IDLE}
        subject.set_goal('red')
        configure_again(subject, 'some forecast')
        assert subject.subject._task == to_goal('red')
        configure_again(subject, '')
        assert subject.subject._goal == 'red'


@pytest.mark.parametrize(('size', 'period'), [((48, 64), 0.1), ((64, 64), 0.25), ((64, 64), 0.05)])
def test_a_forecast_whose_images_cannot_be_made_of_the_models_is_refused(size, period):
    def other(name, backend, threads):
        return Forecasts(name, backend, size, period, Stream)
    with rig(load_forecast=other, forecast='other') as subject:
        assert not subject.change('configure')


def test_a_model_whose_steps_are_longer_than_the_commands_apart_decides_nothing():
    """Its plan would end before its chunk."""
    def slow(name, backend, threads):
        return Forecasts(name, backend, (64, 64), 0.2, Stream)
    with rig(load_forecast=slow, forecast='some forecast') as subject:
        subject.engine.spec = SimpleNamespace(**{**vars(SPEC), 'step_period': 0.2})
        assert not subject.change('configure')
        subject.engine.spec = SPEC
        subject.subject._load_forecast = forecasts
        assert subject.change('configure')
