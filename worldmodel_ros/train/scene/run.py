"""Trains a scene forecast for a given time, while processes still simulate its episodes.

    python -m worldmodel_ros.train.scene.run --out out/scene --seconds 600 --simulate 200
    worldmodel evaluate control --forecast out/scene --seeds 3000000:3000100 --tasks intercept street

It begins with the encoder and DiT of a model, trains both along, and leaves averaged weights, and their errors on episodes
that were not trained on. On an H200 a step of 256 clips took 0.18 s without --compile.
"""
from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from worldmodel_ros.engine.loading import model_folder
from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.scene_forecast import HORIZONS, SCALE, SLOTS, Present, SceneForecast, layout
from worldmodel_ros.sim.scene import COLOURS
from worldmodel_ros.sim.world import World
from .episodes import FRAMES, SHUTTLES, Store, Truth, make, truth

CLIP = 24  # frames of a clip
ANCHORS = ((3, 11, 23), (6, 15, 20), (2, 18, 22), (9, 13, 23), (4, 16, 21), (7, 19, 23))  # one set a step
HELD_BACK = 192  # episodes, the first ones
GROUPS = {'objects': slice(0, len(COLOURS)), 'balls': slice(len(COLOURS), SHUTTLES), 'shuttles': slice(SHUTTLES, SLOTS)}
_BEGIN = 0.25  # share of the clips that begin with their episode, as a task does
_MOVERS = 2.0  # weight of a mover's error, against 1 of an object's
_CHUNK = 16  # episodes that are handed over at a time
_worlds: list[World] = []


def losses(outputs: tuple[Present, Tensor, Tensor], target: Truth) -> dict[str, Tensor]:
    """The parts of the loss, weighted; their sum is what is minimised."""
    present, one, two = outputs
    presence = F.binary_cross_entropy_with_logits(present.presence.float(), target.known.float())
    walls = F.smooth_l1_loss(present.walls.float(), target.walls, beta=0.1)
    return {'presence': 2.0 * presence, 'walls': 2.0 * walls, 'now': _laplace(present.now, target.now, target.known),
            'present': 0.6 * _laplace(present.paths, target.ahead, target.counts),
            'one pass': _laplace(one, target.ahead, target.counts), 'two passes': _laplace(two, target.ahead, target.counts)}


def _laplace(out: Tensor, target: Tensor, counts: Tensor) -> Tensor:
    """Negative logarithm of the likelihood under a Laplace distribution, whose scale the network gives, too."""
    scale = out[..., 2].float().clamp(-4.5, 1.5)
    error = (out[..., :2].float() * SCALE - target).abs().sum(-1)
    weight = torch.ones(SLOTS, device=out.device)
    weight[len(COLOURS):] = _MOVERS
    weight = torch.where(counts, weight, 0.0)
    return (weight * (error * (-scale).exp() + 2.0 * scale)).sum() / weight.sum().clamp(min=1.0)


def clips(store: Store, count: int, episodes: range, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Images (B, CLIP, 3, H, W) in [-1, 1], executed and measured (B, CLIP, 2), and of which episodes and from where."""
    device = store.arrays['frames'].device
    episode = torch.randint(episodes.start, episodes.stop, (count,), device=device, generator=generator)
    start = torch.randint(0, FRAMES - CLIP + 1, (count,), device=device, generator=generator)
    start = torch.where(torch.rand(count, device=device, generator=generator) < _BEGIN, 0, start)
    rows = episode[:, None], start[:, None] + torch.arange(CLIP, device=device)
    images = store.arrays['frames'][rows].permute(0, 1, 4, 2, 3).float().div_(127.5).sub_(1.0)
    return images, store.arrays['executed'][rows], store.arrays['measured'][rows], episode, start


class Training:
    """One run: the network, its average, and the optimiser."""

    def __init__(self, forecast: SceneForecast, store: Store, rate: float, compiled: bool = False, seed: int = 0) -> None:
        self.forecast, self._store = forecast.train(), store
        self._device = store.arrays['frames'].device
        self._run: Callable = torch.compile(forecast) if compiled else forecast
        trained = {id(p) for part in (forecast.encoder, forecast.dit) for p in part.parameters()}
        known = [p for p in forecast.parameters() if id(p) in trained]
        new = [p for p in forecast.parameters() if id(p) not in trained]
        self._optimiser = torch.optim.AdamW([{'params': known, 'lr': 0.7 * rate}, {'params': new, 'lr': rate}],
                                            betas=(0.9, 0.98), weight_decay=0.02, fused=self._device.type == 'cuda')
        self._rates = [group['lr'] for group in self._optimiser.param_groups]
        self._average = {name: value.detach().clone() for name, value in forecast.state_dict().items()}
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._layouts = [tuple(part.to(self._device) for part in layout(forecast.preset, CLIP, anchors)) for anchors in ANCHORS]
        self.steps = 0

    def step(self, count: int, share: float, held_back: int = HELD_BACK) -> dict[str, float | Tensor]:
        """One step of `count` clips; `share` of the run is over, by which the rate falls."""
        decay = min(1.0, (self.steps + 1) / 300) * (0.5 + 0.5 * math.cos(math.pi * min(1.0, share))) + 0.002
        for group, rate in zip(self._optimiser.param_groups, self._rates, strict=True):
            group['lr'] = rate * decay
        parts = losses(*self._forecasts(self._run, count, range(held_back, self._store.count), self.steps % len(ANCHORS)))
        self._optimiser.zero_grad(set_to_none=True)
        sum(parts.values()).backward()
        parts['gradient'] = nn.utils.clip_grad_norm_(self.forecast.parameters(), 1.0)
        self._optimiser.step()
        self.steps += 1
        keep = min(0.998, self.steps / (self.steps + 100))
        with torch.no_grad():
            for name, value in self.forecast.state_dict().items():
                self._average[name].lerp_(value, 1.0 - keep)
        return {name: part.detach() for name, part in parts.items()}

    def finish(self) -> SceneForecast:
        """The network with averaged weights."""
        self.forecast.load_state_dict(self._average)
        return self.forecast.eval()

    @torch.no_grad()
    def errors(self, episodes: range, batches: int = 16, count: int = 64) -> dict[str, float]:
        """Median error in m of what is known, by rung, group of things and seconds ahead."""
        found: dict[str, list[Tensor]] = {}
        for number in range(batches):
            (present, one, two), target = self._forecasts(self.forecast, count, episodes, number % len(ANCHORS))
            forecasts = {'present': present.paths, 'one pass': one, 'two passes': two}
            for group, slots in GROUPS.items():
                error = _metres(present.now, target.now)[..., slots][target.known[..., slots]]
                found.setdefault(f'now, {group}', []).append(error)
                for rung, out in forecasts.items():
                    error = _metres(out, target.ahead)
                    for j, frames in enumerate(HORIZONS):
                        found.setdefault(f'{rung}, {group}, {frames / 10:.1f} s', []).append(
                            error[:, :, j, slots][target.counts[:, :, j, slots]])
        return {name: round(torch.cat(errors).median().item(), 4) for name, errors in found.items() if sum(map(len, errors))}

    def _forecasts(self, run: Callable, count: int, episodes: range, number: int
                   ) -> tuple[tuple[Present, Tensor, Tensor], Truth]:
        images, executed, measured, episode, start = clips(self._store, count, episodes, self._generator)
        mixed = torch.autocast('cuda', torch.bfloat16) if images.is_cuda else nullcontext()
        with mixed:
            outputs = run(images, executed, measured, ANCHORS[number], *self._layouts[number])
        window = self.forecast.preset.window_frames
        return outputs, truth(self._store.arrays, episode, start, ANCHORS[number], window)


def _metres(out: Tensor, target: Tensor) -> Tensor:
    return (out[..., :2].float() * SCALE - target).norm(dim=-1)


def _simulated(seed: int) -> dict:
    if not _worlds:
        torch.set_num_threads(1)
        _worlds.append(World())
    return make(seed, _worlds[0])


def _feed(store: Store, seeds: range, workers: int, seconds: float) -> None:
    """Add episodes until there are as many as seeds, or the time is over."""
    end, chunk = time.monotonic() + seconds, []
    with multiprocessing.get_context('spawn').Pool(workers) as pool:
        for episode in pool.imap_unordered(_simulated, seeds, chunksize=2):
            chunk.append(episode)
            if len(chunk) == _CHUNK:
                store.add(chunk)
                chunk = []
            if time.monotonic() > end:
                break


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m worldmodel_ros.train.scene.run', description=__doc__.splitlines()[0])
    parser.add_argument('--model', default='tiny', help='model whose encoder and DiT it begins with')
    parser.add_argument('--out', type=Path, required=True, help='folder for the weights')
    parser.add_argument('--seconds', type=float, default=600.0, help='of training')
    parser.add_argument('--simulate', type=float, default=200.0, help='seconds for which episodes are simulated')
    parser.add_argument('--episodes', type=int, default=20_000, help='at most; each is 0.9 MB on the device')
    parser.add_argument('--first-seed', type=int, default=0, help='seeds below 1000000 are for training')
    parser.add_argument('--begin', type=int, default=1_500, help='episodes with which the training begins')
    parser.add_argument('--batch', type=int, default=256, help='clips a step')
    parser.add_argument('--rate', type=float, default=4e-4)
    parser.add_argument('--workers', type=int, default=os.cpu_count())
    parser.add_argument('--compile', action='store_true', help='torch.compile: faster after about a minute')
    options = parser.parse_args(arguments)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    store = Store(options.episodes, device)
    seeds = range(options.first_seed, options.first_seed + options.episodes)
    feeder = threading.Thread(target=_feed, args=(store, seeds, options.workers, options.simulate), daemon=True)
    feeder.start()
    forecast = SceneForecast.from_world_model(checkpoint.load(model_folder(options.model), device))
    while store.count < min(options.begin, options.episodes) and feeder.is_alive():
        time.sleep(0.5)
    held_back = min(HELD_BACK, store.count // 2)
    training, log, start = Training(forecast, store, options.rate, options.compile), [], time.monotonic()
    while (elapsed := time.monotonic() - start) < options.seconds:
        parts = training.step(options.batch, elapsed / options.seconds, held_back)
        if training.steps % 100 == 0 or training.steps == 1:
            log.append({'step': training.steps, 'seconds': round(elapsed, 1), 'episodes': store.count,
                        **{name: round(float(part), 4) for name, part in parts.items()}})
            print(json.dumps(log[-1]), file=sys.stderr, flush=True)
    result = {'steps': training.steps, 'batch': options.batch, 'episodes': store.count, 'first_seed': options.first_seed,
              'seconds': round(time.monotonic() - start, 1), 'model': options.model,
              'device': torch.cuda.get_device_name() if device == 'cuda' else 'cpu'}
    finished = training.finish()
    result['errors_m'] = training.errors(range(held_back))
    checkpoint.save(finished, options.out, {'scene_forecast': result, 'log': log})
    print(json.dumps(result))
    return 0


if __name__ == '__main__':
    sys.exit(main())
