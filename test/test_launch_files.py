"""The launch files start what the description says: by their text, and by launch where it is installed."""
import ast
import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rclpy
import yaml
from bags import simulated_drive, write_bag

from worldmodel_ros.bringup import description, fleet, process
from worldmodel_ros.bringup.description import NodeDescription
from worldmodel_ros.bringup.replay import PARAMETERS
from worldmodel_ros.nodes.common.lifecycle_client import LifecycleClient

DIRECTORY = Path(__file__).resolve().parents[1] / 'launch'
LAUNCH_FILES = sorted(DIRECTORY.glob('*.launch.py'))
BRINGUP = Path(process.__file__).parent
SHARED = {'launch_description', 'fleet_description'}


def attributes_of(variable, path, function=None):
    """The attributes that the code of a file reads of anything so named."""
    tree = ast.parse(path.read_text())
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
            and ast.unparse(node.value) in (variable, f'self._{variable}')}


def test_there_are_the_launch_files_that_users_are_told_of():
    assert [path.name for path in LAUNCH_FILES] == [
        'multi_robot.launch.py', 'replay.launch.py', 'shared_control.launch.py', 'sim_demo.launch.py', 'world_model.launch.py']


@pytest.mark.parametrize('path', [path for path in LAUNCH_FILES if path.name != 'shared_control.launch.py'],
                         ids=lambda path: path.name)
def test_a_launch_file_describes_nothing_by_itself(path):
    tree = ast.parse(path.read_text())
    docstring, imported, function = tree.body
    assert ast.get_docstring(tree)
    assert imported.module == 'worldmodel_ros.bringup.ros_launch'
    assert function.name == 'generate_launch_description'
    statement, = function.body
    call = statement.value
    assert call.func.id in SHARED
    target, = call.args
    assert target.value in description.TARGETS


def test_launch_and_supervisor_use_all_that_a_node_is_described_by():
    everything = {field.name for field in dataclasses.fields(NodeDescription)} - {'only_for', 'only_with'}  # resolved
    launched = attributes_of('node', BRINGUP / 'ros_launch.py')
    assert 'own_environment' in launched  # reads both environments
    assert everything - {'environment', 'environment_on_this_machine'} <= launched
    supervisor = (attributes_of('node', BRINGUP / 'process.py')
                  | attributes_of('self', BRINGUP / 'description.py'))
    assert everything <= supervisor


def actions_of(path, **arguments):
    """Return the actions that a launch file leads to, and the context in which they were made."""
    launch = pytest.importorskip('launch', reason='needs the launch of a ROS 2 distribution')
    pytest.importorskip('launch_ros', reason='needs the launch_ros of a ROS 2 distribution')
    from launch.launch_description_sources import get_launch_description_from_python_launch_file
    context = launch.LaunchContext()
    context.launch_configurations.update(arguments)
    actions = []
    for entity in get_launch_description_from_python_launch_file(str(path)).entities:
        actions += entity.visit(context) or []
    return actions, context


def described(action, context):
    """Return what a launch_ros node was made of, in terms of the description."""
    from launch_ros.actions import LifecycleNode
    action._perform_substitutions(context)
    context.extend_locals({'ros_specific_arguments': {'name': '', 'ns': ''}})  # set when a process starts
    command = [''.join(part.perform(context) for part in words) for words in action.cmd]
    return {'full_name': action.node_name, 'executable': command[0], 'command': command,
            'lifecycle': isinstance(action, LifecycleNode)}


@pytest.mark.parametrize('name, target, namespaces', [
    ('world_model.launch.py', 'robot', ['']), ('sim_demo.launch.py', 'sim', ['']),
    ('multi_robot.launch.py', 'sim', ['robot1', 'robot2'])])
def test_launch_makes_the_nodes_of_the_description(name, target, namespaces):
    # Text that looks like a number and like a truth value.
    given = {'model': 'tiny', 'image': '/front/image', 'record': '20261122', 'goal': 'no'}
    actions, context = actions_of(DIRECTORY / name, **given)
    from launch_ros.actions import Node
    made = [described(action, context) for action in actions if isinstance(action, Node)]
    nodes = [(node, namespace) for namespace, values in fleet.robots(target, namespaces, given)
             for node in description.load().resolve(target, values)]
    assert {'recorder', 'world_model_node'} <= {node.name for node, _ in nodes}
    assert [action['full_name'] for action in made] == [node.full_name(where) for node, where in nodes]
    for action, (node, namespace) in zip(made, nodes, strict=True):
        assert action['executable'].endswith(f'lib/{node.package}/{node.executable}')
        assert action['lifecycle'] == node.lifecycle
        command = ' '.join(action['command'])
        files = re.findall(r'--params-file (\S+)', command)
        assert files[:-1] == [str(path) for path in node.parameter_files]
        # launch hands values over in a file of its own.
        assert yaml.safe_load(Path(files[-1]).read_text()) == {
            node.full_name(namespace): {'ros__parameters': dict(node.parameters)}}
        assert all(f'-r {source}:={goal}' in command for source, goal in node.remappings.items())


@pytest.mark.parametrize('monitored', [True, False], ids=['collision monitor', 'none'])
def test_a_joystick_and_the_collision_monitor_stand_between_gate_and_base(monitored):
    actions, context = actions_of(DIRECTORY / 'shared_control.launch.py', cmd_vel='/base/cmd_vel', joy_vel='/pad/cmd_vel',
                                  collision_monitor=str(monitored).lower())
    from launch.actions import ExecuteProcess
    from launch_ros.actions import Node
    topics, waiting = {}, list(actions)
    while waiting:  # an included description is visited in its turn
        entity = waiting.pop(0)
        if isinstance(entity, Node):
            entity._perform_substitutions(context)  # not what it executes: that is installed with a distribution only
            topics[entity.node_name.rpartition('/')[2]] = dict(entity.expanded_remapping_rules or [])
        elif not isinstance(entity, ExecuteProcess):
            waiting = list(entity.visit(context) or []) + waiting
    own = {name: yaml.safe_load((DIRECTORY.parent / 'config' / f'{name}.yaml').read_text())[f'/**/{name}']['ros__parameters']
           for name in ('twist_mux', 'collision_monitor', 'command_gate')}
    model, joystick = (own['twist_mux']['topics'][name] for name in ('model', 'joystick'))
    assert topics['command_gate']['cmd_vel'] == model['topic']
    assert topics['twist_mux'][joystick['topic']] == '/pad/cmd_vel'
    assert joystick['priority'] > model['priority']
    assert topics['world_model_node']['cmd_vel'] == '/base/cmd_vel'  # what is really executed
    assert own['command_gate']['output'] == 'twist_stamped' and own['twist_mux']['use_stamped']
    if monitored:
        assert topics['twist_mux']['cmd_vel_out'] == own['collision_monitor']['cmd_vel_in_topic']
        assert topics['collision_monitor'][own['collision_monitor']['cmd_vel_out_topic']] == '/base/cmd_vel'
        assert own['collision_monitor']['enable_stamped_cmd_vel']
    else:
        assert topics['twist_mux']['cmd_vel_out'] == '/base/cmd_vel'
        assert 'collision_monitor' not in topics


@pytest.mark.parametrize('installed', [False, True], ids=['own player', 'ros2 bag play'])
def test_a_replay_is_played_by_ros2_bag_play_where_that_is_installed(tmp_path, monkeypatch, installed):
    pytest.importorskip('launch_ros', reason='needs the launch_ros of a ROS 2 distribution')
    from worldmodel_ros.bringup import ros_launch
    monkeypatch.setattr(ros_launch, 'find_spec', lambda name: installed and name == 'ros2bag')
    bag = write_bag(tmp_path / 'bag', simulated_drive(seconds=1.0))
    config = tmp_path / 'scaled.yaml'
    config.write_text('actions: {linear.x: {field: twist.linear.x, scale: 2.0}, angular.z: twist.angular.z}\n')
    from launch_ros.actions import Node
    for settings, own in (({}, not installed), ({'config': str(config)}, True)):
        actions, context = actions_of(DIRECTORY / 'replay.launch.py', bag=str(bag), **settings)
        made = [described(action, context) for action in actions if isinstance(action, Node)]
        # What is recorded in other units is for our own player in any case.
        assert [action['full_name'] for action in made] == [
            '/replay/world_model_node', *(['/replay/bag_player'] if own else [])]
        command = ' '.join(made[0]['command'])
        parameters = yaml.safe_load(Path(re.findall(r'--params-file (\S+)', command)[-1]).read_text())
        assert parameters['/replay/world_model_node']['ros__parameters'] == {
            'use_sim_time': True, 'image_transport': 'compressed', **PARAMETERS['world_model_node']}


def test_a_process_that_refuses_its_configuration_is_not_launched_again(tmp_path, monkeypatch):
    launch = pytest.importorskip('launch', reason='needs the launch of a ROS 2 distribution')
    pytest.importorskip('launch_ros', reason='needs the launch_ros of a ROS 2 distribution')
    from worldmodel_ros.bringup import ros_launch
    folder = tmp_path / 'lib' / 'small_package'
    folder.mkdir(parents=True)
    runs = tmp_path / 'runs'
    for name, code in (('refusing', 2), ('crashing', 3)):
        (folder / name).write_text(
            f"#!/usr/bin/env python3\nimport sys\nprint({name!r}, file=open({str(runs)!r}, 'a'))\nsys.exit({code})\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv('AMENT_PREFIX_PATH', str(tmp_path))
    service = launch.LaunchService()
    for name in ('refusing', 'crashing'):
        node = NodeDescription(name, 'small_package', name, shared=True, respawn=True, respawn_delay=0.3)
        action = ros_launch._shared_action(node, {})
        service.include_launch_description(launch.LaunchDescription([
            ros_launch._give_up_when_refused(node, action), action]))
    started = []

    def end_after_three(event, context):
        started.append(event.process_name.rpartition('-')[0])
        return [launch.actions.Shutdown()] if started.count('crashing') > 2 else None
    service.include_launch_description(launch.LaunchDescription([
        launch.actions.RegisterEventHandler(launch.event_handlers.OnProcessStart(on_start=end_after_three)),
        launch.actions.TimerAction(period=60.0, actions=[launch.actions.Shutdown()])]))
    assert service.run() == 0
    assert started.count('crashing') == 3 and started.count('refusing') == 1 == runs.read_text().count('refusing')


def test_the_server_runs_in_the_environment_that_is_activated_not_in_that_of_launch(tmp_path, monkeypatch):
    launch = pytest.importorskip('launch', reason='needs the launch of a ROS 2 distribution')
    pytest.importorskip('launch_ros', reason='needs the launch_ros of a ROS 2 distribution')
    from worldmodel_ros.bringup import ros_launch
    environment = tmp_path / 'venv' / 'bin'
    environment.mkdir(parents=True)
    ran = tmp_path / 'ran'
    (environment / 'python3').write_text(f'#!/bin/sh\necho "$@" >> {ran}\nexec {sys.executable} "$@"\n')
    (environment / 'python3').chmod(0o755)
    monkeypatch.setenv('PATH', f"{environment}{os.pathsep}{os.environ['PATH']}")
    node = NodeDescription('engine_server', 'worldmodel_ros', 'engine_server', shared=True,
                           parameters={'model': 'nonsense', 'socket': str(tmp_path / 'engine.sock')})
    service = launch.LaunchService()
    service.include_launch_description(launch.LaunchDescription([ros_launch._shared_action(node, {})]))
    assert service.run() == 0
    script, *options = ran.read_text().split()
    assert script.endswith('lib/worldmodel_ros/engine_server') and '--model=nonsense' in options


def test_what_waits_for_the_model_does_not_start_when_its_activation_is_interrupted(tmp_path):
    """An interrupted client ends with 0, as one that has succeeded does; here the node that it waits for has died."""
    launch = pytest.importorskip('launch', reason='needs the launch of a ROS 2 distribution')
    pytest.importorskip('launch_ros', reason='needs the launch_ros of a ROS 2 distribution')
    from worldmodel_ros.bringup import ros_launch
    interrupted, started = tmp_path / 'interrupted', tmp_path / 'started'
    client = [sys.executable, '-c', f"""if True:
        import pathlib, signal
        assert signal.sigwait({{signal.SIGINT}}) == signal.SIGINT
        pathlib.Path({str(interrupted)!r}).touch()
    """]
    node = launch.actions.ExecuteProcess(cmd=['sleep', '2'])
    player = launch.actions.ExecuteProcess(cmd=['touch', str(started)])
    service = launch.LaunchService()
    service.include_launch_description(launch.LaunchDescription([
        *ros_launch._bring_to_active(NodeDescription('model', 'worldmodel_ros', 'model'), client, node, [player]), node]))
    assert service.run() == 0
    assert interrupted.exists() and not started.exists()


@pytest.mark.parametrize('after', [0.0, 0.6])  # before there is an interpreter, and while it waits for the node
def test_ctrl_c_early_in_a_launch_leaves_an_activation_that_ends_with_0(after):
    launch = pytest.importorskip('launch', reason='needs the launch of a ROS 2 distribution')
    pytest.importorskip('launch_ros', reason='needs the launch_ros of a ROS 2 distribution')
    from worldmodel_ros.bringup import ros_launch
    node = launch.actions.ExecuteProcess(cmd=['sleep', '60'], name='model')
    ended, handlers = {}, launch.event_handlers

    def interrupt(event, context):
        if event.process_name.startswith('activate_model'):
            return [launch.actions.TimerAction(period=after, actions=[launch.actions.Shutdown(reason='Ctrl-C')])]
        return None
    service = launch.LaunchService()
    service.include_launch_description(launch.LaunchDescription([
        launch.actions.RegisterEventHandler(handlers.OnProcessStart(on_start=interrupt)),
        launch.actions.RegisterEventHandler(handlers.OnProcessExit(
            on_exit=lambda event, context: ended.update({event.process_name.partition('-')[0]: event.returncode}))),
        *ros_launch._bring_to_active(NodeDescription('model', 'worldmodel_ros', 'model'),
                                     ros_launch.activation_command('/absent', 60.0), node, []), node]))
    assert service.run() == 0
    assert ended == {'model': -signal.SIGINT, 'activate_model': 0}


def test_a_robot_that_is_launched_becomes_active_and_does_so_again_after_a_crash(tmp_path, monkeypatch):
    pytest.importorskip('launch_ros', reason='needs the launch_ros of a ROS 2 distribution')
    monkeypatch.setenv('ROS_LOG_DIR', str(tmp_path))
    # The executables begin with ``/usr/bin/env python3``, which is to be this one.
    monkeypatch.setenv('PATH', f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    code = """if True:
        import sys
        from launch import LaunchDescription, LaunchService
        from launch.actions import IncludeLaunchDescription
        service = LaunchService()
        service.include_launch_description(LaunchDescription([
            IncludeLaunchDescription(sys.argv[1], launch_arguments=[('namespace', 'launched')])]))
        sys.exit(service.run())
    """
    output = tmp_path / 'output'
    context = rclpy.Context()
    rclpy.init(args=[], context=context)
    client = LifecycleClient(rclpy.create_node('asking', context=context), '/launched/world_model_node')
    deadline = time.monotonic() + 120.0

    def wait_for(condition):
        while not condition():
            assert time.monotonic() < deadline, 'timed out:\n' + output.read_text()
            time.sleep(0.05)

    def runs(node):
        return [int(pid) for pid in re.findall(rf'\[{node}-\d+\]: process started with pid \[(\d+)\]',
                                               output.read_text())]

    command = [sys.executable, '-c', code, str(DIRECTORY / 'sim_demo.launch.py')]
    with output.open('wb') as file, subprocess.Popen(command, stdout=file, stderr=file) as launched:
        try:
            wait_for(lambda: client.state() == 'active')
            os.kill(runs('world_model_node')[-1], signal.SIGKILL)
            wait_for(lambda: len(runs('world_model_node')) == 2)
            # Of the new run: this client may still be matched to the old one, whose answer never comes.
            wait_for(lambda: len(runs('activate_world_model_node')) == 2)
            activated = '[activate_world_model_node-5]: process has finished cleanly'
            wait_for(lambda: activated in output.read_text())
        finally:
            launched.send_signal(signal.SIGINT)
            launched.wait(30.0)
            rclpy.shutdown(context=context)
    assert launched.returncode == 0
    for node in ('sim_robot', 'command_gate', 'world_model_node'):
        text = output.read_text()
        assert re.search(rf'\[{node}-\d\]: process has finished cleanly', text), text
