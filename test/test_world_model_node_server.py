"""The world model node as the front end of an engine that robots share: what it says, and who drives."""
import pytest
from fake_service import PLAN, serving
from rclpy.parameter import Parameter
from world_model_rig import active, rig, wait_for

from worldmodel_ros.msg import ActionChunk
from worldmodel_ros.nodes.common import diagnostics
from worldmodel_ros.nodes.common.parameters import ParameterError
from worldmodel_ros.srv import WhatIf

pytestmark = [pytest.mark.ros, pytest.mark.untimed]

OWN, SERVER = pytest.approx(0.4), pytest.approx(float(PLAN[0, 0]))


def first_values(node):
    return [message.values[0] for message in node.messages() if message.values]


def test_the_server_drives_and_without_it_the_nodes_own_model_does_and_says_why(tmp_path):
    path = tmp_path / 'engine.sock'
    with serving(path) as served, active(server=str(path), camera_timeout_s=5.0) as node:
        wait_for(lambda: served.service.listeners, 'the session')
        node.film(0.5)
        assert first_values(node)[-1] == SERVER
        assert {values['backend'] for values in node.film_until_well()} == {'fake of the server'}
        wait_for(lambda: node.messages('predicted_future'), 'pictures of the server')
        question = WhatIf.Request(names=['left', 'policy'], horizon=0.3)
        answer = node.call(WhatIf, 'what_if', question)
        assert answer.success and [len(branch.frames) for branch in answer.branches] == [3, 3], answer.message
        served.stop()
        before = len(node.messages())
        node.film_until(lambda: len(node.messages()) >= before + 4, 'commands')
        chunks = node.messages()[before:]
        assert all(chunk.tier != ActionChunk.TIER_STOP and chunk.values for chunk in chunks)
        assert first_values(node)[-1] == OWN
        numbers = [(chunk.episode_id, chunk.sequence) for chunk in node.messages()]
        assert numbers == sorted(set(numbers)), 'an observation was answered twice'
        level, text, values = node.report()
        assert level == diagnostics.WARN and values['backend'] == 'fake'
        assert text.startswith('driving with the own model: the server is not used'), text


def test_without_a_server_to_be_found_the_node_is_active_and_drives(tmp_path):
    with active(server=str(tmp_path / 'nowhere.sock'), camera_timeout_s=5.0) as node:
        node.film(0.3)
        assert first_values(node)[-1] == OWN
        level, text, _ = node.report()
        assert level == diagnostics.WARN and 'there is no socket' in text


def test_the_server_is_fixed_while_configured_and_must_be_a_path_for_a_socket():
    with rig('configure') as node:
        result = node.subject.set_parameters_atomically([Parameter('server', value='auto')])
        assert not result.successful and 'fixed while the node is configured' in result.reason
    with pytest.raises(ParameterError, match='107 are allowed'), rig(server='/' + 'x' * 200):
        pass
