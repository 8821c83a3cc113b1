"""Calibrates the contact probability on episodes that the weights were not fitted to.

The outcome head discriminates contacts well, but a network of this size is overconfident: contacts are rare, and it
memorises the few of the training set. Platt scaling (Platt 1999) fits a scale and a shift of the logit on other episodes,
which are folded into the head's last layer.

    python -m worldmodel_ros.train.data.simulate --episodes 100 --first-seed 900000 --out data/calibration
    python -m worldmodel_ros.train.run.calibrate --model out/tiny/final --data data/calibration --out out/tiny/calibrated
"""
from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from worldmodel_ros.model.sampling import HALF
from worldmodel_ros.model.world_model import WorldModel
from worldmodel_ros.train.data import clips
from worldmodel_ros.train.data.batches import draw
from worldmodel_ros.train.data.episodes import Episodes
from worldmodel_ros.train.objectives.sampler import ChunkSampler
from .options import TeacherOptions


@torch.no_grad()
def contact_logits(model: WorldModel, episodes: Episodes, batches: int, batch: int, seed: int = 2
                   ) -> tuple[Tensor, Tensor]:
    """Return logits and truth (N,) of contacts in chunks drawn from encoded episodes, at the last of two steps."""
    device = episodes.frames.device
    generator = torch.Generator(device).manual_seed(seed)
    rng = np.random.default_rng(seed)
    logits, truth = [], []
    for _ in range(batches):
        drawn = draw(episodes, model.preset, TeacherOptions(batch=batch, context_noise=0.0), rng, generator)
        zero = torch.zeros(drawn.target.shape[:2], device=device)
        # For presets with tiles, attention in float32 exceeds the resources of a GPU's multiprocessor.
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == 'cuda' and model.preset.tile is not None):
            sampler = ChunkSampler(model, drawn)
            half_way = sampler.euler(drawn.noise, zero, 0.5, HALF)
            features = model.dit(half_way, zero + 0.5, torch.full_like(zero, HALF, dtype=torch.long), drawn.noisy_actions,
                                 sampler.rotary, sampler.mask, sampler.k, sampler.v)[1].float()
        index = torch.from_numpy(clips.chunk_frames(model.preset, drawn.starts)).to(device)
        logits.append(model.outcome_head(features)[0].float().flatten())
        truth.append(episodes.collided[drawn.episode, drawn.frame][:, index].float().flatten())
    return torch.cat(logits), torch.cat(truth)


def fit(logits: Tensor, truth: Tensor) -> tuple[float, float]:
    """Return the scale and shift of the logits with the smallest log loss."""
    parameters = torch.tensor([1.0, 0.0], requires_grad=True, device=logits.device)
    optimiser = torch.optim.LBFGS([parameters], max_iter=100, line_search_fn='strong_wolfe')

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = F.binary_cross_entropy_with_logits(parameters[0] * logits + parameters[1], truth)
        loss.backward()
        return loss

    optimiser.step(closure)
    scale, shift = parameters.tolist()
    return scale, shift


def calibrate(model: WorldModel, episodes: Episodes, batches: int = 8, batch: int = 64) -> dict:
    """Fit and apply the calibration in place; return what it did. Raises ValueError without contacts to fit to."""
    logits, truth = contact_logits(model, episodes, batches, batch)
    if not 0 < truth.sum() < len(truth):
        raise ValueError('the episodes for calibration must hold frames with contacts and frames without')
    scale, shift = fit(logits, truth)
    last = model.outcome_head.net[-1]
    with torch.no_grad():
        last.weight[0] *= scale
        last.bias[0] = scale * last.bias[0] + shift
    rate = float(truth.mean())
    return {'frames': len(truth), 'contacts': round(rate, 4), 'scale': round(scale, 4), 'shift': round(shift, 4),
            'log_loss_before': round(float(F.binary_cross_entropy_with_logits(logits, truth)), 4),
            'log_loss': round(float(F.binary_cross_entropy_with_logits(scale * logits + shift, truth)), 4),
            'log_loss_of_the_rate': round(-rate * float(np.log(rate)) - (1 - rate) * float(np.log1p(-rate)), 4),
            'auc': round(area_under_curve(logits, truth), 4)}


def area_under_curve(scores: Tensor, truth: Tensor) -> float:
    """Return the probability that a frame with a contact scores above one without (ROC AUC), by ranks."""
    ranks = torch.empty_like(scores)
    ranks[scores.argsort()] = torch.arange(1, len(scores) + 1, dtype=scores.dtype, device=scores.device)
    positive = truth.sum()
    return float((ranks[truth > 0.5].sum() - positive * (positive + 1) / 2) / (positive * (len(truth) - positive)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m worldmodel_ros.train.run.calibrate',
                                     description=__doc__.splitlines()[0])
    parser.add_argument('--model', type=Path, required=True, help='folder of the model')
    parser.add_argument('--data', type=Path, required=True, help='simulated dataset that was not trained on')
    parser.add_argument('--out', type=Path, required=True, help='folder of the calibrated model')
    parser.add_argument('--batches', type=int, default=8)
    parser.add_argument('--batch', type=int, default=64)
    options = parser.parse_args(arguments)

    from worldmodel_ros.model import checkpoint
    from worldmodel_ros.model.checkpoint_description import read_description
    from worldmodel_ros.train.data import lerobot
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    model = checkpoint.load(options.model, device)
    episodes = lerobot.load([options.data], device, model.preset)
    episodes.encode(model.vae)
    result = calibrate(model, episodes, options.batches, options.batch)
    provenance = read_description(options.model).provenance
    checkpoint.save(model, options.out, {**provenance, 'contact_calibration': result})
    print(json.dumps(result, indent=1))
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
