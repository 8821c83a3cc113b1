"""
A policy cloned from a planner: commands from the features of a scene forecast's network, without what it forecasts.

It reads the features of the newest frame's slots, which attend to the images and slots of the window, and not the heads that
predict where things will be. Commands are a mixture of Laplace distributions (Bishop, *Mixture Density Networks*, 1994): the
planner passes an obstacle on either side, and the average of both would steer into it.
"""
from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .checkpoint_description import ModelError
from .scene_forecast import QUERIES, SCALE, SLOTS
from .weights import read_tensors

FACTS = SLOTS + 8  # numbers about the task and the robot, see ``facts``
MODES = 4  # of the mixture
COMMAND = (0.6, 1.2)  # m/s and rad/s, scaled to 1
_TOKEN, _GOAL, _HIDDEN = 32, 128, 256  # channels


class ClonedPolicy(nn.Module):
    """Maps features of slots, and facts, to a mixture over commands."""

    def __init__(self, width: int, dropout: float = 0.1) -> None:
        """``width``: of the features."""
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.token, self.goal = nn.Linear(width, _TOKEN), nn.Linear(width, _GOAL)
        self.body = nn.Sequential(
            nn.Linear(QUERIES * _TOKEN + _GOAL + FACTS, _HIDDEN), nn.SiLU(), nn.Dropout(dropout),
            nn.Linear(_HIDDEN, _HIDDEN), nn.SiLU(), nn.Dropout(dropout), nn.Linear(_HIDDEN, 5 * MODES))

    def forward(self, features: Tensor, facts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map features (B, QUERIES, D) and facts (B, FACTS) to the modes' logits (B, MODES), their commands in units of
        COMMAND, and their log scales, (B, MODES, 2) each."""
        x = self.norm(features)
        target = torch.einsum('bs,bsd->bd', facts[:, :SLOTS], x[:, :SLOTS])
        numbers = self.body(torch.cat([self.token(x).flatten(1), self.goal(target), facts], 1))
        return numbers[:, :MODES], *numbers[:, MODES:].unflatten(1, (2, MODES, 2)).unbind(1)

    def loss(self, features: Tensor, facts: Tensor, commands: Tensor) -> Tensor:
        """Return the negative log-likelihood of ``commands`` (B, 2), m/s and rad/s."""
        logits, means, scales = self(features, facts)
        scales = scales.clamp(-4.0, 1.0)
        error = (commands / commands.new_tensor(COMMAND))[:, None] - means
        each = -(error.abs() * (-scales).exp() + scales).sum(-1)
        return -torch.logsumexp(F.log_softmax(logits, -1) + each, -1).mean()

    @torch.inference_mode()
    def command(self, features: np.ndarray, facts: np.ndarray) -> np.ndarray:
        """Return the command (2,), m/s and rad/s, of the likeliest mode for features (QUERIES, D) and facts (FACTS,)."""
        logits, means, _ = self(*(torch.from_numpy(np.asarray(part, np.float32))[None] for part in (features, facts)))
        return means[0, int(logits[0].argmax())].numpy() * np.array(COMMAND)

    @classmethod
    def load(cls, file: Path) -> ClonedPolicy:
        """Read weights from a safetensors file. Raises ModelError if they are missing or do not fit."""
        if not file.is_file():
            raise ModelError(f'no cloned policy at {file}: train one with python -m worldmodel_ros.train.scene.cloning')
        state = {name: value.float() for name, value in read_tensors(file).items()}
        try:
            policy = cls(len(state['norm.weight']))
            policy.load_state_dict(state)
        except (KeyError, RuntimeError, TypeError) as error:
            raise ModelError(f'the weights in {file} are of no cloned policy: {error}') from error
        return policy.eval()


def facts(target: int, apart: float, presence: float, place: np.ndarray, twist: np.ndarray, previous: np.ndarray
          ) -> np.ndarray:
    """Return float32 (FACTS,): the slot of the ``target``; the distance ``apart`` in m to keep from it, 0 for a touch; its
    ``presence`` and present ``place`` (2,), m in base_link, also when out of view; the wheels' ``twist`` (2,); and the
    ``previous`` command (2,)."""
    told = np.zeros(FACTS, np.float32)
    told[target] = 1.0
    told[SLOTS:] = (apart, presence, *np.asarray(place) / SCALE, *np.asarray(twist) / COMMAND, *np.asarray(previous) / COMMAND)
    return told
