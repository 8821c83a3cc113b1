"""Would the deadline have held on a recording? Inputs and results of the replay."""
from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import yaml

from worldmodel_ros.control.ladder import STEPS, Settings, Tier
from worldmodel_ros.paths import config_directory
from .step_times import MeasuredTimes

TIERS = (*STEPS, Tier.PLAN_ONLY, Tier.LAST_PLAN, Tier.STOP, Tier.NONE)


@dataclass(frozen=True)
class Budget:
    """``deadline``: from the camera's stamp to the command at the robot [s]; ``ladder``: see there."""

    deadline: float
    ladder: Settings

    @classmethod
    def from_config(cls) -> Budget:
        """Return the budget of config/world_model_node.yaml, which the node is brought up with."""
        content = yaml.safe_load((config_directory() / 'world_model_node.yaml').read_text())
        values = content['/**/world_model_node']['ros__parameters']
        return cls(values['deadline_s'],
                   Settings(values['reserve_s'], values['headroom_s'], values['recovery_ticks']))

    @property
    def limit(self) -> float:
        """Age of the image at which the command must leave [s]."""
        return self.deadline - self.ladder.reserve


class Arrival(NamedTuple):
    """A tick: the stamp of its image, when that was recorded [ns], and its episode."""

    stamp_ns: int
    log_ns: int
    episode: int


@dataclass
class Deadline:
    """How the ticks of a recording would have been answered.

    ``delay``: median age of the images on receipt [s], None if the bag does not tell it and they were taken to be new.
    ``latency`` [s] and ``served``: of each tick with a command, from the camera's stamp until the command was out, and
    the tier. ``late``: ticks that the model did not finish in time. ``stale``: ticks whose image was too old.
    ``reasons``: of all ticks that the best tier did not serve.
    """

    budget: Budget
    times: MeasuredTimes
    delay: float | None
    ticks: int = 0
    tiers: Counter[Tier] = field(default_factory=Counter)
    late: int = 0
    stale: int = 0
    latency: array = field(default_factory=lambda: array('d'))
    served: array = field(default_factory=lambda: array('b'))
    reasons: Counter[str] = field(default_factory=Counter)

    def share(self, tier: Tier) -> float:
        """Return the share of the ticks that a tier answered."""
        return self.tiers[tier] / self.ticks if self.ticks else 0.0

    def latency_ms(self) -> dict[str, float] | None:
        """Return quantiles of the latency [ms]; None if nothing was commanded."""
        if not self.latency:
            return None
        values = np.array(self.latency) * 1e3
        return {'p50': round(float(np.quantile(values, 0.5)), 2), 'p99': round(float(np.quantile(values, 0.99)), 2),
                'max': round(float(values.max()), 2)}

    def to_dict(self) -> dict:
        """For JSON; times in the unit that the key names."""
        return {'deadline_ms': round(self.budget.deadline * 1e3, 3), 'limit_ms': round(self.budget.limit * 1e3, 3),
                'ticks': self.ticks, 'tiers': {tier.name.lower(): self.tiers[tier] for tier in TIERS},
                'late': self.late, 'stale_input': self.stale, 'latency_ms': self.latency_ms(),
                'reasons': dict(self.reasons.most_common()),
                'image_delay_ms': None if self.delay is None else round(self.delay * 1e3, 2),
                'step_times': {'model': self.times.model, 'backend': self.times.backend, 'machine': self.times.machine,
                               'ticks': len(self.times.ticks)}}
