"""The latency histogram and the path driven."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.patches import Circle, Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Affine2D

from worldmodel_ros.demo import style
from worldmodel_ros.demo.goals import REACHED_DISTANCE
from worldmodel_ros.demo.recording import NS, TIERS, GoalAttempt, Pose, Recording, Thing
from worldmodel_ros.demo.summary import camera_to_command


ROOMS = 4  # maximum number of rooms whose paths are drawn
_TITLE = 'Driven path, seen from above'


def draw_latency(path: Path, recording: Recording, deadline: float, note: str) -> None:
    """Write the histogram of camera-to-command times, by tier, with the budget."""
    times = np.array(camera_to_command(recording)) * 1e3
    tier_of = {tick.stamp: tick.tier for tick in recording.ticks}
    tiers = np.array([tier_of.get(c.stamp, 0) for c in recording.commands if c.stamp])
    if len(tiers) != len(times):  # the robot has counted other commands than were observed here
        tiers = np.zeros(len(times), int)
    budget = deadline * 1e3
    with style.picture(path, 8.0, 4.0, 'Camera to command', note) as figure:
        axes = figure.add_axes((0.08, 0.13, 0.89, 0.68))
        bins = np.linspace(0.0, max(budget * 1.2, float(times.max()) * 1.02), 80)
        served = [tier for tier in (*TIERS, 0) if (tiers == tier).any()]
        names = [TIERS.get(tier, 'all tiers') for tier in served]
        axes.hist([times[tiers == tier] for tier in served], bins, stacked=True, label=names,
                  color=[style.TIER_COLOURS.get(name, style.MUTED) for name in names])
        top = axes.get_ylim()[1] * 1.12
        axes.set_ylim(0, top)
        axes.axvspan(budget, bins[-1], color=style.BAD, alpha=0.06, lw=0)
        axes.axvline(budget, color=style.BAD, lw=1.8)
        axes.text(budget + 0.5, top * 0.97, f'budget\n{budget:.0f} ms', color=style.BAD, va='top',
                  fontweight='bold')
        for name, q, at in (('p50', 0.5, 0.97), ('p99', 0.99, 0.82)):
            value = float(np.quantile(times, q))
            axes.axvline(value, color=style.INK, lw=1.0, ls=(0, (3, 2)))
            axes.text(value + 0.4, top * at, f'{name}\n{value:.1f} ms', va='top', fontsize=8.5)
        axes.set(xlabel='camera stamp to command received by the robot [ms]', ylabel='commands',
                 xlim=(0, bins[-1]))
        axes.legend(loc='upper left')


def draw_path(path: Path, recording: Recording, seconds: float) -> None:
    """Write the path seen from above: room, objects, path by time, goals. For a task, one panel per room, at most ROOMS, with
    movers at their initial positions."""
    note = f'{seconds:.0f} s; dashed: goal counts as reached ({REACHED_DISTANCE} m)'
    if not recording.rooms:
        with style.picture(path, 6.6, 6.4, _TITLE, note) as figure:
            line = _draw_room(figure.add_axes((0.1, 0.08, 0.74, 0.8)), recording.poses, recording.things,
                              {goal.goal for goal in recording.goals}, recording.goals)
            _draw_time(figure, line, (0.88, 0.2, 0.022, 0.5))
        return
    rooms = [(room, [pose for pose in recording.poses if recording.room_at(pose.stamp) is room]) for room in recording.driven]
    rooms = [(room, poses) for room, poses in rooms if len(poses) > 1][:ROOMS]
    if not rooms:
        return
    width = 4.4 * len(rooms) + 0.9
    with style.picture(path, max(width, 6.6), 5.4, _TITLE, f'{note}; movers at their initial positions') as figure:
        for column, (room, poses) in enumerate(rooms):
            axes = figure.add_axes(((0.5 + 4.4 * column) / max(width, 6.6), 0.09, 3.8 / max(width, 6.6), 0.72))
            line = _draw_room(axes, poses, room.things, {room.target}, ())
            axes.set_title(f'{room.task} {room.seed}, {room.target}: {room.fate}', fontsize=9)
        _draw_time(figure, line, (1.0 - 0.55 / max(width, 6.6), 0.2, 0.1 / max(width, 6.6), 0.5))


def _draw_time(figure, line, place: tuple[float, float, float, float]) -> None:
    bar = figure.colorbar(line, cax=figure.add_axes(place))
    bar.set_label('time [s]')
    bar.outline.set_visible(False)


def _draw_room(axes, recorded: Sequence[Pose], things: Mapping[str, Thing], wanted: set[str], goals: Sequence[GoalAttempt]):
    """Draw one path and its surroundings; return the line, coloured by time."""
    poses = np.array([(p.x, p.y, p.yaw) for p in recorded])
    times = np.array([p.stamp for p in recorded], np.float64)
    times = (times - times[0]) / NS
    for thing in things.values():
        _draw_thing(axes, thing, thing.name in wanted)
    readable = [withStroke(linewidth=2.5, foreground=style.PAPER)]
    segments = np.stack([poses[:-1, :2], poses[1:, :2]], axis=1)
    line = axes.add_collection(LineCollection(
        segments, array=times[:-1], cmap='viridis', linewidths=2.4, capstyle='round', zorder=4))
    for moment in np.arange(0.0, times[-1], max(1.0, times[-1] / 15)):
        x, y, yaw = poses[int(np.searchsorted(times, moment))]
        axes.annotate('', (x + 0.12 * np.cos(yaw), y + 0.12 * np.sin(yaw)), (x, y), zorder=5,
                      arrowprops={'arrowstyle': '-|>', 'color': style.INK, 'lw': 0.9})
    axes.plot(*poses[0, :2], 'o', color=style.INK, ms=7, zorder=6)
    axes.annotate('start', poses[0, :2], (6, 6), textcoords='offset points', fontsize=8.5, zorder=8, path_effects=readable)
    objects = {thing.name: thing for thing in things.values()}
    for number, goal in enumerate((g for g in goals if g.reached is not None), start=1):
        x, y, _ = poses[min(int(np.searchsorted(times, goal.reached)), len(poses) - 1)]
        axes.plot(x, y, '*', color=style.goal_colour(goal.goal), mec=style.INK, ms=13, zorder=7)
        beyond = objects.get(goal.goal)  # put the label on the side away from the object
        right = beyond is None or beyond.x < x
        axes.annotate(f'{number}: {goal.goal}, {goal.reached - goal.given:.1f} s', (x, y), (9 if right else -9, -4),
                      ha='left' if right else 'right', fontsize=8, zorder=8, textcoords='offset points', path_effects=readable)
    axes.set(xlabel='x [m]', ylabel='y [m]', aspect='equal')
    axes.autoscale_view()
    return line


def _draw_thing(axes, thing: Thing, wanted: bool) -> None:
    turned = Affine2D().rotate(thing.yaw).translate(thing.x, thing.y) + axes.transData
    look = {'facecolor': thing.rgb, 'edgecolor': style.INK, 'lw': 0.6, 'zorder': 2}
    if thing.round:
        axes.add_patch(Circle((thing.x, thing.y), thing.length / 2, **look))
    else:
        corner = (-thing.length / 2, -thing.width / 2)
        axes.add_patch(Rectangle(corner, thing.length, thing.width, transform=turned, **look))
        axes.plot([thing.x - thing.length / 2, thing.x + thing.length / 2], [thing.y, thing.y], alpha=0)
    if wanted:
        axes.add_patch(Circle((thing.x, thing.y), REACHED_DISTANCE, fill=False, ls='--', lw=1.0,
                              ec=style.goal_colour(thing.name), zorder=1))
