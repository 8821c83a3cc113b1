"""Muon (Jordan et al. 2024) with matrices of one shape orthogonalised together: a layer's matrices are small, and a GPU would
wait for the host to launch them one by one."""
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn


class BatchedMuon(torch.optim.Muon):
    """``torch.optim.Muon``, with its options, state and results, in a few launches per matrix shape."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group['params']:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                self._update(group, shape, parameters)
        return loss

    def _update(self, group: dict, shape: torch.Size, parameters: list[nn.Parameter]) -> None:
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            if 'momentum_buffer' not in self.state[parameter]:
                self.state[parameter]['momentum_buffer'] = torch.zeros_like(parameter.grad)
        buffers = [self.state[parameter]['momentum_buffer'] for parameter in parameters]
        torch._foreach_lerp_(buffers, gradients, 1.0 - group['momentum'])
        updates = torch._foreach_lerp(gradients, buffers, group['momentum']) if group['nesterov'] else buffers
        moved = orthogonalised(torch.stack(updates), group['ns_coefficients'], group['ns_steps'], group['eps'])
        torch._foreach_mul_(parameters, 1.0 - group['lr'] * group['weight_decay'])
        # In the parameters' memory layout: otherwise each is a separate launch.
        moved = moved.to(parameters[0].dtype, memory_format=torch.contiguous_format)
        torch._foreach_add_(parameters, list(moved.unbind()),
                            alpha=-group['lr'] * _scale(group['adjust_lr_fn'], shape))


def orthogonalised(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return matrices (N, rows, columns) with singular values near 1, in bfloat16: ``steps`` of the quintic Newton-Schulz
    iteration a X + (b X X^T + c (X X^T)^2) X, on the shorter side."""
    a, b, c = coefficients
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _scale(kind: str | None, shape: torch.Size) -> float:
    """Factor of the learning rate for matrices of a shape, as of torch's ``adjust_lr_fn``."""
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if kind == 'match_rms_adamw' else math.sqrt(max(1.0, rows / columns))
