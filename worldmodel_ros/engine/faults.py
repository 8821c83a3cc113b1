"""Fault injection into an engine's network calls, to test how the rest of the system reacts."""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .backends.protocol import Backend


@dataclass
class Faults:
    """
    May be changed at any time, from any thread.

    ``delay``: added to every network call [s]. ``nan``: the policy returns NaN. ``fail``: every network call raises. ``cuda``:
    every network call raises what PyTorch does for a CUDA error of that name; empty for none.
    """

    delay: float = 0.0
    nan: bool = False
    fail: bool = False
    cuda: str = ''


class InjectedFault(RuntimeError):
    """Raised by a network call because ``Faults.fail`` is set."""


class FaultyBackend:
    """
    A back end with ``faults`` in its network calls; everything else is the wrapped back end's.

    It wraps the back end rather than the session, so that a delay is measured and predicted like any other slowness.
    """

    def __init__(self, backend: Backend, faults: Faults) -> None:
        self._backend = backend
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def run(self, network: str, batch: Sequence[tuple]) -> list:
        return self._faulty(self._backend.run, network, batch)

    def launch(self, network: str, batch: Sequence[tuple]) -> list:
        return self._faulty(self._backend.launch, network, batch)

    def _faulty(self, run: Callable[[str, Sequence[tuple]], list], network: str, batch: Sequence[tuple]) -> list:
        if self._faults.delay > 0.0:
            time.sleep(self._faults.delay)
        if self._faults.fail:
            raise InjectedFault('fault_raise is set')
        if self._faults.cuda:
            raise RuntimeError(f'CUDA error: {self._faults.cuda}')
        outputs = run(network, batch)
        if self._faults.nan and network == 'policy':
            return [plans * np.float32(np.nan) for plans in outputs]  # arrays, or a device's tensors
        return outputs
