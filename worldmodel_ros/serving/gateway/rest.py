"""What the HTTP endpoints for tools report: readiness, metrics, the model, and an account's sessions."""
from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worldmodel_ros.serving.client.link import Rejected, Unavailable, ask_status

_FRESH = 1.0  # s that an answer of the engine is reused
_COUNTS = ('late', 'failed', 'refused_at_arrival', 'given_up')  # of the engine's service
_GAUGES = ('sessions', 'busy', 'waiting')
_BUCKETS = (0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)  # s


class EngineStatus:
    """The status of the engine's server, requested at most once a second."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._asked = -math.inf
        self._known: dict[str, Any] | None = None
        self._asking = asyncio.Lock()

    def forget(self) -> None:
        """Have the next ``get`` ask again."""
        self._asked = -math.inf

    async def get(self) -> dict[str, Any] | None:
        """Return the status; None: the engine does not answer."""
        async with self._asking:
            if time.monotonic() - self._asked >= _FRESH:
                try:
                    self._known = await asyncio.to_thread(ask_status, self._socket)
                except Rejected:
                    pass  # it is there, and has no room for another connection: what was known still holds
                except Unavailable:
                    self._known = None
                self._asked = time.monotonic()
            return self._known


class Histogram:
    """A histogram of times, as in Prometheus."""

    def __init__(self) -> None:
        self._counts, self._sum = [0] * (len(_BUCKETS) + 1), 0.0

    def add(self, seconds: float) -> None:
        """Count one time."""
        self._counts[bisect_left(_BUCKETS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> list[str]:
        """Return the lines of a metric."""
        total, out = 0, [f'# TYPE {name} histogram']
        for bound, count in zip((*_BUCKETS, '+Inf'), self._counts, strict=True):
            total += count
            out.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*out, f'{name}_sum {self._sum:.6f}', f'{name}_count {total}']


def metrics(counts: Mapping[str, int], refusals: Counter[str], gauges: Mapping[str, float], times: Histogram,
            engine: Mapping[str, Any] | None) -> str:
    """Return the text of /metrics: counts of the sessions, of refusals by kind, and of the engine if it answers."""
    lines = ['# TYPE worldmodel_gateway_ticks_total counter']
    tiers = {name.removeprefix('tier_'): n for name, n in counts.items() if name.startswith('tier_')}
    lines += [f'worldmodel_gateway_ticks_total{{tier="{tier}"}} {n}' for tier, n in sorted(tiers.items())]
    for name in ('late', 'repeated'):
        lines += [f'# TYPE worldmodel_gateway_{name}_total counter',
                  f'worldmodel_gateway_{name}_total {counts.get(name, 0)}']
    lines.append('# TYPE worldmodel_gateway_refused_total counter')
    lines += [f'worldmodel_gateway_refused_total{{kind="{kind}"}} {n}' for kind, n in sorted(refusals.items())]
    for name, value in gauges.items():
        lines += [f'# TYPE worldmodel_gateway_{name} gauge', f'worldmodel_gateway_{name} {value:g}']
    lines += times.lines('worldmodel_gateway_tick_seconds')
    lines += ['# TYPE worldmodel_engine_up gauge', f'worldmodel_engine_up {int(engine is not None)}']
    service = (engine or {}).get('service', {})
    if service.get('tiers'):
        lines.append('# TYPE worldmodel_engine_ticks_total counter')
        lines += [f'worldmodel_engine_ticks_total{{tier="{tier.lower()}"}} {n}' for tier, n in service['tiers'].items()]
    for key in (*_COUNTS, *_GAUGES):
        if key in service:
            name, kind = (f'{key}_total', 'counter') if key in _COUNTS else (key, 'gauge')
            lines += [f'# TYPE worldmodel_engine_{name} {kind}', f'worldmodel_engine_{name} {service[key]}']
    if 'pages' in service:
        lines.append('# TYPE worldmodel_engine_pages gauge')
        lines += [f'worldmodel_engine_pages{{state="{state}"}} {n}' for state, n in sorted(service['pages'].items())]
    return '\n'.join(lines) + '\n'
