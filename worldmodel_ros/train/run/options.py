"""Options of the stages' objectives; a stage's steps and learning rate belong to its loop."""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def require_counts(options: Any, *names: str) -> None:
    """Raise ValueError for fields that must be one or more and are not."""
    wrong = [f'{name} ({getattr(options, name)})' for name in names if getattr(options, name) < 1]
    if wrong:
        raise ValueError(f'{", ".join(wrong)} must be above zero')


def require_shares(options: Any, *names: str) -> None:
    """Raise ValueError for fields that must be from 0 to 1, or null, and are not."""
    require(options, names, lambda value: 0.0 <= value <= 1.0, 'from 0 to 1')


def require_amounts(options: Any, *names: str) -> None:
    """Raise ValueError for fields that must be finite and not below zero, or null, and are not."""
    require(options, names, lambda value: 0.0 <= value < math.inf, 'zero or more, and finite')


def require_positive(options: Any, *names: str) -> None:
    """Raise ValueError for fields that must be finite and above zero, or null, and are not."""
    require(options, names, lambda value: 0.0 < value < math.inf, 'above zero, and finite')


def require(options: Any, names: tuple[str, ...], accepted: Callable[[float], bool], what: str) -> None:
    """Raise ValueError for fields that are not null and not ``accepted``: they must be ``what``. NaN must fail the test."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not accepted(value):
            raise ValueError(f'{name} is {value}: it must be {what}')


@dataclass(frozen=True)
class TeacherOptions:
    """Stage ``teacher``: flow matching, imitation and outcomes on recorded clips.

    batch: clips per step. clip_frames: observed frames of each. chunks: noisy chunks per clip.
    full_windows: share of these with a whole window before them, if the clips are long enough; the others see less, like a
    session that has just begun.
    context_noise: largest deviation of the noise on committed frames, in half of the clips, so that a session which
    continues from its own predictions stays in the trained range.
    flow_weight: ``ramp`` weights the error of the predicted clean latents by 0.9 tau + 0.1; ``velocity`` takes the error of
    the flow's velocity, with a weight of at most 100.
    heads_weight, pose_weight: of the losses other than the flow's.
    search: the policy learns to search for a goal that its window does not show, instead of imitating the expert, who knows
    where it is.
    contact_share: of the clips, which hold a frame in contact, all such frames equally likely, with a window before it.
    Of the chunks in these, 71 % begin in contact and 14 % come to one; in the other clips of the usual episodes 8 and 3 %.
    blind_share: of the batches whose last chunk sees no context, so that the network also models images without context, as
    the distribution matching of the stage ``self_forcing`` needs of the teacher.
    served_share: of the chunks, which learn the served steps (half steps from noise and from tau 1/2, whole steps) towards the
    truth, instead of the flow: in a nearly deterministic world, that makes two steps and one usable long before a flow is worth
    distilling.
    pieces: number of episodes that make up one clip in the first ``pieces_until`` of the schedule, each its own short session:
    more rooms per step, short attention, and one clip shape for the compiler.
    recall_share: of the chunks of whole clips, which begin where all robots of a batch turn back to what left their view, so
    that the window is worth attending to.
    own_halfway: of the batches after the first half of the schedule, whose half steps from tau 1/2 start where the model's own
    first ones end, as at run time; one more pass without gradients.
    imagined_share: of the batches after the first half of the schedule, in whose clips the model's own predictions follow
    observed frames; the truth stays the target. imagined_depth: batches that such clips serve, and the depth of their errors in
    the end, in chunks, see objectives/imagined.py; each takes two more passes without gradients. imagined_distance: mean
    squared distance of the latents, of unit variance, between the imagined frames before a chunk and the true ones, at which
    the truth has half its weight as this chunk's target; 0: all chunks weigh the same.
    """

    batch: int = 96
    clip_frames: int = 28
    chunks: int = 4
    full_windows: float = 0.5
    context_noise: float = 0.25
    flow_weight: str = 'ramp'
    heads_weight: float = 0.5
    pose_weight: float = 0.0
    blind_share: float = 0.0
    search: bool = False
    contact_share: float = 0.0
    served_share: float = 0.0
    pieces: int = 1
    pieces_until: float = 0.5
    recall_share: float = 0.0
    own_halfway: float = 0.0
    imagined_share: float = 0.0
    imagined_depth: int = 16
    imagined_distance: float = 0.0

    def __post_init__(self):
        require_counts(self, 'batch', 'clip_frames', 'chunks', 'imagined_depth')
        require_shares(self, 'full_windows', 'blind_share', 'contact_share', 'served_share', 'pieces_until', 'recall_share',
                       'own_halfway', 'imagined_share')
        require_amounts(self, 'context_noise', 'heads_weight', 'pose_weight', 'imagined_distance')
        if self.pieces < 1 or self.clip_frames % self.pieces or self.chunks % self.pieces:
            raise ValueError(f'pieces is {self.pieces}: it must divide clip_frames ({self.clip_frames}) and chunks '
                             f'({self.chunks})')
        if self.flow_weight not in ('ramp', 'velocity'):
            raise ValueError(f"flow_weight is {self.flow_weight!r}: choose 'ramp' or 'velocity'")


@dataclass(frozen=True)
class StudentOptions(TeacherOptions):
    """Stage ``student``: steps of length 1/2 and 1 next to the flow.

    substeps: of the flow, which make the target of a half step.
    bootstrap: take them with the student's own averaged weights instead of the frozen teacher's.
    truth_weight: share of the true latents in the targets that end at clean ones; a simulated episode is nearly
    deterministic, and the truth is the better teacher wherever it is known.
    half_truth_weight: the same for the second of two half steps, which long rollouts consist of; None: truth_weight.
    The mean of uncertain futures is blurred, and blur compounds over a rollout.
    """

    substeps: int = 4
    bootstrap: bool = False
    truth_weight: float = 0.3
    half_truth_weight: float | None = None

    def __post_init__(self):
        super().__post_init__()
        require_counts(self, 'substeps')
        require_shares(self, 'truth_weight', 'half_truth_weight')


@dataclass(frozen=True)
class ImitationOptions:
    """Stage ``imitation``: the policy alone, on a frozen network's features of the episodes.

    batch: clips per step. clip_frames: frames of each, all but a chunk of which are learned from: the fewer, the more
    clips in the same time. search: as in TeacherOptions.
    keep: where a goal was seen, learn the policy's own plans from before the stage instead of the expert's: then only
    the search is new, and what longer training has taught stays (learning without forgetting, Li and Hoiem 2016).
    """

    batch: int = 64
    clip_frames: int = 12
    search: bool = True
    keep: bool = False

    def __post_init__(self):
        require_counts(self, 'batch', 'clip_frames')
        if self.keep and not self.search:
            raise ValueError('keep without search leaves nothing to learn: set one of them to the other value')


@dataclass(frozen=True)
class SelfForcingOptions(StudentOptions):
    """Stage ``self_forcing``: the student's losses on what the student itself has imagined.

    recorded_share: of the clips of a batch, which are recorded ones as in the previous stage; the others are crops of
    roll-outs.
    clip_frames: frames of a roll-out, a window of observed ones and then imagined ones.
    crop_frames: of these, the frames that one step trains on. reuse: steps per roll-out.
    bootstrap: by default the targets of half steps come from the student's own flow here: unlike the frozen teacher's,
    it has learned from the truth under imagined contexts.
    one_step_share: of the roll-outs that take one step per chunk; the others take two.
    tether_share: of these others' clips, which are held near the true episode, half-way through every chunk and each by its
    own strength: contexts with the student's flaws whose true continuation is known, however old they are.
    truth_distance: mean squared distance of the latents, of unit variance, between imagined and true frames, at which
    the truth still has half its weight.
    dmd_weight: of the distribution matching on long roll-outs (see dmd.py), 0 for none; dmd_frames: their length;
    dmd_rate: learning rate of the network that models the imagined images.
    """

    batch: int = 96
    recorded_share: float = 0.5
    clip_frames: int = 64
    crop_frames: int = 28
    reuse: int = 4
    bootstrap: bool = True
    one_step_share: float = 0.25
    tether_share: float = 0.75
    truth_weight: float = 0.3
    truth_distance: float = 0.15
    dmd_weight: float = 0.0
    dmd_frames: int = 400
    dmd_rate: float = 2e-4

    def __post_init__(self):
        super().__post_init__()
        require_counts(self, 'crop_frames', 'reuse', 'dmd_frames')
        require_shares(self, 'recorded_share', 'one_step_share', 'tether_share')
        require_amounts(self, 'dmd_weight')
        require_positive(self, 'truth_distance', 'dmd_rate')
        if self.contact_share:
            raise ValueError('contact_share is for the stages teacher and student: rollouts begin anywhere; set it to 0')


@dataclass(frozen=True)
class DecoderOptions:
    """Stage ``decoder``: images of imagined latents, by the autoencoder's decoder alone.

    batch: images per step. streams: of frames that are imagined at a time, ``ahead`` each (whole chunks), after a window of
    observed ones; reuse: steps that draw from these. one_step_share: of the times, in one step per chunk instead of two.
    Over tiles, ``ahead`` is the length of the clips' imagined end, at most; they serve for as many times as that has chunks,
    get a chunk deeper each time, and every fourth time takes one step per chunk (objectives/imagined.py).
    encoded_share: of the images, which are decoded from the encoded true frames instead.
    aim, encoded_aim: target energy of details, relative to the true images, for imagined and for encoded ones;
    energy_weight: of the error of that energy.
    adversary_weight: of its gradient with respect to the images, relative to that of their error; adversary_rate: its learning
    rate; adversary_width: channels of its first layer; camera_noise: largest deviation of the camera's noise, of 255.
    details_fade: energy and adversary count less farther ahead, too, as the pixel error always does: where little is known, an
    image stays blurred rather than show details in wrong places.
    judge_s: seconds between two evaluations on held-back episodes; the stage keeps the best decoder.
    """

    batch: int = 256
    streams: int = 512
    ahead: int = 20
    reuse: int = 40
    one_step_share: float = 0.25
    encoded_share: float = 0.3
    aim: float = 0.92
    encoded_aim: float = 1.03
    energy_weight: float = 0.05
    adversary_weight: float = 2.0
    adversary_rate: float = 4e-4
    adversary_width: int = 32
    camera_noise: float = 3.0
    details_fade: bool = False
    judge_s: float = 20.0

    def __post_init__(self):
        require_counts(self, 'batch', 'streams', 'ahead', 'reuse', 'adversary_width')
        require_shares(self, 'one_step_share', 'encoded_share')
        require_amounts(self, 'energy_weight', 'adversary_weight', 'camera_noise', 'judge_s')
        require_positive(self, 'aim', 'encoded_aim', 'adversary_rate')
