"""The description of what runs: what is read and refused, and how a robot's nodes follow from it."""
import copy
import os

import pytest
import rclpy
import yaml
from rclpy.node import Node

from worldmodel_ros import paths
from worldmodel_ros.bringup import description as bringup, fleet
from worldmodel_ros.parameters.tables import TABLES
from worldmodel_ros.paths import PACKAGE, config_directory

MINIMAL = {
    'environment': {'PROFILES': '{config}/profiles.xml'},
    'nodes': [
        {'name': 'base', 'package': 'some_package', 'executable': 'base_node', 'only_for': 'sim'},
        {'name': 'brain', 'package': 'some_package', 'executable': 'brain_node', 'lifecycle': True,
         'parameters': ['brain.yaml'], 'remappings': {'in': 'out'}, 'respawn': True, 'respawn_delay': 0.5},
    ],
    'arguments': {
        'model': {'description': 'Preset.', 'parameters': {'brain': 'model'}},
        'sim_time': {'description': 'Clock.', 'default': False,
                     'parameters': {'brain': 'use_sim_time', 'base': 'publish_clock'}},
        'image': {'description': 'Topic.', 'remappings': {'brain': 'camera/image_raw'}},
    },
}


@pytest.fixture
def write(tmp_path):
    """Write a description, with the changes applied to a copy of MINIMAL, and return its path."""
    (tmp_path / 'brain.yaml').write_text('/**/brain:\n  ros__parameters: {}\n')

    def write(change=lambda content: None):
        content = copy.deepcopy(MINIMAL)
        change(content)
        path = tmp_path / 'bringup.yaml'
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    return write


def test_nodes_come_in_the_order_of_the_file_with_paths_beside_it(write, tmp_path):
    description = bringup.load(write())
    assert [node.name for node in description.nodes] == ['base', 'brain']
    assert description.nodes[1].parameter_files == (tmp_path / 'brain.yaml',)
    assert description.environment == {'PROFILES': f'{tmp_path}/profiles.xml'}


def test_a_robot_of_its_own_needs_no_simulated_one(write):
    description = bringup.load(write())
    assert [node.name for node in description.resolve('robot')] == ['brain']
    assert [node.name for node in description.resolve('sim')] == ['base', 'brain']


def test_a_node_runs_for_its_targets_only_and_only_with_its_argument(write):
    def change(content):
        content['nodes'][0]['only_for'] = ['sim', 'replay']
        content['nodes'][1]['only_with'] = 'model'

    description = bringup.load(write(change))
    assert [node.name for node in description.resolve('replay')] == ['base']
    assert [node.name for node in description.resolve('replay', {'model': 'tiny'})] == ['base', 'brain']
    assert description.resolve('robot', {'model': ''}) == ()

    def either(content):
        content['nodes'][1]['only_with'] = ['model', 'sim_time']
    description = bringup.load(write(either))
    for given in ({'model': 'tiny'}, {'sim_time': True}, {'model': 'tiny', 'sim_time': True}):
        assert len(description.resolve('robot', given)) == 1
    assert description.resolve('robot', {'sim_time': 'false'}) == ()


def test_a_target_has_the_arguments_that_change_its_nodes(write):
    description = bringup.load(write())
    assert [argument.name for argument in description.arguments_for('robot')] == ['model', 'sim_time', 'image']
    own = bringup.load()
    names = {target: {argument.name for argument in own.arguments_for(target)} for target in bringup.TARGETS}
    assert 'seed' in names['sim'] and 'seed' not in names['robot'] | names['replay']
    assert 'bag' in names['replay'] and 'bag' not in names['sim'] | names['robot']


def test_a_replay_of_the_package_commands_nobody_and_ends_with_its_bag():
    nodes = bringup.load().resolve('replay', {'bag': '/bag', 'record': '/out'})
    assert [node.executable for node in nodes] == ['world_model_node', 'bag_player', 'recorder']
    assert [node.grace for node in nodes] == [0.0, 0.0, 120.0]  # the recorder may have a slow disk
    assert [node.name for node in nodes if node.required] == ['bag_player']
    assert 'recorder' not in [node.name for node in bringup.load().resolve('sim')]


def test_an_argument_goes_to_the_parameters_and_remappings_it_names(write):
    base, brain = bringup.load(write()).resolve(
        'sim', {'model': 'tiny', 'sim_time': 'true', 'image': '/front/image'})
    assert brain.parameters == {'model': 'tiny', 'use_sim_time': True}
    assert base.parameters == {'publish_clock': True}
    assert brain.remappings == {'in': 'out', 'camera/image_raw': '/front/image'}


def test_an_argument_without_a_value_leaves_its_default_or_the_files(write):
    _, brain = bringup.load(write()).resolve('sim', {'model': '', 'image': None})
    assert brain.parameters == {'use_sim_time': False}
    assert brain.remappings == {'in': 'out'}


def test_more_parameter_files_and_values_win_over_the_described_ones(write, tmp_path):
    more = tmp_path / 'more.yaml'
    more.write_text('')
    _, brain = bringup.load(write()).resolve(
        'sim', {'model': 'tiny'}, parameter_files=[more],
        parameters={'brain': {'model': 'large', 'rate': 5.0}})
    assert brain.parameter_files == (tmp_path / 'brain.yaml', more)
    assert brain.parameters == {'model': 'large', 'use_sim_time': False, 'rate': 5.0}


def test_the_command_line_carries_name_namespace_files_and_typed_values(write, tmp_path):
    _, brain = bringup.load(write()).resolve(
        'sim', parameters={
            'brain': {'text': 'true', 'numbers': [1, 2], 'path': '/with space', 'delay': 0.08}})
    arguments = brain.ros_arguments('robot1')
    pairs = list(zip(arguments[1::2], arguments[2::2]))
    assert arguments[0] == '--ros-args'
    assert pairs == [
        ('-r', '__node:=brain'), ('-r', '__ns:=/robot1'), ('-r', 'in:=out'),
        ('--params-file', f'{tmp_path}/brain.yaml'), ('-p', 'use_sim_time:=false'), ('-p', "text:='true'"),
        ('-p', 'numbers:=[1, 2]'), ('-p', "path:='/with space'"), ('-p', 'delay:=0.08')]


@pytest.mark.parametrize('text', [
    '20261122', '007', '0x1f', '1e5', '2026-11-22', 'no', 'null', "it's", '[x', 'a: b: c'])
def test_text_stays_text_on_its_way_to_a_node_whatever_it_looks_like(text):
    model, = (node for node in bringup.load().resolve('robot', {'goal': text}) if node.name == 'world_model_node')
    assert model.parameters['goal'] == text
    context = rclpy.Context()
    rclpy.init(args=model.ros_arguments(), context=context)
    asked = Node('asked', context=context)
    try:
        # rclpy refuses a value of another type than the default's.
        assert asked.declare_parameter('goal', '').value == text
    finally:
        asked.destroy_node()
        rclpy.shutdown(context=context)


def test_arguments_are_text_where_the_parameters_are():
    types = {(node, param.name): param.type for node, params in TABLES.items() for param in params}
    for argument in bringup.load().arguments:
        for target in argument.parameters.items():
            if target[0] in TABLES and target[1] != 'use_sim_time':
                assert (types[target] == 'string') == argument.text, f'{argument.name}, parameter {target}'


def test_each_argument_has_a_help_of_its_own_or_the_declared_text_of_its_parameter(write):
    own = bringup.load()
    texts = {argument.name: own.help(argument) for argument in own.arguments}
    assert all(texts.values())
    rate, = (param for param in TABLES['bag_player'] if param.name == 'rate')
    assert texts['rate'] == 'Seconds of the bag in one second. Allowed: 0.01 .. 100. Default: 1.0.' == rate.help()
    assert texts['image'] == 'Topic of the raw camera image, relative to the namespace or absolute.'
    with pytest.raises(bringup.DescriptionError, match="arguments: image: key 'description' is missing"):
        bringup.load(write(lambda content: content['arguments']['image'].pop('description')))


def test_the_recorder_and_the_simulated_robot_follow_the_topics_of_the_model():
    given = {'record': '/bag', 'image': '/front/image_raw', 'compressed_image': 'front/jpeg',
             'camera_info': '/lens', 'cmd_vel': '/base/cmd_vel', 'odom': '/wheels/odom'}
    nodes = {node.name: node.remappings for node in bringup.load().resolve('sim', given)}
    assert nodes['world_model_node'] == nodes['recorder'] == nodes['sim_robot'] == {
        'camera/image_raw': '/front/image_raw', 'camera/image_raw/compressed': 'front/jpeg',
        'camera/camera_info': '/lens', 'cmd_vel': '/base/cmd_vel', 'odom': '/wheels/odom'}


def test_of_several_robots_each_has_frames_and_a_room_of_its_own():
    given = {'seed': '7', 'goal': 'red'}
    assert fleet.robots('sim', ['left'], given) == [('left', given)]
    left, right = fleet.robots('sim', ['left', 'right'], {**given, 'base_frame': 'base_footprint'})
    assert left == ('left', {'seed': 7, 'goal': 'red', 'base_frame': 'left/base_footprint'})
    assert right[1]['seed'] == 8
    (_, values), _ = fleet.robots('robot', ['left', 'right'], {'base_frame': ''})
    assert values == {'base_frame': 'left/base_link'}
    nodes = {node.name: node.parameters for node in bringup.load().resolve('sim', values)}
    assert (nodes['world_model_node']['base_frame'] == nodes['command_gate']['frame_id']
            == nodes['sim_robot']['base_frame'] == 'left/base_link')
    with pytest.raises(bringup.DescriptionError, match='seed'):
        fleet.robots('sim', ['left', 'right'], {'seed': 'seven'})
    for asked in ('true', 'yes', 'on', True):  # as YAML reads them
        with pytest.raises(bringup.DescriptionError, match='use_sim_time'):
            fleet.robots('sim', ['left', 'right'], {'use_sim_time': asked})
    assert fleet.robots('sim', ['left', 'right'], {'use_sim_time': 'no'})


def test_of_several_robots_each_has_a_bag_of_its_own():
    def bags(namespaces, record):
        return [values['record'] for _, values in fleet.robots('robot', namespaces, {'record': record})]
    assert bags(['left'], 'drive') == ['drive']
    assert bags(['left', '/right', 'floor_2/left', ''], 'out/drive') == [
        'out/drive/left', 'out/drive/right', 'out/drive/floor_2.left', 'out/drive/robot']
    for none in ('', None, 'false'):
        assert bags(['left', 'right'], none) == [none, none]


def test_a_shared_process_is_no_node_and_takes_its_parameters_as_options(write):
    def change(content):
        content['nodes'].insert(0, {'name': 'engine', 'package': 'some_package', 'executable': 'engine',
                                    'shared': True, 'only_with': 'server'})
        content['arguments']['server'] = {
            'description': 'Socket.', 'values': {True: 'auto', False: ''},
            'parameters': {'engine': 'socket_path', 'brain': 'server'}}

    description = bringup.load(write(change))
    for value, socket in ((True, 'auto'), ('true', 'auto'), ('/run/e.sock', '/run/e.sock')):
        engine, _, brain = description.resolve('sim', {'server': value})
        assert engine.full_name('robot1') == '/engine'
        assert engine.command_line('robot1') == [f'--socket-path={socket}']
        assert brain.parameters['server'] == socket
    for value in (False, 'false', ''):
        nodes = description.resolve('sim', {'server': value})
        assert [node.name for node in nodes] == ['base', 'brain'] and not nodes[1].parameters.get('server')


def test_the_robots_of_the_package_share_an_engine_only_where_they_are_told_to():
    description = bringup.load()
    assert 'engine_server' not in [node.name for node in description.resolve('sim')]
    nodes = {node.name: node for node in description.resolve(
        'sim', {'server': 'true', 'model': 'tiny', 'server_model': 'large'})}
    assert nodes['engine_server'].command_line() == ['--model=large', '--socket=auto']
    assert nodes['world_model_node'].parameters['server'] == 'auto'
    assert nodes['world_model_node'].parameters['model'] == 'tiny'
    assert next(iter(nodes)) == 'engine_server', 'it starts first and ends last'


def test_a_gateway_is_started_where_it_is_asked_for_and_the_engine_with_it():
    description = bringup.load()
    for value, options in (('true', '--options='), ('/etc/door.yaml', '--options=/etc/door.yaml')):
        nodes = {node.name: node for node in description.resolve('robot', {'gateway': value})}
        assert nodes['gateway'].command_line() == [options] and nodes['gateway'].executable == 'gateway_server'
        assert 'engine_server' in nodes and 'server' not in nodes['world_model_node'].parameters
    nodes = {node.name: node for node in description.resolve('sim', {'gateway': 'true', 'server': '/run/e.sock'})}
    assert nodes['gateway'].command_line() == ['--socket=/run/e.sock', '--options=']
    nodes = {node.name: node for node in description.resolve('robot', {'server': 'wss://cell:8000'})}
    assert 'engine_server' not in nodes and nodes['world_model_node'].parameters['server'] == 'wss://cell:8000'
    for value in ('false', ''):
        assert 'gateway' not in [node.name for node in description.resolve('sim', {'gateway': value, 'server': 'true'})]


@pytest.mark.parametrize('change, complaint', [
    (lambda c: c['nodes'][1].update(respwan=True), r"nodes\[1\]: key 'respwan' is unknown: .*respawn"),
    (lambda c: c['nodes'][0].pop('executable'), r"nodes\[0\]: key 'executable' is missing"),
    (lambda c: c['nodes'][0].update(only_for='moon'), r"\(base\): only_for is 'moon'.*one of sim, robot"),
    (lambda c: c['nodes'][0].update(only_for=['sim', 'mars']), r"\(base\): only_for is 'mars'.*one of sim, robot"),
    (lambda c: c['nodes'][0].update(only_with='modle'), r"\(base\): only_with is 'modle', .*there are model"),
    (lambda c: c['nodes'][0].update(only_with=3), r'\(base\): only_with is 3: it must be a string or a list of strings'),
    (lambda c: c['nodes'][0].update(required=1), r'\(base\): required is 1: it must be a bool'),
    (lambda c: c['nodes'][1].update(lifecycle='yes'), r"\(brain\): lifecycle is 'yes': it must be a bool"),
    (lambda c: c['arguments']['model'].update(text='yes'), "model: text is 'yes': it must be a bool"),
    (lambda c: c['nodes'][1].update(respawn_delay=-1), r'respawn_delay is -1: .* number of seconds'),
    (lambda c: c['nodes'][1].update(grace='long'), r"grace is 'long': .* number of seconds"),
    (lambda c: c['nodes'][1].update(parameters=['none.yaml']), r'parameter file .*none.yaml does not exist'),
    (lambda c: c['nodes'][1].update(parameters={'model': 'tiny'}), r'must be a list of file names'),
    (lambda c: c['nodes'][0].update(name='brain'), r"two nodes are named 'brain'"),
    (lambda c: c.update(nodes=[]), r'nodes: must be a list with at least one node'),
    (lambda c: c.update(node=[]), r"key 'node' is unknown"),
    (lambda c: c['arguments']['model'].update(parameters={'brian': 'model'}),
     r"'brian' is no node here: .*brain"),
    (lambda c: c['environment'].update(DOMAIN=7), r'environment: DOMAIN is 7: it must be text'),
])
def test_a_wrong_description_is_refused_with_file_entry_and_remedy(write, change, complaint):
    path = write(change)
    with pytest.raises(bringup.DescriptionError, match=complaint) as error:
        bringup.load(path)
    assert str(error.value).startswith(str(path))


def test_a_file_that_is_no_yaml_or_not_there_is_refused(tmp_path):
    path = tmp_path / 'broken.yaml'
    with pytest.raises(bringup.DescriptionError, match='cannot be read'):
        bringup.load(path)
    path.write_text('nodes: [')
    with pytest.raises(bringup.DescriptionError, match='is not YAML'):
        bringup.load(path)


@pytest.mark.parametrize('arguments, complaint', [
    ({'target': 'moon'}, "target 'moon' is unknown: give one of sim, robot"),
    ({'arguments': {'modle': 'tiny'}}, "argument 'modle' is unknown: the description has model"),
    ({'parameter_files': ['/nowhere.yaml']}, '/nowhere.yaml does not exist'),
    ({'parameters': {'brian': {}}}, "no node 'brian' to set parameters of: there are base, brain"),
])
def test_what_cannot_be_resolved_is_refused(write, arguments, complaint):
    with pytest.raises(bringup.DescriptionError, match=complaint):
        bringup.load(write()).resolve(**{'target': 'sim', **arguments})


def test_the_parameter_files_of_the_package_hold_in_every_namespace():
    for node in bringup.load().nodes:
        for path in node.parameter_files:
            assert f'/**/{node.name}' in yaml.safe_load(path.read_text()), (
                f'{path}: begin it with "/**/{node.name}:", or a robot in a namespace runs on defaults')


def test_the_environment_of_the_package_names_files_that_exist():
    profiles = bringup.load().environment['FASTRTPS_DEFAULT_PROFILES_FILE']
    assert profiles == str(config_directory() / 'fastdds_large_images.xml')
    assert (config_directory() / 'fastdds_large_images.xml').is_file()


def test_a_variable_of_one_node_wins_over_the_shared_one_but_not_over_the_users():
    description = bringup.load()
    gate, = (node for node in description.nodes if node.name == 'command_gate')
    name, shared = 'FASTRTPS_DEFAULT_PROFILES_FILE', description.environment
    own = {name: str(config_directory() / 'fastdds_commands.xml')}
    assert (config_directory() / 'fastdds_commands.xml').is_file()
    assert gate.own_environment({}, shared) == own
    assert gate.own_environment({name: shared[name]}, shared) == own
    assert gate.own_environment({name: '/my/discovery_server.xml'}, shared) == {}


def test_what_is_to_have_no_shared_memory_gets_a_profile_instead_of_the_range_that_would_add_it():
    description = bringup.load()
    profiles, reach = 'FASTRTPS_DEFAULT_PROFILES_FILE', 'ROS_AUTOMATIC_DISCOVERY_RANGE'
    own = {profiles: str(config_directory() / 'fastdds_commands_this_machine.xml'), reach: 'SYSTEM_DEFAULT'}
    assert (config_directory() / 'fastdds_commands_this_machine.xml').is_file()
    assert {'sim_robot', 'command_gate', 'recorder'} == {node.name for node in description.nodes if node.environment}
    for node in (node for node in description.nodes if node.environment):
        ordinary = {profiles: str(config_directory() / 'fastdds_commands.xml')}
        assert node.own_environment({reach: 'LOCALHOST'}, description.environment) == own
        assert node.own_environment({reach: 'SUBNET'}, description.environment) == ordinary
        # SYSTEM_DEFAULT would not look for them.
        assert node.own_environment({reach: 'LOCALHOST', 'ROS_STATIC_PEERS': '10.0.0.2'}, description.environment) == ordinary
        assert node.own_environment({reach: 'LOCALHOST', profiles: '/mine.xml'}, description.environment) == {}


def test_an_installed_package_reads_its_share(tmp_path, monkeypatch):
    share = tmp_path / 'prefix' / 'share' / PACKAGE / 'config'
    share.mkdir(parents=True)
    monkeypatch.setattr(paths, '__file__', str(tmp_path / 'site' / PACKAGE / 'bringup' / 'paths.py'))
    monkeypatch.setenv('AMENT_PREFIX_PATH', os.pathsep.join([str(tmp_path / 'other'), str(tmp_path / 'prefix')]))
    assert config_directory() == share
    monkeypatch.setenv('AMENT_PREFIX_PATH', str(tmp_path / 'other'))
    with pytest.raises(paths.NotInstalledError, match='other: install the package, or source the workspace'):
        config_directory()
