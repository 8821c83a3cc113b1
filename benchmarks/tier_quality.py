"""The effect of the precision of cached pages on the trained model's predictions, at equal bytes.

    python benchmarks/tier_quality.py --json benchmarks/results/tier_quality_tiny.json

Freshly simulated episodes. After each frame its page is rounded as the GPU's pages are (``kernels.quantise``), with one scale
for each layer, head and page, and rounded again when it grows old. Quality is the PSNR of predicted chunks of two steps
while the robot moves, and how far predicted latents and plans are from those of the unrounded, whole window. Differences
are taken chunk by chunk, with a bootstrap interval over episodes.
"""
from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from result_file import command, write_result
import torch

from worldmodel_ros.engine import load
from worldmodel_ros.evaluate.drive.pictures import MOVING_V, MOVING_W, psnr
from worldmodel_ros.kernels.quantise import from_e2m1, to_e2m1, to_e4m3
from worldmodel_ros.machine import machine
from worldmodel_ros.sim.rollout import collect

FIRST_SEED = 4_000_000
BITS = {'fp32': 32.0, 'bf16': 16.0, 'fp8': 8.0, 'fp4': 4.5}


@dataclass(frozen=True)
class Policy:
    """``frames`` are kept; the newest ``recent`` of them in one precision, the others in another."""

    frames: int
    recent: int
    near: str
    far: str = ''

    @property
    def name(self) -> str:
        far = self.frames - self.recent
        return f'{self.recent} {self.near}' + (f' + {far} {self.far}' if far else '')

    @property
    def bits(self) -> float:
        """Size of a session, in units of one value of each frame."""
        return self.recent * BITS[self.near] + (self.frames - self.recent) * BITS.get(self.far, 0.0)


def uniform(frames: int, precision: str) -> Policy:
    return Policy(frames, frames, precision)


POLICIES = (
    uniform(16, 'fp32'), uniform(16, 'bf16'), uniform(16, 'fp8'), uniform(16, 'fp4'), Policy(16, 4, 'fp8', 'fp4'),
    # 72 bits, those of a whole window in FP4.
    uniform(9, 'fp8'), Policy(14, 2, 'fp8', 'fp4'), Policy(12, 4, 'fp8', 'fp4'), uniform(4, 'bf16'),
    # Half of that.
    uniform(8, 'fp4'), uniform(4, 'fp8'), Policy(6, 2, 'fp8', 'fp4'), uniform(2, 'bf16'))


def rounded(x: np.ndarray, precision: str) -> np.ndarray:
    """Return keys or values of a page, (layers, heads, tokens, D), as read back at that precision."""
    t = torch.from_numpy(x)
    if precision == 'fp32':
        return x
    if precision == 'bf16':
        return t.bfloat16().float().numpy()
    if precision == 'fp8':
        stored, scale = to_e4m3(t)
        return (stored.float() * scale[..., None, None]).numpy()
    packed, exponent, scale = to_e2m1(t)
    return (from_e2m1(packed, exponent) * scale[..., None, None]).numpy()


def apply(policy: Policy, session) -> None:
    """Round the newest page and the one that has just grown old, and drop what the policy does not keep."""
    cache = session._cache
    cache.evict(session.frames_seen - policy.frames)
    pages, storage = cache.table.pages, cache.pools[0].storage
    for age, precision in ((0, policy.near), (policy.recent, policy.far)):
        if precision and age < len(pages):
            page = pages[-1 - age, 0]
            storage.k[page] = rounded(storage.k[page], precision)
            # Blocks of FP4 values lie along the tokens, as in the transposed pages of the GPU.
            storage.v[page] = rounded(np.ascontiguousarray(storage.v[page].swapaxes(-1, -2)), precision).swapaxes(-1, -2)


def moments(episode: dict, ahead: int, every: int) -> list[int]:
    """Return every few frames while the robot moves, once every policy has dropped something."""
    return [t for t in range(16, len(episode['frames']) - ahead)
            if t % every == 0 and (np.abs(episode['actions'][t + 1:t + 1 + ahead]) > (MOVING_V, MOVING_W)).any()]


def predictions(engine, episode: dict, policy: Policy, chosen: list[int]
                ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return images, latents and plan at the chosen frames."""
    session, ahead, found = engine.open_session(), engine.spec.chunk_frames, []
    for t in range(len(episode['frames']) - ahead):
        session.observe(episode['frames'][t], episode['actions'][t])
        apply(policy, session)
        if t in chosen:
            future = session.imagine(episode['actions'][t + 1:t + 1 + ahead])
            found.append((session.decode(future), future.latents, session.plan('green')))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', default='tiny')
    parser.add_argument('--episodes', type=int, default=24)
    parser.add_argument('--frames', type=int, default=60)
    parser.add_argument('--every', type=int, default=4)
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    engine = load(options.model, 'onnx', 1)
    engine.warm_up()
    arrays = collect(range(FIRST_SEED, FIRST_SEED + options.episodes), options.frames, workers=1)
    episodes = [{name: np.array(arrays[name][i]) for name in ('frames', 'actions')} for i in range(options.episodes)]
    ahead = engine.spec.chunk_frames
    chosen = [moments(episode, ahead, options.every) for episode in episodes]
    truth = [[episode['frames'][t + 1:t + 1 + ahead] for t in times] for episode, times in zip(episodes, chosen)]
    rows, base = [], None
    for policy in POLICIES:
        runs = [predictions(engine, episode, policy, times) for episode, times in zip(episodes, chosen)]
        scores = [np.array([np.mean([psnr(a, b) for a, b in zip(pictures, true)]) for (pictures, _, _), true in zip(run, real)])
                  for run, real in zip(runs, truth)]
        base = base or (runs, scores)
        loss = [np.mean(ours - exact) for ours, exact in zip(scores, base[1]) if len(ours)]
        draws = np.random.default_rng(0).choice(loss, (2000, len(loss))).mean(1)
        pairs = [(a, b) for run, exact in zip(runs, base[0]) for a, b in zip(run, exact)]
        rows.append({'policy': policy.name, **asdict(policy), 'bits': policy.bits,
                     'psnr_db': round(float(np.mean(np.concatenate(scores))), 3),
                     'psnr_change_db': round(float(np.mean(loss)), 3),
                     'interval_95': [round(float(q), 3) for q in np.quantile(draws, (0.025, 0.975))],
                     'latent_error': round(float(np.mean([np.linalg.norm(a[1] - b[1]) / np.linalg.norm(b[1])
                                                          for a, b in pairs])), 4),
                     'plan_error': round(float(np.mean([np.abs(a[2] - b[2]).mean() for a, b in pairs])), 4),
                     'chunks': len(pairs)})
        print(rows[-1], file=sys.stderr, flush=True)
    result = {'command': command(), 'machine': machine(), 'model': options.model,
              'episodes': options.episodes, 'rows': rows}
    write_result(result, options.json)
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
