"""B2: a policy cloned from the oracle's planner, on the features of a forecast's network, without any forecast."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from worldmodel_ros.control.pilot import Forecast, Pilot
from worldmodel_ros.control.reactive_policy import Aim
from worldmodel_ros.control.terms import Term
from worldmodel_ros.model.cloned_policy import ClonedPolicy, facts
from worldmodel_ros.sim.odometry import WheelOdometry
from worldmodel_ros.sim.world import World
from .learned import named_slots

_STEPS = 4  # that the search is asked for; only the first is used


class FeatureStream(Forecast, Protocol):
    """A forecast that also gives the features (QUERIES, D) of the newest frame's slots."""

    features: np.ndarray


class Cloned:
    """Decides by a cloned policy. An unknown target is searched for as by all other controllers; standing things are
    remembered as by the robot. Of a task, it is told only what to drive to, and how near; it ignores all other terms."""

    def __init__(self, policy: ClonedPolicy | None, stream: FeatureStream, size: tuple[int, int],
                 look: Callable[[World, tuple[int, int]], np.ndarray] = World.render) -> None:
        """``policy``: None, for one that only observes; ``size``: of the images, (H, W); ``look``: the camera."""
        self._policy, self._stream, self._size, self._look = policy, stream, size, look
        self._pilot: Pilot | None = None

    def decide(self, world: World, odometry: WheelOdometry, terms: Sequence[Term],
               sent: list[tuple[float, np.ndarray]], executed: np.ndarray) -> np.ndarray:
        previous = sent[-1][1] if sent else executed
        inputs = self.observe(world, odometry, terms, previous, executed)
        if inputs is None:
            return self._pilot.react(terms, previous, _STEPS).command
        return self._policy.command(*inputs)

    def observe(self, world: World, odometry: WheelOdometry, terms: Sequence[Term], previous: np.ndarray, executed: np.ndarray
                ) -> tuple[np.ndarray, np.ndarray] | None:
        """Take a frame, and return features and facts; None if the target is not known."""
        pilot = self._pilot = self._pilot or Pilot(self._stream, named_slots(world.scene))
        pilot.odometry.measured(odometry.pose, odometry.twist)
        pilot.observe(self._look(world, self._size), executed, 1)
        seen, aim = pilot.known.seen, Aim.of(terms)
        slot = next((number for number, slot in enumerate(pilot.known.slots) if slot and slot.name == aim.target), None)
        if slot is None or aim.target not in pilot.known.view(np.zeros(1)).things:
            return None
        told = facts(slot, aim.apart, seen.presence[slot], seen.places[0, slot], odometry.twist, previous)
        return self._stream.features, told


def policy_file(forecast: Path, seed: int) -> Path:
    """Return the file of the policy cloned with training ``seed`` on the forecast of a folder."""
    return forecast / 'cloned' / f'seed-{seed}.safetensors'
