"""
Starts the world model and the gate, with a joystick that takes precedence and nav2's collision monitor before the base.

gate -> cmd_vel_model -> twist_mux (joy_vel wins) -> cmd_vel_mux -> collision_monitor -> cmd_vel. Needs a distribution's
twist_mux, nav2_collision_monitor and nav2_lifecycle_manager.
"""
from pathlib import Path

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, IncludeLaunchDescription, OpaqueFunction
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch_ros.actions import LifecycleNode, Node

from worldmodel_ros.paths import config_directory


def generate_launch_description():
    return LaunchDescription([
        DeclareLaunchArgument('namespace', default_value='', description='Namespace of the robot.'),
        DeclareLaunchArgument('cmd_vel', default_value='cmd_vel',
                              description="Topic of the velocity commands to the robot's base."),
        DeclareLaunchArgument('joy_vel', default_value='joy_vel',
                              description="Topic of the joystick's commands (TwistStamped), which take precedence."),
        DeclareLaunchArgument('collision_monitor', default_value='true', choices=['true', 'false'],
                              description='Run the collision monitor between all commands and the base; needs a laser scan.'),
        DeclareLaunchArgument('collision_monitor_params_file', default_value=str(config_directory() / 'collision_monitor.yaml'),
                              description="The collision monitor's parameters."),
        IncludeLaunchDescription(
            PythonLaunchDescriptionSource(str(Path(__file__).parent / 'world_model.launch.py')),
            launch_arguments={'gate_cmd_vel': 'cmd_vel_model'}.items()),
        OpaqueFunction(function=_between_gate_and_base)])


def _between_gate_and_base(context):
    given = context.launch_configurations
    namespace, base, monitored = given['namespace'], given['cmd_vel'], given['collision_monitor'] == 'true'
    mux = Node(package='twist_mux', executable='twist_mux', name='twist_mux', namespace=namespace, output='screen',
               parameters=[str(config_directory() / 'twist_mux.yaml')],
               remappings=[('joy_vel', given['joy_vel']), ('cmd_vel_out', 'cmd_vel_mux' if monitored else base)])
    if not monitored:
        return [mux]
    monitor = LifecycleNode(package='nav2_collision_monitor', executable='collision_monitor', name='collision_monitor',
                            namespace=namespace, output='screen', parameters=[given['collision_monitor_params_file']],
                            remappings=[('cmd_vel', base)])
    manager = Node(package='nav2_lifecycle_manager', executable='lifecycle_manager', name='lifecycle_manager_collision_monitor',
                   namespace=namespace, output='screen', parameters=[{'autostart': True, 'node_names': ['collision_monitor']}])
    return [mux, monitor, manager]
