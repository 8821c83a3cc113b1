"""The processes of one run, by torch.distributed: one for each GPU, with the same weights and different clips."""
from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
# Before there is a group: defaults of its functions would keep the group, and with it threads that abort an ending process.
import torch.distributed.nn
from torch import Tensor

from .reading import ConfigError

BUCKET_BYTES = 32 * 2 ** 20  # gradients sent together: few calls, and the first is sent while others are packed
TIMEOUT = timedelta(hours=2)  # the others wait while the first process simulates the data


def usable_device(name: str) -> str:
    """Return ``name``, or for auto cuda if there is a GPU, else cpu. Raises ConfigError if this machine has no such device."""
    if name == 'auto':
        return 'cuda' if torch.cuda.is_available() else 'cpu'
    kind, _, number = name.partition(':')
    if kind not in ('cpu', 'cuda') or not (number or '0').isdecimal():
        raise ConfigError(f'--device {name}: give cuda, cpu or auto')
    if kind == 'cuda' and torch.cuda.device_count() <= int(number or 0):
        raise ConfigError(f'--device {name}: torch sees {torch.cuda.device_count()} GPUs here: give --device cpu, or see '
                          '"worldmodel doctor"')
    return name


def require_devices(name: str, count: int) -> None:
    """Raise ConfigError if this machine has not as many GPUs as there are to be processes; several processes can share CPUs."""
    there = torch.cuda.device_count()
    if usable_device(name).startswith('cuda') and count > there:
        raise ConfigError(f'--gpus {count}: torch sees {there} here: give at most that many, or --device cpu')


@dataclass(frozen=True)
class Ranks:
    """This process, number ``rank`` of ``count``; a single process needs no torch.distributed."""

    device: torch.device
    rank: int = 0
    count: int = 1

    @classmethod
    def join(cls, device: str) -> Ranks:
        """Join the processes that torchrun started, or run alone; ``device`` is cuda, cpu or auto. Raises ConfigError."""
        device = usable_device(device)
        count = int(os.environ.get('WORLD_SIZE', '1'))
        if count == 1:
            return cls(torch.device(device))
        if device == 'cuda':
            device = f'cuda:{os.environ["LOCAL_RANK"]}'
            torch.cuda.set_device(device)
        # Barriers and agreements need no GPU; gradients on a GPU use NCCL.
        dist.init_process_group('cpu:gloo,cuda:nccl' if device.startswith('cuda') else 'gloo', timeout=TIMEOUT)
        return cls(torch.device(device), dist.get_rank(), count)

    def leave(self) -> None:
        """Leave the process group."""
        if self.count > 1:
            dist.destroy_process_group()

    @property
    def main(self) -> bool:
        """Whether this process is the one that logs and saves."""
        return self.rank == 0

    def agree(self, values: Sequence[float]) -> list[float]:
        """Return the maximum of each value over all processes; waits for all."""
        if self.count == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()

    def wait(self) -> None:
        """Wait for all processes."""
        self.agree([0.0])

    def share_weights(self, tensors: Iterable[Tensor]) -> None:
        """Give all processes the first one's values."""
        if self.count > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), 0)

    def average_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Average the gradients over all processes; the same parameters must have one in every process."""
        if self.count == 1:
            return
        sent = []
        for bucket in _buckets([p.grad for p in parameters if p.grad is not None]):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
        for bucket, flat, work in sent:
            work.wait()
            parts = flat.div_(self.count).split([gradient.numel() for gradient in bucket])
            torch._foreach_copy_(bucket, [part.view_as(g) for part, g in zip(parts, bucket)])


def _buckets(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = [[]]
    size = 0
    for gradient in gradients:
        if buckets[-1] and (size + gradient.nbytes > BUCKET_BYTES or gradient.dtype != buckets[-1][0].dtype):
            buckets.append([])
            size = 0
        buckets[-1].append(gradient)
        size += gradient.nbytes
    return [bucket for bucket in buckets if bucket]
