"""Plots a what-if answer: predicted and true outcome of each action sequence."""
from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from worldmodel_ros.demo import style
from worldmodel_ros.demo.images import decode_rgb
from worldmodel_ros.demo.recording import Branch, WhatIf


def most_telling(answers: list[WhatIf]) -> WhatIf | None:
    """Return the answer whose branches differ most, by the simulator if it answered; None without answers."""
    def spread(answer: WhatIf) -> float:
        branches = answer.truth or answer.branches
        frames = np.stack([decode_rgb(branch.frames[-1]).astype(np.float32) for branch in branches])
        return float(frames.std(axis=0).mean())
    candidates = [a for a in answers if a.truth] or answers
    return max(candidates, key=spread, default=None)


def draw_what_if(path: Path, answer: WhatIf, observed: np.ndarray | None) -> None:
    """Plot the branches of one answer, the simulator's truth below, and the branches' paths seen from above.

    ``observed``: (H, W, 3) uint8, the image branched from; None if unknown.
    """
    columns, rows = len(answer.branches), 2 if answer.truth else 1
    width, height = 2.0 * (columns + 1) + 0.9, 1.15 + 2.35 * max(rows, 2)
    horizon = len(answer.branches[0].frames) * answer.step
    note = f'Last frame of each branch, {horizon:.1f} s ahead.'
    if answer.goal:
        note += (f' Progress: how much nearer the goal ({answer.goal}) comes. '
                 'Risk: probability of a contact on the way.')
    with style.picture(path, width, height, 'What if ...?', note) as figure:
        grid = figure.add_gridspec(2, columns + 1, left=0.55 / width, right=1 - 0.15 / width, wspace=0.16,
                                   top=1 - 1.0 / height, bottom=0.55 / height, hspace=0.3)
        if observed is not None:
            style.show_frame(figure.add_subplot(grid[0, 0]), observed, 'camera now', style.INK)
        _draw_paths(figure.add_subplot(grid[1, 0]), answer)
        truth = {b.name: b for b in answer.truth}
        for column, branch in enumerate(answer.branches, start=1):
            above = figure.add_subplot(grid[0, column])
            style.show_frame(above, decode_rgb(branch.frames[-1]), branch.name, style.MODEL,
                             _words(branch, 'risk {:.0%}'))
            below = None
            if branch.name in truth:
                below = figure.add_subplot(grid[1, column])
                true = truth[branch.name]
                style.show_frame(below, decode_rgb(true.frames[-1]), '', style.TRUTH,
                                 _words(true, 'contact' if true.risk.max() > 0.5 else 'no contact'))
            if column == 1:
                above.set_ylabel('model', color=style.MODEL, fontweight='bold')
                if below is not None:
                    below.set_ylabel('simulator', color=style.TRUTH, fontweight='bold')


def anywhere(risk: np.ndarray) -> float:
    """Return the probability of a contact in any step, from that of each step, assuming independence."""
    return 1.0 - float(np.prod(1.0 - np.clip(risk, 0.0, 1.0)))


def progress(branch: Branch) -> str:
    """Return a branch's progress in words, or 'no goal'."""
    return 'no goal' if math.isnan(branch.progress) else f'progress {round(branch.progress, 2) + 0.0:+.2f} m'


def _words(branch: Branch, risk: str) -> str:
    return f'{progress(branch)}\n{risk.format(anywhere(branch.risk))}'


def _draw_paths(axes, answer: WhatIf) -> None:
    for branches, colour, dash, label in ((answer.truth, style.TRUTH, '-', 'simulator'),
                                          (answer.branches, style.MODEL, '--', 'model')):
        for i, branch in enumerate(branches):
            # forward is up, left is left
            xy = np.vstack([[0.0, 0.0], branch.path[:, :2]])
            axes.plot(-xy[:, 1], xy[:, 0], dash, color=colour, lw=1.6, label=label if i == 0 else None)
            axes.plot(-xy[-1, 1], xy[-1, 0], 'o', color=colour, ms=3.5)
    axes.plot(0, 0, '^', color=style.INK, ms=7)
    reach = max(0.1, *(float(np.abs(b.path[:, :2]).max()) for b in (*answer.branches, *answer.truth)))
    behind = min(0.0, *(float(b.path[:, 0].min()) for b in (*answer.branches, *answer.truth)))
    middle = (reach + behind) / 2
    axes.set(xlabel='to the left [m]', ylabel='ahead [m]', xlim=(-0.62 * reach, 0.62 * reach),
             ylim=(middle - 0.62 * reach, middle + 0.62 * reach), aspect='equal')
    axes.xaxis.set_major_formatter(lambda x, _: f'{0.0 - x:g}')
    axes.set_title('paths from above', loc='center', fontsize=9, pad=4)
    axes.locator_params(nbins=4)
    axes.legend(fontsize=7, loc='upper left', handlelength=1.6, borderpad=0.1, labelspacing=0.2)
    axes.tick_params(labelsize=7, pad=1)
    axes.xaxis.label.set_size(8)
    axes.yaxis.label.set_size(8)
