"""The life of the world model node: transitions, failures, parameters, what is left behind."""
import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
from fake_engine import FakeEngine
from rclpy.parameter import Parameter
from world_model_rig import MOTION, Rig, active, open_files, rig, wait_for

from worldmodel_ros.control.responder import Responder
from worldmodel_ros.control.worker import Worker
from worldmodel_ros.model.checkpoint_description import ModelError
from worldmodel_ros.msg import ActionChunk, DeadlineStatus

pytestmark = [pytest.mark.ros, pytest.mark.untimed]


def change(node, **values):
    return node.subject.set_parameters_atomically(
        [Parameter(name, value=value) for name, value in values.items()])


def test_an_engine_that_cannot_be_loaded_fails_configure_with_its_text_and_leaves_the_node_alive(capfd):
    def load(model, **others):
        raise ModelError(f'no model {model!r}: choose another one')
    with rig(load_engine=load, model='huge') as node:
        assert not node.change('configure')
        assert node.state == 'unconfigured'
        shown = capfd.readouterr().err
        assert "no model 'huge': choose another one" in shown and 'Traceback' not in shown
        node.subject._load_engine = lambda **chosen: node.engine
        assert change(node, model='tiny').successful
        assert node.change('configure', 'activate')


def test_an_engine_that_fails_in_warm_up_fails_configure():
    with rig() as node:
        node.engine.warm_up = lambda: 1 / 0
        assert not node.change('configure')
        assert node.state == 'unconfigured' and node.engine.closed == 1
        del node.engine.warm_up
        assert node.change('configure')


def test_the_parameters_choose_the_engine():
    asked = []

    def load(**chosen):
        asked.append(chosen)
        return FakeEngine()
    chosen = {'model': '/some/folder', 'backend': 'torch-fp8', 'threads': 2, 'gpus': 4, 'parallel': 'tensor'}
    with rig('configure', load_engine=load, **chosen):
        assert asked == [chosen]


def test_what_belongs_to_the_engine_is_fixed_while_it_is_there():
    with rig('configure') as node:
        for name, value in (('model', 'other'), ('backend', 'torch'), ('threads', 4), ('gpus', 2),
                            ('parallel', 'tensor'),
                            ('image_transport', 'compressed'), ('executed_action_topic', 'x')):
            refused = change(node, **{name: value})
            assert not refused.successful and 'deactivate and clean it up' in refused.reason
        assert node.change('cleanup')
        assert change(node, model='other', threads=4).successful


def test_every_parameter_is_described():
    with rig() as node:
        names = list(node.subject._settings)
        described = node.subject.describe_parameters(names)
        assert len(names) > 20
        assert all(d.description for d in described)


def test_a_goal_that_the_model_does_not_know_fails_configure(capfd):
    with rig(goal='') as node:
        assert change(node, goal='purple').successful
        assert not node.change('configure')
        assert 'red, green, blue, yellow' in capfd.readouterr().err


def test_a_model_whose_actions_no_twist_holds_fails_configure(capfd):
    with rig() as node:
        spec = node.engine.spec
        node.engine.spec = SimpleNamespace(**{**vars(spec), 'action_names': ('angular.z', 'linear.x')})
        assert not node.change('configure')
        assert 'its actions are angular.z, linear.x' in capfd.readouterr().err
        assert node.engine.closed == 1 and not node.engine.warmed_up
        node.engine.spec = spec
        assert node.change('configure', 'activate')


@pytest.mark.parametrize('where', ['open_session', 'start'])
def test_activations_that_fail_half_way_leave_nothing_and_a_later_one_succeeds(where, monkeypatch):
    def fail(*given):
        raise RuntimeError('out of memory')
    with rig('configure', goal='red') as node:
        before, sessions = set(threading.enumerate()), []

        def started():
            return sorted(thread.name for thread in set(threading.enumerate()) - before)
        with monkeypatch.context() as broken:
            broken.setattr(node.engine if where == 'open_session' else Worker, where, fail)
            for _ in range(3):
                assert not node.change('activate')
                assert node.state == 'inactive'
                sessions += map(weakref.ref, node.engine.sessions)
                node.engine.sessions.clear()
        assert not started()
        assert len(sessions) == (3 if where == 'start' else 0)
        assert not any(session() for session in sessions), 'its memory is kept from the next one'
        assert node.change('activate')
        assert started() == ['engine', 'publishing']
        node.film_until(lambda: node.messages() and node.messages()[-1].tier in MOTION, 'a command')  # any tick may be late
        assert node.change('deactivate')
        assert not started()


def test_a_deactivation_that_fails_ends_its_threads_and_can_be_taken_again(monkeypatch):
    def fail(*given):
        raise RuntimeError('no last word')
    with rig('configure') as node:
        before = set(threading.enumerate())
        assert node.change('activate')
        with monkeypatch.context() as broken:
            broken.setattr(Responder, 'halt', fail)
            assert not node.change('deactivate')
        assert set(threading.enumerate()) <= before
        assert node.change('deactivate', 'activate', 'deactivate', 'cleanup')


def test_inactive_nodes_do_not_observe_and_do_not_command():
    with rig('configure', goal='red') as node:
        node.film(0.4)
        assert not node.engine.sessions
        assert not node.messages()
        assert node.report()[1] == 'not active'


def test_deactivation_asks_for_a_stop_as_its_last_word():
    with active() as node:
        node.film(0.4)
        assert node.change('deactivate')
        wait_for(lambda: node.messages()[-1].tier == ActionChunk.TIER_STOP, 'a stop')
        stop = node.messages()[-1]
        assert stop.sequence == max(m.sequence for m in node.messages())
        node.film(0.3)
        assert node.messages()[-1] == stop
        wait_for(lambda: node.statuses[-1].verdict == DeadlineStatus.IDLE, 'the report')


def test_reactivation_begins_a_new_episode_with_a_new_session():
    with active() as node:
        node.film(0.4)
        first = node.messages()[0].episode_id
        assert node.change('deactivate', 'activate')

        def later():
            return [chunk.tier for chunk in node.messages() if chunk.episode_id > first]
        node.film_until(lambda: (tiers := later()) and tiers[-1] in MOTION, 'a command')  # any tick may be late
        wait_for(lambda: node.statuses[-1].two_step <= len(later()), 'counts of the new episode alone')
        assert len(node.engine.sessions) == 2


def test_ten_lives_leave_nothing_behind():
    with rig() as node:
        def live():
            gc.freeze()  # as in the rig: garbage of before is collected when all lives are over
            assert node.change('configure', 'activate')
            node.images.publish(node.image())
            assert node.change('deactivate', 'cleanup')

        earlier = set(threading.enumerate())

        def left():
            gc.collect()
            return (len(set(threading.enumerate()) - earlier), len(list(node.subject.subscriptions)),
                    len(list(node.subject.publishers)), len(list(node.subject.timers)), gc.get_freeze_count())
        live()
        live()
        before, files = left(), open_files()
        for _ in range(8):
            live()
        assert left() == before
        assert open_files() <= files + 2
        assert len(node.engine.sessions) == 10


def test_the_end_of_the_process_stops_the_robot():
    node = Rig()
    try:
        assert node.change('configure', 'activate')
        node.set_goal('red')
        node.film(0.4)
        assert node.spinning[0].node.trigger_shutdown()
        wait_for(lambda: node.messages()[-1].tier == ActionChunk.TIER_STOP, 'a stop')
        assert node.state == 'finalized'
    finally:
        node.close()


def test_reset_begins_a_new_episode_with_the_next_image():
    with active() as node:
        node.film(0.4)
        before = node.messages()[-1].episode_id
        assert node.trigger('reset').success
        node.film(0.3)
        assert node.messages()[-1].episode_id > before
        assert node.change('deactivate')
        refused = node.trigger('reset')
        assert not refused.success and 'activate it' in refused.message
