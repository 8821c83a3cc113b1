"""Trains a scene forecast for a given time, while processes simulate its episodes.

    python -m worldmodel_ros.train.scene.run --out out/scene --seconds 600 --simulate 200
    worldmodel evaluate control --forecast out/scene --seeds 3000000:3000100 --tasks intercept street

It starts from a model's encoder, which is trained too, or from an earlier forecast, and leaves averaged weights, and their
errors on episodes that were not trained on.
"""
from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from worldmodel_ros.engine.forecast.loading import forecast_folder
from worldmodel_ros.engine.loading import model_folder
from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.checkpoint_description import ModelError
from worldmodel_ros.model.scene_forecast import HORIZONS, SCALE, SLOTS, Ahead, Present, SceneForecast
from worldmodel_ros.sim.scene import COLOURS
from worldmodel_ros.sim.world import World
from .episodes import FRAMES, SHUTTLES, Store, Truth, make, truth

CLIP = 40  # frames of a clip, unless told otherwise
ANCHORS = 8  # frames of a clip from which a second pass is trained, drawn in each step
HELD_BACK = 192  # episodes, the first ones
_SEEDS = range(1_000_000)  # for training
GROUPS = {'objects': slice(0, len(COLOURS)), 'balls': slice(len(COLOURS), SHUTTLES), 'shuttles': slice(SHUTTLES, SLOTS)}
_BEGIN = 0.25  # share of the clips that start with their episode, as a task does
_MOVERS = 2.0  # weight of a mover's error, against 1 of an object's
_GAIN, _TINT, _OFFSET, _NOISE = 0.2, 0.08, 0.06, 0.04  # largest ones, of images in [-1, 1]
UNSEEN = {'in view': (0, 1), '0.1 to 1 s': (1, 11), '1 to 2 s': (11, 21), '2 to 4 s': (21, 41), '4 to 8 s': (41, 81)}  # frames
_SAVE = 240.0  # s, between two checkpoints
_CHUNK = 16  # episodes that are handed over at a time
_ORDERS = tuple(permutations(range(SLOTS - SHUTTLES)))
_worlds: list[World] = []


def losses(outputs: tuple[Present, Ahead, Ahead], target: Truth, anchors: Tensor) -> dict[str, Tensor]:
    """Return the weighted parts of the loss; their sum is minimised. Each output has the shuttles in its own order, and is
    compared with the truth in that order."""
    present, one, two = outputs
    seen = ordered(target, present)
    parts = {'present': _presence(present, seen) + _laplace(present.now, seen.now, seen.known),
             'present walls': 0.5 * _walls(present, target)}
    for name, out, truly in (('one pass', one, ordered(target, one)), ('two passes', two, ordered(_at(target, anchors), two))):
        parts[name] = _presence(out, truly) + _laplace(out.now, truly.now, truly.known) + \
            2.0 * _laplace(out.paths, truly.ahead, truly.counts)
        parts[f'{name}, walls'] = _walls(out, truly)
    return parts


@torch.no_grad()
def ordered(target: Truth, out: Present) -> Truth:
    """Return the truth with its shuttles in the order that fits ``out`` best, frame by frame."""
    others = slice(SHUTTLES, SLOTS)
    known, now = target.known[..., None, others], target.now[..., None, others, :]
    logits, places = out.presence[..., others, None].float(), out.now[..., others, None, :2].float() * SCALE
    apart = (places - now).abs().sum(-1)
    if isinstance(out, Ahead):
        paths = (out.paths[..., others, None, :2].float() * SCALE - target.ahead[..., None, others, :]).abs().sum(-1)
        apart = apart + torch.where(target.counts[..., None, others], paths, 0.0).mean(-3)
    cost = torch.where(known, 2.0 * F.softplus(-logits) + apart, 2.0 * F.softplus(logits))  # (..., out, truth)
    orders = torch.tensor(_ORDERS, device=cost.device)
    best = orders[cost[..., torch.arange(orders.shape[1], device=cost.device), orders].sum(-1).argmin(-1)]
    order = torch.cat([torch.arange(SHUTTLES, device=cost.device).expand(*best.shape[:-1], -1), SHUTTLES + best], -1)
    ahead = order[..., None, :].expand(*target.counts.shape)
    return Truth(target.known.gather(-1, order), target.unseen.gather(-1, order),
                 target.now.gather(-2, order[..., None].expand(*order.shape, 2)),
                 target.ahead.gather(-2, ahead[..., None].expand(*ahead.shape, 2)), target.counts.gather(-1, ahead),
                 target.walls)


def _at(target: Truth, frames: Tensor) -> Truth:
    return Truth(*(part[:, frames] for part in (target.known, target.unseen, target.now, target.ahead, target.counts,
                                                target.walls)))


def _presence(out: Present, target: Truth) -> Tensor:
    return 2.0 * F.binary_cross_entropy_with_logits(out.presence.float(), target.known.float())


def _walls(out: Present, target: Truth) -> Tensor:
    return 2.0 * F.smooth_l1_loss(out.walls.float(), target.walls, beta=0.1)


def _laplace(out: Tensor, target: Tensor, counts: Tensor) -> Tensor:
    """Negative log likelihood under Laplace distributions along the forecast's line of sight and across it, whose scales the
    network predicts too.

    The directions are those of the forecast, not of the truth: with the truth's, a forecast of 0 would never err across it.
    """
    place = out[..., :2].float() * SCALE
    away = place.detach().norm(dim=-1, keepdim=True)
    sight = torch.where(away > 1e-3, place.detach() / away.clamp(min=1e-3), torch.tensor([1.0, 0.0], device=out.device))
    error, scale = place - target, out[..., 2:].float().clamp(-3.5, 1.5)
    along = (error * sight).sum(-1)
    across = error[..., 1] * sight[..., 0] - error[..., 0] * sight[..., 1]
    weight = torch.ones(SLOTS, device=out.device)
    weight[len(COLOURS):] = _MOVERS
    weight = torch.where(counts, weight, 0.0)
    both = torch.stack([along, across], -1).abs() * (-scale).exp() + scale
    return (weight * both.sum(-1)).sum() / weight.sum().clamp(min=1.0)


@dataclass
class Clips:
    """Images (B, T, 3, H, W) in [-1, 1], executed and measured (B, T, 2), and the forecast targets."""

    images: Tensor
    executed: Tensor
    measured: Tensor
    target: Truth


def clips(store: Store, count: int, episodes: range, generator: torch.Generator, varied: bool = False, frames: int = CLIP
          ) -> Clips:
    """Draw clips of ``frames`` frames, half with left and right exchanged; ``varied``: each in its own light."""
    device = store.arrays['frames'].device
    episode = torch.randint(episodes.start, episodes.stop, (count,), device=device, generator=generator)
    start = torch.randint(0, FRAMES - frames + 1, (count,), device=device, generator=generator)
    chance = torch.rand((2, count), device=device, generator=generator)
    start, mirrored = torch.where(chance[0] < _BEGIN, 0, start), chance[1] < 0.5
    rows = episode[:, None], start[:, None] + torch.arange(frames, device=device)
    images = store.arrays['frames'][rows]
    images = torch.where(mirrored[:, None, None, None, None], images.flip(3), images)
    images = images.permute(0, 1, 4, 2, 3).float().div_(127.5).sub_(1.0)
    if varied:
        images = _in_other_light(images, generator)
    turned = torch.where(mirrored[:, None, None], torch.tensor([1.0, -1.0], device=device), 1.0)
    return Clips(images, store.arrays['executed'][rows] * turned, store.arrays['measured'][rows] * turned,
                 truth(store.arrays, episode, start, frames, mirrored))


def _in_other_light(images: Tensor, generator: torch.Generator) -> Tensor:
    """Clips (B, T, 3, H, W), each with its own overall and colour gains, offset and noise: without them a network memorises
    the training rooms (docs/task_results.md)."""
    def drawn(*shape: int) -> Tensor:
        return 2.0 * torch.rand((len(images), 1, *shape), device=images.device, generator=generator) - 1.0
    gain = (1.0 + _GAIN * drawn(1, 1, 1)) * (1.0 + _TINT * drawn(3, 1, 1))
    noise = torch.randn(images.shape, device=images.device, generator=generator) * (_NOISE * drawn(1, 1, 1))
    return ((images + 1.0) * gain - 1.0 + _OFFSET * drawn(1, 1, 1) + noise).clamp(-1.0, 1.0)


class Training:
    """One run: the network, its averaged weights, and the optimisers: Muon (Jordan et al. 2024) for the layers' matrices,
    AdamW for the rest."""

    def __init__(self, forecast: SceneForecast, store: Store, rate: float, compiled: bool = False, seed: int = 0,
                 clip: int = CLIP) -> None:
        self.forecast, self._store = forecast.train().to(memory_format=torch.channels_last), store
        self._device, self._clip = store.arrays['frames'].device, clip
        if compiled:  # part by part: the layers share one compiled graph
            for part in (*forecast.layers, forecast.encoder.down):
                part.compile(dynamic=False)
        matrices = [p for p in forecast.layers.parameters() if p.ndim == 2]
        known = {id(p) for p in matrices}
        rest = [p for p in forecast.parameters() if id(p) not in known]
        self._optimisers = (
            torch.optim.Muon(matrices, lr=rate, momentum=0.95, weight_decay=0.05, adjust_lr_fn='match_rms_adamw'),
            torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.02, fused=self._device.type == 'cuda'))
        self._rate = rate
        self._average = {name: value.detach().clone() for name, value in forecast.state_dict().items()}
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self.steps = 0

    def step(self, count: int, share: float, held_back: int = HELD_BACK) -> dict[str, Tensor]:
        """Take one step on ``count`` clips; the rate falls with the ``share`` of the run that is over."""
        decay = min(1.0, (self.steps + 1) / 200) * (min(1.0, (1.0 - min(1.0, share)) / 0.6) + 0.002)
        for optimiser in self._optimisers:
            for group in optimiser.param_groups:
                group['lr'] = self._rate * decay
        outputs, target, anchors = self._forecasts(count, range(held_back, self._store.count), varied=True)
        parts = losses(outputs, target, anchors)
        self.forecast.zero_grad(set_to_none=True)
        sum(parts.values()).backward()
        parts['gradient'] = nn.utils.clip_grad_norm_(self.forecast.parameters(), 1.0)
        for optimiser in self._optimisers:
            optimiser.step()
        self.steps += 1
        keep = min(0.999, self.steps / (self.steps + 100))
        with torch.no_grad():
            state = self.forecast.state_dict()
            torch._foreach_lerp_(list(self._average.values()), [state[name] for name in self._average], 1.0 - keep)
        return {name: part.detach() for name, part in parts.items()}

    def finish(self) -> SceneForecast:
        """Return the network with averaged weights."""
        self.forecast.load_state_dict(self._average)
        return self.forecast.eval()

    def averaged(self) -> SceneForecast:
        """Return a copy of the network with averaged weights; training can continue."""
        copy = SceneForecast(self.forecast.preset)
        copy.load_state_dict(self._average)
        return copy.eval()

    @torch.no_grad()
    def errors(self, episodes: range, batches: int = 16, count: int = 64) -> dict[str, float]:
        """Return the median error in m of what is known, by rung, group of things and seconds ahead, and the share of things
        whose presence is predicted wrongly."""
        found: dict[str, list[Tensor]] = {}
        for _ in range(batches):
            outputs, target, anchors = self._forecasts(count, episodes)
            for rung, out, truly in zip(('present', 'one pass', 'two passes'), outputs, (target, target, _at(target, anchors)),
                                        strict=True):
                truly = ordered(truly, out)
                for group, slots in GROUPS.items():
                    known = truly.known[..., slots]
                    found.setdefault(f'{rung}, {group}, wrong', []).append(
                        ((out.presence[..., slots] > 0) != known).float().mean()[None])
                    found.setdefault(f'{rung}, {group}, now', []).append(
                        _metres(out.now, truly.now)[..., slots][known])
                    for name, (low, high) in UNSEEN.items() if group == 'shuttles' else ():
                        told = known & (truly.unseen[..., slots] >= low) & (truly.unseen[..., slots] < high)
                        found.setdefault(f'{rung}, {group}, now, {name}', []).append(
                            _metres(out.now, truly.now)[..., slots][told])
                    for j, frames in enumerate(HORIZONS if isinstance(out, Ahead) else ()):
                        found.setdefault(f'{rung}, {group}, {frames / 10:.1f} s', []).append(
                            _metres(out.paths, truly.ahead)[:, :, j, slots][truly.counts[:, :, j, slots]])
        return {name: round((torch.cat(errors).mean() if name.endswith('wrong') else torch.cat(errors).median()).item(), 4)
                for name, errors in found.items() if sum(map(len, errors))}

    def _forecasts(self, count: int, episodes: range, varied: bool = False
                   ) -> tuple[tuple[Present, Ahead, Ahead], Truth, Tensor]:
        with self._store.reading:
            drawn = clips(self._store, count, episodes, self._generator, varied, self._clip)
        anchors = torch.randperm(self._clip, device=self._device, generator=self._generator)[:ANCHORS].sort().values
        mixed = torch.autocast('cuda', torch.bfloat16) if drawn.images.is_cuda else nullcontext()
        with mixed:
            outputs = self.forecast(drawn.images, drawn.executed, drawn.measured, anchors)
        return outputs, drawn.target, anchors


def _metres(out: Tensor, target: Tensor) -> Tensor:
    return (out[..., :2].float() * SCALE - target).norm(dim=-1)


def _simulated(seed: int) -> dict:
    if not _worlds:
        torch.set_num_threads(1)
        _worlds.append(World())
    return make(seed, _worlds[0])


def _feed(store: Store, seeds: range, workers: int, seconds: float) -> None:
    """Add episodes until the seeds or the time are used up."""
    end, chunk = time.monotonic() + seconds, []
    with multiprocessing.get_context('spawn').Pool(workers) as pool:
        for episode in pool.imap_unordered(_simulated, seeds, chunksize=2):
            chunk.append(episode)
            if len(chunk) == _CHUNK:
                store.add(chunk)
                chunk = []
            if time.monotonic() > end:
                break
        if chunk:
            store.add(chunk)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m worldmodel_ros.train.scene.run', description=__doc__.splitlines()[0])
    parser.add_argument('--model', default='tiny', help='model whose encoder it begins with')
    parser.add_argument('--resume', metavar='FORECAST', help='shipped forecast, or folder of one, to begin with')
    parser.add_argument('--out', type=Path, required=True, help='folder for the weights')
    parser.add_argument('--seconds', type=float, default=600.0, help='of training')
    parser.add_argument('--simulate', type=float, default=200.0, help='seconds for which episodes are simulated')
    parser.add_argument('--episodes', type=int, default=20_000,
                        help='that are kept, of 1 MB each on the device; new ones then replace the oldest')
    parser.add_argument('--first-seed', type=int, default=0, help='seeds below 1000000 are for training')
    parser.add_argument('--begin', type=int, default=1_500, help='episodes with which the training begins')
    parser.add_argument('--batch', type=int, default=128, help='clips a step')
    parser.add_argument('--clip', type=int, default=CLIP, help='frames of a clip: what is to be remembered is in one')
    parser.add_argument('--judged', type=int, default=1024, help='clips that the errors are taken on')
    parser.add_argument('--rate', type=float, default=8e-4)
    parser.add_argument('--workers', type=int, default=os.cpu_count())
    parser.add_argument('--compile', action='store_true', help='torch.compile: faster after about a minute')
    options = parser.parse_args(arguments)
    if not ANCHORS <= options.clip <= FRAMES:
        parser.error(f'--clip must be from {ANCHORS} to {FRAMES}, not {options.clip}')
    if options.episodes < 2 or options.first_seed not in _SEEDS:
        parser.error(f'--episodes ({options.episodes}) must be 2 or more, and --first-seed ({options.first_seed}) from 0 to '
                     f'{_SEEDS.stop - 1}')
    try:
        resumed = options.resume and forecast_folder(options.resume)
    except ModelError as error:
        parser.error(str(error))
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    try:
        store = Store(options.episodes, device, min(HELD_BACK, options.episodes // 2))
    except MemoryError as error:
        print(f'{error}: keep fewer by --episodes', file=sys.stderr)
        return 1
    seeds = _SEEDS[options.first_seed:]
    feeder = threading.Thread(target=_feed, args=(store, seeds, options.workers, options.simulate), daemon=True)
    feeder.start()
    forecast = SceneForecast.load(resumed, device) if resumed else \
        SceneForecast.from_world_model(checkpoint.load(model_folder(options.model), device))
    while store.count < min(options.begin, options.episodes) and feeder.is_alive():
        time.sleep(0.5)
    if store.count < 2:
        print(f'{store.count} episodes were simulated in {options.simulate:g} s, and one to train on and one to judge by are '
              'needed: allow more time by --simulate', file=sys.stderr)
        return 1
    held_back = min(HELD_BACK, store.count // 2)
    training, log, start = Training(forecast, store, options.rate, options.compile, clip=options.clip), [], time.monotonic()
    saved = 0.0
    while (elapsed := time.monotonic() - start) < options.seconds:
        parts = training.step(options.batch, elapsed / options.seconds, held_back)
        if training.steps % 100 == 0 or training.steps == 1:
            log.append({'step': training.steps, 'seconds': round(elapsed, 1), 'episodes': store.added,
                        **{name: round(float(part), 4) for name, part in parts.items()}})
            print(json.dumps(log[-1]), file=sys.stderr, flush=True)
        if elapsed > saved + _SAVE:
            checkpoint.save(training.averaged(), options.out, {'scene_forecast': log[-1]}, torch.float16)
            saved = elapsed
    result = {'steps': training.steps, 'batch': options.batch, 'clip': options.clip, 'episodes': store.added,
              'first_seed': options.first_seed,
              'seconds': round(time.monotonic() - start, 1), 'model': options.model,
              'device': torch.cuda.get_device_name() if device == 'cuda' else 'cpu'}
    finished = training.finish()
    result['errors_m'] = training.errors(range(held_back), max(1, options.judged // 64), min(64, options.judged))
    checkpoint.save(finished, options.out, {'scene_forecast': result, 'log': log}, torch.float16)
    print(json.dumps(result))
    return 0


if __name__ == '__main__':
    sys.exit(main())
