"""The parameters of the command gate, and what they mean for the state machine."""

from collections.abc import Mapping
from typing import Any

from rclpy.parameter import Parameter

from worldmodel_ros.nodes.command_gate.output import OUTPUTS, TWIST_OUTPUTS
from worldmodel_ros.nodes.common.parameters import Param
from worldmodel_ros.safety.gate import ACTIONS, Policy
from worldmodel_ros.safety.joints import MeasuredPositions
from worldmodel_ros.safety.limits import Limits, TwistLimits
from worldmodel_ros.safety.motion import INTERVAL, Motion, PositionMotion, VelocityMotion

TWIST_NAMES = ('linear.x', 'angular.z')
INTERFACES = ('velocity', 'position')
_POLICY = Policy()

PARAMETERS = (
    Param('output', 'twist_stamped', 'message type of the command', choices=OUTPUTS, read_only=True),
    Param('frame_id', 'base_link', 'frame of the twist, for twist_stamped', read_only=True),
    Param('deadline_s', _POLICY.deadline,
          'age of the observation (ROS time) at which the robot must have the command that answers it',
          low=0.001, high=10.0),
    Param('delivery_reserve_s', _POLICY.delivery_reserve,
          'part of deadline_s kept for the way from here to the robot', low=0.0, high=1.0),
    Param('future_tolerance_s', _POLICY.future_tolerance,
          'how far in the future an observation may be stamped, for clocks that differ a little',
          low=0.0, high=1.0),
    Param('command_timeout_s', _POLICY.command_timeout,
          'time without a passed command (steady clock) after which on_timeout applies; more than the '
          'control period plus its jitter, or the motion stutters', low=0.01, high=10.0),
    Param('on_timeout', _POLICY.on_timeout,
          'what to do without commands: hold the last one for hold_s and then slow; slow down within the '
          'acceleration limits; stop (zero at once). For the position interface, slow and stop keep the '
          'joints where they are',
          choices=ACTIONS),
    Param('hold_s', _POLICY.hold, 'for on_timeout hold: how long the last command stays in force',
          low=0.0, high=10.0),
    Param('stop_repeat_s', _POLICY.stop_repeat,
          'how long a stop is repeated before the gate falls silent and leaves the robot to others',
          low=0.0, high=60.0),
    Param('resume_after', _POLICY.resume_after,
          'consecutive good commands needed to go on after a stop for a fault; 0: only after ~/reset',
          low=0, high=1000),
    Param('step_period_min_s', _POLICY.step_period_min,
          'shortest step_period that a chunk may have', low=0.001, high=10.0),
    Param('step_period_max_s', _POLICY.step_period_max,
          'longest step_period that a chunk may have; a trajectory may move a joint by joint_rate times this from one '
          'point to the next', low=0.001, high=10.0),
    Param('command_interval_max_s', INTERVAL,
          'longest time since the last command (steady clock) that the limits of change count: after a longer pause a '
          'command changes by no more than within this time. The control period', low=0.001, high=1.0),
    Param('v_min', -0.3, 'lowest linear.x [m/s]', high=0.0),
    Param('v_max', 0.6, 'highest linear.x [m/s]', low=0.0),
    Param('w_max', 1.5, 'highest angular.z, both ways [rad/s]', low=0.0),
    Param('a_max', 1.5, 'highest change of linear.x, both ways [m/s^2]', low=0.001),
    Param('alpha_max', 6.0, 'highest change of angular.z, both ways [rad/s^2]', low=0.001),
    Param('interface', 'velocity',
          'what the commands mean to the controller: twists are velocity, a joint trajectory is position',
          choices=INTERFACES, read_only=True),
    Param('joint_names', Parameter.Type.STRING_ARRAY,
          'for joint outputs: the names that a chunk must carry, in order', read_only=True),
    Param('joint_low', Parameter.Type.DOUBLE_ARRAY,
          'for joint outputs: lowest value of each joint [rad or rad/s]'),
    Param('joint_high', Parameter.Type.DOUBLE_ARRAY,
          'for joint outputs: highest value of each joint [rad or rad/s]'),
    Param('joint_rate', Parameter.Type.DOUBLE_ARRAY,
          'for joint outputs: highest change of each joint, both ways [rad/s or rad/s^2]'),
    Param('joint_state_timeout_s', 0.2,
          'for positions: how long (steady clock) a joint is known to be where joint_states had it; without, no '
          'command passes', low=0.01, high=2.0),
    Param('watchdog_period_s', 0.005, 'period of the watchdog (steady clock)',
          low=0.001, high=0.1, read_only=True),
    Param('realtime_priority', 0, 'SCHED_FIFO priority of the process, 0 for none',
          low=0, high=99, read_only=True),
)


def inconsistency(values: Mapping[str, Any]) -> str | None:
    """Return why the parameters do not go together, or None."""
    try:
        make_policy(values)
        make_motion(values)
    except ValueError as error:
        return str(error)
    return None


def make_policy(values: Mapping[str, Any]) -> Policy:
    """Return the gate's policy. Raises ValueError for a combination that makes none."""
    return Policy(
        deadline=values['deadline_s'], delivery_reserve=values['delivery_reserve_s'],
        future_tolerance=values['future_tolerance_s'], command_timeout=values['command_timeout_s'],
        on_timeout=values['on_timeout'], hold=values['hold_s'], stop_repeat=values['stop_repeat_s'],
        resume_after=values['resume_after'], step_period_min=values['step_period_min_s'],
        step_period_max=values['step_period_max_s'])


def make_motion(values: Mapping[str, Any]) -> Motion:
    """Return the motion of the chosen interface, with its limits. Raises ValueError where they clash."""
    output, interface = values['output'], values['interface']
    if output in TWIST_OUTPUTS and interface != 'velocity':
        raise ValueError(f'output {output} is a velocity: set interface to velocity')
    if output == 'joint_trajectory' and interface != 'position':
        raise ValueError('output joint_trajectory carries positions: set interface to position')
    limits, interval = make_limits(values), values['command_interval_max_s']
    if interface == 'velocity':
        return VelocityMotion(limits, interval)
    joints = MeasuredPositions(values['joint_names'], values['joint_state_timeout_s'])
    return PositionMotion(limits, joints, whole_chunk=output == 'joint_trajectory', interval=interval)


def retune(motion: Motion, values: Mapping[str, Any]) -> None:
    """Have a motion in use go on by other limits."""
    motion.limits, motion.interval = make_limits(values), values['command_interval_max_s']
    if isinstance(motion, PositionMotion):
        motion.joints.timeout = values['joint_state_timeout_s']


def make_limits(values: Mapping[str, Any]) -> Limits:
    """Return the limits of each axis. Raises ValueError where one is missing or impossible."""
    if values['output'] in TWIST_OUTPUTS:
        names = ('v_min', 'v_max', 'w_max', 'a_max', 'alpha_max')
        return TwistLimits(**{name: values[name] for name in names}).axes()
    joints = values['joint_names'] or ()
    if not joints:
        raise ValueError(f'output {values["output"]} needs joint_names')
    for name in ('joint_low', 'joint_high', 'joint_rate'):
        if len(values[name] or ()) != len(joints):
            raise ValueError(f'{name} must have one number for each of the {len(joints)} joint_names, got '
                             f'{len(values[name] or ())}')
    return Limits(values['joint_low'], values['joint_high'], values['joint_rate'])


def axis_names(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names that a chunk must carry."""
    return TWIST_NAMES if values['output'] in TWIST_OUTPUTS else values['joint_names']
