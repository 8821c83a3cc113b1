"""Builds the settings of engine and control from the world model node's parameters."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from worldmodel_ros.control.ladder import Settings
from worldmodel_ros.engine.faults import Faults
from worldmodel_ros.inputs.ticks import FrameSettings
from worldmodel_ros.motion import Limits
from worldmodel_ros.parameters.declaration import Param
from worldmodel_ros.parameters.world_model_node import PARAMETERS

ENGINE = ('model', 'backend', 'threads', 'gpus', 'parallel')  # the parameters that are passed to ``engine.load``


def parameters(configured: Callable[[], bool],
               goal_refusal: Callable[[str], str | None]) -> tuple[Param, ...]:
    """
    Return the parameters of a node, with the checks that depend on its state.

    ``configured`` tells whether the node has an engine; ``goal_refusal`` returns why a goal cannot be set, or None.
    """
    def of_node(param: Param) -> Param:
        def check(value: Any) -> str | None:
            if configured():
                return 'fixed while the node is configured: deactivate and clean it up, set it, configure it again'
            return param.check(value) if param.check else None

        if param.name == 'goal':
            return replace(param, check=goal_refusal)
        return replace(param, check=check) if param.while_configured else param

    return tuple(map(of_node, PARAMETERS))


def inconsistency(values: Mapping[str, Any]) -> str | None:
    """Return why the parameters are inconsistent, or None."""
    if not values['reserve_s'] < values['deadline_s']:
        return (f'reserve_s ({values["reserve_s"]} s) must be less than deadline_s '
                f'({values["deadline_s"]} s), or no model could ever answer')
    return None


def set_faults(faults: Faults, values: Mapping[str, Any]) -> None:
    """Set the engine's injected faults from the parameters."""
    faults.delay = values['fault_delay_ms'] / 1e3
    faults.nan, faults.fail, faults.cuda = values['fault_nan'], values['fault_raise'], values['fault_cuda_error']


def ladder_settings(values: Mapping[str, Any]) -> Settings:
    """Return the settings of the deadline ladder."""
    return Settings(values['reserve_s'], values['headroom_s'], values['recovery_ticks'])


def base_limits(values: Mapping[str, Any]) -> Limits:
    """Return the limits within which candidates are imagined."""
    top = values['angular.z.max_velocity']
    return Limits(low=(values['linear.x.min_velocity'], -top), high=(values['linear.x.max_velocity'], top),
                  rate=(values['linear.x.max_acceleration'], values['angular.z.max_acceleration']))


def frame_settings(values: Mapping[str, Any]) -> FrameSettings:
    """Return the settings that decide which images are ticks."""
    return FrameSettings(values['tick_tolerance_s'], values['time_jump_s'], values['frozen_camera_timeout_s'],
                         values['frozen_camera_recovery'])
