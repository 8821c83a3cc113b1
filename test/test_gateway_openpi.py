"""The dialect of openpi: replies, refusals, steps that are not done twice, sessions that outlast their connection."""
import contextlib
import logging
import threading
import time

import numpy as np
import pytest
from fake_service import PLAN, FakeService, wait_for
from gateway_rig import TIMEOUT, client, gateway, heard, infer, robot, say
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, InvalidStatus

from worldmodel_ros.serving.gateway.contract import Contract, ContractError
from worldmodel_ros.serving.gateway.msgpack import encode
from worldmodel_ros.serving.gateway.server import Limits

CONTRACT = Contract(goals={'red': ('crimson',)}, executed=(2, 0))


@pytest.fixture(scope='module')
def running(tmp_path_factory):
    with gateway(tmp_path_factory.mktemp('run'), FakeService(sessions=40), limits=Limits(linger=5.0)) as started:
        yield started


@pytest.fixture(autouse=True)
def fresh(running):
    running.service.answer, running.service.delay = 'plan', 0.0
    running.service.ticks.clear()


def test_an_observation_is_answered_by_actions_and_scalars(running):
    with robot(running) as connection:
        assert connection.metadata['action_names'] == ['linear.x', 'angular.z'] and connection.metadata['action_horizon'] == 4
        reply = infer(connection, deadline_ms=2000, step_id=3)
        assert np.array_equal(reply['actions'], PLAN) and reply['actions'].dtype == np.float32
        assert (reply['valid_steps'], reply['step_id'], reply['episode']) == (4, 3, 1)
        timing = reply['server_timing']
        assert set(timing) == {'infer_ms', 'queue_ms', 'total_ms', 'slack_ms', 'tier'} and timing['tier'] == 'two_step'
        assert 0 < timing['infer_ms'] <= timing['total_ms'] and timing['queue_ms'] == 2.0
        assert timing['total_ms'] + timing['slack_ms'] == pytest.approx(2000)
    tick, = running.service.ticks
    assert tick.image.shape == (64, 64, 3) and (tick.image == 7).all() and tick.goal == 'red' and tick.prefix is None


def test_the_path_of_a_world_model_server_speaks_the_same(running):
    with robot(running, path='/v1/realtime/robot/openpi') as connection:
        assert infer(connection)['valid_steps'] == 4


def test_a_channel_first_image_and_a_nested_key_are_understood(running):
    image = np.arange(3 * 64 * 64, dtype=np.uint8).reshape(3, 64, 64)
    with robot(running) as connection:
        connection.send(encode({'observation': {'image': image}}))
        assert heard(connection)['valid_steps'] == 4
    tick, = running.service.ticks
    assert np.array_equal(tick.image, image.transpose(1, 2, 0)) and tick.goal == ''


@pytest.mark.parametrize('changes, reason', [
    ({'observation/image': None}, 'must be an image'), ({'observation/image': np.zeros((4, 4), np.uint8)}, 'must be an image'),
    ({'observation/image': np.zeros((4, 4, 3))}, 'must be an image'),
    ({'observation/image': np.zeros((0, 4, 3), np.uint8)}, 'sides up to'),
    ({'prompt': 'sing'}, 'names no goal'), ({'prompt': 'red or green'}, 'names red and green'), ({'prompt': 3}, 'a text'),
    ({'step_id': -1}, 'whole numbers'), ({'step_id': True}, 'whole numbers'), ({'deadline_ms': 0}, 'deadline_ms'),
    ({'deadline_ms': float('nan')}, 'deadline_ms'), ({'session_id': 7}, 'session_id is a text'),
    ({'session_id': 'a b'}, 'session_id must be'), ({'endpoint': 'train'}, 'endpoint'), ({'inference_delay': 'x'}, 'whole'),
    ({'endpoint': np.zeros(2)}, 'endpoint'), ({'prompt': np.zeros(0)}, 'a text'),
    ({'executed_actions': [[1], [1, 2]]}, 'executed_'), ({'executed_actions': np.zeros((1000, 65))}, 'executed_actions is'),
    ({'executed_actions': 'x'}, 'executed_actions is'), ({'executed_actions': np.zeros(3)}, 'finite numbers linear.x'),
    ({'executed_actions': np.array([[np.nan, 0]])}, 'finite numbers linear.x')])
def test_an_observation_that_makes_no_sense_is_refused_and_the_next_one_is_answered(running, changes, reason):
    with robot(running) as connection:
        refusal = infer(connection, **changes)
        assert isinstance(refusal, str) and refusal.startswith('refused: ') and reason in refusal
        assert infer(connection)['valid_steps'] == 4


def test_what_the_engine_refuses_or_fails_at_is_a_text_and_the_connection_stays(running):
    with robot(running) as connection:
        running.service.answer = 'refusal'
        assert 'refused: deadline: two steps would finish' in infer(connection)
        running.service.answer = 'failure'
        assert 'refused: model: OutputError' in infer(connection)
        running.service.answer = 'nan'
        assert 'refused: model' in infer(connection)
        running.service.answer = 'plan'
        assert infer(connection)['episode'] == 2  # after the failure the session began anew


@pytest.mark.parametrize('message', [b'\xc1', b'\x91' * 40, 'reset', encode([1])])
def test_a_malformed_message_ends_its_connection_alone(running, message):
    with robot(running) as other, robot(running) as connection:
        connection.send(message)
        said = heard(connection)
        if message == encode([1]):  # well-formed, and no map
            assert said.startswith('refused: observation')
            return
        assert said.startswith('fatal: malformed')
        with pytest.raises(ConnectionClosedError) as closed:
            connection.recv(TIMEOUT)
        assert closed.value.rcvd.code == 1011
        assert infer(other)['valid_steps'] == 4


def test_a_message_that_is_too_long_is_refused_unread(running):
    with robot(running) as connection:
        with pytest.raises(ConnectionClosed) as closed:
            connection.send(b'\xc6\x01\x00\x00\x00' + bytes(16 << 20))
            connection.recv(TIMEOUT)
        assert closed.value.rcvd.code == 1009


def test_a_step_that_comes_again_gets_the_stored_reply_and_is_not_done_again(running):
    with robot(running) as connection:
        first = infer(connection, session_id='steps', step_id=1)
        assert infer(connection, session_id='steps', step_id=1)['server_timing'] == first['server_timing']
        assert len(running.service.ticks) == 1
        running.service.answer = 'refusal'
        refusal = infer(connection, session_id='steps', step_id=2)
        running.service.answer = 'plan'
        assert infer(connection, session_id='steps', step_id=2) == refusal
        for step in range(3, 14):
            infer(connection, session_id='steps', step_id=step)
        assert 'refused: step: step 1 came after 13' in infer(connection, session_id='steps', step_id=1)


def test_a_client_that_comes_back_goes_on_and_no_step_is_done_twice(running):
    running.service.delay = 0.5
    with robot(running) as connection:
        assert infer(connection, session_id='dropped', step_id=1)['episode'] == 1
        say(connection, session_id='dropped', step_id=2)
        wait_for(lambda: len(running.service.ticks) == 2)
        connection.socket.close()  # as a cable does
    with robot(running) as connection:
        reply = infer(connection, session_id='dropped', step_id=2)  # its answer is still on its way
        assert (reply['step_id'], reply['episode']) == (2, 1) and len(running.service.ticks) == 2
        assert infer(connection, session_id='dropped', step_id=3)['episode'] == 1
    assert len({tick.episode for tick in running.service.ticks}) == 1


def test_a_session_goes_over_to_the_newer_connection(running):
    with robot(running) as first, robot(running) as second:
        infer(first, session_id='moving', step_id=1)
        assert infer(second, session_id='moving', step_id=2)['episode'] == 1
        assert 'goes on over a newer connection' in infer(first, session_id='moving', step_id=3)
        assert 'newer connection' in infer(first)
        assert infer(second, session_id='moving', step_id=3)['step_id'] == 3


def test_sessions_of_one_connection_do_not_mix_and_end_with_it_or_later(running):
    before = len(running.service.listeners)
    with robot(running) as connection:
        infer(connection, session_id='one', step_id=5)
        assert infer(connection, session_id='two', step_id=1)['step_id'] == 1
        wait_for(lambda: len(running.service.listeners) == before + 2)
    with robot(running) as connection:
        infer(connection)
        unnamed = len(running.service.listeners)
    wait_for(lambda: len(running.service.listeners) == unnamed - 1)


def test_a_session_to_which_nobody_comes_back_ends(running):
    with robot(running) as connection:
        infer(connection, session_id='left')
    (session,) = [each for each in running.gateway.sessions.all() if each.name == 'left']

    def forget():
        session.left -= 100.0
        running.gateway.sessions.expire()
    wait_for(lambda: session.holder is None)
    running.call(forget)
    assert session not in running.gateway.sessions.all()


def test_a_gateway_that_ends_with_connections_open_ends_their_sessions_once(tmp_path, caplog):
    with contextlib.ExitStack() as stack:
        with gateway(tmp_path) as running:
            for name in ('', 'named'):
                infer(stack.enter_context(robot(running)), session_id=name)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING] and len(running.service.closed) == 2


def test_reset_begins_an_episode_and_lets_steps_begin_again(running):
    with robot(running) as connection:
        infer(connection, session_id='reset', step_id=9)
        reset = infer(connection, session_id='reset', endpoint='reset')
        assert reset == {'status': 'reset', 'session_id': 'reset', 'episode': 2}
        assert infer(connection, session_id='reset', step_id=0)['episode'] == 2
    assert [tick.episode for tick in running.service.ticks] == [1, 2]


def test_executed_actions_come_from_the_client_else_from_the_last_plan(running):
    with robot(running) as connection:
        infer(connection)
        infer(connection, executed_actions=np.array([[0.1, 0.0], [0.3, 1.0]]))
        infer(connection, executed_actions=np.array([0.2, -0.5]))
        infer(connection, executed_actions=np.zeros((0, 2)))
        infer(connection)  # at once: the first action of the last plan
    executed = [tick.executed for tick in running.service.ticks]
    expected = [[0, 0], [0.2, 0.5], [0.2, -0.5], [0, 0]]
    assert np.allclose(executed[:4], expected)
    assert any(np.allclose(executed[4], PLAN[:n].mean(0)) for n in range(1, 5))


def test_an_inference_delay_hands_the_engine_the_actions_that_are_committed(running):
    with robot(running) as connection:
        assert infer(connection, inference_delay=2)['committed_steps'] == 0  # there is no plan yet
        reply = infer(connection, inference_delay=2, executed_actions=PLAN[:1])
        assert reply['committed_steps'] == 2
        assert infer(connection, inference_delay=3, executed_actions=PLAN[:3])['committed_steps'] == 1
        assert 'plans 4 actions' in infer(connection, inference_delay=4)
    ticks = running.service.ticks
    assert ticks[0].prefix is None and np.array_equal(ticks[1].prefix, PLAN[1:3]) and np.array_equal(ticks[2].prefix, PLAN[3:])


def test_pings_are_answered_and_others_served_while_the_engine_computes(running):
    running.service.delay = 1.0
    with robot(running) as connection:
        replies = []
        say(connection)
        waiting = threading.Thread(target=lambda: replies.append(heard(connection)))
        waiting.start()
        wait_for(lambda: running.service.ticks)
        pings = []
        for _ in range(9):
            begun = time.monotonic()
            assert connection.ping().wait(TIMEOUT) and not replies
            pings.append(time.monotonic() - begun)
        assert sorted(pings)[4] < 0.05
        waiting.join()
    assert replies[0]['valid_steps'] == 4


def test_without_an_engine_a_connection_is_refused_and_one_that_is_open_goes_on_when_it_is_back(tmp_path):
    with gateway(tmp_path) as running, robot(running) as connection:
        assert infer(connection, session_id='robot', step_id=1)['episode'] == 1
        running.server.stop()
        assert 'refused: engine' in infer(connection, session_id='robot', step_id=2)
        with pytest.raises(InvalidStatus) as refused, client(running):
            pass
        assert refused.value.response.status_code == 503
        running.server.start()
        end = time.monotonic() + TIMEOUT
        while isinstance(reply := infer(connection, session_id='robot', step_id=2), str):
            assert 'refused: engine' in reply and time.monotonic() < end
        assert reply['episode'] == 2  # what was seen is gone, and the client is told


def test_a_measured_state_is_the_executed_action_where_the_contract_says_so(tmp_path):
    with gateway(tmp_path, contract=CONTRACT) as running, robot(running) as connection:
        infer(connection, **{'observation/state': np.array([0.5, 9.0, 0.25]), 'prompt': 'CRIMSON!'})
        assert 'observation/state must be a vector' in infer(connection, **{'observation/state': np.zeros(2)})
        assert 'observation/state must be a vector' in infer(connection)
        tick, = running.service.ticks
        assert np.allclose(tick.executed, [0.25, 0.5]) and tick.goal == 'red'


@pytest.mark.parametrize('text, reason', [
    ('', 'must have a map, openpi'), ('openpi: 3', 'must have a map, openpi'), ('openpi: {imge: x}', 'unknown imge'),
    ('openpi: {image: 3}', 'keys are texts'), ('openpi: {deadline_ms: 0}', 'deadline_ms is above 0'),
    ('openpi: {deadline_ms: soon}', 'deadline_ms is above 0'), ('openpi: {deadline_ms: "500"}', 'deadline_ms is above 0'),
    ('openpi: {executed: [x]}', 'columns are 0 or more'), ('openpi: {executed: [1.7]}', 'columns are 0 or more'),
    ('openpi: {mount: [x]}', 'is no contract: could not convert'), ('openpi: {goals: {red: ball}}', 'has a list of words'),
    ('a: [', 'is no contract')])
def test_a_contract_that_makes_no_sense_is_refused(tmp_path, text, reason):
    file = tmp_path / 'contract.yaml'
    file.write_text(text)
    with pytest.raises(ContractError, match=reason):
        Contract.read(file)


def test_the_shipped_contract_is_the_default():
    from worldmodel_ros.model.presets import TINY
    from pathlib import Path
    shipped = Contract.read(Path(__file__).parents[1] / 'config' / 'gateway.yaml')
    shipped.check(TINY)
    assert {**vars(shipped), 'goals': {}} == vars(Contract())
    with pytest.raises(ValueError, match='the model knows red'):
        Contract(goals={'pink': ()}).check(TINY)
