"""Common style of the demo's plots."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use('Agg')  # before importing pyplot: a robot has no display

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import ImageFont

INK, MUTED, LINE, PAPER = '#1f2933', '#66727f', '#d5dae0', '#ffffff'
MODEL, TRUTH, GOOD, BAD = '#2563eb', '#0f766e', '#15803d', '#dc2626'
TIER_COLOURS = {'two_step': '#2563eb', 'one_step': '#7dd3fc', 'smaller': '#a78bfa',
                'plan_only': '#facc15', 'last_plan': '#f59e0b', 'stop': '#dc2626'}
GOAL_COLOURS = {'red': '#dc2626', 'green': '#16a34a', 'blue': '#2563eb', 'yellow': '#ca9a04'}

_RC = {
    'figure.dpi': 110, 'savefig.facecolor': PAPER, 'font.family': 'DejaVu Sans', 'font.size': 9,
    'text.color': INK, 'axes.labelcolor': INK, 'axes.edgecolor': LINE, 'axes.titlesize': 10,
    'axes.titlelocation': 'left', 'axes.spines.top': False, 'axes.spines.right': False,
    'axes.axisbelow': True, 'axes.grid': True, 'grid.color': '#eceff2',
    'xtick.color': MUTED, 'ytick.color': MUTED, 'legend.frameon': False,
}


@contextmanager
def picture(path: Path, width: float, height: float, title: str, note: str = '') -> Iterator[Figure]:
    """Yield a figure of ``width`` x ``height`` inches with a title and a muted note, and write it to ``path`` at the end."""
    with plt.rc_context(_RC):
        figure = plt.figure(figsize=(width, height))
        figure.text(0.16 / width, 1 - 0.14 / height, title, fontsize=13, fontweight='bold', va='top')
        figure.text(0.16 / width, 1 - 0.42 / height, note, fontsize=8.5, color=MUTED, va='top')
        try:
            yield figure
            figure.savefig(path)
        finally:
            plt.close(figure)


def show_frame(axes: Axes, frame: np.ndarray, label: str = '', colour: str = LINE, below: str = '') -> None:
    """Show a small image (H, W, 3) with visible pixels, a thin border, a label above and a note below."""
    axes.imshow(frame, interpolation='nearest')
    axes.set(xticks=[], yticks=[])
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set(visible=True, color=colour, linewidth=1.2)
    if label:
        axes.set_title(label, loc='center', fontsize=9, color=INK, pad=4)
    if below:
        axes.set_xlabel(below, fontsize=8, color=MUTED, labelpad=3)


def font(size: int) -> ImageFont.FreeTypeFont:
    """Return the font of the charts, for images not drawn by matplotlib; ``size`` [pixels]."""
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / 'fonts/ttf/DejaVuSans.ttf'), size)


def goal_colour(name: str) -> str:
    """Return the text colour of a goal's name."""
    return GOAL_COLOURS.get(name, INK)
