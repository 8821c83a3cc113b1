"""The services of the world model node: what-if questions that disturb nothing, sessions in files."""
import contextlib
import math
import threading
import time

import numpy as np
import pytest
from rclpy.parameter import Parameter
from world_model_rig import MOTION, active, rig, stamp_of, wait_for

from worldmodel_ros.msg import ActionChunk
from worldmodel_ros.nodes.world_model import services as world_model_services
from worldmodel_ros.nodes.common.messages import nanoseconds
from worldmodel_ros.srv import SessionFile, WhatIf

pytestmark = [pytest.mark.ros, pytest.mark.untimed]


@pytest.fixture(scope='module')
def node(tmp_path_factory):
    sessions = tmp_path_factory.mktemp('home') / 'sessions'
    with active(goal='red', session_directory=str(sessions)) as subject:
        subject.sessions = sessions
        subject.film(0.3)
        yield subject


def ask(node, **fields):
    return node.call(WhatIf, 'what_if', WhatIf.Request(**fields))


def chunk(values, names=('linear.x', 'angular.z'), period=0.1):
    return ActionChunk(names=list(names), step_period=period, values=[float(v) for v in values])


def test_named_and_explicit_branches_come_back_with_pictures_scalars_and_paths(node):
    answer = ask(node, names=['forward', 'policy', 'left'], actions=[chunk([0.1, 0.0] * 3)], horizon=0.8)
    assert answer.success and not answer.deadline_exceeded, answer.message
    assert [b.name for b in answer.branches] == ['forward', 'policy', 'left', 'explicit_0']
    assert [len(b.frames) for b in answer.branches] == [8, 8, 8, 3]
    assert answer.step_period == pytest.approx(0.1)
    forward, policy, left, explicit = answer.branches
    assert forward.x[-1] == pytest.approx(0.32) and forward.y[-1] == pytest.approx(0.0)
    assert left.y[-1] > 0.05 and left.yaw[-1] == pytest.approx(0.8)
    assert explicit.x[-1] == pytest.approx(0.03)
    assert forward.progress == pytest.approx(0.4)
    assert np.reshape(forward.actions.values, (-1, 2))[:, 0] == pytest.approx(0.4)
    assert forward.actions.tier == ActionChunk.TIER_NONE
    assert stamp_of(forward.frames[1]) - stamp_of(answer) == 200_000_000
    assert 0.0 < answer.elapsed < 5.0


def test_branches_are_denoised_in_as_many_steps_as_the_parameter_says(node):
    asked, name = node.engine.sessions[-1].asked, 'what_if_denoising_steps'
    del asked[:]
    for steps in (1, 2):
        assert node.subject.set_parameters([Parameter(name, value=steps)])[0].successful
        assert ask(node, names=['left', 'right'], horizon=0.4).success
    assert asked == [1, 1, 2, 2]
    refused, = node.subject.set_parameters([Parameter(name, value=3)])
    assert not refused.successful and name in refused.reason


def test_the_control_loop_goes_on_undisturbed_while_a_question_is_answered(node):
    request = WhatIf.Request(names=['forward', 'left', 'right', 'stop'], horizon=1.6)
    client = node.clients['what_if']
    future = client.call_async(request)
    node.film(1.5)
    wait_for(future.done, 'the answer')
    assert future.result().success
    assert sum(m.tier in MOTION for m in node.messages()[-12:]) >= 10


def test_a_deadline_is_kept_with_the_branches_that_were_finished(node):
    request = WhatIf.Request(names=['forward'] * 8, horizon=4.0)
    request.deadline.nanosec = 500_000_000
    answer = node.call(WhatIf, 'what_if', request)
    assert answer.deadline_exceeded
    assert len(answer.branches) < 8
    assert answer.elapsed < 0.7
    assert f'after {len(answer.branches)} of 8 branches' in answer.message


@contextlib.contextmanager
def busy(node, seconds):
    """Let each tick take so long, and keep filming: the engine is never idle."""
    filming = threading.Event()

    def film():
        while not filming.is_set():
            node.film(0.1)
    thread = threading.Thread(target=film)
    before = dict(node.engine.costs)
    thread.start()
    try:
        node.engine.costs.update(encode=seconds)
        time.sleep(0.25)  # a slow tick has begun
        yield
    finally:
        node.engine.costs.update(before)
        filming.set()
        thread.join()


@pytest.mark.parametrize('tick', [0.13, 1.2])  # s: longer than a period, and longer than the deadline and its grace
def test_an_engine_that_is_never_idle_lets_a_deadline_pass_and_says_what_to_do(node, tick):
    request = WhatIf.Request(names=['forward'])
    request.deadline.nanosec = 400_000_000
    with busy(node, tick):
        answer = node.call(WhatIf, 'what_if', request)
    assert answer.deadline_exceeded and not answer.success and not answer.branches
    assert answer.elapsed < 1.0
    assert 'after 0 of 1 branches' in answer.message and 'lower the load or the rate of the camera' in answer.message


def test_a_save_that_was_not_begun_is_told_from_one_that_is_not_finished(node, monkeypatch):
    monkeypatch.setattr(world_model_services, '_FILE_TIMEOUT', 0.2)
    request = SessionFile.Request(path='slow.safetensors')
    with busy(node, 0.13):
        answer = node.call(SessionFile, 'save_session', request)
    assert not answer.success and 'has not begun' in answer.message

    node.film(0.3)
    monkeypatch.setitem(node.engine.costs, 'session', 0.4)
    answer = node.call(SessionFile, 'save_session', request)
    assert not answer.success and 'it has begun' in answer.message
    assert not list(node.sessions.glob('*slow*'))
    time.sleep(0.4)
    node.film(0.3)


@pytest.mark.parametrize(('fields', 'word'), [
    ({}, 'no branch'),
    ({'names': ['sideways']}, 'forward, left, right, stop, backward, policy'),
    ({'names': ['forward'], 'horizon': -1.0}, 'horizon'),
    ({'names': ['forward'], 'horizon': math.nan}, 'horizon'),
    ({'names': ['forward'], 'goal': 'purple'}, 'purple'),
    ({'actions': [chunk([0.1, 0.0], names=('a', 'b'))]}, 'names'),
    ({'actions': [chunk([0.1, 0.0], period=0.2)]}, 'step_period'),
    ({'actions': [chunk([0.1, 0.0, 0.3])]}, 'rows of 2'),
    ({'actions': [chunk([])]}, 'at least one'),
    ({'actions': [chunk([math.nan, 0.0])]}, 'finite'),
    ({'actions': [chunk([0.1, 0.0] * 500)]}, 'too long'),
    ({'names': ['forward'] * 100}, 'too long')])
def test_requests_that_make_no_sense_are_refused_with_the_remedy(node, fields, word):
    answer = ask(node, **fields)
    assert not answer.success and not answer.branches
    assert word in answer.message


def test_only_the_newest_observation_is_branched_from(node):
    node.film(0.2)
    request = WhatIf.Request(names=['stop'], horizon=0.4)
    first = node.call(WhatIf, 'what_if', request)
    request.observation_stamp = first.header.stamp
    assert node.call(WhatIf, 'what_if', request).success
    request.observation_stamp.sec -= 1
    refused = node.call(WhatIf, 'what_if', request)
    assert not refused.success and 'not the newest' in refused.message


def test_explicit_actions_are_limited_to_what_the_robot_can_do(node):
    answer = ask(node, actions=[chunk([9.0, -9.0])])
    assert list(answer.branches[0].actions.values) == pytest.approx([0.6, -1.5])


def test_a_session_is_saved_to_a_file_and_loaded_again(node):
    saved = node.call(SessionFile, 'save_session', SessionFile.Request(path='session.safetensors'))
    assert saved.success and saved.message == 'session.safetensors', saved.message
    assert [p.name for p in node.sessions.iterdir()] == ['session.safetensors']
    assert node.call(SessionFile, 'load_session', SessionFile.Request(path=saved.message)).success


@pytest.mark.parametrize('service', ['save_session', 'load_session'])
@pytest.mark.parametrize('path', ['', 'session', '.safetensors', '../up.safetensors', '~/home.safetensors', 'a/b.safetensors',
                                  'a\0.safetensors', 'a.safetensors\n', '{home}/absolute.safetensors'])
def test_only_names_in_the_session_directory_are_taken(node, service, path):
    home = node.sessions.parent
    before = sorted(home.rglob('*'))
    answer = node.call(SessionFile, service, SessionFile.Request(path=path.format(home=home)))
    assert not answer.success and 'without a folder' in answer.message and 'a-z, A-Z, 0-9' in answer.message
    assert sorted(home.rglob('*')) == before


def test_a_file_that_is_not_there_or_is_no_session_changes_nothing(node):
    broken = node.sessions / 'x.safetensors'
    for text in ('there is no session', 'not a saved session'):
        answer = node.call(SessionFile, 'load_session', SessionFile.Request(path=broken.name))
        assert not answer.success and text in answer.message
        broken.write_bytes(b'nonsense')
    # On a busy machine a tick may be late, and the last answer a stop.
    wait_for(lambda: (node.film(0.1), node.messages()[-1].tier in MOTION)[-1], 'driving to go on')


def test_as_many_sessions_are_saved_as_the_parameters_allow(node):
    def save(name):
        return node.call(SessionFile, 'save_session', SessionFile.Request(path=name))
    count = len(list(node.sessions.glob('*.safetensors')))
    assert node.subject.set_parameters([Parameter('session_files_max', value=count + 1)])[0].successful
    assert save('one_more.safetensors').success and save('one_more.safetensors').success
    refused = save('too_many.safetensors')
    assert not refused.success and 'session_files_max' in refused.message
    assert not (node.sessions / 'too_many.safetensors').exists()
    assert node.subject.set_parameters([Parameter('session_files_max', value=32)])[0].successful


def test_services_of_an_inactive_node_say_what_to_do():
    with rig('configure', namespace='alone') as subject:
        for kind, name in ((WhatIf, 'what_if'), (SessionFile, 'save_session'), (SessionFile, 'load_session')):
            answer = subject.call(kind, name, kind.Request())
            assert not answer.success and 'not active' in answer.message


def test_a_question_without_any_observation_is_refused():
    with active(namespace='alone') as subject:
        answer = ask(subject, names=['forward'])
        assert not answer.success and 'nothing has been observed' in answer.message
        answer = subject.call(SessionFile, 'save_session', SessionFile.Request(path='empty.safetensors'))
        assert not answer.success and answer.message == 'nothing has been observed yet: save when the camera publishes'


def test_a_question_about_no_goal_has_no_progress():
    with active(goal='', namespace='alone') as subject:
        subject.film(0.3)
        answer = ask(subject, names=['forward'])
        assert answer.success and math.isnan(answer.branches[0].progress)
        refused = ask(subject, names=['policy'])
        assert not refused.success and 'set goal' in refused.message
        assert nanoseconds(answer.header.stamp) > 0
