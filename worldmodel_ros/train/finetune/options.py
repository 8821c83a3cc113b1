"""Options of fine-tuning, and how its time is split."""
from __future__ import annotations

from dataclasses import dataclass

from worldmodel_ros.train.run.config import Schedule
from worldmodel_ros.train.run.options import SelfForcingOptions, StudentOptions
from ...model.presets import Preset

VAE_SHARE = 0.3         # of the time
MOST_STEPS = 1_000_000  # where time is the limit


@dataclass(frozen=True)
class FineTuning:
    """``minutes`` of training in total, or exactly ``steps`` of autoencoder and DiT (repeatable).

    ``vae_batch`` and ``batch``: clips per step. ``variants`` of each recording that the DiT sees, half of them mirrored unless
    ``mirror`` is off or the actions' names do not tell how. Rates are peak learning rates; ``imagined_from`` is the share
    of the DiT's training after which its own predictions serve as context too.
    """

    minutes: float
    steps: tuple[int, int] | None = None
    vae_batch: int = 8
    batch: int = 4
    variants: int = 8
    mirror: bool = True
    vae_rate: float = 5e-4
    rate: float = 3e-4
    average: float = 0.98
    imagined_from: float = 0.5
    seed: int = 0

    @classmethod
    def on(cls, device: str, minutes: float | None = None, **others) -> FineTuning:
        """Return the defaults for a device: a GPU takes large batches in the time a CPU takes for small ones."""
        if device == 'cpu':
            return cls(minutes or 20.0, **others)
        return cls(minutes or 2.0, vae_batch=64, batch=48, average=0.995, **others)

    def schedules(self) -> tuple[Schedule, Schedule]:
        """Return the schedules of the autoencoder and of the DiT."""
        if self.steps:
            return (Schedule(self.steps[0], self.vae_rate, average=self.average),
                    Schedule(self.steps[1], self.rate, average=self.average))
        return (Schedule(MOST_STEPS, self.vae_rate, VAE_SHARE * self.minutes, average=self.average),
                Schedule(MOST_STEPS, self.rate, (1.0 - VAE_SHARE) * self.minutes, average=self.average))

    def recorded(self, preset: Preset) -> StudentOptions:
        """Objective on recorded context: a window, and two chunks after it."""
        return StudentOptions(batch=self.batch, clip_frames=preset.window_frames + 2 * preset.chunk_frames)

    def imagined(self, preset: Preset) -> SelfForcingOptions:
        """Objective on imagined context: three chunks, as far as the longest judged horizon."""
        frames = preset.window_frames + 3 * preset.chunk_frames
        return SelfForcingOptions(batch=self.batch, recorded_share=0.0, clip_frames=frames, crop_frames=frames)

    def clip_frames(self, preset: Preset) -> int:
        """Frames of the longest clip that is drawn."""
        return max(self.recorded(preset).clip_frames, self.imagined(preset).clip_frames)
