"""Plots as SVG whose colours follow the page's, light or dark."""
from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np

MAX_POINTS = 900  # of a line: more cannot be seen, and would make the page of a long recording heavy


class Plot:
    """Axes of fixed ranges to draw into; ``svg`` gives the element. Style classes are those of style.py."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], *, width: int = 360, height: int = 210,
                 x_label: str = '', y_label: str = '', y_ticks: int = 5, x_ticks: int = 6, left: int = 44) -> None:
        self._x, self._y, self.width, self.height = x, y, width, height
        self._left, self._right, self._top, self._bottom = left, 10, 20, 36 if x_label else 22
        self._parts: list[str] = []
        for value in ticks(*y, y_ticks):
            self._parts.append(f'<line class="grid" x1="{self._left}" x2="{width - self._right}" '
                               f'y1="{self.py(value):.1f}" y2="{self.py(value):.1f}"/>'
                               f'<text class="tick" x="{self._left - 6}" y="{self.py(value) + 3.5:.1f}" '
                               f'text-anchor="end">{label(value)}</text>')
        for value in ticks(*x, x_ticks):
            self._parts.append(f'<text class="tick" x="{self.px(value):.1f}" y="{height - self._bottom + 15}" '
                               f'text-anchor="middle">{label(value)}</text>')
        base = height - self._bottom
        self._parts.append(f'<line class="axis" x1="{self._left}" x2="{width - self._right}" y1="{base}" y2="{base}"/>')
        if x_label:
            middle = (self._left + width - self._right) / 2
            self._parts.append(f'<text class="axis-label" x="{middle}" y="{height - 5}" text-anchor="middle">'
                               f'{escape(x_label)}</text>')
        if y_label:
            self._parts.append(f'<text class="axis-label" x="4" y="12">{escape(y_label)}</text>')

    def px(self, x: float) -> float:
        """Column of a value."""
        low, high = self._x
        return self._left + (x - low) / (high - low) * (self.width - self._left - self._right)

    def py(self, y: float) -> float:
        """Row of a value."""
        low, high = self._y
        return self.height - self._bottom - (y - low) / (high - low) * (self.height - self._top - self._bottom)

    def line(self, xs: Sequence[float], ys: Sequence[float], kind: str) -> None:
        """A line through the points, broken at NaN."""
        pieces, pen = [], 'M'
        for x, y in zip(xs, ys):
            if not math.isfinite(y):
                pen = 'M'
                continue
            pieces.append(f'{pen}{self.px(x):.1f} {self._clipped(y):.1f}')
            pen = 'L'
        self._parts.append(f'<path class="line {kind}" d="{"".join(pieces)}"/>')

    def dots(self, xs: Sequence[float], ys: Sequence[float], kind: str, titles: Sequence[str]) -> None:
        """Points, each with a tooltip."""
        for x, y, title in zip(xs, ys, titles):
            self._parts.append(f'<circle class="dot {kind}" cx="{self.px(x):.1f}" cy="{self._clipped(y):.1f}" r="3.5">'
                               f'<title>{title}</title></circle>')

    def band(self, xs: Sequence[float], low: Sequence[float], high: Sequence[float], kind: str) -> None:
        """The area between two lines."""
        there = [(x, a, b) for x, a, b in zip(xs, low, high) if a is not None and b is not None]
        if len(there) < 2:
            return
        path = [f'{self.px(x):.1f} {self.py(b):.1f}' for x, _, b in there]
        path += [f'{self.px(x):.1f} {self.py(a):.1f}' for x, a, _ in reversed(there)]
        self._parts.append(f'<path class="band {kind}" d="M{"L".join(path)}Z"/>')

    def bar(self, left: float, right: float, low: float, high: float, kind: str, title: str = '') -> None:
        """A rectangle from x ``left`` to ``right`` and y ``low`` to ``high``."""
        x, y = self.px(left), self.py(high)
        width, height = max(0.5, self.px(right) - x), max(0.0, self.py(low) - y)
        self._parts.append(f'<rect class="bar {kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                           f'height="{height:.1f}"><title>{title}</title></rect>')

    def vertical(self, x: float, kind: str, text: str = '', row: int = 0, anchor: str = 'start') -> None:
        """A vertical line with a text next to its upper end; ``row`` sets the text lower."""
        column, shift = self.px(x), 4 if anchor == 'start' else -4
        self._parts.append(f'<line class="rule {kind}" x1="{column:.1f}" x2="{column:.1f}" y1="{self._top}" '
                           f'y2="{self.height - self._bottom}"/>')
        if text:
            self._parts.append(f'<text class="note {kind}" x="{column + shift:.1f}" y="{self._top + 10 + 13 * row}" '
                               f'text-anchor="{anchor}">{text}</text>')

    def horizontal(self, y: float, kind: str, text: str = '') -> None:
        """A horizontal line with a text at its right end."""
        row = self.py(y)
        self._parts.append(f'<line class="rule {kind}" x1="{self._left}" x2="{self.width - self._right}" '
                           f'y1="{row:.1f}" y2="{row:.1f}"/>')
        if text:
            self._parts.append(f'<text class="note {kind}" x="{self.width - self._right - 2}" y="{row - 4:.1f}" '
                               f'text-anchor="end">{text}</text>')

    def episodes(self, times: np.ndarray, episodes: np.ndarray) -> None:
        """A line where each episode but the first begins."""
        for start in np.flatnonzero(np.diff(episodes)) + 1:
            self.vertical(float(times[start]), 'episode')

    def link(self, x: float, y: float, target: str, text: str, title: str, kind: str = '') -> None:
        """A numbered mark that leads to an anchor of the page."""
        column, row = self.px(x), self._clipped(y) - 13
        self._parts.append(
            f'<a href="#{target}" class="mark {kind}"><title>{title}</title>'
            f'<circle cx="{column:.1f}" cy="{row:.1f}" r="9"/>'
            f'<text x="{column:.1f}" y="{row + 3.8:.1f}" text-anchor="middle">{text}</text></a>')

    def svg(self, title: str, wide: bool = False) -> str:
        """Return the element; ``title`` describes it for screen readers."""
        kind = 'plot wide' if wide else 'plot'
        return (f'<div class="scroll"><svg class="{kind}" viewBox="0 0 {self.width} {self.height}" role="img" '
                f'aria-label="{escape(title)}">{"".join(self._parts)}</svg></div>')

    def _clipped(self, y: float) -> float:
        return self.py(min(max(y, self._y[0]), self._y[1]))


def ticks(low: float, high: float, count: int) -> list[float]:
    """About ``count`` round numbers between two bounds."""
    raw = (high - low) / max(1, count)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def label(value: float) -> str:
    """A tick's number in few characters."""
    return f'{value + 0.0:.6g}'.replace('-', '\u2212')


def padded(values: np.ndarray, share: float = 0.08, at_least: float = 1e-3) -> tuple[float, float]:
    """A range that holds all finite values, with room on both sides."""
    there = np.asarray(values, np.float64)
    there = there[np.isfinite(there)]
    low, high = (float(there.min()), float(there.max())) if len(there) else (0.0, 1.0)
    room = max(share * (high - low), at_least)
    return low - room, high + room


def over_time(times: np.ndarray, values: np.ndarray, episodes: np.ndarray, reduce=np.mean
              ) -> tuple[np.ndarray, np.ndarray]:
    """Points of a line, broken between episodes; of a long recording about MAX_POINTS, each ``reduce`` of several."""
    xs, ys = [], []
    size = -(-len(times) // MAX_POINTS)
    for episode in np.split(np.arange(len(times)), np.flatnonzero(np.diff(episodes)) + 1):
        for start in range(0, len(episode), size):
            group = episode[start:start + size]
            there = values[group][np.isfinite(values[group])]
            xs.append(times[group[0]])
            ys.append(reduce(there) if len(there) else np.nan)
        xs.append(xs[-1])
        ys.append(np.nan)
    return np.array(xs), np.array(ys)


def legend(*items: tuple[str, str]) -> str:
    """Names of what is drawn, (style class, text)."""
    return '<p class="legend">' + ''.join(
        f'<span><i class="key {kind}"></i>{text}</span>' for kind, text in items) + '</p>'
