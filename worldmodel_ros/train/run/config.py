"""Configuration of a training run: dataclasses read from YAML (config/train/), every key checked, one section per stage."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from worldmodel_ros.model.presets import PRESETS, Preset
from .options import (DecoderOptions, ImitationOptions, SelfForcingOptions, StudentOptions, TeacherOptions, require,
                      require_amounts, require_counts, require_positive, require_shares)
from .reading import build, parse_override, read_yaml, with_values

STAGES = ('data', 'vae', 'teacher', 'student', 'self_forcing', 'imitation', 'decoder', 'calibration', 'evaluation')  # in order
TRAINING_SEEDS = range(1_000_000)  # those of sim.rollout, which this module does not import: it needs OpenGL


@dataclass(frozen=True)
class DataConfig:
    """Simulated episodes by default: ``episodes`` of ``frames``, with seeds from ``first_seed``, and ``held_back`` further
    ones that are not trained on but calibrate the contact probability. ``mix``: weights of the drivers of ``sim.behaviour``, by
    name; null: the usual ones. ``folders`` of LeRobot datasets are used instead.

    ``live``: simulate during training instead of before; this many episodes, the newest, are held on the training device, and
    nothing is written to disk. Each process begins with ``begin`` of them. 0: write a dataset first. Not for the stage
    ``imitation``; stages that go on with a clip need ``live`` for all episodes of a process. ``measured``: share of
    live episodes whose actions are what wheel encoders measured, with their noise and slip, instead of what was commanded."""

    folders: tuple[str, ...] = ()
    episodes: int = 3000
    frames: int = 120
    first_seed: int = 0
    held_back: int = 64
    mix: Mapping[str, float] | None = None
    live: int = 0
    begin: int = 128
    measured: float = 0.0

    def __post_init__(self) -> None:
        require_counts(self, 'episodes', 'frames')
        if min(self.held_back, self.live) < 0:
            raise ValueError(f'held_back ({self.held_back}) and live ({self.live}) must not be below zero')


@dataclass(frozen=True)
class Schedule:
    """Duration and rates of a stage: ``steps``, or fewer if ``max_minutes`` are over first (the schedule then follows the
    clock). ``rate`` is the peak learning rate, after a ``warm_up`` (share of the schedule) and before a cosine; ``average`` the
    decay of the averaged weights, ``decay`` that of AdamW. With ``matrix_rate``, the matrices of the DiT's layers are trained
    by Muon at that rate, with updates as large as AdamW's: fewer steps, each a little longer."""

    steps: int
    rate: float
    max_minutes: float | None = None
    warm_up: float = 0.03
    average: float = 0.999
    decay: float = 0.01
    matrix_rate: float | None = None

    def __post_init__(self) -> None:
        require_counts(self, 'steps')
        require_positive(self, 'rate', 'max_minutes', 'matrix_rate')
        require_shares(self, 'warm_up')
        require_amounts(self, 'decay')
        require(self, ('average',), lambda value: 0.0 <= value < 1.0, 'from 0 to below 1')

    def done(self, step: int, seconds: float) -> float:
        """Return the share of the schedule that is over after ``step`` steps and ``seconds``; 1 and more: all of it."""
        by_clock = 0.0 if self.max_minutes is None else seconds / (60.0 * self.max_minutes)
        return max(step / self.steps, by_clock)


@dataclass(frozen=True)
class VaeOptions:
    """Stage ``vae``: clips per step."""

    batch: int = 256

    def __post_init__(self) -> None:
        require_counts(self, 'batch')


@dataclass(frozen=True)
class VaeStage(Schedule):
    objective: VaeOptions = VaeOptions()


@dataclass(frozen=True)
class TeacherStage(Schedule):
    objective: TeacherOptions = TeacherOptions()


@dataclass(frozen=True)
class StudentStage(Schedule):
    objective: StudentOptions = StudentOptions()


@dataclass(frozen=True)
class SelfForcingStage(Schedule):
    objective: SelfForcingOptions = SelfForcingOptions()


@dataclass(frozen=True)
class ImitationStage(Schedule):
    objective: ImitationOptions = ImitationOptions()


@dataclass(frozen=True)
class DecoderStage(Schedule):
    objective: DecoderOptions = DecoderOptions()


@dataclass(frozen=True)
class CalibrationConfig:
    """Batches of clips of the held-back episodes that the contact probability is calibrated on."""

    batches: int = 8
    batch: int = 64

    def __post_init__(self) -> None:
        require_counts(self, 'batches', 'batch')


@dataclass(frozen=True)
class EvaluationConfig:
    """Losses and short predictions on ``episodes`` episodes from ``first_seed`` on (``batches`` of ``batch`` clips); and
    ``worldmodel evaluate quality`` on the seeds ``quality`` ('first:end'), if given, limited to ``parts`` if any are named; on
    the CPU, with what robots run by default, or with ``gpu`` on a GPU where there is one."""

    episodes: int = 60
    first_seed: int = 1_000_000
    batches: int = 6
    batch: int = 16
    quality: str | None = None
    parts: tuple[str, ...] = ()
    gpu: bool = False

    def __post_init__(self) -> None:
        require_counts(self, 'episodes', 'batches', 'batch')


@dataclass(frozen=True)
class Memory:
    """Overrides what the cache layers of a preset with tiles see: frames of the window, slabs of sinks and keyframes;
    ``temporal``: whether some layers see their own place in all slabs, not only in a few around; ``heading``: whether attention
    knows how far the robot has turned."""

    window_frames: int | None = None
    sink_slabs: int | None = None
    keyframe_slabs: int | None = None
    temporal: bool = True
    heading: bool = True

    def of(self, preset: Preset) -> Preset:
        """Return the preset with this memory. Raises ValueError for one without tiles, or a memory that it cannot have."""
        if preset.tile is None:
            raise ValueError(f'memory is for presets with tiles, and {preset.name!r} has none: leave it null')
        changed: dict[str, Any] = {name: getattr(self, name) for name in ('window_frames', 'sink_slabs', 'keyframe_slabs')
                                   if getattr(self, name) is not None}
        if not self.heading:
            changed['heading_pairs'] = 0
        if not self.temporal:
            changed['patterns'] = tuple(pattern for pattern in preset.patterns if pattern[0])
        if changed.get('window_frames', 1) < 1 or min(changed.get('sink_slabs', 0), changed.get('keyframe_slabs', 0)) < 0:
            raise ValueError(f'memory.window_frames ({self.window_frames}) must be above zero, and memory.sink_slabs '
                             f'({self.sink_slabs}) and memory.keyframe_slabs ({self.keyframe_slabs}) not below')
        return replace(preset, **changed)


@dataclass(frozen=True)
class TrainConfig:
    """A training run. A null section leaves its stage out; ``init`` names a model to start from, ``autoencoder`` one of which
    only the autoencoder is used, with latents of the same kind, whatever its image size."""

    preset: str
    policy: str | None = None  # 'flow' or 'regression' instead of the preset's
    memory: Memory | None = None  # of a preset with tiles, instead of the preset's
    seed: int = 0
    init: str | None = None
    autoencoder: str | None = None
    compile: bool = True
    compare: bool = True  # near predictions before and after each stage
    checkpoint_minutes: float = 10.0
    portable: bool = False  # also keep small averaged weights; a stage without progress resumes from them
    workers: int = 0  # processes that simulate and evaluate; 0: one for each core
    weight_bits: int = 16  # of the layers' matrices in the finished model's files: 8 or 16
    data: DataConfig = DataConfig()
    vae: VaeStage | None = None
    teacher: TeacherStage | None = None
    student: StudentStage | None = None
    self_forcing: SelfForcingStage | None = None
    imitation: ImitationStage | None = None
    decoder: DecoderStage | None = None
    calibration: CalibrationConfig = CalibrationConfig()
    evaluation: EvaluationConfig | None = None

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ValueError(f'preset {self.preset!r} is unknown: choose from {", ".join(PRESETS)}')
        if self.model_preset.tile and (self.self_forcing or self.imitation):  # raises for an unknown policy
            raise ValueError(f'preset {self.preset!r} has tiles, over which the stages self_forcing and imitation do not go: '
                             'set them to null')
        if self.seed < 0:
            raise ValueError(f'seed is {self.seed}, and must not be below zero')
        require_positive(self, 'checkpoint_minutes')
        if self.weight_bits not in (8, 16):
            raise ValueError(f'weight_bits is {self.weight_bits}: choose 8 or 16')
        if self.vae is None and self.init is None and self.autoencoder is None:
            raise ValueError('vae is null, and init and autoencoder too: give the stage, or a model to take the autoencoder '
                             'from')
        if self.data.live and (self.data.folders
                               or not 1 <= self.data.begin <= min(self.data.live, self.data.episodes)):
            raise ValueError(f'data.live holds {self.data.live} of {self.data.episodes} episodes that are simulated, and '
                             f'training begins with {self.data.begin}: give no folders, and begin with 1 to as many')
        if self.data.live and self.imitation:
            raise ValueError('the stage imitation takes the features of all episodes as it begins, and data.live adds some '
                             'later: set data.live to 0, or imitation to null')
        if not 0.0 <= self.data.measured <= 1.0 or (self.data.measured and not self.data.live):
            raise ValueError(f'data.measured is {self.data.measured}: give a share of 0 to 1, of episodes that are '
                             'simulated while the model is trained on them (data.live); in a dataset, actions are commands')
        if self.student is None and self.self_forcing is not None and self.init is None:
            raise ValueError('self_forcing goes on from a student: give that stage, or a model in init')
        last = self.data.first_seed + self.data.episodes + self.data.held_back
        if not self.data.folders and not (0 <= self.data.first_seed and last <= len(TRAINING_SEEDS)):
            raise ValueError(f'data takes the seeds {self.data.first_seed} to {last - 1}, and only those below '
                             f'{len(TRAINING_SEEDS)} are for training')
        judged = TeacherOptions().clip_frames if self.evaluation or self.data.held_back else 0  # also for the calibration
        longest = max(self.clip_frames, judged)
        if not self.data.folders and self.data.frames < longest:
            raise ValueError(f'data.frames is {self.data.frames}, and the longest clip of a stage takes {longest} frames: '
                             'simulate longer episodes' + (', or set objective.clip_frames of the stages'
                                                           if longest > judged else ''))
        if self.evaluation and self.evaluation.first_seed < len(TRAINING_SEEDS):
            raise ValueError(f'evaluation.first_seed {self.evaluation.first_seed} is a seed for training: take one from '
                             f'{len(TRAINING_SEEDS)} on')

    def check_live(self, processes: int) -> None:
        """Raise ValueError if one of so many ``processes``, each of which simulates and holds its share of live episodes, has
        fewer than it begins with, or if a stage goes on with clips of those that are replaced meanwhile."""
        data, most = self.data, math.ceil(self.data.episodes / processes)
        least = data.episodes // processes
        if data.live and data.begin > least:
            raise ValueError(f'data.begin is {data.begin}, and one of {processes} processes simulates only {least} of '
                             f'{data.episodes} episodes: lower data.begin, raise data.episodes, or start fewer processes')
        held = {f'{name}.objective.{share}': getattr(stage.objective, share) for share in ('imagined_share', 'contact_share')
                for name in ('teacher', 'student') if (stage := getattr(self, name))}
        held |= {name: getattr(self, name) for name in ('self_forcing', 'decoder')}
        holding = [name for name, value in held.items() if value]
        if 0 < data.live < most and holding:
            raise ValueError(f'data.live holds {data.live} of {most} episodes of a process, of which new ones replace the '
                             f'oldest, and {", ".join(holding)} would go on with clips of these: set data.live to {most}')

    @property
    def model_preset(self) -> Preset:
        """Shape of the model."""
        preset = PRESETS[self.preset]
        if self.memory is not None:
            preset = self.memory.of(preset)
        return preset if self.policy is None else replace(preset, policy=self.policy)

    @property
    def clip_frames(self) -> int:
        """Frames of the longest clip that any stage draws."""
        stages = [stage for stage in (self.teacher, self.student, self.self_forcing, self.imitation) if stage]
        preset, decoder = self.model_preset, []
        if self.decoder:
            decoder = [preset.staying_frames + preset.window_frames + max(self.decoder.objective.ahead, 12)]
        return max([3, *decoder, *(stage.objective.clip_frames for stage in stages)])

    def of_stage(self, name: str) -> dict[str, Any]:
        """Return what a stage's result depends on, ready for JSON: if it changes, so does the result."""
        everything = asdict(self)
        if name == 'data':
            return {'preset': self.preset, 'data': everything['data']}
        until = STAGES[:STAGES.index(name) + 1]
        files = ('weight_bits',) if name in ('calibration', 'evaluation') else ()  # that of the model that is saved and judged
        return {key: everything[key] for key in ('preset', 'policy', 'memory', 'seed', 'init', 'autoencoder', *files, *until)}


def read_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """
    Read a run from YAML; ``overrides`` are ``section.key=value``, the value as YAML.

    Raises ConfigError for a file that cannot be read, a key that is unknown or missing, or a value of another kind.
    """
    return from_dict(read_yaml(path), str(path), overrides)


def from_dict(content: Mapping[str, Any], where: str, overrides: Sequence[str] = ()) -> TrainConfig:
    """Like ``read_config``, from a file's content; ``where`` names it in errors."""
    return build(TrainConfig, with_values(content, dict(map(parse_override, overrides))), where)
