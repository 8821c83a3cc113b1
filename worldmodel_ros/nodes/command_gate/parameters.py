"""Builds the state machine's policy and limits from the command gate's parameters."""

from collections.abc import Mapping
from typing import Any

from worldmodel_ros.safety.gate import Policy
from worldmodel_ros.safety.motion import Limits, MeasuredPositions, Motion, PositionMotion, TwistLimits, VelocityMotion

TWIST_OUTPUTS = ('twist_stamped', 'twist')
TWIST_NAMES = ('linear.x', 'angular.z')


def inconsistency(values: Mapping[str, Any]) -> str | None:
    """Return why the parameters are inconsistent, or None."""
    try:
        make_policy(values)
        make_motion(values)
    except ValueError as error:
        return str(error)
    return None


def make_policy(values: Mapping[str, Any]) -> Policy:
    """Return the gate's policy. Raises ValueError for an invalid combination."""
    return Policy(
        deadline=values['deadline_s'], delivery_reserve=values['delivery_reserve_s'],
        future_tolerance=values['future_tolerance_s'], command_timeout=values['command_timeout_s'],
        on_timeout=values['on_timeout'], hold=values['hold_s'], stop_repeat=values['stop_repeat_s'],
        resume_after=values['resume_after'], step_period_min=values['step_period_min_s'],
        step_period_max=values['step_period_max_s'])


def make_motion(values: Mapping[str, Any]) -> Motion:
    """Return the motion of the chosen interface, with its limits. Raises ValueError if they conflict."""
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
    """Apply changed limits to a motion in use."""
    motion.limits, motion.interval = make_limits(values), values['command_interval_max_s']
    if isinstance(motion, PositionMotion):
        motion.joints.timeout = values['joint_state_timeout_s']


def make_limits(values: Mapping[str, Any]) -> Limits:
    """Return the limits of each axis. Raises ValueError if one is missing or impossible."""
    if values['output'] in TWIST_OUTPUTS:
        return TwistLimits(
            v_min=values['linear.x.min_velocity'], v_max=values['linear.x.max_velocity'],
            w_max=values['angular.z.max_velocity'], a_max=values['linear.x.max_acceleration'],
            alpha_max=values['angular.z.max_acceleration']).axes()
    joints = values['joint_names'] or ()
    if not joints:
        raise ValueError(f'output {values["output"]} needs joint_names')
    for name in ('joint_low', 'joint_high', 'joint_rate'):
        if len(values[name] or ()) != len(joints):
            raise ValueError(f'{name} must have one number for each of the {len(joints)} joint_names, got '
                             f'{len(values[name] or ())}')
    return Limits(values['joint_low'], values['joint_high'], values['joint_rate'])


def axis_names(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the axis names that a chunk must have."""
    return TWIST_NAMES if values['output'] in TWIST_OUTPUTS else values['joint_names']
