"""Evaluates a trained model on the 3-D paged cache: short predictions, memory of objects turned away from, ten-minute rollouts,
precision by age, the time of a chunk, and one process against two.

    python benchmarks/tile_model.py --model out/small_tiles/final --folder benchmarks/results

Rooms have seeds that no training draws from. Sessions run in the engine, as on robots. Each part writes its own file, with
the preset's name, as its rows come:

* chunk_time: a chunk of two steps with pages in bf16 and FP8, and of the same network under torch.compile over a cloned cache
* prediction, agreement: PSNR at 0.4 and 1 s; how far sessions on pages are from the training pass
* precision: PSNR by the precision of pages; decisions: what-if ranking and success of driving, by the same precisions
* weights: PSNR of the finished model, such as one in 8 bits, against the weights before rounding (``--full``)
* memory: objects that were turned away from; ten_minutes: a long rollout; sharded: one process against two
"""
from __future__ import annotations

import argparse
import gc
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from result_file import provenance, write_result
from torch import Tensor

from worldmodel_ros.cache.tiers import TierPolicy
from worldmodel_ros.engine import memory
from worldmodel_ros.engine.backends import PARALLEL_KINDS
from worldmodel_ros.engine.backends.torch import TorchBackend
from worldmodel_ros.engine.engine import WARM_UP_TICKS, Engine
from worldmodel_ros.engine.loading import load, model_folder
from worldmodel_ros.engine.sampler import Noise
from worldmodel_ros.engine.session import Session
from worldmodel_ros.evaluate.drive.pictures import MOVING_V, MOVING_W, psnr, sharpness
from worldmodel_ros.evaluate.processes import each
from worldmodel_ros.evaluate.quality.horizons import finish
from worldmodel_ros.evaluate.quality.objects import compare_objects, find_objects
from worldmodel_ros.evaluate.quality.tiled_imagination import SessionMemory, TiledImagination
from worldmodel_ros.kernels.pages import Precision
from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.checkpoint_description import ModelError, read_description
from worldmodel_ros.model.sampling import HALF, TWO_STEP, Steps
from worldmodel_ros.model.tile_mask import FOR_GOOD
from worldmodel_ros.train.data import clips
from worldmodel_ros.train.data.batches import Chunks
from worldmodel_ros.train.data.recall import stay_until
from worldmodel_ros.train.objectives.sampler import ChunkSampler

FIRST_SEED = 6_000_000
PERIOD = 0.1  # s
HORIZONS = (0.4, 1.0)  # s
AHEAD = 12  # frames to predict, whole chunks
HIDDEN = (3.0, 6.0, 12.0)  # s that an object is out of view
TURN_RATE, AWAY, BACK = 1.2, 18, 20  # rad/s; frames in which the robot turns away, and back to where it looked
CLOSE = math.radians(5.0)
LATENCIES = 5  # separates the command latencies from the scene of the same seed
AROUND = math.ceil(2.0 * math.pi / TURN_RATE / PERIOD)  # frames of a full turn
MOST_SEARCH = 60  # frames in which the robot looks for an object to turn away from
PARTS = ('chunk_time', 'prediction', 'agreement', 'precision', 'decisions', 'weights', 'memory', 'ten_minutes', 'sharded')
# The pages' precision, and the age [frames] from which FP4 pages are FP4, instead of a quarter of the window. An incomplete
# slab is in bf16, and becomes FP8 first.
PAGES = {'bf16': (Precision.BF16, None), 'fp8': (Precision.FP8, None),
         'fp8 for the newest quarter, fp4': (Precision.FP4, None), 'fp4 for all complete slabs': (Precision.FP4, 2)}


@dataclass(frozen=True)
class Sight:
    """An episode in which an object is turned away from: frames (T, H, W, 3), odometry before each (T, 2), the
    frame ``start`` after which the robot turns back, the object's colour and its bearing [rad] at the end."""

    seed: int
    hidden: float
    frames: np.ndarray
    actions: np.ndarray
    start: int
    colour: str
    bearing: float
    visible: tuple[str, ...]


def turned_away(job: tuple[int, float, int]) -> Sight | None:
    """Look at an object, turn away, stay, and turn back to it, within the limits of acceleration and with the command latencies
    of training; None if no object is in sight, or it is not in the end.

    The way back is steered by the true heading. A way back by commands alone ends up to 15 degrees short: the object then
    stands at the image's border, where ``find_objects`` sees half of it, and not where it is.
    """
    from worldmodel_ros.safety.motion import TwistLimiter
    from worldmodel_ros.sim.odometry import WheelOdometry
    from worldmodel_ros.sim.rollout import LIMITS, advance, random_latency
    from worldmodel_ros.sim.scene import COLOURS
    from worldmodel_ros.sim.world import World
    seed, hidden, size = job
    world = World(image_size=(size, size))
    world.reset(seed)
    frames, actions, odometry = [world.render()], [(0.0, 0.0)], WheelOdometry(world)
    limiter, rng, executed = TwistLimiter(LIMITS), np.random.default_rng([seed, LATENCIES]), (0.0, 0.0)

    def drive(target: tuple[float, float]) -> None:
        nonlocal executed
        command = limiter.limit(target, executed, PERIOD).twist
        advance(world, executed, command, random_latency(rng))
        executed = command
        odometry.update(world)
        frames.append(world.render())
        actions.append(odometry.twist)

    def centred() -> list[str]:
        return [colour for colour in COLOURS if world.visible(colour) and abs(world.goal_bearing(colour)) < 0.35
                and 0.5 < world.goal_distance(colour) < 3.0]

    while not (found := centred()):
        if len(frames) > MOST_SEARCH:
            return None
        drive((0.0, 0.6))
    colour, side = found[0], 1.0 if np.random.default_rng(seed).random() < 0.5 else -1.0
    for _ in range(12):
        drive((0.0, 0.0))
    looked, out_of_view = world.pose[2], 0
    for _ in range(AWAY):
        drive((0.0, side * TURN_RATE))
        out_of_view += not world.visible(colour)
    # It leaves the view about as many frames after the turn begins as it comes back before the turn ends.
    for _ in range(max(0, round(hidden / PERIOD) - 2 * out_of_view)):
        drive((0.0, 0.0))
    if world.visible(colour):
        return None
    start = len(frames) - 1
    for left in range(BACK, 0, -1):
        drive((0.0, math.remainder(looked - world.pose[2], math.tau) / (left * PERIOD)))
    if not world.visible(colour):
        return None
    return Sight(seed, hidden, np.stack(frames), np.array(actions, np.float32), start, colour, world.goal_bearing(colour),
                 tuple(each for each in COLOURS if world.visible(each)))


def _scene(seed: int) -> Any:
    from worldmodel_ros.sim.world import World
    world = World(image_size=(64, 64))
    world.reset(seed)
    return world.scene


@contextmanager
def fp4_from(near: int | None) -> Iterator[None]:
    """Let engines made in the block keep FP4 pages in FP4 from ``near`` frames of age on; None: the default."""
    by_window = memory.TierPolicy.by_window
    if near is not None:
        memory.TierPolicy.by_window = staticmethod(lambda frames: TierPolicy((near,)))
    try:
        yield
    finally:
        memory.TierPolicy.by_window = by_window


def engine_of(model: Path, precision: Precision, near: int | None = None, compiled: bool = False) -> Engine:
    """Return an engine of a model with its pages in a precision; ``near``: see ``fp4_from``."""
    with fp4_from(near):
        return Engine(TorchBackend(checkpoint.load(model), precision=precision, compiled=compiled), model, 1)


def seen(session: Session, frames: np.ndarray, actions: np.ndarray) -> None:
    for frame, action in zip(frames, actions, strict=True):
        session.observe(frame, action)


def quality(engine: Engine, episodes: dict[str, np.ndarray], first: int, every: int, steps: Sequence[int] = (2, 1)) -> dict:
    """PSNR by horizon while the robot moves, of what sessions predict and of the last image."""
    rows: dict[str, list[list[float]]] = {}
    sharp, latents = [], []
    wanted = [round(horizon / PERIOD) - 1 for horizon in HORIZONS]
    session = engine.open_session()
    for frames, actions in zip(episodes['frames'], episodes['actions']):
        session.reset()
        for t in range(len(frames) - AHEAD):
            session.observe(frames[t], actions[t])
            later = actions[t + 1:t + 1 + AHEAD]
            if t < first or (t - first) % every or not (np.abs(later[:4]) > (MOVING_V, MOVING_W)).any():
                continue
            true = frames[[t + 1 + k for k in wanted]]
            for count in steps:
                future = finish(session.what_if(later, count))
                rows.setdefault(f'{count} steps', []).append([psnr(future.frames[k], image) for k, image in zip(wanted, true)])
                if count == steps[0]:
                    latents.append(np.asarray(future.latents))
                    sharp.append((sharpness(future.frames[wanted[-1]]), sharpness(true[-1])))
            rows.setdefault('copy last', []).append([psnr(frames[t], image) for image in true])
    result = {name: {f'{horizon} s': round(float(np.mean([row[i] for row in values])), 3) for i, horizon in enumerate(HORIZONS)}
              for name, values in rows.items()}
    # Summed over all images, since a wall seen from near has none, and cannot be divided by.
    predicted, truth = np.sum(sharp, 0) if sharp else (0.0, 0.0)
    return {'psnr_db': result, 'chunks': len(latents), 'sharpness_1_s': round(float(predicted / max(truth, 1e-6)), 3),
            'rows': rows, 'latents': latents}


def through_autoencoder(engine: Engine, episodes: dict[str, np.ndarray]) -> float:
    """Return PSNR of frames reconstructed by the autoencoder alone."""
    vae, device, found = engine.backend.model.vae, engine.backend.device, []
    for frames in episodes['frames'][:8]:
        images = torch.from_numpy(frames[:40]).to(device).float().div(127.5).sub(1.0).movedim(-1, -3)
        with torch.inference_mode():
            latents = vae.encode_clips(images[None])[0]
            decoded = vae.decode_clip(latents[1:], latents[0])
        decoded = ((decoded + 1.0) * 127.5).round().clamp(0, 255).byte().movedim(-3, -1).cpu().numpy()
        found += [psnr(a, b) for a, b in zip(decoded, frames[1:40])]
    return round(float(np.mean(found)), 3)


def remembered(engine: Engine, sights: Sequence[Sight]) -> dict:
    """Return by seconds out of view how often the object is in the final imagined view, and how often within 5 degrees.

    This is of where ``find_objects`` sees it in the true image, and, separately, of its true place: a near object that the
    border cuts off is seen up to 6 degrees from there.
    """
    rows: dict[float, list[tuple[bool, float, float, bool, int]]] = {}
    session, chunk = engine.open_session(), engine.spec.chunk_frames
    for sight in sights:
        session.reset()
        seen(session, sight.frames[:sight.start + 1], sight.actions[:sight.start + 1])
        later = sight.actions[sight.start + 1:]
        picture = finish(session.what_if(later[:len(later) // chunk * chunk], 2)).frames[-1]
        scene = _scene(sight.seed)
        found, true = find_objects(picture, scene), find_objects(sight.frames[-1], scene)
        errors = [abs(found[sight.colour].bearing - bearing) if sight.colour in found else math.inf
                  for bearing in (true[sight.colour].bearing if sight.colour in true else math.inf, sight.bearing)]
        rows.setdefault(sight.hidden, []).append((
            sight.colour in found, *errors, sight.colour in true, len(set(found) - set(sight.visible))))
    return {f'{hidden} s': _remembered(values) for hidden, values in rows.items()}


def _remembered(values: Sequence[tuple[bool, float, float, bool, int]]) -> dict:
    present, seen_off, off, found, wrong = map(np.array, zip(*values))
    median = math.degrees(float(np.median(seen_off)))
    return {'episodes': len(values), 'present': _share(present), 'within_5_degrees': _share(seen_off <= CLOSE),
            'within_5_degrees_of_its_place': _share(off <= CLOSE),
            'median_error_deg': round(median, 2) if math.isfinite(median) else None,
            'found_in_the_true_image': _share(found), 'colours_imagined_that_are_not_there': _share(wrong)}


def _share(values: np.ndarray) -> float:
    return round(float(np.mean(values)), 3)


class Watched(TiledImagination):
    """As its base; and notes at each roll what its sessions hold: number of the newest frame, slabs, pages, bytes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.held: list[tuple[int, np.ndarray, int, int]] = []
        self.last: SessionMemory | None = None

    def roll(self, memory: SessionMemory, actions: np.ndarray, steps: Steps, keep: bool = True
             ) -> tuple[Tensor, SessionMemory | None]:
        latents, after = super().roll(memory, actions, steps, keep)
        if keep:
            self.last = after
            pages = sum(pool.allocator.usage().used for pool in self._engine.memory.pools)
            self.held.append((after.newest, after.moments[0].cache.table.slabs.copy(), pages, _bytes_held()))
        return latents, after

    def report(self) -> dict:
        """Return what is held after a tenth of the way and at the end, and whether only whole slabs left: sinks stay, and up to
        the maximum of keyframes."""
        late = self.held[len(self.held) // 10:]
        whole = all(self._whole(newest, slabs) for newest, slabs, *_ in late)
        return {'pages_first_and_last': [late[0][2], late[-1][2]], 'most_pages': max(row[2] for row in late),
                'bytes_first_and_last': [late[0][3], late[-1][3]], 'most_slabs': max(len(row[1]) for row in late),
                'slabs_evicted': int(late[-1][1][-1]) + 1 - len(late[-1][1]),
                'only_whole_slabs_evicted': bool(whole)}

    def _whole(self, newest: int, slabs: np.ndarray) -> bool:
        preset, size = self.spec, self.spec.tile[0]
        window = np.arange(max(0, newest + 1 - preset.window_frames) // size, newest // size + 1)
        return (bool(np.isin(window, slabs).all()) and len(slabs) - len(window) <= preset.staying_slabs
                and (slabs[:preset.sink_slabs] == np.arange(preset.sink_slabs)).all())


def _bytes_held() -> int:
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    return int(Path('/proc/self/statm').read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE')


@dataclass(frozen=True)
class Long:
    """How a long rollout is made: its seconds; the seconds observed before it, 0 for as many as a window and keyframes need;
    how many anchors its session keeps; and whether it is given the commands of the true episode, or the motion that these led
    to."""

    seconds: float
    observed: float
    anchors: int
    motion: str


def long_imagination(job: tuple[Path, int, Long]) -> tuple[dict, dict]:
    """Return a record of ``evaluate.quality.drift``; and of the same rollout what it held, and ``compare_objects`` of a full
    turn at the end."""
    from worldmodel_ros.evaluate.quality import drift
    from worldmodel_ros.evaluate.quality.drives import drive_branch, record_drive
    from worldmodel_ros.evaluate.quality.horizons import context_of
    from worldmodel_ros.motion import twists_between
    folder, seed, how = job
    torch.set_num_threads(1)
    device, kind = ('cuda', Precision.BF16) if torch.cuda.is_available() else ('cpu', Precision.FP32)
    network = checkpoint.load(folder, device)
    watched = Watched(network, folder, 1, TorchBackend(network, precision=kind), how.anchors)
    spec = watched.spec
    observed = round(how.observed / spec.step_period) or context_of(spec)
    drive = recorded = record_drive(seed, observed + drift.drift_steps(spec, how.seconds), spec.image_size, drift.MIX)
    if how.motion == 'true':
        moved = twists_between(drive.poses, spec.step_period).astype(np.float32)
        drive = replace(drive, actions=np.concatenate([np.zeros((1, 2), np.float32), moved]))
    start = time.perf_counter()
    record, _ = drift.drift_record(seed, watched, how.seconds, drive, observed)
    took = time.perf_counter() - start
    frames = -(-AROUND // spec.chunk_frames) * spec.chunk_frames
    around = np.tile(np.array([[0.0, TURN_RATE]], np.float32), (frames, 1))
    turn = drive_branch(recorded, len(drive.frames) - 1, around, spec.step_period)
    if how.motion == 'true':  # the body lags behind the commands, at last by up to 26 degrees
        around = twists_between(np.concatenate([drive.poses[-1:], turn.poses]), spec.step_period).astype(np.float32)
    latents = watched.roll(watched.last, around[None], TWO_STEP, keep=False)[0][0]
    images = watched.decode(latents, torch.cat([watched.last.latent, latents[:-1]]))
    seen = set().union(*(find_objects(image, drive.scene) for image in drive.frames[:observed]))
    return record, {'seed': seed, 'seconds_taken': round(took, 1), 'observed': sorted(seen),
                    **compare_objects(turn.frames, images, drive.scene), **watched.report()}


def ten_minutes(model: Path, seeds: Sequence[int], how: Long, workers: int) -> Iterator[dict]:
    """Yield the results of ``long_imagination`` for all rooms so far, after each."""
    from worldmodel_ros.evaluate.quality import summary
    records, rooms = [], []
    for _, done in each(long_imagination, [(model, seed, how) for seed in seeds], workers):
        record, room = done.result()
        records.append(record)
        rooms.append(room)
        there, found, in_place = (sum(len(one[name]) for one in rooms) for name in ('there', 'found', 'found_in_place'))
        sightings = {name: sum(one['sightings'][name] for one in rooms) for name in rooms[0]['sightings']}
        yield {'how': asdict(how), **summary.drift(records), 'objects': there,
               'share_of_objects_found': round(found / max(1, there), 3),
               'share_of_objects_found_in_place': round(in_place / max(1, there), 3), 'sightings': sightings, 'rooms': rooms}


def against_first(engines: Iterable[tuple[str, Callable[[], Engine]]], key: str, episodes: dict[str, np.ndarray], first: int
                  ) -> Iterator[dict]:
    """Yield PSNR of two steps for each of the engines, by their names under ``key``, and its difference and that of the
    latents from the first engine's, at the same moments."""
    base = None
    for name, make in engines:
        engine = make()
        result = quality(engine, episodes, first, 6, (2,))
        scores, latents = np.array(result.pop('rows')['2 steps']), result.pop('latents')
        base = base or (scores, latents)
        change = (scores - base[0]).mean(1)
        draws = np.random.default_rng(0).choice(change, (2000, len(change))).mean(1)
        yield {key: name, **result, 'change_db': round(float(change.mean()), 4),
               'interval_95': [round(float(q), 4) for q in np.quantile(draws, (0.025, 0.975))],
               'latent_error': round(float(np.mean([np.linalg.norm(a - b) / np.linalg.norm(b)
                                                    for a, b in zip(latents, base[1])])), 5)}
        del engine
        torch.cuda.empty_cache()


def decided(job: tuple[Path, int, int, float]) -> list[tuple[str, list[dict], dict]]:
    """Return for one room, by the name of each of PAGES: records of ``evaluate.quality.ranking`` from ``starts`` starts, and
    how the robot drove to its goal, in ``seconds``, by the plans that the action head makes over these pages."""
    from worldmodel_ros.evaluate.quality import closed_loop
    from worldmodel_ros.evaluate.quality.drives import record_drive
    from worldmodel_ros.evaluate.quality.horizons import context_of, drive_frames
    from worldmodel_ros.evaluate.quality.ranking import ranking_records
    folder, seed, starts, seconds = job
    torch.set_num_threads(1)
    device, found, drive = 'cuda' if torch.cuda.is_available() else 'cpu', [], None
    for name, (kind, near) in PAGES.items():
        with fp4_from(near):
            network = checkpoint.load(folder, device)
            imagination = TiledImagination(network, folder, starts, TorchBackend(network, precision=kind))
        spec = imagination.spec
        drive = drive or record_drive(seed, drive_frames(spec.step_period, starts, context_of(spec)), spec.image_size)
        ranks = ranking_records(drive, imagination)
        del imagination
        driver = closed_loop.policy(engine_of(folder, kind, near), 2)
        found.append((name, ranks, {'driver': 'two_step', **asdict(closed_loop.drive(seed, driver, spec.image_size, seconds))}))
    return found


def decisions(model: Path, seeds: Sequence[int], starts: int, seconds: float, workers: int) -> Iterator[list[dict]]:
    """Yield what-if ranking and success by the precision of pages; rows of all rooms so far, after each."""
    from worldmodel_ros.evaluate.quality import summary
    ranks: dict[str, list[dict]] = {name: [] for name in PAGES}
    drives: dict[str, list[dict]] = {name: [] for name in PAGES}
    for _, done in each(decided, [(model, seed, starts, seconds) for seed in seeds], min(workers, 8)):
        for name, records, episode in done.result():
            ranks[name] += records
            drives[name].append(episode)
        yield [{'pages': name, 'rooms': len(drives[name]), **summary.what_if(ranks[name]),
                'closed_loop': summary.closed_loop(drives[name])} for name in PAGES]


def agreement(engine: Engine, frames: np.ndarray, actions: np.ndarray, chunks: int = 20) -> dict:
    """Return how far sessions on pages are from the training pass over the same frames: RMS of latents, relative."""
    model, device, k = engine.backend.model, engine.backend.device, engine.spec.chunk_frames
    session, found, starts, latents, state = engine.open_session(), [], [], [], None
    for t in range(len(frames) - k):
        (latent, state), = engine.backend.run('encode', [(frames[t], state)])
        latents.append(engine.backend.host(latent))
        session.observe(frames[t], actions[t])
        if t % 5 == 3 and len(found) < chunks:
            found.append(session.imagine(actions[t + 1:t + 1 + k]).latents)
            starts.append(t + 1)
    draw = Noise(0, (k, *engine.spec.latent_size, engine.spec.latent_channels)).draw
    noise = torch.from_numpy(np.concatenate([draw(start) for start in starts]))[None].to(device)
    context, executed = (torch.from_numpy(np.asarray(part))[None].to(device) for part in (np.stack(latents), actions))
    starts = np.array(starts)
    index = torch.from_numpy((starts[:, None] + np.arange(k)).ravel()).to(device)
    with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == 'cuda'):
        until = stay_until(engine.spec, actions[:context.shape[1]])
        sampler = ChunkSampler(model, Chunks(context, executed[:, :context.shape[1]], starts, noise, executed[:, index],
                                             until=until))
        ours = sampler.euler(noise, torch.zeros(noise.shape[:2], device=device), 1.0, HALF, 2)[0]
    ours, pages = ours.unflatten(0, (-1, k)).float().cpu().numpy(), np.stack(found)
    errors = np.sqrt(((ours - pages) ** 2).mean((1, 2, 3, 4)) / (pages ** 2).mean())
    return {'chunks': len(errors), 'frames': len(latents), 'rms_error_mean': round(float(errors.mean()), 6),
            'rms_error_max': round(float(errors.max()), 6)}


def chunk_times(model: Path, frames: np.ndarray, actions: np.ndarray, repeats: int) -> dict:
    """Return ms of a two-step chunk over a full window, called by a session; and of the same network under torch.compile with
    FlexAttention over keys and values that are cloned when the window rolls; on a CPU without compilation and its kernels."""
    result: dict[str, Any] = {}
    kinds = [('paged bf16', Precision.BF16, False), ('paged fp8', Precision.FP8, False)]
    if torch.cuda.is_available():  # served as ``torch-compiled``
        kinds.append(('paged bf16, compiled', Precision.BF16, True))
    for name, kind, compiled in kinds:
        engine = engine_of(model, kind, compiled=compiled)
        engine.warm_up(min(repeats, WARM_UP_TICKS))
        session, chunk = engine.open_session(), engine.spec.chunk_frames
        count = min(72, len(frames) - chunk)
        seen(session, frames[:count], actions[:count])
        result[name] = _quantiles(_timed(partial(session.imagine, actions[count:count + chunk]), repeats))
        print(name, result[name], file=sys.stderr, flush=True)
        del session, engine
        torch.cuda.empty_cache()
    compiled = 'torch.compile, FlexAttention, cloned cache'
    others = {compiled: False, f'{compiled}, CUDA graph': True} if torch.cuda.is_available() else {'cloned cache': False}
    for name, graph in others.items():
        try:
            result[name] = _quantiles(_cloned(model, graph, repeats))
        except Exception as error:  # keep measuring the others
            result[name] = {'failed': repr(error)[:300]}
        print(name, result[name], file=sys.stderr, flush=True)
    return result


def _timed(work: Callable[[], Any], repeats: int) -> list[float]:
    """Return ms of each of ``repeats`` calls, after warm-up."""
    found = []
    for number in range(-(repeats // 10), repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if number >= 0:
            found.append(1e3 * (time.perf_counter() - start))
    return found


@torch.inference_mode()
def _cloned(model: Path, graph: bool, repeats: int) -> list[float]:
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    network = checkpoint.load(model, str(device)).dit.bfloat16()
    network.conditioning.float()
    preset = network.preset
    k, f = preset.chunk_frames, preset.context_frames + preset.sink_slabs * preset.tile[0]
    if device.type == 'cuda':
        for block in network.blocks:
            block.compile(dynamic=False)
    times = np.arange(f)
    starts = np.array([f])
    shape = *preset.latent_size, preset.latent_channels
    z = torch.randn(1, k, *shape, device=device)
    actions = torch.zeros(1, k, preset.actions, device=device)
    keys = torch.randn(2, len(preset.cache_layers), 1, preset.heads, f * preset.tokens, preset.head_dim, device=device,
                       dtype=torch.bfloat16)
    new = keys[..., -k * preset.tokens:, :].clone()
    sinks = preset.sink_slabs * preset.tile[0] * preset.tokens
    mask = clips.noisy_mask(preset, times, starts, device, until=np.full(f, FOR_GOOD))
    rotary = clips.rotary(preset, f + np.arange(k), torch.zeros(1, k, device=device))
    tau = [torch.full((1, k), level, device=device) for level in (0.0, 0.5)]
    row = torch.full((1, k), HALF, dtype=torch.long, device=device)

    def chunk() -> Tensor:
        window = torch.cat([keys[..., :sinks, :], keys[..., sinks + new.shape[-2]:, :], new], -2)
        x = z
        for step, level in enumerate(tau):
            clean = network(x, level, row, actions, rotary, mask, window[0], window[1])[0].float()
            x = x + (clean - x) / (2 - step)
        return x

    for _ in range(5):
        chunk()
    work: Callable[[], Any] = chunk
    if graph:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            chunk()
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out = chunk()

        def work() -> Tensor:
            captured.replay()
            return out
    return _timed(lambda: work().cpu(), repeats)


def closed_loop(model: Path, seed: int, ticks: int, gpus: int, parallel: str, shown: tuple[np.ndarray, np.ndarray] | None = None
                ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Drive to the red object with one process or several; return images (ticks, H, W, 3), commands (ticks, A) and the latents
    of the chunk imagined at the end. ``shown``: images and commands of another loop, which are observed instead."""
    from worldmodel_ros.sim.world import World
    engine = load(str(model), 'torch', sessions=1, gpus=gpus, parallel=parallel)
    try:
        session, commands, seen = engine.open_session(), [], []
        world = World(image_size=engine.spec.image_size)
        world.reset(seed)
        command = np.zeros(engine.spec.actions, np.float32)
        for tick in range(ticks):
            seen.append(world.render() if shown is None else shown[0][tick])
            session.observe(seen[-1], command)
            commands.append(np.asarray(session.plan('red')[0], np.float32))
            command = commands[-1] if shown is None else shown[1][tick]
            world.step(command, PERIOD)
        future = session.imagine(np.tile(command, (engine.spec.chunk_frames, 1)))
        return np.stack(seen), np.stack(commands), future.latents
    finally:
        engine.close()


def sharded(model: Path, seed: int, ticks: int) -> list[dict]:
    """Compare two processes with one, each in its own closed loop in the same room, and when both see the same images."""
    (images, commands, latents), rows = closed_loop(model, seed, ticks, 1, 'sequence'), []
    for parallel in PARALLEL_KINDS:
        try:
            own, others, imagined = closed_loop(model, seed, ticks, 2, parallel)
            *_, same = closed_loop(model, seed, ticks, 2, parallel, (images, commands))
        except ModelError as error:
            rows.append({'processes': 2, 'parallel': parallel, 'refused': str(error)})
            continue
        rows.append({'processes': 2, 'parallel': parallel, 'ticks': ticks, 'same_commands': bool((others == commands).all()),
                     'commands_differ_by': float(np.abs(others - commands).max()),
                     'pixels_that_differ': float((own != images).any(-1).mean()),
                     'latents_differ_by': float(np.abs(imagined - latents).max()),
                     'latents_differ_by_after_the_same_images': float(np.abs(same - latents).max()),
                     'mean_latent': float(np.abs(latents).mean())})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _quantiles(times: Sequence[float]) -> dict[str, float]:
    return {'p50_ms': round(float(np.quantile(times, 0.5)), 3), 'p99_ms': round(float(np.quantile(times, 0.99)), 3)}


def simulated(options: argparse.Namespace, size: int, with_sights: bool
              ) -> tuple[dict[str, np.ndarray], dict[int, list[Sight]]]:
    """Return episodes of images of ``size`` pixels and, ``with_sights``, the objects that are turned away from, at this size
    and for ``compared``; a new file of episodes always includes these for later parts."""
    from worldmodel_ros.sim.rollout import collect
    sizes = {size, 64} if options.compared else {size}
    if options.episodes and options.episodes.is_file():
        with np.load(options.episodes) as file:
            episodes = {name: file[name][:options.rooms] for name in ('frames', 'actions')}
            sights = {pixels: [Sight(**{name: _plain(file[f'{pixels}.{n}.{name}']) for name in Sight.__dataclass_fields__})
                               for n in range(int(file[f'{pixels}.count']))] for pixels in sizes} if with_sights else {}
        return episodes, sights
    collected = collect(range(options.first_seed, options.first_seed + options.rooms), options.frames, (size, size),
                        options.workers)
    episodes, sights = {name: np.array(collected[name]) for name in ('frames', 'actions')}, {}
    if with_sights or options.episodes:
        seeds = range(options.first_seed + 1000, options.first_seed + 1000 + options.sights)
        jobs = [(seed, hidden, pixels) for pixels in sizes for hidden in options.hidden for seed in seeds]
        found = {job: done.result() for job, done in each(turned_away, jobs, options.workers)}
        sights = {pixels: [found[job] for job in jobs if job[2] == pixels and found[job]] for pixels in sizes}
    if options.episodes:
        content = {f'{pixels}.{n}.{name}': np.asarray(getattr(sight, name)) for pixels, each in sights.items()
                   for n, sight in enumerate(each) for name in Sight.__dataclass_fields__}
        unfinished = options.episodes.with_suffix('.partial.npz')
        counts = {f'{pixels}.count': np.array(len(each)) for pixels, each in sights.items()}
        np.savez(unfinished, **episodes, **content, **counts)
        unfinished.replace(options.episodes)
    return episodes, sights


def _plain(array: np.ndarray) -> Any:
    return array if array.ndim > 1 else tuple(array.tolist()) if array.ndim else array.item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', required=True)
    parser.add_argument('--full', type=Path, help='folder of the same model before its weights were rounded, for part weights')
    parser.add_argument('--compared', default='tiny', help="model with a short window whose memory is measured, too; '': none")
    parser.add_argument('--rooms', type=int, default=32)
    parser.add_argument('--sights', type=int, default=60, help='rooms in which an object is turned away from')
    parser.add_argument('--hidden', type=float, nargs='+', default=HIDDEN, help='seconds that an object is out of view')
    parser.add_argument('--frames', type=int, default=110)
    parser.add_argument('--first', type=int, default=72, help='frames that a session has seen before it is asked')
    parser.add_argument('--first-seed', type=int, default=FIRST_SEED)
    parser.add_argument('--long-rooms', type=int, default=3, help='of the imagination over minutes')
    parser.add_argument('--seconds', type=float, default=600.0, help='of that imagination')
    parser.add_argument('--observed', type=float, default=0.0, help='seconds observed before it (default: a window and what '
                        'left it, 7.2)')
    parser.add_argument('--anchors', type=int, default=0, help='of its session, see worldmodel_ros.engine.anchors')
    parser.add_argument('--motion', choices=('commands', 'true'), default='commands', help='what it is given of the true '
                        'episode: commands, or the motion that these led to')
    parser.add_argument('--driving-rooms', type=int, default=8, help='of part decisions')
    parser.add_argument('--starts', type=int, default=3, help='of each of these rooms, from which maneuvers are imagined')
    parser.add_argument('--driving-seconds', type=float, default=30.0, help='in which a robot is to reach its goal')
    parser.add_argument('--ticks', type=int, default=24, help='of the closed loops of one and two processes')
    parser.add_argument('--repeats', type=int, default=200, help='of a chunk that is timed')
    parser.add_argument('--parts', default=','.join(part for part in PARTS if part != 'weights' and
                                                    (part != 'chunk_time' or torch.cuda.is_available())),
                        help='with commas between (default: all but weights, and without a GPU chunk_time)')
    parser.add_argument('--workers', type=int, default=os.cpu_count())
    parser.add_argument('--folder', type=Path, required=True)
    parser.add_argument('--episodes', type=Path, help='file that keeps what is simulated, and from which it is taken again')
    options = parser.parse_args()
    gc.freeze()  # imports stay: scanning them for garbage at exit took 0.3 s
    parts = options.parts.split(',')
    if unknown := set(parts) - set(PARTS):
        parser.error(f'--parts: {", ".join(sorted(unknown))} is unknown; choose from {", ".join(PARTS)}')
    if 'weights' in parts and options.full is None:
        parser.error('part weights compares with the model before rounding: give its folder as --full')
    try:
        judge(options, parts)
    except ModelError as error:
        print(f'tile_model: {error}', file=sys.stderr)
        return 1
    return 0


def judge(options: argparse.Namespace, parts: Sequence[str]) -> None:
    """Measure the parts. Raises ModelError for folders that hold no model, or models that the parts cannot use."""
    model = model_folder(options.model)
    preset = read_description(model).preset
    if preset.tile is None and (others := set(parts) - {'prediction', 'memory'}):
        raise ModelError(f'{options.model} is of preset {preset.name!r}, without tiles, and {", ".join(sorted(others))} are of '
                         'models over tiles: leave these parts out')
    episodes, sights = {'frames': ()}, {}
    if not set(parts) <= {'ten_minutes', 'sharded', 'decisions'}:
        episodes, sights = simulated(options, preset.image_size[0], 'memory' in parts)
    print(f'{len(episodes["frames"])} episodes, { {k: len(v) for k, v in sights.items()} } sights', file=sys.stderr, flush=True)
    start = {**provenance(), 'model': options.model, 'seeds': f'{options.first_seed}:+{options.rooms}'}
    on_gpu = torch.cuda.is_available()
    kind, first = Precision.BF16 if on_gpu else Precision.FP32, min(options.first, options.frames - AHEAD - 4)

    def write(part: str, result: dict) -> None:
        write_result({**start, **result}, options.folder / f'{part}_{preset.name}.json')
        print(part, result, file=sys.stderr, flush=True)

    def write_rows(part: str, rows: Iterable[dict]) -> None:
        found: list[dict] = []
        for row in rows:
            found.append(row)
            write(part, {'rows': found})

    if 'chunk_time' in parts:
        write('chunk_time', {'rows': chunk_times(model, episodes['frames'][0], episodes['actions'][0], options.repeats)})
    if 'sharded' in parts:
        write('sharded', {'rows': sharded(model, options.first_seed + 500, options.ticks)})
    if 'prediction' in parts:
        engine = engine_of(model, kind)
        engine.warm_up(min(options.repeats, WARM_UP_TICKS))
        found = quality(engine, episodes, first, 6)
        found.pop('rows'), found.pop('latents')
        result = {'backend': engine.backend.name, **found, 'autoencoder_db': through_autoencoder(engine, episodes)}
        write('prediction', result)
        if 'agreement' in parts:
            same = agreement(engine_of(model, kind), episodes['frames'][0], episodes['actions'][0])
            write('prediction', {**result, 'agreement_with_training': same})
        del engine
    few = {key: value[:max(4, options.rooms // 2)] for key, value in episodes.items()}
    if 'precision' in parts:
        engines = ((name, partial(engine_of, model, *pages)) for name, pages in PAGES.items())
        write_rows('precision', against_first(engines, 'pages', few, first))
    if 'weights' in parts:
        folders = {'before rounding': options.full, 'as finished': model}
        write_rows('weights', against_first(((name, partial(engine_of, folder, kind)) for name, folder in folders.items()),
                                            'weights', episodes, first))
    if 'decisions' in parts:
        seeds = range(options.first_seed + 3000, options.first_seed + 3000 + options.driving_rooms)
        for rows in decisions(model, seeds, options.starts, options.driving_seconds, options.workers):
            write('decisions', {'rows': rows})
    if 'ten_minutes' in parts:
        seeds = range(options.first_seed + 2000, options.first_seed + 2000 + options.long_rooms)
        for found in ten_minutes(model, seeds, Long(options.seconds, options.observed, options.anchors, options.motion),
                                 options.workers):
            write('ten_minutes', found)
    if 'memory' in parts:
        engines = {preset.name: (engine_of(model, kind), sights[preset.image_size[0]])}
        if options.compared:
            other = model_folder(options.compared)
            engines[options.compared] = Engine(TorchBackend(checkpoint.load(other)), other, 1), sights[64]
        rows: dict[str, dict] = {}
        for name, (engine, seen_by_it) in engines.items():
            for hidden in options.hidden:
                found = remembered(engine, [sight for sight in seen_by_it if sight.hidden == hidden][:options.sights])
                rows.setdefault(name, {}).update(found)
                write('memory', {'rows': rows})


if __name__ == '__main__':
    raise SystemExit(main())
