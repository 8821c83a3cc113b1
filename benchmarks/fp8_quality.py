"""What FP8 layers do to a trained model's predictions, on a CPU, which reproduces the rounding of FP8 products exactly.

    python benchmarks/fp8_quality.py --json benchmarks/results/fp8_quality_tiny.json

Freshly simulated episodes. From a warm window two steps a chunk predict 0.4, 1 and 2 s under the executed actions,
by the float32 network and by others of the same weights: bfloat16; FP8, with everything but the linear layers in
bfloat16; FP8 with the MLP's middle rounded by a bound (``fused``) or by calibrated scales (from other episodes); FP8
with some linear layers left in bfloat16, as modulation is unless stated otherwise. ``psnr_db`` is against the
true images, ``change_db`` its difference to float32, paired, with a bootstrap interval over episodes;
``to_float32_db`` is the PSNR between the two predictions, and ``plan_error`` the mean difference between their
commands for all goals, in m/s and rad/s.
"""
from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from result_file import provenance, write_result
import torch
from torch import Tensor, nn

from worldmodel_ros.engine.loading import model_folder
from worldmodel_ros.evaluate.drive.pictures import psnr
from worldmodel_ros.evaluate.quality.drives import Drive, record_drive
from worldmodel_ros.evaluate.quality.horizons import CONTEXT
from worldmodel_ros.evaluate.quality.imagination import Imagination
from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.dit import DiT
from worldmodel_ros.model.precision import LINEARS, calibration, to_fp8, weight_bytes
from worldmodel_ros.model.sampling import TWO_STEP

FIRST_SEED, CALIBRATION_SEED, CALIBRATION_DRIVES = 5_000_000, 5_900_000, 2
HORIZONS = (0.4, 1.0, 2.0)  # s


@dataclass(frozen=True)
class Variant:
    """``keep``: linear layers that stay in bfloat16; ``static``: those that get a calibrated scale; ``fused`` as in
    ``precision.Fp8Block``."""

    name: str
    fp8: bool = True
    keep: Collection[str] = ()
    static: Collection[str] = ()
    fused: bool = False


M = 'modulation'
VARIANTS = (
    Variant('bf16', fp8=False), Variant('fp8, modulation too'), Variant('fp8', keep=(M,)),
    Variant('fp8, fused', keep=(M,), fused=True),
    Variant('fp8, fused, calibrated', keep=(M,), static=('mlp.2',), fused=True),
    Variant('fp8, fused, all calibrated', keep=(M,), static=LINEARS[1:], fused=True),
    *(Variant(f'fp8 but {name}', keep=(M, name)) for name in LINEARS[1:]),
    Variant('fp8 but the first block', keep=(M, *(f'0.{name}' for name in LINEARS))),
    Variant('fp8 but the last block', keep=(M, *(f'5.{name}' for name in LINEARS))))


class Converted(nn.Module):
    """A DiT whose layers may compute in another type, with results in float32; it keeps the last features."""

    def __init__(self, dit: DiT, dtype: torch.dtype):
        super().__init__()
        for part in (dit.embed, dit.blocks, dit.modulation, dit.out):  # as ``TorchBackend`` does
            part.to(dtype)
        self.dit = dit

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        latents, self.features, keys, values = self.dit(*inputs)
        return latents.float(), self.features, keys, values


def predicted(model: Imagination, drives: list[Drive], ahead: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return images (drives, horizons, H, W, 3) so many frames ahead, their latents, and plans (drives, goals, K, A)."""
    frames, actions = (np.stack([getattr(drive, name) for drive in drives]) for name in ('frames', 'actions'))
    memory = model.observe(frames[:, :CONTEXT], actions[:, :CONTEXT], tuple(range(len(drives))))
    plans = model.model.action_head(model.model.dit.features[:, -1].float())
    latents, _ = model.roll(memory, actions[:, CONTEXT:], TWO_STEP)
    pictures = [model.decode(latents[:, k - 1], latents[:, k - 2]) for k in ahead]
    return np.stack(pictures, 1), latents[:, [k - 1 for k in ahead]].numpy(), plans.numpy()


def interval(changes: np.ndarray) -> list[float]:
    """Return the 95 % bootstrap interval of the mean over drives."""
    draws = np.random.default_rng(0).choice(changes, (2000, len(changes))).mean(1)
    return [round(float(q), 4) for q in np.quantile(draws, (0.025, 0.975))]


def scores(pictures: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return PSNR (drives, horizons) in dB."""
    return np.array([[psnr(a, b) for a, b in zip(*pair)] for pair in zip(pictures, others)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', default='tiny')
    parser.add_argument('--drives', type=int, default=24)
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = checkpoint.load(model_folder(options.model))
    preset = model.preset
    ahead = [round(horizon / preset.step_period) for horizon in HORIZONS]
    length = CONTEXT + -(-ahead[-1] // preset.chunk_frames) * preset.chunk_frames

    def record(first: int, count: int) -> list[Drive]:
        return [record_drive(seed, length, preset.image_size) for seed in range(first, first + count)]
    drives, others = record(FIRST_SEED, options.drives), record(CALIBRATION_SEED, CALIBRATION_DRIVES)
    truth = np.stack([[drive.frames[CONTEXT + k - 1] for k in ahead] for drive in drives])
    whole = model.dit
    model.dit = Converted(whole, torch.float32)
    exact, exact_latents, exact_plans = predicted(Imagination(model), drives, ahead)
    base = scores(exact, truth)
    result = {**provenance(('torch', 'numpy')), 'model': options.model, 'drives': len(drives),
              'horizons_s': HORIZONS, 'float32_psnr_db': base.mean(0).round(3).tolist(),
              'float32_bytes_of_layers': weight_bytes(whole.blocks), 'rows': []}
    for variant in VARIANTS:
        model.dit = Converted(copy.deepcopy(whole), torch.bfloat16)
        imagination = Imagination(model)
        if variant.fp8:
            to_fp8(model.dit.dit, variant.keep, variant.fused)
        if variant.static:
            with calibration(model.dit.dit, variant.static):
                predicted(imagination, others, ahead)
        pictures, latents, plans = predicted(imagination, drives, ahead)
        found = scores(pictures, truth)
        result['rows'].append({
            'layers': variant.name, 'bytes_of_layers': weight_bytes(model.dit.dit.blocks),
            'psnr_db': found.mean(0).round(3).tolist(), 'change_db': (found - base).mean(0).round(4).tolist(),
            'interval_95': [interval(change) for change in (found - base).T],
            'to_float32_db': scores(pictures, exact).mean(0).round(2).tolist(),
            'latent_error': [round(float(np.linalg.norm(latents[:, i] - exact_latents[:, i])
                                         / np.linalg.norm(exact_latents[:, i])), 4) for i in range(len(ahead))],
            'plan_error': {name: round(float(np.abs(plans - exact_plans)[..., i].mean()), 4)
                           for i, name in enumerate(preset.action_names)}})
        print(json.dumps(result['rows'][-1]), file=sys.stderr, flush=True)
        write_result(result, options.json)
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
