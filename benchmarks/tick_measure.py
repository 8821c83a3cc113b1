"""Times one engine's ticks as on a robot: how long each takes, and how long the device works on each of its parts."""
from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from worldmodel_ros.engine.backends.networks import Source
from worldmodel_ros.engine.backends.torch import TorchBackend
from worldmodel_ros.engine.engine import Engine

FRAMES = 16  # different ones, so that host caches do not make them cheap
WARM = 5


def gathering_engine(preset: str, backend: str, sessions: int = 1) -> Engine:
    """Load as ``load_random`` on one GPU, except that passes of one session gather their pages."""
    source = Source(preset, 0, backend)
    networks = source.read()
    made = TorchBackend(networks, precision=source.precision, compiled=backend == 'torch-compiled', in_place=False)
    source.finish(networks)
    return Engine(made, Path(preset), sessions)


class Timed:
    """A back end whose queued network calls are timed by the device itself (see TorchBackend.mark)."""

    def __init__(self, backend: Any):
        self._backend = backend
        self.marks: list[tuple[str, Any, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def launch(self, network: str, batch: Sequence[tuple]) -> list:
        start = self._backend.mark()
        outputs = self._backend.launch(network, batch)
        self.marks.append((network, start, self._backend.mark()))
        return outputs

    def run(self, network: str, batch: Sequence[tuple]) -> list:
        start = time.perf_counter()
        outputs = self._backend.run(network, batch)
        self._backend.settle()
        self.marks.append((network, start, time.perf_counter()))
        return outputs

    def milliseconds(self) -> dict[str, float]:
        """Return the total of each network since the last call; the device must have finished."""
        found: dict[str, float] = {}
        for network, start, end in self.marks:
            ms = (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)
            found[network] = found.get(network, 0.0) + ms
        self.marks.clear()
        return found


def measure(engine: Engine, steps: int, ticks: int, seconds: float, period: float = 0.0) -> dict:
    """Run ``ticks`` ticks over a full window, or as many as ``seconds`` allow, beginning ``period`` s apart, or back to back;
    return ms."""
    spec = engine.spec
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (FRAMES, *spec.image_size, 3), dtype=np.uint8)
    executed = np.full(spec.actions, 0.1, np.float32)
    timed = engine.backend = Timed(engine.backend)
    session = engine.open_session()
    try:
        for count in range(spec.window_frames):
            session.observe(frames[count % FRAMES], executed)
        whole, plan, parts = [], [], []
        gc.collect()
        gc.freeze()
        end = time.perf_counter() + seconds
        for tick in range(WARM + ticks):
            timed.marks.clear()
            start = time.perf_counter()
            session.observe(frames[tick % FRAMES], executed)
            ahead = session.look_ahead(spec.goals[0], steps)
            ahead.plan()
            planned = time.perf_counter()
            future = ahead.future()
            whole.append((time.perf_counter() - start) * 1e3)
            plan.append((planned - start) * 1e3)
            parts.append(timed.milliseconds())
            if time.perf_counter() > end and tick >= 2 * WARM:
                break
            time.sleep(max(0.0, start + period - time.perf_counter()))
        if not np.isfinite(future.collision_risk).all():
            raise RuntimeError('the network gave numbers that are not finite: the times mean nothing')
        names = parts[-1]
        rows = {name: summary([part[name] for part in parts[WARM:]]) for name in names}
        return {'ticks': len(whole) - WARM, 'chunk_ms': rows['denoise'], 'commit_ms': rows['commit']['p50'],
                'commit_p99_ms': rows['commit']['p99'], 'encode_ms': rows['encode']['p50'],
                'policy_ms': rows['policy']['p50'], 'outcomes_ms': rows['outcomes']['p50'],
                'plan_ms': summary(plan[WARM:]), 'tick_ms': summary(whole[WARM:])}
    finally:
        gc.unfreeze()
        engine.backend = timed._backend


def summary(ms: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.quantile(ms, (0.5, 0.99))
    return {'p50': round(float(p50), 3), 'p99': round(float(p99), 3), 'max': round(float(np.max(ms)), 3)}


def memory(engine: Engine) -> dict:
    """Return what the weights and a second of a session take on one GPU, as allocated; if old slabs take fewer bits than
    new ones, the old ones count."""
    spec, layout, model = engine.spec, engine.memory.layout, engine.backend.model
    storages = [pool.storage for pool in engine.memory.pools]
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    per_second = storages[-1].page_bytes * layout.tiles / layout.frames / spec.step_period
    result = {'weights_gib': round(weights / 2 ** 30, 3), 'cache_mib_per_second': round(per_second / 2 ** 20, 3),
              'pages_gib': round(sum(storage.page_bytes * storage.pages for storage in storages) / 2 ** 30, 3)}
    if torch.cuda.is_available():
        result['allocated_gib'] = round(torch.cuda.max_memory_allocated() / 2 ** 30, 3)
        result['reserved_gib'] = round(torch.cuda.max_memory_reserved() / 2 ** 30, 3)
    return result
