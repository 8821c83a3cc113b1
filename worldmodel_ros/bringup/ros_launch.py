"""The description as actions of ``ros2 launch``; for the launch files only, since it needs launch and launch_ros."""
from __future__ import annotations

import signal
from importlib.util import find_spec
from collections.abc import Callable

from launch import Action, LaunchContext, LaunchDescription
from launch.actions import (
    DeclareLaunchArgument, EmitEvent, ExecuteProcess, OpaqueFunction, RegisterEventHandler,
    SetEnvironmentVariable, Shutdown)
from launch.event_handlers import OnProcessExit, OnProcessStart
from launch.events import matches_action
from launch.events.process import ProcessExited, ProcessStarted, ShutdownProcess, SignalProcess
from launch.logging import get_logger
from launch_ros.actions import LifecycleNode, Node
from launch_ros.parameter_descriptions import ParameterValue

from worldmodel_ros.bringup import fleet
from worldmodel_ros.bringup.defaults import ACTIVATION_TIMEOUT
from worldmodel_ros.bringup.description import Description, NodeDescription, absolute_namespace, load
from worldmodel_ros.bringup.process import HOLD_INTERRUPT, activation_command, signal_prefix
from worldmodel_ros.bringup.replay import NAMESPACE, PARAMETERS, Replay, prepare
from worldmodel_ros.exit_codes import BAD_CONFIGURATION
from worldmodel_ros.paths import find_executable

Values = dict[str, str]  # launch argument -> its text


def launch_description(target: str) -> LaunchDescription:
    """Return the launch description of one robot, 'sim', 'robot' or 'replay', in the given namespace."""
    def robots(values: Values) -> list[tuple[str, Values]]:
        return [(values['namespace'], values)]

    namespace = NAMESPACE if target == 'replay' else ''
    return _launch_description(target, [DeclareLaunchArgument(
        'namespace', default_value=namespace, description='Namespace of the robot.')], robots)


def fleet_description(target: str) -> LaunchDescription:
    """Return the launch description of several robots, each in its own namespace (bringup/fleet.py)."""
    def robots(values: Values) -> list[tuple[str, Values]]:
        return fleet.robots(target, values['robots'].split(), values)

    return _launch_description(target, [DeclareLaunchArgument(
        'robots', default_value='robot1 robot2',
        description='Namespaces of the robots, separated by spaces.')], robots)


def _launch_description(target: str, arguments: list[DeclareLaunchArgument],
                        robots: Callable[[Values], list[tuple[str, Values]]]) -> LaunchDescription:
    description = load()
    declared = [
        *arguments,
        DeclareLaunchArgument('params_file', default_value='',
                              description='Parameter file that overrides those of the package.'),
        DeclareLaunchArgument('autostart', default_value='true', choices=['true', 'false'],
                              description='Activate the lifecycle nodes, also after a respawn.'),
        DeclareLaunchArgument('activation_timeout', default_value=str(ACTIVATION_TIMEOUT),
                              description='Time limit of the activation [s]; the first start of a model can take minutes.'),
        *(DeclareLaunchArgument(argument.name, description=description.help(argument),
                                default_value='' if argument.default is None else str(argument.default))
          for argument in description.arguments_for(target))]

    def start(context: LaunchContext) -> list[Action]:
        values = {argument.name: context.launch_configurations[argument.name] for argument in declared}
        actions: list[Action] = [
            SetEnvironmentVariable(name, value) for name, value in description.environment.items()
            if name not in context.environment]
        running: set[str] = set()
        for namespace, given in robots(values):
            actions += _robot_actions(description, target, namespace, given, context.environment, running)
        return actions

    return LaunchDescription([*declared, OpaqueFunction(function=start)])


def _robot_actions(description: Description, target: str, namespace: str, values: Values, inherited: Values,
                   running: set[str]) -> list[Action]:
    """Return the actions that start one robot; ``running``: names of shared processes started so far, which is updated."""
    arguments = {argument.name: values[argument.name] for argument in description.arguments_for(target)}
    files = [values['params_file']] if values['params_file'] else []
    replay = prepare(arguments) if target == 'replay' else None
    nodes = (description.resolve(target, replay.arguments, files, PARAMETERS) if replay else
             description.resolve(target, arguments, files))
    player: list[Action] = []  # started when the model is active; our own player waits by itself
    if replay and replay.plain and find_spec('ros2bag'):
        nodes = [node for node in nodes if node.executable != 'bag_player']
        player.append(_ros2_bag_play(replay, namespace))
    actions: list[Action] = []
    for node in nodes:
        if node.name in running:
            continue
        environment = node.own_environment(inherited, description.environment)
        if node.shared:
            running.add(node.name)
            action = _shared_action(node, environment)
        else:
            action = _node_action(node, namespace, environment)
        # Register before the process starts, or its start is missed.
        if node.lifecycle and values['autostart'] == 'true':
            command = activation_command(node.full_name(namespace), float(values['activation_timeout']))
            actions += _bring_to_active(node, command, action, player)
        if node.respawn:
            actions.append(_give_up_when_refused(node, action))
        actions.append(action)
    return actions


def _ros2_bag_play(replay: Replay, namespace: str) -> ExecuteProcess:
    return ExecuteProcess(cmd=replay.ros2_bag_play(namespace), name='bag_player', output='screen',
                          on_exit=Shutdown(reason='the bag has ended'))


def _shared_action(node: NodeDescription, environment: Values) -> ExecuteProcess:
    # By its shebang, as with launch_ros and ``ros2 run``: ``env python3`` is the activated virtual environment's, which has
    # torch; launch itself runs in the system's Python.
    return ExecuteProcess(
        cmd=[str(find_executable(node.package, node.executable)), *node.command_line()], name=node.name,
        respawn=node.respawn, respawn_delay=node.respawn_delay, additional_env=environment, output='screen', **_grace(node),
        on_exit=Shutdown(reason=f'{node.name} has ended') if node.required else None)


def _node_action(node: NodeDescription, namespace: str, environment: Values) -> Node:
    kind = LifecycleNode if node.lifecycle else Node
    # Without a type, launch_ros would parse text as YAML: a folder named 20261122 would be a number.
    parameters = {name: ParameterValue(value, value_type=str) if isinstance(value, str) else value
                  for name, value in node.parameters.items()}
    return kind(
        package=node.package, executable=node.executable, name=node.name,
        namespace=absolute_namespace(namespace),
        parameters=[*map(str, node.parameter_files), *([parameters] if parameters else [])],
        remappings=list(node.remappings.items()), ros_arguments=node.enclave(namespace),
        respawn=node.respawn, respawn_delay=node.respawn_delay, additional_env=environment, output='screen', emulate_tty=True,
        **_grace(node), on_exit=Shutdown(reason=f'{node.name} has ended') if node.required else None)


def _grace(node: NodeDescription) -> dict[str, str]:
    """Return the option that gives a node its own time to end after SIGINT; the default is that of launch."""
    return {'sigterm_timeout': str(node.grace)} if node.grace else {}


def _give_up_when_refused(node: NodeDescription, action: ExecuteProcess) -> RegisterEventHandler:
    """Return the handler that prevents the respawn of a process that has refused its configuration."""
    def end(event: ProcessExited, context: LaunchContext) -> list[Action]:
        if event.returncode != BAD_CONFIGURATION:
            return []
        get_logger(node.name).error(f'it refuses its configuration (exit code {BAD_CONFIGURATION}, the reason is '
                                    'above) and is not started again')
        # During the respawn delay, this cancels the respawn.
        return [EmitEvent(event=ShutdownProcess(process_matcher=matches_action(action)))]

    return RegisterEventHandler(OnProcessExit(target_action=action, on_exit=end))


def _bring_to_active(node: NodeDescription, command: list[str], action: LifecycleNode,
                     afterwards: list[Action]) -> list[Action]:
    """Return the handlers that activate the node by ``command`` after every start; the first success starts ``afterwards``."""
    # Not by launch_ros's ChangeState event: after a crash its client confuses the services of the dead run with those of the
    # new one, and waits for a response forever. A new process has no such stale state.
    clients: list[ExecuteProcess] = []

    def start(event: ProcessStarted, context: LaunchContext) -> ExecuteProcess:
        clients.append(ExecuteProcess(
            # Ctrl-C reaches it, too, perhaps during its start-up; such an end must not be reported as a failure.
            cmd=[*signal_prefix(HOLD_INTERRUPT), *command, '--zero-when-interrupted'],
            name=f'activate_{node.name}', output='screen', on_exit=follow))
        return clients[-1]

    def follow(event: ProcessExited, context: LaunchContext) -> list[Action]:
        # A client that was interrupted, by ``end`` or by Ctrl-C, also returns 0; the launch is then over.
        due = list(afterwards) if event.returncode == 0 and event.action in clients else []
        del afterwards[:len(due)]
        return due

    def end(event: ProcessExited, context: LaunchContext) -> EmitEvent:
        return EmitEvent(event=SignalProcess(
            signal_number=signal.SIGINT, process_matcher=matches_action(clients.pop())))

    return [RegisterEventHandler(OnProcessStart(target_action=action, on_start=start)),
            RegisterEventHandler(OnProcessExit(target_action=action, on_exit=end))]
