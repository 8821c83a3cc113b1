"""What the stages share: a schedule over a budget of time, averaged weights, gradient clipping."""
from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

WARM_UP = 0.03  # share of the budget


class Trainer:
    """AdamW under a warm-up and cosine schedule that ends when the budget of seconds ends, with averaged weights."""

    def __init__(self, parameters: list[nn.Parameter], module: nn.Module, seconds: float, rate: float,
                 decay: float = 0.01, average: float = 0.999):
        self.module = module
        self.averaged = copy.deepcopy(module).eval().requires_grad_(False)
        self.optimiser = torch.optim.AdamW(parameters, lr=rate, weight_decay=decay, betas=(0.9, 0.99),
                                           fused=parameters[0].is_cuda)
        self.parameters, self.seconds, self.rate = parameters, seconds, rate
        self.average = average
        self.step_count = 0

    def steps(self, limit: int | None = None) -> Iterator[int]:
        """Counts steps until the budget, or ``limit`` steps, are spent. The clock starts after the first two steps,
        since these pay for compilation."""
        start = time.monotonic()
        while True:
            if self.step_count == 2:
                start = time.monotonic()
            done = (time.monotonic() - start) / self.seconds if limit is None else self.step_count / limit
            if done >= 1.0 and self.step_count > 2:
                return
            # A floor under both ends: the first step moves, and the last ones still average.
            scale = max(0.02, min(1.0, done / WARM_UP) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))
            for group in self.optimiser.param_groups:
                group['lr'] = self.rate * scale
            yield self.step_count
            self.step_count += 1

    def update(self, loss: Tensor) -> None:
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimiser.step()
        # Early weights are worth nothing: let the average follow quickly at first.
        keep = min(self.average, 1.0 - 1.0 / (self.step_count + 2))
        with torch.no_grad():
            pairs = list(zip(self.averaged.parameters(), self.module.parameters()))
            torch._foreach_lerp_([a for a, _ in pairs], [p for _, p in pairs], 1.0 - keep)
