"""The film strip and the animation: predicted frames next to the camera's."""
from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from worldmodel_ros.demo import style
from worldmodel_ros.demo.images import decode_rgb, enlarge
from worldmodel_ros.demo.prediction import Match, PredictionScorer
from worldmodel_ros.demo.recording import NS, Future, Recording

MOMENTS = 2
GIF_SECONDS = 10.0
GIF_SCALE = 4
GIF_COLOURS = 96
_BAR, _GAP = 26, 6  # [pixels]


@dataclass(frozen=True)
class Moment:
    """One prediction with the corresponding camera images."""

    time: float                     # since the first image [s]
    step: float                     # between frames [s]
    observed: np.ndarray            # (H, W, 3) uint8
    predicted: list[np.ndarray]
    seen: list[np.ndarray]
    psnr: list[float]               # [dB]
    psnr_copy: list[float]          # [dB]
    command: tuple[float, float]    # mean v [m/s] and w [rad/s] over its frames


def moments(recording: Recording, scorer: PredictionScorer, count: int = MOMENTS) -> list[Moment]:
    """Return, from each of ``count`` equal parts of the run, the prediction during which the camera image changed most.

    The choice depends on the camera only, never on the quality of the prediction.
    """
    whole: dict[int, list[Match]] = {}
    for match in scorer.matches:
        if match.moving:
            whole.setdefault(match.future, []).append(match)
    indices = [i for i, matches in whole.items() if len(matches) == len(recording.futures[i].frames)]
    parts = [part for part in np.array_split(np.array(sorted(indices)), count) if len(part)]
    chosen = [min(part, key=lambda i: float(np.mean([m.psnr_copy for m in whole[i]]))) for part in parts]
    return [_moment(recording, scorer, int(i), whole[i]) for i in chosen]


def _moment(recording: Recording, scorer: PredictionScorer, index: int, matches: list[Match]) -> Moment:
    future = recording.futures[index]
    last = future.target(len(future.frames) - 1)
    images = [recording.image_at(stamp, scorer.tolerance)
              for stamp in [future.stamp, *(future.target(m.k) for m in matches)]]
    return Moment(
        (future.stamp - recording.image_stamps[0]) / NS, future.step, images[0],
        [decode_rgb(future.frames[m.k]) for m in matches], images[1:],
        [m.psnr for m in matches], [m.psnr_copy for m in matches], recording.mean_command(future.stamp, last))


def draw_film_strip(path: Path, strip: list[Moment]) -> None:
    """Write the film strip: for each moment the observation, the predicted frames, and below them the camera's."""
    columns = max(len(m.predicted) for m in strip)
    width, block, top = 1.75 * (columns + 1) + 0.3, 3.75, 0.85
    height = top + block * len(strip)
    with style.picture(path, width, height, 'What the model expected to see, and what the camera saw',
                       'Each prediction starts from the picture on its left. From each part of the drive: '
                       'the moment when the camera image changed most.') as figure:
        grid = figure.add_gridspec(
            2 * len(strip), columns + 2, left=0.15 / width, right=1 - 0.15 / width, wspace=0.1,
            top=1 - (top + 0.05) / height, bottom=0.12 / height, hspace=0.2,
            width_ratios=[1.1, 0.02] + [1.0] * columns)
        for row, moment in enumerate(strip):
            _draw_moment(figure, grid, 2 * row, moment)


def _draw_moment(figure, grid, row: int, moment: Moment) -> None:
    v, w = moment.command
    observed = figure.add_subplot(grid[row:row + 2, 0])
    style.show_frame(observed, moment.observed, f'camera at {moment.time:.1f} s', style.INK,
                     f'then {v + 0.0:+.2f} m/s,\n{w + 0.0:+.2f} rad/s')
    for k, (predicted, seen) in enumerate(zip(moment.predicted, moment.seen)):
        above, below = figure.add_subplot(grid[row, k + 2]), figure.add_subplot(grid[row + 1, k + 2])
        style.show_frame(above, predicted, f'+{(k + 1) * moment.step:.1f} s', style.MODEL,
                         f'{moment.psnr[k]:.1f} dB (copy {moment.psnr_copy[k]:.1f})')
        style.show_frame(below, seen, '', style.TRUTH)
        if k == 0:
            above.set_ylabel('predicted', color=style.MODEL, fontweight='bold', labelpad=2)
            below.set_ylabel('camera', color=style.TRUTH, fontweight='bold', labelpad=2)


def draw_animation(path: Path, recording: Recording, tolerance: float) -> None:
    """Write a GIF in real time: the camera images, and their predictions of a step and of a chunk before."""
    font = style.font(14)
    period = recording.futures[0].step
    horizons = sorted({0, len(recording.futures[0].frames) - 1})
    pages = []
    for stamp, image in zip(recording.image_stamps, recording.images):
        sources = [_future_for(recording, stamp, k, tolerance) for k in horizons]
        if all(sources):
            shown = [image] + [decode_rgb(f.frames[k]) for f, k in zip(sources, horizons)]
            pages.append(_page(shown, [f'predicted {(k + 1) * period:.1f} s before' for k in horizons], font))
        if len(pages) >= GIF_SECONDS / period:
            break
    if pages:
        save_animation(path, pages, period)


def save_animation(path: Path, pages: list[Image.Image], period: float) -> None:
    """Write a GIF that shows a page every ``period`` s, in a loop."""
    # One palette for all pages, made from pages of the whole run: with one per page, colours flicker.
    sample = np.concatenate([np.asarray(page) for page in pages[::max(1, len(pages) // 12)]])
    palette = Image.fromarray(sample).quantize(GIF_COLOURS)
    pages = [page.quantize(palette=palette, dither=Image.Dither.NONE) for page in pages]
    pages[0].save(path, save_all=True, append_images=pages[1:], duration=round(period * 1000), loop=0)


def _future_for(recording: Recording, stamp: int, k: int, tolerance: float) -> Future | None:
    """Return the future whose frame ``k`` is nearest to ``stamp``; None if there is none within ``tolerance`` seconds."""
    i = bisect_left(recording.futures, stamp, key=lambda f: f.target(k))
    near = [f for f in recording.futures[max(i - 1, 0):i + 1]
            if len(f.frames) > k and abs(f.target(k) - stamp) <= tolerance * NS]
    return min(near, key=lambda f: abs(f.target(k) - stamp), default=None)


def _page(pictures: list[np.ndarray], labels: list[str], font: ImageFont.FreeTypeFont) -> Image.Image:
    height, width = (side * GIF_SCALE for side in pictures[0].shape[:2])
    page = Image.new('RGB', (len(pictures) * (width + _GAP) - _GAP, height + _BAR), style.PAPER)
    draw = ImageDraw.Draw(page)
    colours = [style.TRUTH] + [style.MODEL] * len(labels)
    for i, (picture, label, colour) in enumerate(zip(pictures, ['camera', *labels], colours)):
        left = i * (width + _GAP)
        page.paste(Image.fromarray(enlarge(picture, GIF_SCALE)), (left, _BAR))
        draw.text((left + 2, 4), label, fill=colour, font=font)
    return page
