"""How an active world model node is doing, in a level and a line for a person."""

import time
from typing import Any

from worldmodel_ros.control.ladder import Tier
from worldmodel_ros.nodes.common.diagnostics import ERROR, OK, WARN
from worldmodel_ros.nodes.world_model.activation import Activation


def judge(engine: Any, activation: Activation) -> tuple[bytes, str]:
    """Return level and message of a diagnostic_msgs/DiagnosticStatus: what stops the robot, else all that is amiss."""
    if activation.trouble:
        return ERROR, activation.trouble
    warnings = []
    if activation.worker.degraded_reason:
        warnings.append(f'driving with the own model: {activation.worker.degraded_reason}')
    if engine.trouble:
        warnings.append(f'the model is being restored: {engine.trouble}')
    if unheard := activation.executed.trouble(time.monotonic()):
        warnings.append(unheard)
    if misfit := activation.statistics.misfit(engine.spec.step_period):
        warnings.append(misfit)
    if few := activation.statistics.few_predictions(
            time.monotonic(), engine.step_times.prediction_rate(engine.spec.step_period)):
        warnings.append(few)
    if activation.best is not Tier.TWO_STEP:
        warnings.append(f'degraded to {activation.best.name.lower()}')
    if warnings:
        return WARN, '; '.join(warnings)
    return OK, f'driving to {activation.goal}' if activation.goal else 'no goal'
