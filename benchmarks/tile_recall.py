"""Does a small model over tiles use its window? Trained for a few hundred steps on a CPU, with and without headings in its
attention.

    python benchmarks/tile_recall.py --out benchmarks/results/tile_recall.json

Robots turn away and back; images of 16 x 16 pixels through the autoencoder of ``tiny``; 6 layers with the patterns of
``small_tiles``. In rooms that were not trained on: mean squared error of one-step latents, for chunks that begin where a
robot turns back to what left its view, and for others, given the whole window or only its newest 16 frames.
"""
from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from result_file import provenance, write_result
from torch.nn import functional as F

from worldmodel_ros.engine.loading import model_folder
from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.presets import SMALL_TILES, Preset
from worldmodel_ros.model.sampling import WHOLE
from worldmodel_ros.model.world_model import WorldModel
from worldmodel_ros.sim.rollout import collect
from worldmodel_ros.train.data.batches import FAR, Chunks
from worldmodel_ros.train.data.episodes import Episodes
from worldmodel_ros.train.objectives.sampler import ChunkSampler
from worldmodel_ros.train.objectives.teacher import TeacherObjective
from worldmodel_ros.train.run.config import Schedule
from worldmodel_ros.train.run.loop import Optimiser, averaged_copy
from worldmodel_ros.train.run.options import TeacherOptions
from worldmodel_ros.train.run.ranks import Ranks

FRAMES, TRAINED, JUDGED = 130, range(100_000, 100_128), range(5_000_000, 5_000_032)
WINDOW, NEWEST = 64, 16  # frames
MOMENTS = 160  # of each kind, at most


def episodes(path: Path | None) -> tuple[Episodes, Episodes]:
    """Return episodes for training and evaluation, at half the rendered size; ``path`` keeps what is simulated."""
    if path is None or not path.is_file():
        drawn = {f'{name}.{key}': np.asarray(array) for name, seeds in (('a', TRAINED), ('b', JUDGED))
                 for key, array in collect(seeds, FRAMES, (32, 32), None, {'look_away': 1.0}).items()}
        if path is not None:
            np.savez(path, **drawn)
    else:
        with np.load(path) as file:
            drawn = dict(file)
    found = []
    for name in 'ab':
        part = Episodes.of_arrays({key[2:]: array for key, array in drawn.items()
                                   if key[0] == name and array.dtype.kind != 'U'})
        frames = F.avg_pool2d(part.frames.flatten(0, 1).movedim(-1, 1).float(), 2).round().byte().movedim(1, -1)
        part.frames = frames.unflatten(0, part.frames.shape[:2]).contiguous()
        found.append(part)
    return found[0], found[1]


def trained(preset: Preset, data: Episodes, steps: int, share: float) -> WorldModel:
    """Return the averaged model after ``steps`` steps."""
    torch.manual_seed(0)
    model = WorldModel(preset)
    checkpoint.take_autoencoder(model, model_folder('tiny'))
    data.encode(model.vae)
    options = TeacherOptions(batch=3, clip_frames=88, chunks=16, full_windows=0.6, served_share=0.8, recall_share=share,
                             heads_weight=0.1)
    averaged, objective = averaged_copy(model), TeacherObjective(model, data, options)
    optimiser = Optimiser(model, averaged, objective.parameters(), Schedule(steps, 1.5e-3, matrix_rate=5e-3, average=0.99),
                          Ranks(torch.device('cpu')))
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    for step in range(steps):
        loss, _ = optimiser.learn(objective, rng, generator, step, step / steps)
        if step % 50 == 49:
            print(step + 1, round(float(loss.detach()), 4), file=sys.stderr, flush=True)
    return averaged


def moments(data: Episodes, preset: Preset) -> dict[str, list[tuple[int, int]]]:
    """Return episodes and frames at which a robot turns back to what left its view, and others."""
    recalls, rng = data.recalls(preset), np.random.default_rng(1)
    back = [(e, t) for e, t in np.argwhere(recalls).tolist() if WINDOW < t < FRAMES - preset.chunk_frames]
    others = [(e, t) for e in range(len(recalls)) for t in range(WINDOW + 6, FRAMES - 6, 9)
              if not recalls[e, t - 6:t + 6].any()]
    return {name: [each[i] for i in rng.choice(len(each), min(MOMENTS, len(each)), False)]
            for name, each in (('turning back', back), ('other', others))}


@torch.no_grad()
def error(model: WorldModel, data: Episodes, where: list[tuple[int, int]], seen: int) -> float:
    """Return the mean squared error of one step's latents, after ``seen`` frames of a session that has lasted longer."""
    k, found = model.preset.chunk_frames, []
    for e, t in where:
        context, actions = data.latents[e:e + 1, t - seen:t].float(), data.actions[e:e + 1]
        noise = torch.randn(1, k, *context.shape[2:], generator=torch.Generator().manual_seed(t))
        headings = (actions[..., model.preset.turn] * model.preset.step_period).cumsum(1)[:, t - seen:t]
        chunk = Chunks(context, actions[:, t - seen:t], np.array([seen]), noise, actions[:, t:t + k],
                       times=10 * FAR + np.arange(seen), headings=headings)
        x = ChunkSampler(model, chunk).euler(noise, torch.zeros(1, k), 1.0, WHOLE)
        found.append(float((x - data.latents[e:e + 1, t:t + k].float()).square().mean()))
    return round(float(np.mean(found)), 4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--heading-pairs', type=int, nargs='+', default=[8, 0])
    parser.add_argument('--recall-share', type=float, default=0.5)
    parser.add_argument('--steps', type=int, default=400)
    parser.add_argument('--episodes', type=Path, help='file that keeps what is simulated, and from which it is taken again')
    parser.add_argument('--out', type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data, judged = episodes(options.episodes)
    rows = []
    for pairs in options.heading_pairs:
        preset = replace(SMALL_TILES, name='few-tokens', image_size=(16, 16), tile=(4, 1, 1), width=128, depth=6,
                         heading_pairs=pairs)
        model = trained(preset, data, options.steps, options.recall_share)
        judged.encode(model.vae)
        errors = {name: {'chunks': len(where), 'whole window': error(model, judged, where, WINDOW),
                         'newest 16 frames': error(model, judged, where, NEWEST)}
                  for name, where in moments(judged, preset).items()}
        rows.append({'heading_pairs': pairs, 'recall_share': options.recall_share, 'steps': options.steps, 'errors': errors})
        write_result({**provenance(), 'rows': rows}, options.out)
        print(rows[-1], file=sys.stderr, flush=True)
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
