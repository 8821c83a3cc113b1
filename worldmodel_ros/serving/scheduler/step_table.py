"""Measured batch times of each network: the basis of all the scheduler's predictions."""
from __future__ import annotations

import json
from bisect import bisect_left
from math import inf, isfinite
from pathlib import Path
from typing import Any, NamedTuple

from .samples import Cell, Speed

SHORTEST = 1e-6  # s; lower bound of a batch's time, so that work per second stays finite
CHANGE = 0.01  # relative; a smaller change of a time does not rebuild the curve


class Curve(NamedTuple):
    """Times [s] of one network by batch size; index 0 is not used. Neither falls with the size."""

    typical: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def largest(self) -> int:
        return len(self.typical) - 1


class StepTable:
    """
    Times per (network, batch size), kept up to date: the median of the newest samples, and a high quantile. All are
    multiplied by the current slowness of the device, measured over batches of any network: a device that shares its
    processor, or is hot, is slower at everything.

    A size between two measured ones is interpolated linearly or, where batches are ``padded`` to the measured sizes,
    takes as long as the larger one. Times never fall with the size.
    """

    def __init__(self, padded: bool = False) -> None:
        self.padded = padded
        self._cells: dict[str, dict[int, Cell]] = {}
        self._speed = Speed()
        self._curves: dict[str, Curve] = {}

    def record(self, network: str, batch: int, seconds: float, now: float = -inf, calibrating: bool = False) -> None:
        """
        Record a duration measured at ``now`` [s, steady], in order of time; a size larger than all before makes batches
        of that size possible. One measured while ``calibrating``, which runs selected cases one after the other, does not
        count for the slowness.
        """
        if batch < 1 or not isfinite(seconds) or seconds < 0.0:
            raise ValueError(f'step table: {network} at batch {batch} cannot have taken {seconds} s')
        cells = self._cells.setdefault(network, {})
        sizes = sorted(cells)
        if batch not in cells and sizes and batch < sizes[-1]:
            if self.padded:
                batch = sizes[bisect_left(sizes, batch)]
            else:
                curve, slowness = self.curve(network), self._speed.slowness
                cells[batch] = Cell.seeded(curve.typical[batch] / slowness, curve.high[batch] / slowness)
        new = batch not in cells
        cell = cells.setdefault(batch, Cell())
        seconds = max(seconds, SHORTEST)
        if calibrating:
            cell.add(seconds / self._speed.slowness, now)
        elif self._speed.take(cell, seconds, now):
            self._curves.clear()
            return
        curve, slowness = self._curves.get(network), self._speed.slowness
        if new or curve is None or _differ(cell.typical() * slowness, curve.typical[batch]) or _differ(
                cell.high() * slowness, curve.high[batch]):
            self._curves.pop(network, None)

    def curve(self, network: str) -> Curve:
        """Return the times of all sizes; raises ValueError for a network that was never measured."""
        curve = self._curves.get(network)
        if curve is None:
            if network not in self._cells:
                raise ValueError(f'step table: no time of network {network!r}; it has '
                                 f'{", ".join(sorted(self._cells)) or "none"}: calibrate it, or load a table with it')
            cells, slowness = self._cells[network], self._speed.slowness
            curve = self._curves[network] = Curve(
                self._filled({size: cell.typical() * slowness for size, cell in cells.items()}),
                self._filled({size: cell.high() * slowness for size, cell in cells.items()}))
        return curve

    @property
    def slowness(self) -> float:
        """How many times longer everything takes than on a quiet device."""
        return self._speed.slowness

    def typical(self, network: str, batch: int) -> float:
        """Return the median time of a batch [s]."""
        return self.curve(network).typical[batch]

    def high(self, network: str, batch: int) -> float:
        """Return a high quantile of the time of a batch [s]."""
        return self.curve(network).high[batch]

    def largest(self, network: str) -> int:
        """Return the largest measured batch size."""
        return self.curve(network).largest

    def to_dict(self, machine: str, preset: str) -> dict[str, Any]:
        """Return the table as JSON values; times in ms."""
        ms = 1e3 * self._speed.slowness
        rows = [{'network': network, 'batch': size, 'p50_ms': round(ms * cell.typical(), 4),
                 'p95_ms': round(ms * cell.high(0.95), 4), 'p99_ms': round(ms * cell.high(), 4), 'samples': cell.count}
                for network, cells in sorted(self._cells.items()) for size, cell in sorted(cells.items())]
        return {'machine': machine, 'preset': preset, 'padded': self.padded, 'measured': True, 'rows': rows}

    def save(self, path: str | Path, machine: str, preset: str) -> None:
        """Write the table to a JSON file."""
        Path(path).write_text(json.dumps(self.to_dict(machine, preset), indent=1) + '\n')

    @classmethod
    def from_dict(cls, *tables: dict[str, Any]) -> StepTable:
        """Make one table from several; raises ValueError if one of them is not a step table."""
        try:
            table = cls(any(values.get('padded', False) for values in tables))
            for values in tables:
                for row in values['rows']:
                    p50, p99 = row['p50_ms'] / 1e3, row['p99_ms'] / 1e3
                    if not (isfinite(p50) and isfinite(p99) and 0.0 <= p50 and int(row['batch']) >= 1):
                        raise ValueError(f'the row {row} has an impossible time or batch size')
                    cell = Cell.seeded(max(p50, SHORTEST), p99)
                    cell.count = int(row.get('samples', 0))
                    table._cells.setdefault(row['network'], {})[int(row['batch'])] = cell
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f'not a step table: {type(error).__name__} {error}; expected rows of network, batch, '
                             f'p50_ms and p99_ms') from error
        return table

    @classmethod
    def load(cls, *paths: str | Path) -> StepTable:
        """Read one table from several JSON files; raises ValueError if one of them is not a step table."""
        tables = []
        for path in paths:
            try:
                tables.append(json.loads(Path(path).read_text()))
            except json.JSONDecodeError as error:
                raise ValueError(f'{path} is not JSON: {error}') from error
        return cls.from_dict(*tables)

    def _filled(self, measured: dict[int, float]) -> tuple[float, ...]:
        sizes = sorted(measured)
        times, floor = [0.0], SHORTEST
        for size in range(1, sizes[-1] + 1):
            after = sizes[bisect_left(sizes, size)]
            value = measured[after]
            if size != after and not self.padded and size > sizes[0]:
                before = sizes[bisect_left(sizes, size) - 1]
                share = (size - before) / (after - before)
                value = (1.0 - share) * measured[before] + share * measured[after]
            floor = max(floor, value)
            times.append(floor)
        return tuple(times)


def _differ(a: float, b: float) -> bool:
    return abs(a - b) > CHANGE * b

