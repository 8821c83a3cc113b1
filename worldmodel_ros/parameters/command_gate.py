"""The parameters of the command gate. The limits are named as in ros2_controllers' diff_drive_controller."""

from worldmodel_ros.parameters.declaration import DIAGNOSTICS_PERIOD, Param
from worldmodel_ros.safety.gate import ACTIONS

OUTPUTS = ('twist_stamped', 'twist', 'joint_trajectory', 'float64_multi_array')
INTERFACES = ('velocity', 'position')

PARAMETERS = (
    Param('output', 'twist_stamped', 'message type of the command', choices=OUTPUTS, read_only=True),
    Param('frame_id', 'base_link', 'frame of the twist, for twist_stamped', read_only=True),
    Param('deadline_s', 0.05, 'age of the observation (ROS time) at which the robot must have the command that answers it',
          low=0.001, high=10.0),
    Param('delivery_reserve_s', 0.006, 'part of deadline_s kept for the way from here to the robot', low=0.0, high=1.0),
    Param('future_tolerance_s', 0.005, 'how far in the future an observation may be stamped, for clocks that differ a little',
          low=0.0, high=1.0),
    Param('command_timeout_s', 0.13, 'time without a passed command (steady clock) after which on_timeout applies; more than '
          'the control period plus its jitter, or the motion stutters', low=0.01, high=10.0),
    Param('on_timeout', 'stop', 'what to do without commands: hold the last one for hold_s and then slow; slow down within the '
          'acceleration limits; stop (zero at once). For the position interface, slow and stop keep the joints where they are',
          choices=ACTIONS),
    Param('hold_s', 0.2, 'for on_timeout hold: how long the last command stays in force', low=0.0, high=10.0),
    Param('stop_repeat_s', 1.0, 'how long a stop is repeated before the gate falls silent and leaves the robot to others',
          low=0.0, high=60.0),
    Param('resume_after', 3, 'consecutive good commands needed to go on after a stop for a fault; 0: only after ~/reset',
          low=0, high=1000),
    Param('step_period_min_s', 0.01, 'shortest step_period that a chunk may have', low=0.001, high=10.0),
    Param('step_period_max_s', 0.5, 'longest step_period that a chunk may have; a trajectory may move a joint by joint_rate '
          'times this from one point to the next', low=0.001, high=10.0),
    Param('command_interval_max_s', 0.1, 'longest time since the last command (steady clock) that the limits of change count: '
          'after a longer pause a command changes by no more than within this time. The control period', low=0.001, high=1.0),
    Param('linear.x.min_velocity', -0.3, 'lowest linear.x: the fastest backwards', 'm/s', high=0.0, formerly='v_min'),
    Param('linear.x.max_velocity', 0.6, 'highest linear.x', 'm/s', low=0.0, formerly='v_max'),
    Param('linear.x.max_acceleration', 1.5, 'highest change of linear.x, of speeding up and of braking', 'm/s^2', low=0.001,
          formerly='a_max'),
    Param('angular.z.max_velocity', 1.5, 'highest angular.z, both ways', 'rad/s', low=0.0, formerly='w_max'),
    Param('angular.z.max_acceleration', 6.0, 'highest change of angular.z, both ways', 'rad/s^2', low=0.001,
          formerly='alpha_max'),
    Param('interface', 'velocity', 'what the commands mean to the controller: twists are velocity, a joint trajectory is '
          'position', choices=INTERFACES, read_only=True),
    Param('joint_names', None, 'for joint outputs: the names that a chunk must carry, in order', read_only=True,
          type='string_array'),
    Param('joint_low', None, 'for joint outputs: lowest value of each joint', 'rad or rad/s', type='double_array'),
    Param('joint_high', None, 'for joint outputs: highest value of each joint', 'rad or rad/s', type='double_array'),
    Param('joint_rate', None, 'for joint outputs: highest change of each joint, both ways', 'rad/s or rad/s^2',
          type='double_array'),
    Param('joint_state_timeout_s', 0.2, 'for positions: how long (steady clock) a joint is known to be where joint_states had '
          'it; without, no command passes', low=0.01, high=2.0),
    Param('watchdog_period_s', 0.005, 'period of the watchdog (steady clock)', low=0.001, high=0.1, read_only=True),
    Param('realtime_priority', 0, 'SCHED_FIFO priority of the process, 0 for none', low=0, high=99, read_only=True),
    DIAGNOSTICS_PERIOD,
)
