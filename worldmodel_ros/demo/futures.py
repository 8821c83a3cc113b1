"""Plots the futures predicted before a command was decided, seen from above: the rejected ones and the chosen one."""
from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from PIL import Image, ImageDraw

from worldmodel_ros.control.scene_view import corners
from worldmodel_ros.control.terms import ROBOT_RADIUS
from worldmodel_ros.demo import style
from worldmodel_ros.demo.film import GIF_SECONDS, save_animation
from worldmodel_ros.demo.images import enlarge
from worldmodel_ros.demo.recording import NS, Choice, Option, Pose, Recording, Sighting

MOMENTS = 3
APART = 2.0             # between two moments, if the run is long enough [s]
SHOWN = 8               # options of a moment that are listed in words
AHEAD, BEHIND, ASIDE = 3.6, 0.9, 2.25   # extent of the plot around the robot [m]
AT = (0.0, 0.4, 0.8, 1.2, 1.6)          # times of the plotted forecast [s]
LATER = 0.8             # time at which the truth is also plotted [s]
_CHOSEN, _REJECTED, _VETOED = (21, 128, 61), (239, 150, 140), (185, 28, 28)
_INK, _FAINT, _WALL, _TRUTH = (31, 41, 51), (229, 231, 235), (120, 128, 138), (15, 118, 110)
_COLOURS = {'red': (220, 38, 38), 'green': (22, 163, 74), 'blue': (37, 99, 235), 'yellow': (202, 138, 4),
            'magenta': (192, 38, 211), 'cyan': (8, 145, 178), 'violet': (124, 58, 237)}
_SUBPIXEL = 4           # bits, of cv2's coordinates
_FOV = math.radians(45.0)  # to each side
_GIF_SCALE = 64         # pixels per m


@dataclass(frozen=True)
class Truth:
    """Ground truth: the robot's pose at an observation, and the movers then and LATER."""

    pose: Pose
    now: Sighting
    later: Sighting | None

    @classmethod
    def of(cls, recording: Recording, stamp: int) -> Truth | None:
        """Return the truth at a stamp [ns]; None if it was not recorded."""
        pose, now = recording.pose_at(stamp), recording.sighting_at(stamp)
        return cls(pose, now, recording.sighting_at(stamp + round(LATER * NS))) if pose and now else None

    def in_base(self, sighting: Sighting) -> list[tuple[float, float, float]]:
        """Return x, y and radius of each mover, in base_link of the pose [m]."""
        cos, sin = math.cos(self.pose.yaw), math.sin(self.pose.yaw)
        ways = [(mover.x - self.pose.x, mover.y - self.pose.y, mover.length / 2) for mover in sighting.movers.values()]
        return [(cos * x + sin * y, cos * y - sin * x, radius) for x, y, radius in ways]


def birds_eye(choice: Choice, scale: int, truth: Truth | None = None) -> np.ndarray:
    """
    Return a plot of a choice from above, uint8 (H, W, 3) RGB; the robot faces up. ``scale``: pixels per m.

    Green: the chosen path; pale red: rejected ones; red: vetoed ones. Discs: estimated positions of things, and, paler,
    their forecast positions AT. Rings: true positions of movers, and, thin, those LATER.
    """
    sheet = _Sheet(scale)
    for side in (-_FOV, _FOV):
        sheet.line(np.array([[0.0, 0.0], [6.0 * math.cos(side), 6.0 * math.sin(side)]]), _FAINT, 1)
    if len(choice.walls) == 4:
        around = corners(choice.walls)
        sheet.line(np.concatenate([around, around[:1]]), _WALL, 2)
    for thing in choice.things:
        colour = _COLOURS.get(thing.colour, _INK)
        moves = len(thing.path) > 1 and float(np.ptp(thing.path, 0).max()) > 0.02
        for at in reversed(AT if moves and len(choice.times) > 1 else AT[:1]):
            place = [np.interp(at, choice.times, thing.path[:, axis]) for axis in range(2)] if moves else thing.path[0]
            sheet.disc(place, thing.radius, colour, 0.65 - 0.5 * at / AT[-1])
    best = choice.option(choice.chosen)
    for option in sorted(choice.options, key=lambda option: bool(option.contact)):
        if option is not best:
            sheet.line(option.path, _VETOED if option.contact else _REJECTED, 2 if option.contact else 1)
    if best is not None:
        sheet.line(best.path, _CHOSEN, 4)
        sheet.ring(best.path[-1], ROBOT_RADIUS, _CHOSEN, 1)
    if truth:
        for x, y, radius in truth.in_base(truth.now):
            sheet.ring((x, y), radius, _TRUTH, 2)
        for x, y, radius in truth.in_base(truth.later) if truth.later else ():
            sheet.ring((x, y), radius, _TRUTH, 1)
    sheet.disc((0.0, 0.0), ROBOT_RADIUS, _INK, 0.9)
    sheet.line(np.array([[0.0, 0.0], [ROBOT_RADIUS, 0.0]]), (255, 255, 255), 2)
    return sheet.pixels


class _Sheet:
    """A white canvas for drawing at positions in base_link [m], x up and y to the left."""

    def __init__(self, scale: int) -> None:
        self._scale = scale
        self.pixels = np.full((round((AHEAD + BEHIND) * scale), round(2 * ASIDE * scale), 3), 255, np.uint8)

    def _at(self, places: np.ndarray) -> np.ndarray:
        places = np.asarray(places, float).reshape(-1, 2)
        pixels = np.column_stack([ASIDE - places[:, 1], AHEAD - places[:, 0]]) * self._scale
        return np.round(np.clip(pixels, -1e4, 1e4) * 2 ** _SUBPIXEL).astype(np.int32)

    def line(self, places: np.ndarray, colour: tuple[int, int, int], width: int) -> None:
        """Draw a line through positions (N, 2)."""
        if len(places) > 1:
            cv2.polylines(self.pixels, [self._at(places)], False, colour, width, cv2.LINE_AA, _SUBPIXEL)

    def ring(self, place: np.ndarray, radius: float, colour: tuple[int, int, int], width: int) -> None:
        """Draw a circle of ``radius`` [m]."""
        cv2.circle(self.pixels, self._at(place)[0].tolist(), round(radius * self._scale * 2 ** _SUBPIXEL), colour, width,
                   cv2.LINE_AA, _SUBPIXEL)

    def disc(self, place: np.ndarray, radius: float, colour: tuple[int, int, int], opacity: float) -> None:
        """Draw a filled circle of ``radius`` [m]."""
        drawn = self.pixels.copy()
        cv2.circle(drawn, self._at(place)[0].tolist(), round(radius * self._scale * 2 ** _SUBPIXEL), colour, -1, cv2.LINE_AA,
                   _SUBPIXEL)
        self.pixels = cv2.addWeighted(drawn, opacity, self.pixels, 1.0 - opacity, 0.0)


def moments(recording: Recording, tolerance: float, count: int = MOMENTS) -> list[Choice]:
    """Return, from each of ``count`` equal parts of the run, the choice that gains most over the policy, preferably one where
    that was vetoed, and APART from the previous one if possible. The selection ignores the forecast's accuracy."""
    shown = [choice for choice in recording.choices
             if choice.option(choice.chosen) and recording.image_at(choice.stamp, tolerance) is not None]

    def against(choice: Choice) -> tuple[bool, float]:
        policy, best = choice.option('policy'), choice.option(choice.chosen)
        return (bool(policy.contact), best.score - policy.score) if policy else (False, 0.0)
    parts = [part for part in np.array_split(np.arange(len(shown)), count) if len(part)]
    found: list[Choice] = []
    for part in parts:
        choices = [shown[int(i)] for i in part]
        later = [choice for choice in choices if not found or choice.stamp - found[-1].stamp >= APART * NS]
        found.append(max(later or choices, key=against))
    return found


def words(choice: Choice) -> list[tuple[str, str, str]]:
    """Return name, score and fate of the chosen option and the best others, at most SHOWN, including the best vetoed one."""
    best = choice.option(choice.chosen)
    others = sorted((option for option in choice.options if option is not best), key=lambda option: -option.score)
    vetoed = [option for option in others if option.contact]
    told = others[:SHOWN - 1]
    if vetoed and not any(option.contact for option in told):
        told[-1:] = vetoed[:1]
    lines = [(best.name, f'{best.score:+.2f}', 'chosen')] if best else [(choice.chosen, '', 'chosen')]
    return lines + [(option.name, f'{option.score:+.2f}', _fate(choice, option)) for option in told]


def _fate(choice: Choice, option: Option) -> str:
    reason = choice.rejected_for(option)
    return f'vetoed: {reason}' if option.contact else reason or 'no better'


def draw_futures(path: Path, recording: Recording, chosen: list[Choice], tolerance: float) -> None:
    """Write the moments: camera image, predicted futures from above, and why each option was chosen or not."""
    block, top = 4.3, 0.85
    width, height = 11.0, top + block * len(chosen) + 0.1
    note = ('Green: chosen. Pale red: rejected; red: vetoed for a contact. Discs: where things are taken to be, paler in 0.4 '
            f'to 1.6 s. Rings: where movers really were, thin {LATER:.1f} s later.')
    with style.picture(path, width, height, 'The futures that were imagined, and the one that was chosen', note) as figure:
        for row, choice in enumerate(chosen):
            bottom = 1.0 - (top + block * (row + 1)) / height
            camera = figure.add_axes((0.02, bottom + 1.1 / height, 0.21, 2.4 / height))
            at = (choice.stamp - recording.image_stamps[0]) / NS
            room = recording.room_at(choice.stamp)
            style.show_frame(camera, recording.image_at(choice.stamp, tolerance), f'camera at {at:.1f} s', style.INK,
                             f'{room.task}, room {room.seed}' + (f': {room.target}' if room.target else '') if room else '')
            above = figure.add_axes((0.25, bottom + 0.12 / height, 0.35, (block - 0.4) / height))
            style.show_frame(above, birds_eye(choice, 120, Truth.of(recording, choice.stamp)),
                             f'{len(choice.options)} futures on a forecast of {choice.passes} pass'
                             f'{"es" if choice.passes != 1 else ""}')
            told = figure.add_axes((0.62, bottom, 0.37, (block - 0.3) / height))
            told.axis('off')
            for line, (name, score, fate) in enumerate(words(choice)):
                y = 0.93 - 0.105 * line
                colour = style.GOOD if not line else style.BAD if fate.startswith('vetoed') else style.INK
                told.text(0.0, y, f'{name}  {score}', transform=told.transAxes, color=colour, fontweight='bold', fontsize=9)
                told.text(0.03, y - 0.045, fate, transform=told.transAxes, color=style.MUTED, fontsize=8)


def draw_animation(path: Path, recording: Recording, tolerance: float) -> None:
    """Write a GIF in real time: the camera, and the futures predicted before the command was decided."""
    font, pages = style.font(13), []
    begin = next((choice.stamp for choice in recording.choices if choice.options), 0)
    for choice in recording.choices:
        image = recording.image_at(choice.stamp, tolerance)
        if choice.stamp < begin or image is None:
            continue
        if choice.stamp - begin > GIF_SECONDS * NS:
            break
        above = birds_eye(choice, _GIF_SCALE, Truth.of(recording, choice.stamp))
        pages.append(_page(image, above, choice, font))
    if pages:
        stamps = [choice.stamp for choice in recording.choices]
        save_animation(path, pages, float(np.median(np.diff(stamps))) / NS if len(stamps) > 1 else 0.1)


def _page(image: np.ndarray, above: np.ndarray, choice: Choice, font) -> Image.Image:
    camera = enlarge(image, above.shape[0] // image.shape[0])
    page = Image.new('RGB', (camera.shape[1] + above.shape[1] + 6, above.shape[0] + 24), style.PAPER)
    page.paste(Image.fromarray(camera), (0, 24))
    page.paste(Image.fromarray(above), (camera.shape[1] + 6, 24))
    draw = ImageDraw.Draw(page)
    vetoed = sum(bool(option.contact) for option in choice.options)
    draw.text((2, 4), 'camera', fill=style.TRUTH, font=font)
    text = f'{choice.chosen}, of {len(choice.options)}' if choice.options else choice.chosen
    draw.text((camera.shape[1] + 8, 4), text + (f'; {vetoed} vetoed' if vetoed else ''), fill=style.GOOD, font=font)
    return page
