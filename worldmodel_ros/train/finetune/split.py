"""Splits recordings into parts for training, for early stopping (validation) and for judging the result."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...model.presets import Preset
from .recording import Chain, Recording, RecordingError, chains

VALIDATION_SHARE = 0.12  # of what may be trained on: its end, for early stopping
HORIZON_STEPS = 10       # of the longest judged prediction
LEAST_VALIDATION = 2 * HORIZON_STEPS
_GAP = 2.0               # s that a gap between images counts at most: where a clock was set forward, it may be an hour


@dataclass(frozen=True)
class Part:
    """What was received from ``start`` until ``end``, in s since the recording's first image."""

    recording: Recording
    start: float
    end: float

    @property
    def path(self) -> Path:
        return self.recording.path

    def chains(self, preset: Preset, least: int = 1) -> list[Chain]:
        """The part's images; chains of fewer than ``least`` frames are left out."""
        return [chain for chain in chains(self.recording, preset, self.start, self.end) if len(chain) >= least]

    def to_dict(self) -> dict:
        count = int(((self.recording.received >= self.start) & (self.recording.received < self.end)).sum())
        return {'path': str(self.path), 'start_s': round(self.start, 3), 'end_s': round(self.end, 3), 'pictures': count}


@dataclass(frozen=True)
class Split:
    """Parts of all recordings. ``gap_s`` before the held-out part is unused, so that no window spans training and held-out
    data. A validation part begins with a window that is trained on; only what follows it counts."""

    training: Sequence[Part]
    validation: Sequence[Part]
    held_out: Sequence[Part]
    gap_s: float

    def to_dict(self) -> dict:
        return {'gap_s': round(self.gap_s, 3), **{name: [part.to_dict() for part in getattr(self, name)]
                                                  for name in ('training', 'validation', 'held_out')}}


def judged_frames(preset: Preset) -> int:
    """Return the frames of the shortest chain that can be judged: a window, the frame before it, from which the
    autoencoder's state comes, and the images that follow it."""
    return 1 + preset.window_frames + HORIZON_STEPS


def split(recordings: Sequence[Recording], preset: Preset, clip_frames: int, share: float = 0.25,
          held_out: Sequence[Recording] = ()) -> Split:
    """Hold out the last ``share`` of each recording, with a gap before it; or ``held_out``, and nothing of the others.

    Raises RecordingError where a part is too short to be trained on or judged.
    """
    if not held_out and not 0.0 < share < 1.0:
        raise RecordingError(f'a share of {share} cannot be held out: choose one between 0 and 1, such as 0.25')
    period = preset.step_period
    gap = 0.0 if held_out else (preset.window_frames + preset.chunk_frames) * period
    context = (1 + preset.window_frames) * period
    training, validation, judged = [], [], []
    for recording in recordings:
        seen = _Seen(recording)
        border = seen.seconds + period if held_out else round((1.0 - share) * seen.seconds, 1)
        end = border - gap
        middle = end - max(VALIDATION_SHARE * end, LEAST_VALIDATION * period)
        training.append(Part(recording, 0.0, seen.received(middle)))
        validation.append(Part(recording, seen.received(max(0.0, middle - context)), seen.received(end)))
        if not held_out:
            # Tenths of a second, so that ``--skip`` of ``worldmodel evaluate bag`` can give exactly the same.
            judged.append(Part(recording, round(seen.received(border), 1), recording.seconds + period))
    judged += [Part(recording, 0.0, recording.seconds + period) for recording in held_out]
    result = Split(training, validation, judged, gap)
    _check(result, preset, clip_frames, share)
    return result


class _Seen:
    """The time of a recording in which gaps between images count as ``_GAP`` at most: ``seconds`` of it in all."""

    def __init__(self, recording: Recording) -> None:
        excess = np.maximum(np.diff(recording.received, prepend=recording.received[0]) - _GAP, 0.0)
        self._left_out = np.cumsum(excess)
        self._times = recording.received - self._left_out
        self.seconds = float(self._times[-1])

    def received(self, seconds: float) -> float:
        """Return the time of receipt, as of the recording, after so many seconds."""
        image = max(0, int(np.searchsorted(self._times, seconds, 'right')) - 1)
        return seconds + float(self._left_out[image])


def _check(parts: Split, preset: Preset, clip_frames: int, share: float) -> None:
    """One recording that is long enough makes up for others that are too short to be drawn from."""
    judged = judged_frames(preset)
    for what, part, least in (('training', parts.training, clip_frames), ('validation', parts.validation, judged),
                              ('judging', parts.held_out, judged)):
        if any(p.chains(preset, least) for p in part):
            continue
        found = ', '.join(f'{p.path} has {max(0.0, p.end - p.start):.1f} s' for p in part)
        learned = (clip_frames + LEAST_VALIDATION) * preset.step_period + parts.gap_s
        needed = max(learned / (1.0 - share), judged * preset.step_period / share) if parts.gap_s else learned
        raise RecordingError(
            f'too short: {what} needs {least * preset.step_period:.1f} s without a gap, and {found} for it. '
            f'Record at least {needed + 1.0:.0f} s without a gap, preferably several minutes'
            + (', or hold another bag out (--held-out-bag)' if parts.gap_s else ''))
