"""Quality of a trained model on episodes it has not seen: prediction by horizon and number of steps.

    python -m worldmodel_ros.train.data.simulate --episodes 100 --first-seed 1000000 --out data/eval
    python -m worldmodel_ros.train.run.metrics --data data/eval

To compare models with different image sizes, simulate the same episodes in both sizes and use --picture-size: it averages
all images down to one size first. Every model is then judged on the same clips.
"""
from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from worldmodel_ros.evaluate.drive.pictures import MOVING_V, MOVING_W
from worldmodel_ros.model.sampling import HALF, ONE_STEP, TEACHER, TRUNCATED, TRUNCATED_ONE, TWO_STEP
from worldmodel_ros.model.world_model import WorldModel
from worldmodel_ros.train.data import clips
from worldmodel_ros.train.data.batches import Batch, draw
from worldmodel_ros.train.data.episodes import Episodes
from worldmodel_ros.train.objectives.policy import command_targets
from worldmodel_ros.train.objectives.sampler import ChunkSampler
from worldmodel_ros.train.objectives.teacher import WorldObjective
from .options import TeacherOptions

SAMPLERS = {'teacher_32': TEACHER, 'two_step': TWO_STEP, 'one_step': ONE_STEP,
            'naive_two_step': TRUNCATED, 'naive_one_step': TRUNCATED_ONE}


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """Return the PSNR (dB) of images (..., 3, H, W) in [-1, 1], one value per image."""
    mse = ((a.clamp(-1, 1) - b) / 2).square().mean((-3, -2, -1))
    return -10 * torch.log10(mse.clamp_min(1e-10))


def averaged_down(pictures: Tensor, size: int | None) -> Tensor:
    """Average images (..., 3, H, W) over squares of pixels, down to ``size`` rows; None: leave them as they are.

    Raises ValueError if the images' rows are not a multiple of ``size``.
    """
    rows = pictures.shape[-2]
    if size is None or size == rows:
        return pictures
    if rows % size:
        raise ValueError(f'images of {rows} rows cannot be averaged down to {size}: choose a divisor')
    return F.avg_pool2d(pictures.clamp(-1, 1).flatten(0, -4), rows // size).unflatten(0, pictures.shape[:-3])


@torch.no_grad()
def evaluate(model: WorldModel, episodes: Episodes, batches: int = 8, batch: int = 64, seed: int = 1,
             picture_size: int | None = None, samplers: Sequence[str] | None = None) -> dict:
    """Return the mean PSNR (dB) by horizon while the robot moves, for each of ``samplers`` (by default all of SAMPLERS),
    for copy-last-frame and for the VAE alone; and errors of the heads. Images are averaged down to ``picture_size`` rows
    first, if given.

    Clips depend only on the seed, not on the model, so differences of two models' ``by_batch`` are paired. Raises
    ValueError for a ``picture_size`` that the model's image size is not a multiple of.
    """
    device = episodes.frames.device
    rng = np.random.default_rng(seed)
    preset, k = model.preset, model.preset.chunk_frames
    options = TeacherOptions(batch=batch, context_noise=0.0)
    objective = WorldObjective(model, episodes, options)
    samplers = tuple(SAMPLERS if samplers is None else samplers)
    rows: dict[str, list] = {name: [] for name in (*samplers, 'copy_last', 'vae')}
    moving, heads = [], []
    # On a CPU the session runs in float32 too, and masked attention in bfloat16 is slow there.
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == 'cuda'):
        for number in range(batches):
            # How much is drawn depends on the model's shape, so each batch is seeded.
            generator = torch.Generator(device).manual_seed(seed + number)
            drawn = draw(episodes, preset, options, rng, generator)
            sampler = ChunkSampler(model, drawn)
            frames = drawn.frame[:, torch.from_numpy(clips.chunk_frames(preset, drawn.starts)).to(device)]
            truth = episodes.images(drawn.episode, frames).unflatten(1, (-1, k))
            before = frames.unflatten(1, (-1, k))[:, :, :1] - 1
            last = episodes.images(drawn.episode[..., None], before)
            history = episodes.latents[drawn.episode[..., None], before].float()

            def compare(pictures: Tensor, truth: Tensor = truth) -> Tensor:
                return psnr(*(averaged_down(part, picture_size) for part in (pictures, truth)))

            def decode(latents: Tensor, history: Tensor = history) -> Tensor:
                x = torch.cat([history, latents.unflatten(1, (-1, k))], 2)
                x = x * model.vae.latent_std + model.vae.latent_mean
                inner = model.vae.decoder.inp(x.flatten(0, 2).permute(0, 3, 1, 2))
                inner = inner.unflatten(0, x.shape[:3])
                mixed = model.vae.decoder.mix(inner[:, :, 1:].flatten(0, 2), inner[:, :, :-1].flatten(0, 2))
                return model.vae.decoder.up(mixed).float().unflatten(0, (x.shape[0], x.shape[1], k))

            zero = torch.zeros(frames.shape, device=device)
            for name in samplers:
                way = SAMPLERS[name]
                rows[name].append(compare(decode(sampler.euler(drawn.noise, zero, 1.0, way.row, way.count))))
            rows['copy_last'].append(compare(last.expand_as(truth)))
            rows['vae'].append(compare(decode(drawn.target)))
            speed = drawn.noisy_actions.unflatten(1, (-1, k)).abs().amax(2)
            moving.append(((speed[..., 0] > MOVING_V) | (speed[..., 1] > MOVING_W)).flatten())
            tau = torch.full_like(zero, 0.5)
            _, noisy, clean = objective.forward(drawn, 0.5 * drawn.noise + 0.5 * drawn.target, tau,
                                                torch.full_like(tau, HALF, dtype=torch.long))
            heads.append(objective.head_losses(drawn, clean, noisy)[1] | _policy_error(model, episodes, drawn, clean))
    chosen = torch.cat(moving)
    result = {name: torch.cat([v.flatten(0, 1) for v in values])[chosen].mean(0) for name, values in rows.items()}
    table = {name: {'mean': round(float(v.mean()), 3), 'by_horizon': [round(float(x), 3) for x in v],
                    'by_batch': [round(float(values.flatten(0, 1)[moves].mean()), 3) if moves.any() else None
                                 for values, moves in zip(rows[name], moving)]}
             for name, v in result.items()}
    return {'psnr_db': table, 'picture_size': picture_size or preset.image_size[0],
            'horizons_s': [round(preset.step_period * (i + 1), 3) for i in range(k)], 'chunks': int(chosen.sum()),
            'heads': {name: round(float(sum(h[name] for h in heads) / len(heads)), 4) for name in heads[0]}}


def _policy_error(model: WorldModel, episodes: Episodes, batch: Batch, clean: Tensor) -> dict[str, Tensor]:
    """Mean absolute error of the command to be executed now, per action, where the goal is visible."""
    expert = episodes.expert[batch.episode, batch.frame]
    _, target, _ = command_targets(expert, batch.actions, torch.zeros_like(batch.policy.delay), model.preset)
    plan = model.action_head(clean[:, :target.shape[1]].flatten(0, 1)).unflatten(0, (-1, target.shape[1])).float()
    seen = episodes.visible[batch.episode, batch.frame][:, :target.shape[1]]
    error = (plan - target)[:, :, :, 0].abs()
    return {f'policy_error_{name}': (error[..., i] * seen).sum() / seen.sum()
            for i, name in enumerate(model.preset.action_names)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m worldmodel_ros.train.run.metrics',
                                     description=__doc__.splitlines()[0])
    parser.add_argument('--model', default='tiny', help='shipped model or folder (default: tiny)')
    parser.add_argument('--data', type=Path, required=True, help='simulated dataset that was not trained on')
    parser.add_argument('--batches', type=int, default=8)
    parser.add_argument('--batch', type=int, default=64, help='clips per batch, four chunks each (default: 64)')
    parser.add_argument('--samplers', default=','.join(SAMPLERS), metavar='NAMES',
                        help=f'ways to denoise (default: {",".join(SAMPLERS)})')
    parser.add_argument('--picture-size', type=int, metavar='ROWS',
                        help='average images down to so many rows before they are compared')
    parser.add_argument('--json', type=Path)
    options = parser.parse_args(arguments)
    samplers = [name for name in options.samplers.split(',') if name]
    unknown = set(samplers) - set(SAMPLERS)
    if unknown:
        parser.error(f'--samplers: unknown {", ".join(sorted(unknown))}; known: {", ".join(SAMPLERS)}')

    from worldmodel_ros.engine.loading import model_folder
    from worldmodel_ros.model import checkpoint
    from worldmodel_ros.train.data import lerobot
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    model = checkpoint.load(model_folder(options.model), device)
    episodes = lerobot.load([options.data], device, model.preset)
    episodes.encode(model.vae)
    try:
        result = evaluate(model, episodes, options.batches, options.batch, picture_size=options.picture_size,
                          samplers=samplers)
    except ValueError as error:
        parser.error(str(error))
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps({'model': options.model, 'episodes': len(episodes), **result}, indent=1) + '\n')
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
