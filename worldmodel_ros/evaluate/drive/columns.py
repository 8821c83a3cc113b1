"""The numbers of all windows of a recording as arrays, in some hundred bytes per window."""
from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from worldmodel_ros.model.presets import Preset
    from .windows import Window

HORIZONS = ('moving', 'psnr_db', 'copy_psnr_db', 'ssim', 'copy_ssim')
SCALARS = ('time_s', 'reconstruction_db', 'surprise_db')
INTEGERS = ('stamp_ns', 'episode', 'goal')


class Columns:
    """Grows one window at a time; ``columns[name]`` is an array with a row for each of N windows.

    The fields of Window of the same names: HORIZONS (N, K), SCALARS (N,), INTEGERS (N,) int64, of which ``goal`` is
    an index into the preset's goals, -1 where none is known. And, float64 too: ``before`` (N, A) and ``after`` (N, A),
    the actions executed in the step before and after each tick; ``plans`` (N, goals, A), the first command of each
    plan; ``branches`` (M, 6), for the windows with branches alone: number of the window, of the nearest branch and of
    the best, rank of the nearest, margin, whether it is decisive. NaN where there is nothing.
    """

    def __init__(self, spec: Preset) -> None:
        self.spec = spec
        k, a = spec.chunk_frames, spec.actions
        self._shapes = {**dict.fromkeys(HORIZONS, (k,)), **dict.fromkeys((*SCALARS, *INTEGERS), ()), 'before': (a,),
                        'after': (a,), 'plans': (len(spec.goals), a), 'branches': (6,)}
        self._columns = {name: array('q' if name in INTEGERS else 'd') for name in self._shapes}

    def __len__(self) -> int:
        return len(self._columns['stamp_ns'])

    def __getitem__(self, name: str) -> np.ndarray:
        values = self._columns[name]
        return np.array(values, np.int64 if name in INTEGERS else np.float64).reshape(-1, *self._shapes[name])

    def add(self, window: Window) -> None:
        """Append the next window."""
        spec, branches = self.spec, window.branches
        if branches:
            names = list(branches.distance)
            self._extend('branches', (len(self), names.index(branches.nearest), names.index(branches.best),
                                      branches.rank, branches.margin, branches.decisive))
        for name in HORIZONS:
            values = getattr(window, name)
            self._extend(name, [*values, *[math.nan] * (spec.chunk_frames - len(values))])
        for name in SCALARS:
            value = getattr(window, name)
            self._extend(name, [math.nan if value is None else value])
        self._extend('before', window.executed)
        self._extend('after', window.actions[0] if window.actions else [math.nan] * spec.actions)
        self._extend('plans', [value for goal in spec.goals for value in window.plans[goal]])
        goal = spec.goals.index(window.goal) if window.goal in spec.goals else -1
        for name, value in (('stamp_ns', window.stamp_ns), ('episode', window.episode), ('goal', goal)):
            self._columns[name].append(value)

    def _extend(self, name: str, values: Iterable[float]) -> None:
        self._columns[name].extend(map(float, values))
