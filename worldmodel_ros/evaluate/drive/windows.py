"""Runs a model along a recording: per-tick predictions versus ground truth.

At each tick the session commits the image, plans for every goal, and imagines the next chunk under the actions
that were *really executed* afterwards. That is the prediction that can be judged: what the model would have done
instead would have led elsewhere. So a tick waits here until the ticks that follow it are known; nothing else is
kept.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from worldmodel_ros.inputs.ticks import NS
from .branches import Branches, imagine_branches
from .pictures import is_moving, psnr, ssim

if TYPE_CHECKING:
    from worldmodel_ros.bags.drive import Tick
    from worldmodel_ros.engine.engine import Engine
    from worldmodel_ros.engine.session import Future, Session

# A later image stands for a horizon if its stamp is nearer to that than to any other one.
PACE_TOLERANCE = 0.5  # of the model's step period


@dataclass(frozen=True)
class Window:
    """The results of one tick. Lists over horizons hold those whose image came in time, at most a chunk's.

    ``actions`` (n, A): executed in the steps after the tick (SI units), under which the future was imagined; empty
    where the bag has no actions, and then nothing is imagined. ``moving``: whether the action that led to the
    horizon's image moves the robot. ``psnr_db``, ``ssim``: of the predicted images; ``copy_...``: of the tick's own
    image in their place. ``reconstruction_db``: of the tick's image through the autoencoder alone, which no
    prediction can beat. ``surprise_db``: by how much the image that was predicted for this tick one step before is
    worse than that; None where there was no such prediction. ``plans``: the first command of the plan for each goal.
    ``branches``: see there.
    """

    index: int
    episode: int
    stamp_ns: int
    time_s: float  # since the first tick of the recording
    goal: str
    executed: list[float]
    actions: list[list[float]]
    moving: list[bool]
    psnr_db: list[float]
    copy_psnr_db: list[float]
    ssim: list[float]
    copy_ssim: list[float]
    reconstruction_db: float
    surprise_db: float | None
    plans: dict[str, list[float]]
    branches: Branches | None = None

    def to_dict(self) -> dict:
        return _rounded(asdict(self))


@dataclass(frozen=True)
class Scene:
    """A window with its images, uint8 (H, W, 3): the tick's, the predicted and the seen ones of the same horizons.

    ``surprise`` is how badly the first of them was predicted [dB], known one tick later than the window itself;
    ``branches``: the last image of each imagined branch, and the true one under the name ''.
    """

    window: Window
    observed: np.ndarray
    predicted: list[np.ndarray]
    seen: list[np.ndarray]
    branches: dict[str, np.ndarray]
    surprise: float | None


def scenes(engine: Engine, ticks: Iterable[Tick], has_actions: bool = True) -> Iterator[Scene]:
    """Yield the scene of every tick of a recording, in order; the same ones bit for bit on one machine, for the same ticks.

    ``has_actions``: whether the ticks' actions are known; without them nothing can be imagined, and only the
    autoencoder and the plans are judged.
    """
    runner = _Runner(engine, has_actions)
    ahead: deque[Tick] = deque()
    held: Scene | None = None  # waits for its surprise
    for tick in _and_then_none(ticks, engine.spec.chunk_frames):
        ahead.append(tick)
        if len(ahead) <= engine.spec.chunk_frames:
            continue
        now = ahead.popleft()
        scene = runner.run(now, [later for later in ahead if later and later.episode == now.episode])
        if held:
            # What was predicted for an image is judged with the image's own tick.
            yield replace(held, surprise=scene.window.surprise_db)
        held = scene
    if held:
        yield held


def _and_then_none(ticks: Iterable[Tick], count: int) -> Iterator[Tick | None]:
    yield from ticks
    yield from [None] * count


class _Runner:
    """The session along the recording, and what the last tick predicted."""

    def __init__(self, engine: Engine, has_actions: bool) -> None:
        self._session: Session = engine.open_session()
        self._spec, self._has_actions = engine.spec, has_actions
        self._episode: int | None = None
        self._first_stamp: int | None = None
        self._latent: np.ndarray | None = None  # of the last tick
        self._foreseen: float | None = None     # dB of what the last tick predicted for this one
        self._count = 0                         # ticks of this episode

    def run(self, tick: Tick, later: list[Tick]) -> Scene:
        if tick.episode != self._episode:
            self._session.reset()
            self._episode, self._latent, self._foreseen, self._count = tick.episode, None, None, 0
        if self._first_stamp is None:
            self._first_stamp = tick.stamp_ns
        session, size = self._session, self._spec.chunk_frames
        session.observe(tick.image, tick.executed)
        plans = {goal: session.plan(goal)[0] for goal in self._spec.goals}
        known = np.array([t.executed for t in later], np.float32).reshape(-1, self._spec.actions)
        if not self._has_actions:
            known = known[:0]
        # A chunk that reaches beyond the episode repeats its last action; that part is not used.
        chunk = np.concatenate([known, np.repeat(known[-1:], size - len(known), 0)]) if len(known) else \
            np.tile(tick.executed, (size, 1))
        future = session.imagine(chunk)
        reconstruction = psnr(self._reconstruct(future), tick.image)
        surprise = None if self._foreseen is None else reconstruction - self._foreseen
        seen = [t.image for t in self._on_pace(tick, later)][:len(known)]
        predicted = list(session.decode(future)[:len(seen)]) if seen else []
        branches, pictures = None, {}
        if len(seen) == size and self._count % size == 0:
            branches, pictures = imagine_branches(session, known, seen)
        window = Window(
            tick.index, tick.episode, tick.stamp_ns, (tick.stamp_ns - self._first_stamp) / NS, tick.goal,
            tick.executed.tolist(), known.tolist(), [is_moving(*action) for action in known[:len(seen)].tolist()],
            [psnr(a, b) for a, b in zip(predicted, seen)], [psnr(tick.image, b) for b in seen],
            [ssim(a, b) for a, b in zip(predicted, seen)], [ssim(tick.image, b) for b in seen],
            reconstruction, surprise, {goal: plan.tolist() for goal, plan in plans.items()}, branches)
        self._latent, self._count = future.before, self._count + 1
        self._foreseen = window.psnr_db[0] if seen else None
        return Scene(window, tick.image, predicted, seen, pictures, None)

    def _on_pace(self, tick: Tick, later: list[Tick]) -> list[Tick]:
        """The later ticks up to the first that is off the model's step period."""
        period = self._spec.step_period * NS
        kept = []
        for steps, other in enumerate(later, start=1):
            if abs(other.stamp_ns - tick.stamp_ns - steps * period) > PACE_TOLERANCE * period:
                break
            kept.append(other)
        return kept

    def _reconstruct(self, future: Future) -> np.ndarray:
        """The newest image, encoded and decoded; ``future`` follows it."""
        before = future.before if self._latent is None else self._latent
        return self._session.decode(replace(future, latents=future.before[None], before=before, frames=None))[0]


def _rounded(value, digits: int = 5):
    """Round the numbers of nested lists and dicts, which keeps the files small."""
    if isinstance(value, float):
        return round(value, digits)
    if isinstance(value, dict):
        return {key: _rounded(v, digits) for key, v in value.items()}
    return [_rounded(v, digits) for v in value] if isinstance(value, (list, tuple)) else value
