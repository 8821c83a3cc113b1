"""What-if branches on a recording: does the branch nearest to the executed actions best predict what followed?

A model that ignores the action imagines the same future for every branch, and the best one is a matter of chance.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from worldmodel_ros.motion import MANEUVERS, maneuver
from .pictures import psnr

if TYPE_CHECKING:
    from worldmodel_ros.engine.session import Session

# The real action tells two branches apart if one is nearer to it by this much (share of the action's range).
DECISIVE = 0.1


@dataclass(frozen=True)
class Branches:
    """By the name of each maneuver: ``distance`` of its actions from the real ones (root mean square, as a share of
    each action's range) and ``psnr_db``, mean over the chunk, of the images imagined under it against the true ones."""

    distance: dict[str, float]
    psnr_db: dict[str, float]

    @property
    def nearest(self) -> str:
        """The branch nearest to the executed actions."""
        return min(self.distance, key=self.distance.__getitem__)

    @property
    def best(self) -> str:
        """The branch that best predicted what followed."""
        return max(self.psnr_db, key=self.psnr_db.__getitem__)

    @property
    def margin(self) -> float:
        """By how much the nearest branch is nearer than the second one."""
        first, second = sorted(self.distance.values())[:2]
        return second - first

    @property
    def decisive(self) -> bool:
        return self.margin >= DECISIVE

    @property
    def rank(self) -> int:
        """Place of the nearest branch among all, by their images; 1 is the first."""
        return 1 + sum(value > self.psnr_db[self.nearest] for value in self.psnr_db.values())


def imagine_branches(session: Session, actions: np.ndarray, seen: list[np.ndarray]
                     ) -> tuple[Branches, dict[str, np.ndarray]]:
    """Imagine every maneuver from the session's newest image, and compare with the images that followed, ``seen`` (K).

    ``actions`` (K, A): those executed, for a base whose actions are linear.x and angular.z. Also returns the last image
    of each branch, and the last one seen under the name ''.
    """
    span = np.subtract(session.spec.action_high, session.spec.action_low)
    distance, score, pictures = {}, {}, {'': seen[-1]}
    for name in MANEUVERS:
        done = maneuver(name, len(actions))
        frames = session.decode(session.imagine(done))
        distance[name] = float(np.sqrt(np.mean(np.square((done - actions) / span))))
        score[name] = float(np.mean([psnr(a, b) for a, b in zip(frames, seen)]))
        pictures[name] = frames[-1]
    return Branches(distance, score), pictures
