"""Inputs and outputs of the service of many sessions. Times are steady, in s, unless noted."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from worldmodel_ros.model.presets import Preset
from worldmodel_ros.serving.scheduler import Tier

if TYPE_CHECKING:
    from worldmodel_ros.engine.futures import Future


class SessionError(RuntimeError):
    """A call for a session that is not open, or in a state that does not allow it; the text says which."""


class ServiceFull(RuntimeError):
    """No more sessions can be opened."""


@dataclass(frozen=True, eq=False)
class Tick:
    """
    A frame, uint8 (H, W, 3) RGB, to be answered by ``due``. The service reads ``image`` until the Reply.

    ``executed`` (A,), SI units: mean action since the previous Tick of the session, whatever happened to that one.
    ``sequence`` increases within an episode; a Tick of another ``episode`` begins a new one. ``stamp`` [ns] of the
    observation is echoed, and is what a question refers to. Without a ``goal`` the future of standing still is imagined.
    ``prefix`` (n, A): actions that will be executed before the answer can take over. If ``answer`` is False, the frame is
    taken in when there is time, and the reply is a refusal. ``plan`` (K, A): the robot's own decision, whose future is
    imagined; None: the service plans.
    """

    image: np.ndarray
    executed: np.ndarray
    due: float
    sequence: int
    stamp: int = 0
    episode: int = 0
    goal: str = ''
    prefix: np.ndarray | None = None
    answer: bool = True
    spacing: float = 0.0  # s between the camera's images; 0: no choice of another image
    moved: float = 0.0    # s by which ticks have moved earlier since the session began, as Replies offered
    plan: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Reply:
    """
    The answer to a Tick: ``plan`` float32 (K, A), the first action for now, or None for tier NONE: refused.

    ``reason`` says why it is not the best tier. ``predicted`` is the typical finish predicted at arrival, None where nothing
    was promised; ``finish`` the real one. ``queue`` [s] from arrival to the first unit; ``timings`` [s]: observe, denoise and
    total. ``collision_risk`` (K,) and ``progress`` [m] by goal are those of the imagined plan. ``failed``: the model failed
    on it; the session begins again with the next Tick. ``earlier`` [s]: the robots' ticks would fit better if this robot's
    came earlier by this much (``scheduler.phases``).
    """

    session: int
    sequence: int
    stamp: int
    episode: int
    tier: Tier
    plan: np.ndarray | None
    reason: str
    predicted: float | None
    finish: float
    queue: float = 0.0
    timings: dict[str, float] = field(default_factory=dict)
    collision_risk: np.ndarray | None = None
    progress: dict[str, float] = field(default_factory=dict)
    failed: bool = False
    earlier: float = 0.0


@dataclass(frozen=True, eq=False)
class Picture:
    """The imagined future of a reply's plan, with its frames; ``seconds`` that decoding them took."""

    reply: Reply
    future: Future
    seconds: float


class ServiceListener(Protocol):
    """
    Receives the results of one session. Called one at a time, from the service's thread, or from the thread that calls
    ``tick`` for refusals at arrival. Must return quickly, and must not call back.
    """

    def replied(self, reply: Reply) -> None:
        """A Tick was answered."""

    def pictured(self, picture: Picture) -> None:
        """The images of an earlier reply were decoded."""

    def failed(self, reason: str, error: Exception) -> None:
        """Something of this session failed and was given up."""


def check(tick: Tick, spec: Preset) -> None:
    """Raise ValueError if a tick does not fit a model."""
    image, executed = tick.image, np.asarray(tick.executed)
    if image.shape != (*spec.image_size, 3) or image.dtype != np.uint8:
        raise ValueError(f'image must be uint8 {(*spec.image_size, 3)} (height, width, RGB), not {image.dtype} '
                         f'{image.shape}')
    if executed.shape != (spec.actions,) or not np.isfinite(executed).all():
        raise ValueError(f'executed must be {spec.actions} finite numbers, {", ".join(spec.action_names)}; not '
                         f'{executed}')
    if tick.goal and tick.goal not in spec.goals:
        raise ValueError(f'unknown goal {tick.goal!r}; this model knows {", ".join(spec.goals)}')
    if tick.prefix is not None:
        given = np.asarray(tick.prefix)
        if given.shape[1:] != (spec.actions,) or len(given) >= spec.chunk_frames or not np.isfinite(given).all():
            raise ValueError(f'prefix must be finite (n, {spec.actions}), n below {spec.chunk_frames}; not '
                             f'{given.shape}')
    if tick.plan is not None:
        plan, wanted = np.asarray(tick.plan), (spec.chunk_frames, spec.actions)
        if plan.shape != wanted or not np.isfinite(plan).all():
            raise ValueError(f'plan must be finite {wanted}, not {plan.shape}')
    if not np.isfinite(tick.due):
        raise ValueError(f'due must be a steady time in s, not {tick.due}')


def require_alike(specs: list[Preset]) -> None:
    """Raise ValueError if one model cannot stand in for another: they must be for the same robot."""
    for name in ('action_names', 'action_low', 'action_high', 'goals', 'step_period', 'chunk_frames'):
        values = [getattr(spec, name) for spec in specs]
        if any(value != values[0] for value in values):
            raise ValueError(f'the smaller model cannot stand in: {name} is {values[1]}, and {values[0]} of the best '
                             f'one')
    (height, width), *others = [spec.image_size for spec in specs]
    if any(height * w != width * h for h, w in others):
        raise ValueError(f'the smaller model cannot stand in: its pictures are {others[0]}, of another shape than '
                         f'{(height, width)}')
