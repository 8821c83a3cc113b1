"""A command gate on its own clock, and a model that sends what it is told."""

import dataclasses

from worldmodel_ros.safety.gate import Chunk, Gate, Policy
from worldmodel_ros.safety.motion import TwistLimits, VelocityMotion

NAMES = ('linear.x', 'angular.z')
LIMITS = TwistLimits(v_min=-0.3, v_max=0.6, w_max=1.5, a_max=1.5, alpha_max=6.0)
TICK = 0.01
PERIOD = 0.1


class Rig:
    """A gate, a clock and a model that sends a chunk when told."""

    def __init__(self, **policy) -> None:
        self.gate = Gate(NAMES, VelocityMotion(LIMITS.axes()), Policy(**policy))
        self.now = 100.0
        self.sequence = 0
        self.sent = []

    def chunk(self, v=0.1, w=0.0, **changes) -> Chunk:
        self.sequence += 1
        chunk = Chunk(stamp=int(self.now * 1e9), episode_id=1, sequence=self.sequence, step_period=PERIOD,
                      names=list(NAMES), values=[v, w] * 4)
        return dataclasses.replace(chunk, **changes)

    def offer(self, chunk: Chunk, age=0.02):
        command = self.gate.on_chunk(chunk, chunk.stamp + round(age * 1e9), self.now)
        self.sent += [command] if command else []
        return command

    def wait(self, seconds: float) -> list:
        """Tick through ``seconds``; return what was sent meanwhile."""
        before = len(self.sent)
        for _ in range(round(seconds / TICK)):
            self.now += TICK
            command = self.gate.on_tick(self.now)
            self.sent += [command] if command else []
        return self.sent[before:]

    def drive(self, commands=10, v=0.1, w=0.0) -> None:
        for _ in range(commands):
            self.offer(self.chunk(v, w))
            self.wait(PERIOD)
