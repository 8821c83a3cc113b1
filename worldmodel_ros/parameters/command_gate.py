"""The parameters of the command gate."""

from worldmodel_ros.parameters.declaration import DIAGNOSTICS_PERIOD, Param
from worldmodel_ros.parameters.velocity_limits import VELOCITY_LIMITS
from worldmodel_ros.safety.gate import ACTIONS

OUTPUTS = ('twist_stamped', 'twist', 'joint_trajectory', 'float64_multi_array')
INTERFACES = ('velocity', 'position')

PARAMETERS = (
    Param('output', 'twist_stamped', 'message type of the command', choices=OUTPUTS, read_only=True),
    Param('frame_id', 'base_link', 'frame of the twist, for twist_stamped', read_only=True),
    Param('deadline_s', 0.05, 'maximum age of the observation (ROS time) when the robot receives the command that answers it',
          low=0.001, high=10.0),
    Param('delivery_reserve_s', 0.006, 'part of deadline_s reserved for delivery from the gate to the robot', low=0.0,
          high=1.0),
    Param('future_tolerance_s', 0.005, 'how far in the future an observation may be stamped, to allow for small clock offsets',
          low=0.0, high=1.0),
    Param('command_timeout_s', 0.13, 'time without a passed command (steady clock) after which on_timeout applies; must '
          'exceed the control period plus its jitter, or the motion stutters', low=0.01, high=10.0),
    Param('on_timeout', 'stop', 'what to do without commands. hold: keep the last one for hold_s, then slow; slow: brake '
          'within the acceleration limits; stop: command zero at once. For the position interface, slow and stop keep the '
          'joints where they are', choices=ACTIONS),
    Param('hold_s', 0.2, 'for on_timeout hold: how long the last command stays in force', low=0.0, high=10.0),
    Param('stop_repeat_s', 1.0, 'how long a stop is repeated; after that the gate publishes nothing, so that others can '
          'control the robot', low=0.0, high=60.0),
    Param('resume_after', 3, 'consecutive good commands required to resume after a stop due to a fault; 0: resume only after '
          '~/reset', low=0, high=1000),
    Param('step_period_min_s', 0.01, 'shortest step_period allowed in a chunk', low=0.001, high=10.0),
    Param('step_period_max_s', 0.5, 'longest step_period allowed in a chunk; a trajectory may move a joint by joint_rate '
          'times this from one point to the next', low=0.001, high=10.0),
    Param('command_interval_max_s', 0.1, 'upper bound on the time since the last command (steady clock) in the acceleration '
          'and joint_rate limits: after a longer pause, a command changes by no more than within this time. Set it to the '
          'control period', low=0.001, high=1.0),
    *VELOCITY_LIMITS,
    Param('interface', 'velocity', 'how the controller interprets commands: twists are velocity, a joint trajectory is '
          'position', choices=INTERFACES, read_only=True),
    Param('joint_names', None, 'for joint outputs: the names that a chunk must have, in this order', read_only=True,
          type='string_array'),
    Param('joint_low', None, 'for joint outputs: minimum value of each joint', 'rad or rad/s', type='double_array'),
    Param('joint_high', None, 'for joint outputs: maximum value of each joint', 'rad or rad/s', type='double_array'),
    Param('joint_rate', None, 'for joint outputs: maximum rate of change of each joint, in both directions',
          'rad/s or rad/s^2', type='double_array'),
    Param('joint_state_timeout_s', 0.2, 'for the position interface: how long (steady clock) a joint position from '
          'joint_states is valid; without a valid position of each joint, no command passes', low=0.01, high=2.0),
    Param('watchdog_period_s', 0.005, 'period of the watchdog (steady clock)', low=0.001, high=0.1, read_only=True),
    Param('realtime_priority', 0, 'SCHED_FIFO priority of the process; 0: none', low=0, high=99, read_only=True),
    DIAGNOSTICS_PERIOD,
)
