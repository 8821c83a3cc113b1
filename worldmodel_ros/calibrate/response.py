"""
Fits how a base follows its commands: latency and gain, with intervals.

The model is the command, delayed by a dead time, through a first-order lag, times a gain. All dead times and lags of a grid are
tried; the gain of each is a least-squares fit. It is fitted to increments between two readings of odometry: the integral over
the time between them, which no driver has filtered. Intervals are percentiles of a bootstrap over blocks of time (Künsch,
Annals of Statistics 17, 1989), since successive errors are not independent.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

GRID = 0.005                                      # s, of the simulated response
DEAD_TIMES = np.arange(0.0, 0.6001, GRID)         # s, candidates
LAGS = np.array([0.001, 0.015, 0.03, 0.045, 0.06, 0.08, 0.1, 0.13, 0.17, 0.22, 0.28, 0.35])  # s, time constants
BLOCK = 1.0        # s, of the bootstrap
SAMPLES = 400      # of the bootstrap
INTERVAL = 0.95
_FEWEST_CHANGES = 6     # of a command, needed to determine a latency
_CHANGE = 0.05          # of the greatest command, that counts as a change
_EXPLAINED = 0.7        # share of the motion's variance below which the base does not follow these commands
_WIDE_LATENCY = 0.1     # s, width of an interval that is too wide to be useful


class CannotTell(ValueError):
    """A recording does not determine a number; the text says why, and what would."""


@dataclass(frozen=True)
class Estimate:
    """A ``value`` with the ``low`` and ``high`` end of its 95 % interval."""

    value: float
    low: float
    high: float

    def to_dict(self, digits: int = 4) -> dict:
        """Return it for YAML."""
        return {'value': round(self.value, digits), 'interval': [round(self.low, digits), round(self.high, digits)]}


@dataclass(frozen=True)
class Response:
    """
    ``latency`` [s]: dead time plus lag, the average delay of the motion. How it divides into the two is less well determined,
    and matters less. ``gain``: motion over command. ``explained``: share of the motion's variance.
    """

    latency: Estimate
    gain: Estimate
    explained: float


def fit(command_times: np.ndarray, commands: np.ndarray, times: np.ndarray, increments: np.ndarray,
        what: str = 'command', seed: int = 0) -> Response:
    """
    Fit how increments follow commands.

    ``commands`` (N,) hold from their ``command_times`` (N,) [s], rising, each to the next one. ``times`` (M + 1,) [s], rising,
    are those of readings, ``increments`` (M,) the motion between them: m for m/s, rad for rad/s; a NaN is left out.
    ``what``: the command's name in messages. Raises CannotTell.
    """
    _require_changes(commands, what)
    start, end = times[0] - DEAD_TIMES[-1] - 1.0, times[-1]
    inside = (command_times[:1] <= times[:-1]) & (times[:-1] <= command_times[-1] + 2.0) & np.isfinite(increments)
    if inside.sum() < 20:
        raise CannotTell(f'odometry and {what} hardly overlap: record both at the same time, with one clock')
    grid = np.arange(start, end + GRID, GRID)
    held = commands[np.clip(np.searchsorted(command_times, grid, 'right') - 1, 0, None)] * (grid >= command_times[0])
    travelled = _travelled(held)
    # (lags, dead times, M): motion between two readings for each combination, with a gain of 1.
    at = times[None] - DEAD_TIMES[:, None]
    expected = np.stack([np.diff(np.interp(at, grid, each), axis=1) for each in travelled])[:, :, inside]
    moved = increments[inside]
    block = ((times[:-1][inside] - times[0]) // BLOCK).astype(int)
    sums = [np.stack([_by_block(values, block) for values in parts])
            for parts in (expected.reshape(-1, len(moved)) ** 2, expected.reshape(-1, len(moved)) * moved)]
    square, product = sums                                             # (combinations, blocks)
    total = _by_block(moved ** 2, block)                               # (blocks,)
    best = _best(square.sum(1), product.sum(1), total.sum())
    explained = 1.0 - best.error / max(float(total.sum()), 1e-12)
    if explained < _EXPLAINED:
        raise CannotTell(f'what is measured does not follow the {what}, which explains {max(0.0, explained):.0%} of it: see '
                         'whether the topic is what the base executes')
    rng = np.random.default_rng(seed)
    drawn = np.array([_best(square @ weights, product @ weights, total @ weights)[:2] for weights in
                      rng.multinomial(len(total), np.full(len(total), 1 / len(total)), SAMPLES).astype(float)])
    low, high = np.quantile(drawn, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2], axis=0).tolist()
    # Widened by a step of the grid at both ends, the resolution of what was tried.
    latency = Estimate(best.latency, max(0.0, min(best.latency, low[0]) - GRID), max(best.latency, high[0]) + GRID)
    gain = Estimate(best.gain, min(best.gain, low[1]), max(best.gain, high[1]))
    if gain.value < 0.0:
        raise CannotTell(f'what is measured goes the other way than the {what}: left and ahead are positive (REP 103)')
    if latency.high - latency.low > _WIDE_LATENCY:
        raise CannotTell(f'the latency of the {what} may be anything from {latency.low:.2f} to {latency.high:.2f} s: record '
                         'more changes of it, in steps')
    return Response(latency, gain, explained)


class _Best(NamedTuple):
    latency: float
    gain: float
    error: float


def _require_changes(commands: np.ndarray, what: str) -> None:
    greatest = float(np.abs(commands).max(initial=0.0))
    if greatest == 0.0:
        raise CannotTell(f'there is no {what} but 0')
    changes = int((np.abs(np.diff(commands)) > _CHANGE * greatest).sum())
    if changes < _FEWEST_CHANGES:
        raise CannotTell(f'the {what} changes {changes} times, and {_FEWEST_CHANGES} are the fewest that tell a latency')


def _travelled(held: np.ndarray) -> np.ndarray:
    """Return the motion (lags, N) of bases with all LAGS up to each time of the grid, under commands (N,) on the grid."""
    keep = np.exp(-GRID / LAGS)
    speeds, speed = np.empty((len(held), len(LAGS))), np.zeros(len(LAGS))
    for k, command in enumerate(held):
        speeds[k] = speed
        speed = command + (speed - command) * keep
    return (np.cumsum(speeds, 0) * GRID).T


def _by_block(values: np.ndarray, block: np.ndarray) -> np.ndarray:
    return np.bincount(block, values)


def _best(square: np.ndarray, product: np.ndarray, total: float) -> _Best:
    """Return the best combination of lag and dead time, given the sums for each (combinations,)."""
    error = total - product ** 2 / np.maximum(square, 1e-12)
    k = int(error.argmin())
    lag, dead = divmod(k, len(DEAD_TIMES))
    return _Best(float(DEAD_TIMES[dead] + LAGS[lag]), float(product[k] / max(square[k], 1e-12)), float(error[k]))
