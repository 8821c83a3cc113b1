"""One step of learning: AdamW under a warm-up and a cosine, clipped gradients, averaged weights."""
from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from .config import Schedule
from .ranks import Ranks


def averaged_copy(module: nn.Module) -> nn.Module:
    """A copy that is not trained, for the averaged weights."""
    return copy.deepcopy(module).eval().requires_grad_(False)


class Optimiser:
    """Trains `parameters` (those of `module`, and auxiliary ones) and lets `averaged` follow `module`."""

    def __init__(self, module: nn.Module, averaged: nn.Module, parameters: list[nn.Parameter], schedule: Schedule,
                 ranks: Ranks):
        self.module, self.averaged, self.parameters = module, averaged, parameters
        self.schedule, self.ranks = schedule, ranks
        self.adam = torch.optim.AdamW(parameters, lr=schedule.rate, weight_decay=schedule.decay, betas=(0.9, 0.99),
                                      fused=parameters[0].is_cuda)

    def set_rate(self, done: float) -> None:
        """Set the learning rate for the share of the schedule that is done."""
        # A floor under both ends: the first step moves, and the last ones still average.
        cosine = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        warm_up = min(1.0, done / self.schedule.warm_up) if self.schedule.warm_up else 1.0
        for group in self.adam.param_groups:
            group['lr'] = self.schedule.rate * max(0.02, warm_up * cosine)

    def update(self, loss: Tensor, step: int) -> None:
        """Step number `step` (from 0), down the loss averaged over all processes."""
        self.adam.zero_grad(set_to_none=True)
        loss.backward()
        self.ranks.average_gradients(self.parameters)
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.adam.step()
        # Early weights are worth nothing: let the average follow quickly at first.
        keep = min(self.schedule.average, 1.0 - 1.0 / (step + 2))
        with torch.no_grad():
            pairs = list(zip(self.averaged.parameters(), self.module.parameters()))
            torch._foreach_lerp_([a for a, _ in pairs], [p for _, p in pairs], 1.0 - keep)

    def state(self) -> dict[str, Tensor]:
        """What a later process needs to go on exactly: weights, averaged weights, moments of all parameters."""
        tensors = {f'module.{name}': value for name, value in self.module.state_dict().items()}
        tensors |= {f'averaged.{name}': value for name, value in self.averaged.state_dict().items()}
        for index, moments in self.adam.state_dict()['state'].items():
            tensors |= {f'adam.{index}.{name}': value for name, value in moments.items()}
        return tensors

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        def part(prefix: str) -> dict[str, Tensor]:
            return {name[len(prefix):]: value for name, value in tensors.items() if name.startswith(prefix)}

        self.module.load_state_dict(part('module.'))
        self.averaged.load_state_dict(part('averaged.'))
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in part('adam.').items():
            index, _, key = name.partition('.')
            moments.setdefault(int(index), {})[key] = value
        self.adam.load_state_dict({**self.adam.state_dict(), 'state': moments})
