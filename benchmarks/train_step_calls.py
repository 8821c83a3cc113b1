"""The host cost of a training step over tiles: calls of PyTorch's operators, by part, with matrices orthogonalised
one by one and in batches.

    python benchmarks/train_step_calls.py --out benchmarks/results/train_step_calls.json

The network has the layers of ``small_tiles`` and few tokens, which do not affect the number of calls. On a GPU, layers are
compiled, which makes fewer calls; those of the optimiser and of drawing batches stay.
"""
from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from result_file import provenance, write_result
from torch.profiler import ProfilerActivity, profile

from worldmodel_ros.model.presets import SMALL_TILES
from worldmodel_ros.model.world_model import WorldModel
from worldmodel_ros.train.data.episodes import Episodes
from worldmodel_ros.train.objectives.teacher import TeacherObjective
from worldmodel_ros.train.run.config import Schedule
from worldmodel_ros.train.run.loop import Optimiser, averaged_copy
from worldmodel_ros.train.run.options import TeacherOptions
from worldmodel_ros.train.run.ranks import Ranks

PRESET = replace(SMALL_TILES, name='few-tokens', image_size=(16, 16), tile=(4, 1, 1))
OPTIONS = TeacherOptions(batch=3, clip_frames=88, chunks=16, full_windows=0.6, served_share=0.8, recall_share=0.5)


def episodes(count: int = 8, frames: int = 160) -> Episodes:
    generator, shape = torch.Generator().manual_seed(0), (*PRESET.latent_size, PRESET.latent_channels)
    actions = torch.zeros(count, frames, 2)
    actions[:, 20:40, 1], actions[:, 80:100, 1] = 1.2, -1.2
    return Episodes(torch.zeros(count, frames, 1, 1, 3, dtype=torch.uint8), actions, torch.zeros(count, frames, 4, 2),
                    collided=torch.zeros(count, frames, dtype=torch.bool), goal_distance=torch.rand(count, frames, 4),
                    latents=torch.randn(count, frames, *shape, generator=generator))


def counted(work: Callable[[], object]) -> tuple[object, int, float]:
    """Return the result, the number of operator calls, and ms of the host without counting."""
    start = time.perf_counter()
    work()
    took = 1e3 * (time.perf_counter() - start)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        result = work()
    return result, sum(event.count for event in profiler.key_averages() if event.key.startswith('aten::')), took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = WorldModel(PRESET)
    objective = TeacherObjective(model, episodes(), OPTIONS)
    optimiser = Optimiser(model, averaged_copy(model), objective.parameters(), Schedule(10, 1e-3, matrix_rate=5e-3),
                          Ranks(torch.device('cpu')))
    batched = optimiser.optimisers['muon']
    single = torch.optim.Muon(batched.param_groups[0]['params'], lr=5e-3, adjust_lr_fn='match_rms_adamw')
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    optimiser.learn(objective, rng, generator, 0, 0.5)  # first calls
    rows = {}
    batch, *rows['draw'] = counted(lambda: objective.draw(rng, generator))
    (loss, _), *rows['forward'] = counted(lambda: objective.loss(batch))
    _, *rows['backward'] = counted(lambda: loss.backward(retain_graph=True))
    for name, work in (('muon, matrix by matrix', single.step), ('muon, in batches', batched.step),
                       ('adamw', optimiser.optimisers['adam'].step)):
        _, *rows[name] = counted(work)
    result = {name: {'operator_calls': calls, 'host_ms': round(took, 1)} for name, (calls, took) in rows.items()}
    write_result({**provenance(), 'matrices': len(batched.param_groups[0]['params']), 'rows': result}, options.out)
    print(result)
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
