"""The command gate, its clocks, a robot, an honest model and whatever else may publish: see gate_machine."""
from __future__ import annotations

from gate_machine import GateMachine

from .harness import States

TARGET = States(GateMachine, inputs=4000)
