"""DDS security: nodes that are told to be secure refuse to start without it, and the policy allows what they do."""
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import rclpy
from rclpy.context import Context

from worldmodel_ros import dds_security
from worldmodel_ros.bringup.description import load
from worldmodel_ros.bringup.environment import free_domain_id
from worldmodel_ros.bringup.process import activation_command
from worldmodel_ros.cli import checks
from worldmodel_ros.exit_codes import BAD_CONFIGURATION
from worldmodel_ros.paths import config_directory

PACKAGE = Path(dds_security.__file__).parent
CLI = (sys.executable, '-m', 'worldmodel_ros.cli')

KINDS = ('publish', 'subscribe', 'reply', 'request')
NODES = ('sim_robot', 'command_gate', 'world_model_node', 'bag_player', 'recorder')
FOLDERS = {'world_model_node': 'world_model'}
SECURE = {'ROS_SECURITY_ENABLE': 'true', 'ROS_SECURITY_STRATEGY': 'Enforce'}
FILES = ('identity_ca.cert.pem', 'cert.pem', 'key.pem', 'permissions_ca.cert.pem', 'governance.p7s', 'permissions.p7s')
# What the policy allows because of parameters that the system of the test does not have.
BY_PARAMETER = {
    'sim_robot': {'/clock', '/task', '/sim/judgement'},
    'command_gate': {'/joint_trajectory', '/commands', '/joint_states', '/clock'},
    'world_model_node': {'/camera/image_raw/compressed', '/clock', '/odom', '/task'},
    'recorder': {'/goal', '/goal_image', '/goal_pose', '/task', '/clock'},
    'worldmodel_calibrate': {'/deadman'}}
# The node of each tool of the command line, and a command that has it wait for a robot.
TOOLS = {
    'lifecycle_client': activation_command('/world_model_node', 60.0),
    'what_if_client': (*CLI, 'what-if', '--timeout', '60'),
    'worldmodel_drive_to': (*CLI, 'drive-to', 'red'),
    'worldmodel_calibrate': (*CLI, 'calibrate', '--drive', '--deadman', '/joy', '--button', '4'),
    'worldmodel_doctor': (sys.executable, '-c', """if True:
        from worldmodel_ros.engine.loading import model_folder
        from worldmodel_ros.model.checkpoint_description import read_description
        from worldmodel_ros.nodes.world_model.camera import look
        look('/camera/image_raw', read_description(model_folder('tiny')).preset, 60.0)""")}
# They listen to nodes that the same process starts in simulation, which is done without security (docs/security.md).
OF_SIMULATIONS = {'demo_observer', 'judging'}


@pytest.fixture
def keystore(tmp_path):
    """A keystore with one enclave, and Fast DDS libraries with and without the plugins."""
    (tmp_path / 'enclaves' / 'arm').mkdir(parents=True)
    for name in FILES:
        (tmp_path / 'enclaves' / 'arm' / name).touch()
    (tmp_path / 'with').write_bytes(b'..dds.sec.auth.plugin..')
    (tmp_path / 'without').write_bytes(b'...')
    return tmp_path


def refusal(keystore, library='with', enclave='/arm', **environment):
    environment = {**SECURE, 'ROS_SECURITY_KEYSTORE': str(keystore), **environment}
    return dds_security.refusal(['--ros-args', '--enclave', enclave], environment, library and keystore / library)


def test_a_node_that_can_be_secure_starts_and_one_that_is_not_told_to_be_does_not_look(keystore):
    assert refusal(keystore) == refusal(keystore, library=None) == ''
    for value in ('false', 'False', '0', 'no', 'off', ''):
        assert refusal(keystore, 'without', ROS_SECURITY_ENABLE=value) == ''
    assert dds_security.refusal([], {}, keystore / 'without') == ''


@pytest.mark.parametrize('changes, reason', [
    ({'ROS_SECURITY_ENABLE': 'True'}, 'must be written "true", not "True"'),
    ({'ROS_SECURITY_ENABLE': 'TRUE'}, 'must be written "true"'), ({'ROS_SECURITY_ENABLE': 'true '}, 'must be written "true"'),
    ({'ROS_SECURITY_ENABLE': '1'}, 'must be written "true"'), ({'library': 'without'}, 'was built without DDS security'),
    ({'ROS_SECURITY_STRATEGY': 'Permissive'}, 'set it to Enforce'), ({'ROS_SECURITY_STRATEGY': ''}, 'set it to Enforce'),
    ({'enclave': '/leg'}, 'leg has no identity_ca.cert.pem'), ({'ROS_SECURITY_ENCLAVE_OVERRIDE': '/leg'}, 'leg has no'),
    ({'ROS_SECURITY_KEYSTORE': ''}, 'ROS_SECURITY_KEYSTORE has no')])
def test_a_node_that_cannot_be_as_secure_as_it_is_told_is_refused(keystore, changes, reason):
    assert reason in refusal(keystore, **changes)


def test_a_file_that_is_missing_is_named(keystore):
    (keystore / 'enclaves' / 'arm' / 'key.pem').unlink()
    assert 'has no key.pem: make them' in refusal(keystore)


@pytest.mark.parametrize('node', NODES)
def test_each_node_refuses_to_start(node, tmp_path):
    program = f'from worldmodel_ros.nodes.{FOLDERS.get(node, node)}.node import main; raise SystemExit(main())'
    done = subprocess.run([sys.executable, '-c', program, '--ros-args', '--enclave', f'/{node}'], capture_output=True,
                          text=True, timeout=120, env={**os.environ, **SECURE, 'ROS_SECURITY_KEYSTORE': str(tmp_path)})
    assert done.returncode == BAD_CONFIGURATION, done.stderr
    assert 'cannot start: ROS_SECURITY_ENABLE is true, and' in done.stderr and 'Traceback' not in done.stderr


def test_the_bring_up_gives_each_node_its_enclave(monkeypatch):
    node = next(each for each in load().nodes if each.name == 'command_gate')
    assert '--enclave' not in node.ros_arguments('left')
    monkeypatch.setenv('ROS_SECURITY_ENABLE', 'true')
    arguments = node.ros_arguments('left')
    assert arguments[:3] == ['--ros-args', '--enclave', '/left/command_gate']


@pytest.mark.parametrize('namespace', ['', '/left'])
def test_a_node_is_activated_from_the_enclave_of_the_operator(namespace, monkeypatch, tmp_path):
    node = f'{namespace}/world_model_node'
    assert '--enclave' not in activation_command(node, 5.0)
    for name, value in {**SECURE, 'ROS_SECURITY_KEYSTORE': str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run(activation_command(node, 5.0), capture_output=True, text=True, timeout=120)
    # There is no such enclave, and rcl says which one it has looked for.
    assert done.returncode == 1 and f"{tmp_path}/enclaves{namespace}/operator'" in done.stderr


def test_doctor_says_what_there_is(tmp_path):
    surroundings = checks.environment(str(tmp_path))
    found = checks.security(surroundings)
    has = dds_security.loaded_library() is not None and dds_security.has_security(dds_security.loaded_library())
    assert found.level is checks.Level.OK and ('has DDS security' if has else 'has no DDS security') in found.text
    asked = checks.security({**surroundings, **SECURE, 'ROS_SECURITY_KEYSTORE': '/nowhere'})
    assert asked.level is checks.Level.FAIL and 'the nodes refuse to start' in asked.text


def test_doctor_looks_for_the_keys_of_the_operator_too(keystore, monkeypatch):
    monkeypatch.setattr(dds_security, 'has_security', lambda library: True)
    for name in checks.EXECUTABLES:
        (keystore / 'enclaves' / name).symlink_to(keystore / 'enclaves' / 'arm')
    surroundings = {**checks.environment(str(keystore)), **SECURE, 'ROS_SECURITY_KEYSTORE': str(keystore)}
    assert 'enclaves/operator has no' in checks.security(surroundings).text
    (keystore / 'enclaves' / 'operator').symlink_to(keystore / 'enclaves' / 'arm')
    assert checks.security(surroundings).level is checks.Level.OK


@pytest.mark.ros
@pytest.mark.untimed
def test_doctor_needs_no_keys_for_the_message_that_it_sends(tmp_path):
    found = checks.ros({**checks.environment(str(tmp_path)), **SECURE, 'ROS_SECURITY_KEYSTORE': '/nowhere'})
    assert found.level is checks.Level.OK, found.text


def policy():
    """Return enclave -> node -> {publish, subscribe, reply, request} -> names, as they are in the graph."""
    root = ElementTree.parse(config_directory() / dds_security.POLICY).getroot()
    assert root.tag == 'policy' and root.attrib == {'version': '0.2.0'}
    found = {}
    for enclave in root.find('enclaves'):
        nodes = found.setdefault(enclave.attrib['path'], {})
        for profile in enclave.find('profiles'):
            assert set(profile.attrib) == {'ns', 'node'} and profile.attrib['ns'] == '/'
            rules = nodes.setdefault(profile.attrib['node'], {})
            for part in profile:
                (kind, verdict), = part.attrib.items()
                assert verdict == 'ALLOW' and (part.tag, kind) in {
                    ('topics', 'publish'), ('topics', 'subscribe'), ('services', 'reply'), ('services', 'request'),
                    ('actions', 'execute'), ('actions', 'call')}
                names = [name.text for name in part]
                assert {name.tag for name in part} == {part.tag[:-1]} and len(set(names)) == len(names)
                if part.tag == 'actions':  # each is two topics and three services
                    topics, services = ('publish', 'reply') if kind == 'execute' else ('subscribe', 'request')
                    for key, parts in ((topics, ('feedback', 'status')),
                                       (services, ('send_goal', 'cancel_goal', 'get_result'))):
                        rules.setdefault(key, set()).update(f'/{name}/_action/{part}' for name in names for part in parts)
                    continue
                node = '/' + profile.attrib['node']
                rules[kind] = {name if name.startswith('/') else name.replace('~', node, 1) if name.startswith('~')
                               else f'/{name}' for name in names}
    return found


def test_the_policy_has_an_enclave_for_each_node_of_the_bring_up():
    nodes = {node.full_name() for node in load().nodes if not node.shared}
    assert set(policy()) == {*nodes, '/operator', '/worldmodel_calibrate'} and nodes == {f'/{name}' for name in NODES}


def test_the_policy_has_each_node_that_the_package_makes():
    makes = re.compile(r"(?:\bNode|super\(\)\.__init__)\('(\w+)'")
    made = {name for path in PACKAGE.joinpath('nodes').rglob('*.py') for name in makes.findall(path.read_text())}
    assert made - {node for nodes in policy().values() for node in nodes} == OF_SIMULATIONS
    assert made >= {*NODES, *TOOLS, 'worldmodel_view'}


def test_only_the_gate_may_command_the_base():
    commands = {enclave for enclave, nodes in policy().items()
                if any('/cmd_vel' in rules.get('publish', ()) for rules in nodes.values())}
    # Calibration runs while there is no gate; the player replays a base, and runs with none.
    assert commands == {'/command_gate', '/worldmodel_calibrate', '/bag_player'}


@pytest.mark.ros
@pytest.mark.untimed
def test_the_policy_allows_what_the_nodes_do_and_no_more(tmp_path):
    allowed = {node: rules for enclave in policy().values() for node, rules in enclave.items()}
    domain = free_domain_id()
    environment = {**os.environ, 'ROS_DOMAIN_ID': str(domain), 'ROS_AUTOMATIC_DISCOVERY_RANGE': 'LOCALHOST'}
    up = subprocess.Popen([*CLI, 'up', '--set', f'record:={tmp_path / "bag"}', '--logs',
                           str(tmp_path / 'log')], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    context = Context()
    rclpy.init(context=context, domain_id=domain)
    looker = rclpy.create_node('looker', context=context, enable_rosout=False)
    try:
        # The recorder subscribes to each topic once it has seen its publisher: the last one is not always the same.
        used = watch(looker, lambda used: '/predicted_path' in used.get('world_model_node', {}).get('publish', ())
                     and allowed['recorder']['subscribe'] - BY_PARAMETER.get('recorder', set()) <= used.get(
                         'recorder', {}).get('subscribe', set()))
        kinds = dict(looker.get_topic_names_and_types())
    finally:
        looker.destroy_node()
        context.shutdown()
        up.send_signal(signal.SIGINT)
        up.wait(60)
    for node in (*NODES[:3], 'recorder', 'sim_robot_services', '_world_model_node_services', '_world_model_node_goals'):
        for kind in KINDS:
            permitted = allowed[node].get(kind, set())
            assert used[node][kind] <= permitted, (node, kind, used[node][kind] - permitted)
        assert not unused(node, allowed[node], used)
    shows = re.findall(r"'(\w+/msg/\w+)': _", PACKAGE.joinpath('evaluate', 'view.py').read_text())
    shown = {name for node in NODES[:3] for name in used[node]['publish'] if kinds[name][0] in shows}
    assert shown and shown <= allowed['worldmodel_view']['subscribe']


@pytest.mark.ros
@pytest.mark.untimed
@pytest.mark.parametrize('node', TOOLS)
def test_the_policy_allows_what_a_tool_does_and_no_more(node, tmp_path):
    allowed = {node: rules for nodes in policy().values() for node, rules in nodes.items()}[node]
    domain = free_domain_id()
    environment = {**os.environ, 'ROS_DOMAIN_ID': str(domain), 'ROS_AUTOMATIC_DISCOVERY_RANGE': 'LOCALHOST'}
    context = Context()
    rclpy.init(context=context, domain_id=domain)
    looker = rclpy.create_node('looker', context=context, enable_rosout=False)
    tool = subprocess.Popen(TOOLS[node], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        used = watch(looker, lambda used: not unused(node, allowed, used))
    finally:
        tool.kill()
        tool.wait()
        looker.destroy_node()
        context.shutdown()
    for kind in KINDS:
        assert used[node][kind] <= allowed.get(kind, set())


def unused(node, allowed, used):
    """Return what the policy allows a node and it does not use, without what depends on parameters and distribution."""
    rest = {name for kind in KINDS for name in allowed.get(kind, set()) - used.get(node, {}).get(kind, set())}
    return {name for name in rest - BY_PARAMETER.get(node, set()) if not name.endswith(('/get_type_description', '/rosout'))}


def watch(looker, enough):
    """Return node -> kind of use -> names, once that is enough."""
    asks = {'publish': looker.get_publisher_names_and_types_by_node, 'subscribe': looker.get_subscriber_names_and_types_by_node,
            'reply': looker.get_service_names_and_types_by_node, 'request': looker.get_client_names_and_types_by_node}
    end, used = time.monotonic() + 120, {}
    while not enough(used):
        assert time.monotonic() < end, used
        time.sleep(0.5)
        for name, namespace in looker.get_node_names_and_namespaces():
            try:
                used[name] = {kind: {topic for topic, _ in ask(name, namespace)} for kind, ask in asks.items()}
            except Exception:  # it has gone in between
                continue
    return used
