"""Quality checks of recorded data, made while it is read: gaps, stamps, jitter, images and actions."""
from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from io import BytesIO
from typing import Any

import PIL.Image

from worldmodel_ros.inputs.images import ImageError
from worldmodel_ros.inputs.ticks import GAP, NS, Pace, misfit
from worldmodel_ros.model.presets import Preset
from worldmodel_ros.safety.gate import Policy
from .findings import Finding, by_severity, finding
from .quantiles import Quantiles

_JITTER = 0.5        # of the median spacing, between the 1st and the 99th percentile without gaps
_OTHER_CLOCK = 1.0   # s, median from stamp to receipt
_CLOCK_JUMP = 0.2    # s, change of the offset between stamp and receipt from one image to the next
_FUTURE = 0.1        # s, like the node's parameter future_tolerance_s
_DEADLINE = 0.05     # s, like the node's parameter deadline_s
_PLACES = 5          # stamps listed in a finding


class Health:
    """Collects statistics and findings while a recording is read; they cover what was read so far."""

    def __init__(self, preset: Preset) -> None:
        self._preset = preset
        self.images = self.ticks = self.episodes = self.actions = 0
        self.spacing, self.age = Quantiles(), Quantiles()  # s, between two stamps without gaps; from stamp to receipt
        self._spacing = Quantiles()                        # s, with gaps
        self._steps = array('d')                           # s, between ticks of one episode
        self._tick = 0                                     # stamp of the newest
        self.sizes: Counter[tuple[int, int]] = Counter()   # (width, height), of ticks
        self.range = [(float('inf'), float('-inf'))] * preset.actions  # of each action, SI
        self._places: dict[str, list[int]] = {}
        self._counts: Counter[str] = Counter()
        self._details: dict[str, str] = {}
        self._first: int | None = None
        self._last: int | None = None
        self._offset: int | None = None

    def image(self, message: Any, stamp: int, log: int, pace: Pace) -> None:
        """Count an image that could be read."""
        self.images += 1
        if pace.refused or pace is Pace.FROZEN:
            self._note(pace.value, stamp or log)
            self._last = self._last if pace.refused else stamp
            return
        self._time(stamp, log)
        if pace is not Pace.BETWEEN:
            self.ticks += 1
            if pace is Pace.NEW_EPISODE:
                self.episodes += 1
            else:
                self._steps.append((stamp - self._tick) / NS)
            self._tick = stamp
            self._size(message, stamp)

    def refused(self, message: Any, stamp: int, log: int, error: ImageError) -> None:
        """Count an image that could not be read."""
        self.images += 1
        self._note(error.kind, stamp, str(error))

    def action(self, action: tuple[float, ...], log: int) -> None:
        """Count an action [SI units]."""
        self.actions += 1
        self.range = [(min(low, a), max(high, a)) for (low, high), a in zip(self.range, action)]
        preset = self._preset
        if any(not low <= a <= high for a, low, high in zip(action, preset.action_low, preset.action_high)):
            self._note('action out of range', log)

    def not_finite(self, log: int) -> None:
        """Count an action that was left out because it is not finite."""
        self._note('action not finite', log)

    def ran_out(self, log: int, timeout: float) -> None:
        """Count an action that is the first after more than ``timeout`` s of silence while the robot moved."""
        self._note('action ran out', log, f'{timeout:g} s')

    def unknown_goal(self, goal: str, log: int) -> None:
        """Count a goal that the model does not know."""
        self._note('unknown goal', log, f'{goal!r}')

    def unreadable(self, topic: str, log: int, text: str) -> None:
        """Count a message that could not be decoded."""
        self._note('unreadable message', log, text)

    def findings(self) -> list[Finding]:
        """Return all findings, the most severe first."""
        noted = [finding(kind, count, self._places[kind], self._details[kind]) for kind, count in self._counts.items()]
        return by_severity([*noted, *self._of_the_whole()])

    def to_dict(self) -> dict:
        """Return numbers and findings for JSON. Times in s, stamps in ns."""
        def spread(values: Quantiles) -> dict | None:
            return {f'p{q}': round(values.quantile(q / 100), 6) for q in (1, 50, 99)} if len(values) else None
        return {
            'images': self.images, 'ticks': self.ticks, 'episodes': self.episodes,
            'first_stamp': self._first, 'last_stamp': self._last,
            'spacing_s': spread(self.spacing), 'age_on_receipt_s': spread(self.age),
            'sizes': {f'{width}x{height}': count for (width, height), count in self.sizes.items()},
            'actions': self.actions,
            'action_range': dict(zip(self._preset.action_names, self.range)) if self.actions else None,
            'counts': dict(self._counts), 'findings': [asdict(finding) for finding in self.findings()]}

    def _of_the_whole(self) -> Iterator[Finding]:
        """Yield findings on the recording as a whole."""
        period, usual = self._preset.step_period, self._spacing.quantile(0.5)
        if not self.ticks:
            yield finding('no ticks', self.images)
        if not self.actions:
            yield finding('no actions', 0)
        if abs(self.age.quantile(0.5)) > _OTHER_CLOCK:
            yield finding('other clock', self.images, detail=f'{abs(self.age.quantile(0.5)):.1f} s')
        if usual > GAP * period:
            yield finding('slow camera', self.images,
                          detail=f'{usual:.3f} s apart, and the model\'s step is {period} s')
        elif unfit := misfit(self._steps, period, Policy().command_timeout):
            yield finding('unfit rate', self.ticks, detail=f'{unfit[0].upper()}{unfit[1:]}')
        shortest, longest = self.spacing.quantile(0.01), self.spacing.quantile(0.99)
        if longest - shortest > _JITTER * usual:
            yield finding('jitter', self.images, detail=f'{shortest * 1e3:.0f} to {longest * 1e3:.0f} ms apart (1st '
                          'and 99th percentile, without gaps)')

    def _time(self, stamp: int, log: int) -> None:
        offset, age = log - stamp, (log - stamp) / NS
        self.age.add(age)
        if age < -_FUTURE:
            self._note('stamp in the future', stamp)
        elif age > _DEADLINE:
            self._note('stale on receipt', stamp)
        if self._offset is not None and abs(offset - self._offset) > _CLOCK_JUMP * NS:
            self._note('clock jump', stamp, f'{(self._offset - offset) / NS:+.3f} s')
        self._offset = offset
        if self._last is not None:
            spacing = (stamp - self._last) / NS
            if spacing < 0.0:
                self._note('time set back', stamp, f'{spacing:.3f} s')
            else:
                self._spacing.add(spacing)
                if spacing > GAP * max(self._preset.step_period, self._spacing.quantile(0.5)):
                    self._note('gap', stamp, f'{spacing:.3f} s')
                else:
                    self.spacing.add(spacing)
        self._first = stamp if self._first is None else self._first
        self._last = stamp

    def _size(self, message: Any, stamp: int) -> None:
        if hasattr(message, 'encoding'):
            size = message.width, message.height
        else:
            try:
                with PIL.Image.open(BytesIO(message.data)) as picture:  # reads the header only
                    size = picture.size
            except OSError:  # a format that only OpenCV knows
                return
        if self.sizes and size != next(iter(self.sizes)):
            self._note('mixed sizes', stamp)
        self.sizes[size] += 1

    def _note(self, kind: str, stamp: int, detail: str = '') -> None:
        self._counts[kind] += 1
        places = self._places.setdefault(kind, [])
        if len(places) < _PLACES:
            places.append(stamp)
        self._details.setdefault(kind, detail)
