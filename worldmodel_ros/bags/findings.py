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
        'No actions were recorded, so the robot is assumed to be at rest. Record the commands that it '
        'executes (cmd_vel), or name their topic in the --config file.'),
    'other clock': ('error',
        'Image stamps and receive times are {detail} apart: the camera has a clock of its own, and '
        'actions cannot be matched with images. Synchronise the clocks (chrony, PTP); for this bag, set '
        'image_stamps: log to use the receive time instead.'),
    'zero stamp': ('error',
        'Images without a stamp, skipped: {count}. Make the camera driver stamp them; for this bag, set '
        'image_stamps: log to use the receive time instead.'),
    'duplicate stamp': ('warning',
        'Images with the same stamp as the previous one, skipped: {count}. The camera driver must stamp each '
        'image with its capture time.'),
    'stamp out of order': ('warning',
        'Images stamped earlier than the previous one, skipped: {count}. Possible causes: two publishers on one '
        'topic, or a clock that was set back slightly.'),
    'time set back': ('warning',
        'Places where the stamps go back (the first by {detail}), each of which begins a new episode: {count}. '
        'Possible causes: a simulation that was reset, or a clock that was set.'),
    'clock jump': ('warning',
        'Places where the stamps jump relative to the receive times (the first by {detail}): {count}. The clock '
        'of the camera or the recorder was set, or the recorder stalled. Synchronise the clocks (chrony, '
        'PTP).'),
    'gap': ('warning',
        'Gaps between images (the first of {detail}): {count}. A gap of more than a second begins a new episode. '
        'Check whether the recorder drops messages: a slow disk, a small cache (ros2 bag record '
        '--max-cache-size), or best-effort images larger than the middleware\'s buffers.'),
    'slow camera': ('error',
        'The images are {detail}: to the model, the world seems to move faster than it does. Record at the '
        'model\'s rate or a multiple of it.'),
    'unfit rate': ('warning', '{detail}.'),
    'jitter': ('warning',
        'The images are unevenly spaced: {detail}. Check whether the camera driver or the recorder has to share '
        'its cores.'),
    'stale on receipt': ('warning',
        'Images more than 50 ms old when recorded: {count}. The live node would answer them too '
        'late. If camera and recorder have different clocks, synchronise them.'),
    'stamp in the future': ('warning',
        'Images stamped more than 100 ms after they were received: {count}. The live node rejects them. '
        'Synchronise the clocks; for this bag, set image_stamps: log to use the receive time instead.'),
    'frozen camera': ('warning',
        'Images identical to the previous one while the robot moves, skipped: {count}. The live node '
        'stops the robot. Check whether the camera driver republishes its last image.'),
    'mixed sizes': ('warning',
        'Images that differ in size from the first: {count}. Their field of view may differ too, which the '
        'model cannot know.'),
    'action out of range': ('warning',
        'Actions outside the model\'s training range: {count}. Check scale and units in the --config file; '
        'predictions for such actions are unreliable.'),
    'action not finite': ('error',
        'Actions that are not finite numbers, or beyond 1e6, skipped: {count}. Fix the node that publishes them.'),
    'action ran out': ('warning',
        'Places where no action followed within {detail} of one that moves the robot: {count}. The robot is '
        'assumed to have stopped by itself, as most bases do. If the base has no timeout and the topic carries '
        'changes only, set executed_timeout_s: 0 in the --config file.'),
    'unknown goal': ('warning',
        'Goals that the model does not know, ignored as by the live node: {count} (the first: {detail}).'),
    'unreadable message': ('error',
        'Messages that cannot be read, skipped: {count}. The first: {detail}.'),
}
_UNUSABLE = 'error', 'Images that cannot be used, skipped: {count}. The first: {detail}.'


def finding(kind: str, count: int, places: Sequence[int] = (), detail: str = '') -> Finding:
    """Return a finding in words; a kind unknown here is that of an ImageError, whose text is ``detail``."""
    severity, text = _KNOWN.get(kind, _UNUSABLE)
    return Finding(kind, severity, text.format(count=count, detail=detail), list(places), count)


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings, the most severe first."""
    return sorted(findings, key=lambda f: _SEVERITIES.index(f.severity))
