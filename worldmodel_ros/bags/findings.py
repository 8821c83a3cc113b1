"""Findings on recorded data, in words: what they mean for the evaluation, and what to do about them."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_SEVERITIES = ('error', 'warning', 'info')


@dataclass
class Finding:
    """
    Something that the reader of a report should know. ``severity``: 'info', 'warning' or 'error'; ``first_stamps`` [ns]: of
    the first places; ``count``: of all places.
    """

    kind: str
    severity: str
    text: str
    first_stamps: list[int] = field(default_factory=list)
    count: int = 0


# Severity and text, with placeholders {count} and {detail} (of the first place).
_KNOWN = {
    'no ticks': ('error',
        'None of the images can be used ({count} in the bag): there is nothing to evaluate.'),
    'no actions': ('error',
        'No action was recorded, so that the robot is taken to be at rest. Record the commands that it '
        'executes (cmd_vel), or name their topic in the file of --config.'),
    'other clock': ('error',
        'Stamp and receipt of the images are {detail} apart: the camera has a clock of its own, and the '
        'actions cannot be told to their images. Synchronise the clocks (chrony, PTP); for this bag, set '
        'image_stamps: log to take the time of receipt instead.'),
    'zero stamp': ('error',
        'Images without a stamp, left out: {count}. Make the camera driver stamp them; for this bag, set '
        'image_stamps: log to take the time of receipt instead.'),
    'duplicate stamp': ('warning',
        'Images with the stamp of the one before, left out: {count}. The camera driver must stamp each '
        'image with the time it was taken.'),
    'stamp out of order': ('warning',
        'Images stamped before the one before them, left out: {count}. Two publishers on one topic do this, '
        'and a clock that is set back a little.'),
    'time set back': ('warning',
        'Places where the stamps go back (first by {detail}), a new episode at each: {count}. A simulation '
        'that was reset does this, and a clock that was set.'),
    'clock jump': ('warning',
        'Places where the stamps move against the time of receipt (first by {detail}): {count}. The clock '
        'of the camera or of the recorder was set, or the recorder stalled. Synchronise the clocks (chrony, '
        'PTP).'),
    'gap': ('warning',
        'Gaps in the images (first of {detail}): {count}. A gap of more than a second begins a new episode. '
        'Look for a recorder that drops messages: a slow disk, a small cache (ros2 bag record '
        '--max-cache-size), best-effort images larger than the buffers of the middleware.'),
    'slow camera': ('error',
        'The images are {detail}: the model takes the world to move faster than it does. Record at the rate '
        'of the model or a multiple of it.'),
    'unfit rate': ('warning', '{detail}.'),
    'jitter': ('warning',
        'The images come unevenly: {detail}. Look for a camera driver or a recorder that has to share its '
        'cores.'),
    'stale on receipt': ('warning',
        'Images more than 50 ms old when they were recorded: {count}. The live node would answer them too '
        'late. Where the clock of the camera is not that of the recorder, synchronise them.'),
    'stamp in the future': ('warning',
        'Images stamped more than 100 ms after their receipt: {count}. The live node refuses them. '
        'Synchronise the clocks; for this bag, set image_stamps: log to take the time of receipt instead.'),
    'frozen camera': ('warning',
        'Images that repeat the one before although the robot moves, left out: {count}. The live node '
        'stops the robot. Look for a camera driver that republishes its last image.'),
    'mixed sizes': ('warning',
        'Images of another size than the first: {count}. Their field of view may differ too, which the '
        'model cannot know.'),
    'action out of range': ('warning',
        'Actions beyond the range that the model was trained for: {count}. Check scale and units in the '
        'file of --config; what is predicted for such actions means little.'),
    'action not finite': ('error',
        'Actions that are not finite numbers, left out: {count}. Correct what publishes them.'),
    'action ran out': ('warning',
        'Places where no action came for more than {detail} after one that moves the robot, which is taken to '
        'have braked by itself, as bases do: {count}. If the base has no time-out and the topic tells changes '
        'only, set executed_timeout_s: 0 in the file of --config.'),
    'unknown goal': ('warning',
        'Goals that the model does not know, left out as the live node does: {count} (first {detail}).'),
    'unreadable message': ('error',
        'Messages that cannot be read, left out: {count}. The first: {detail}.'),
}
_UNUSABLE = 'error', 'Images that cannot be used, left out: {count}. The first: {detail}.'


def finding(kind: str, count: int, places: Sequence[int] = (), detail: str = '') -> Finding:
    """Return a finding in words; a kind unknown here is that of an ImageError, whose text is ``detail``."""
    severity, text = _KNOWN.get(kind, _UNUSABLE)
    return Finding(kind, severity, text.format(count=count, detail=detail), list(places), count)


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings, the most severe first."""
    return sorted(findings, key=lambda f: _SEVERITIES.index(f.severity))
