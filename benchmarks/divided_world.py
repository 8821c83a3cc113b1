"""An open world on several GPUs as a server opens it, compared with one GPU; and its recovery when a rank is killed.

    python benchmarks/divided_world.py --gpus 4 --folder benchmarks/results
    python benchmarks/divided_world.py --tiny --gpus 2 --folder /tmp/divided          # tries the code on CPUs

Writes a folder with ``world.json`` and random weights: a network of a preset's width with few layers, so that it starts
quickly. Three programs load it with ``load_world``, from the same image along the same poses:

* one: on one GPU, with the sampler without graphs, and with the one that ``OpenWorld`` takes.
* divided: on all. Its chunks are compared with those of one. Then it saves its session and imagines another chunk, and a rank
  is killed (SIGKILL); it then ends with the exit code that asks for a restart.
* again: after the restart, it resumes the session: is its chunk the same as before?

``images_mean``, ``images_largest``: difference of a chunk's images, of 255 (``images_std``: of theirs). ``latents``: norm of
the difference, relative. ``to_end_s``, ``loaded_after_kill_s`` and ``chunk_after_kill_s`` are from the kill. Each row is
written as it is measured; each program reports its progress on stderr, and its stack every 20 s.
"""
from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from programs import ENVIRONMENT
from result_file import provenance, short_name, write_result

from worldmodel_ros.exit_codes import DEVICE_LOST
from worldmodel_ros.model.wan.config import PRESETS, WanConfig

if TYPE_CHECKING:
    from worldmodel_ros.engine.open_world.session import WorldSession
    from worldmodel_ros.engine.open_world.world import OpenWorld

SAMPLING = {'chunk_frames': 3, 'window_frames': 12, 'sink_frames': 3,
            'schedule': {'kind': 'unipc', 'steps': [0, 250, 500, 750], 'shift': 5.0}}
TINY = WanConfig(512, 2, 4, 512, 36, camera_width=1536, text_width=32, text_tokens=24)
TEXT_ROWS = 20
LATENTS_LIMIT = 0.02  # bf16, summed in another order, after the first chunk; on a CPU in float32 far less
TRACE_S = 20.0


class Program:
    """The output of a program: rows as lines of a file, and progress on stderr."""

    def __init__(self, options: argparse.Namespace):
        self.options, self._start = options, options.began
        self._file = options.folder / f'{options.program}.rows'
        self.say('the program runs')

    @property
    def seconds(self) -> float:
        return round(time.time() - self._start, 2)

    def say(self, text: str) -> None:
        print(f'{self.options.program} {self.seconds:7.2f} s: {text}', file=sys.stderr, flush=True)

    def row(self, **values: object) -> None:
        self.say(json.dumps(values))
        with self._file.open('a') as file:
            print(json.dumps({'program': self.options.program, **values}), file=file)


class Walk:
    """A session from the same image along the same poses, for any world."""

    def __init__(self, program: Program, world: OpenWorld, session: WorldSession | None = None):
        from worldmodel_ros.model.wan.camera import Intrinsics
        height, width = world.spec.image_size
        self.program, self.world = program, world
        self._intrinsics = Intrinsics(0.6 * width, 0.6 * width, 0.5 * width, 0.5 * height)
        image = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
        self.session = world.open(image, np.eye(4)) if session is None else session

    def chunk(self) -> np.ndarray:
        """Return the next images."""
        session, poses = self.session, [self.session.pose]
        for _ in range(session.images_of_chunk // self.world.frame_images):
            step = np.eye(4)
            step[[0, 0, 2, 2], [0, 2, 0, 2]] = np.cos(0.1), np.sin(0.1), -np.sin(0.1), np.cos(0.1)
            step[2, 3] = 0.05
            poses.append(poses[-1] @ step)
        return session.imagine(np.stack(poses[1:]), self._intrinsics)

    def seen(self, count: int, what: str) -> tuple[list[np.ndarray], list[np.ndarray], list[float]]:
        """Return images and latents of ``count`` chunks, and the ms of each, with the host waiting for it."""
        images, latents, ms, decode = [], [], [], self.session._decode

        def noted(clean: torch.Tensor) -> torch.Tensor:
            latents.append(clean.float().cpu().numpy())
            return decode(clean)
        self.session._decode = noted
        for number in range(count):
            start = time.perf_counter()
            images.append(self.chunk())
            ms.append(round(1e3 * (time.perf_counter() - start), 2))
            self.program.say(f'{what}: chunk {number}, {ms[-1]} ms')
        del self.session._decode
        return images, latents, ms

    def timed(self, count: int) -> dict[str, object]:
        """Time ``count`` more chunks, each alone, host and images included, after two that are not timed."""
        ms = []
        for _ in range(2 + count):
            start = time.perf_counter()
            self.chunk()
            ms.append(1e3 * (time.perf_counter() - start))
        return {'timed_ms': {'p50': round(float(np.median(ms[2:])), 2), 'most': round(max(ms[2:]), 2)}, 'chunks': count,
                'frames': self.session.frame}


def write_world(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Write the folder of a world with random weights."""
    from diffusers import AutoencoderKLWan
    from safetensors.torch import save_file

    from worldmodel_ros.model.wan.checkpoint import original_shapes
    from worldmodel_ros.model.weights import RandomWeights
    say('diffusers is imported')
    folder = options.scratch / 'world'
    (folder / 'text').mkdir(parents=True, exist_ok=True)
    config = TINY if options.tiny else replace(PRESETS[options.preset].config, layers=options.layers)
    device = torch.device('cpu' if options.tiny else 'cuda')
    drawn, dtype = RandomWeights(0, device), torch.float32 if options.tiny else torch.bfloat16
    save_file({name: drawn.take(name, torch.Size(shape), None).to('cpu', dtype).contiguous()
               for name, shape in original_shapes(config).items()}, folder / 'model.safetensors')
    (folder / 'config.json').write_text(json.dumps({
        '_class_name': 'WanModelFast', 'dim': config.width, 'num_layers': config.layers, 'num_heads': config.heads,
        'ffn_dim': config.ffn, 'in_dim': 36, 'out_dim': 16, 'text_len': config.text_tokens, 'text_dim': config.text_width}))
    say('the network is written')
    torch.manual_seed(0)
    with device:
        vae = AutoencoderKLWan(base_dim=8) if options.tiny else AutoencoderKLWan()
    vae.to('cpu', dtype).save_pretrained(folder / 'vae')
    save_file({'rows': torch.randn(TEXT_ROWS, config.text_width)}, folder / 'text' / 'rows.safetensors')
    (folder / 'world.json').write_text(json.dumps({
        'vae': 'vae', 'text': 'text/rows.safetensors', 'size': [64, 96] if options.tiny else options.size, 'top_speed': 0.5,
        'camera_in_base': [0.1, 0.0, 0.2, 0.0, 0.0, 0.0], **SAMPLING}))
    (folder / 'written').touch()
    say('the decoder is written')


def differences(found: list[np.ndarray], wanted: list[np.ndarray], latents: list[np.ndarray], others: list[np.ndarray]
                ) -> dict[str, object]:
    """Compare chunk by chunk: with random weights, differences carry over from one chunk to the next."""
    images = [np.abs(one.astype(int) - other) for one, other in zip(found, wanted, strict=True)]
    return {'images_mean': [round(float(each.mean()), 4) for each in images],
            'images_largest': [int(each.max()) for each in images],
            'latents': [float(np.linalg.norm(one - other) / np.linalg.norm(other))
                        for one, other in zip(latents, others, strict=True)]}


def loaded(program: Program, gpus: int = 1) -> OpenWorld:
    """Load the world, once it is written."""
    from diffusers import AutoencoderKLWan  # noqa: F401  slow to import, so done before

    from worldmodel_ros.engine.loading import load_world
    program.say('the modules are imported')
    options = program.options
    while not (options.scratch / 'world' / 'written').exists():
        time.sleep(0.05)
    world = load_world(str(options.scratch / 'world'), options.backend, gpus=gpus, parallel=options.parallel)
    program.say('loaded')
    return world


def one(program: Program) -> None:
    """Run the world on one GPU."""
    options, world = program.options, loaded(program)
    steps, taken = len(world.preset.schedule.steps), world.sampler
    world._samplers[steps] = getattr(taken, 'sampler', taken)
    plain = Walk(program, world)
    program.say('the first image is encoded')
    wanted = plain.seen(options.chunks, 'by the host')
    np.savez(options.scratch / 'one.npz', **{f'images {at}': each for at, each in enumerate(wanted[0])},
             **{f'latents {at}': each for at, each in enumerate(wanted[1])})
    about = {'gpus': 1, 'backend': world.backend}
    program.row(**about, sampler=type(world.sampler).__name__, first_ms=wanted[2],
                images_std=round(float(np.std(wanted[0][-1])), 2), **plain.timed(options.timed))
    plain.session.close()
    world._samplers[steps] = taken
    own = Walk(program, world)
    found = own.seen(options.chunks, 'by its own sampler')
    program.row(**about, sampler=type(taken).__name__, first_ms=found[2], compared_with='by the host',
                **differences(found[0], wanted[0], found[1], wanted[1]), **own.timed(options.timed))


def divided(program: Program) -> None:
    """Run the world on all GPUs, until a rank is killed."""
    options, world = program.options, loaded(program, program.options.gpus)
    one_is_over(options)  # else they would slow each other down while being timed
    walk = Walk(program, world)
    program.say('the first image is encoded')
    images, latents, ms = walk.seen(options.chunks, 'divided')
    about = {'gpus': options.gpus, 'parallel': options.parallel, 'backend': world.backend,
             'sampler': type(world.sampler).__name__, 'all_decode': world.vae.rows is not None, 'first_ms': ms}
    if (options.scratch / 'one.npz').exists():
        wanted = np.load(options.scratch / 'one.npz')
        found = differences(images, [wanted[f'images {at}'] for at in range(len(images))],
                            latents, [wanted[f'latents {at}'] for at in range(len(latents))])
        program.row(**about, compared_with='by the host', limit=LATENTS_LIMIT, **found,
                    passed=found['latents'][0] <= LATENTS_LIMIT)
    else:
        program.row(**about, compared_with=None, passed=False)
    kept = walk.session.save()
    (options.scratch / 'session').write_bytes(kept)
    program.say(f'{len(kept) / 2 ** 20:.0f} MiB of a session are kept')
    np.save(options.scratch / 'next.npy', walk.chunk())
    program.row(**about, **walk.timed(options.timed))
    (options.scratch / 'killed').write_text(str(time.time()))
    os.kill(world.pids[-1], signal.SIGKILL)
    try:
        while True:
            walk.chunk()
    except Exception as error:
        program.say(f'{type(error).__name__}: {error}')
    time.sleep(60.0)  # meanwhile ``LeadingWorld`` ends this process


def again(program: Program) -> None:
    """Run the world after its restart."""
    from worldmodel_ros.engine.open_world.session import WorldSession
    options, world = program.options, loaded(program, program.options.gpus)
    ready, killed = time.time(), float((options.scratch / 'killed').read_text())
    walk = Walk(program, world, WorldSession.load(world, (options.scratch / 'session').read_bytes()))
    program.say('the session goes on')
    found, wanted = walk.chunk(), np.load(options.scratch / 'next.npy')
    program.row(gpus=options.gpus, loaded_after_kill_s=round(ready - killed, 2),
                chunk_after_kill_s=round(time.time() - killed, 2),
                same_images=bool(np.array_equal(found, wanted)),
                images_largest=int(np.abs(found.astype(int) - wanted).max()))
    world.close()


def one_is_over(options: argparse.Namespace) -> None:
    """Wait for program ``one`` to end, at most until half of the time is over."""
    while not (options.scratch / 'one.over').exists() and time.time() < options.end - 0.5 * options.seconds:
        time.sleep(0.05)


PROGRAMS = {'one': one, 'divided': divided, 'again': again}


def start(name: str, options: argparse.Namespace) -> subprocess.Popen:
    """Start a program, with the options that it needs."""
    print(f'{name} ...', file=sys.stderr, flush=True)
    given = [*sys.argv[1:], '--program', name, '--scratch', str(options.scratch), '--began', str(time.time()),
             '--end', str(options.end)]
    return subprocess.Popen([sys.executable, __file__, *given], env={**os.environ, **ENVIRONMENT}, start_new_session=True)


def end(child: subprocess.Popen, seconds: float) -> int | None:
    """Return the exit status, or None if still running after ``seconds``; kill it, with all that it has started."""
    try:
        return child.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None
    finally:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.wait()


def measure(options: argparse.Namespace, result: dict, save: Callable[[], None]) -> None:
    """Run all programs, ``one`` and ``divided`` at the same time, since most of their time is start-up."""
    began = time.time()

    def say(text: str) -> None:
        print(f'{time.time() - began:.1f} s: {text}', file=sys.stderr, flush=True)
    alone, several = start('one', options), start('divided', options)
    try:
        write_world(options, say)
        torch.cuda.empty_cache()
        result['world_written_s'] = round(time.time() - began, 1)
        while several.poll() is None and time.time() < options.end:
            if alone.poll() is not None:
                (options.scratch / 'one.over').touch()
            save()
            time.sleep(0.1)
        ended = time.time()
    finally:
        result['exit_statuses'] = {'one': end(alone, 0.0), 'divided': end(several, 0.0)}
    killed = options.scratch / 'killed'
    if killed.exists():
        result['to_end_s'] = round(ended - float(killed.read_text()), 2)
        result['ended_to_be_started_again'] = result['exit_statuses']['divided'] == DEVICE_LOST
        save()
        result['exit_statuses']['again'] = end(start('again', options), options.end - time.time())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--gpus', type=int, default=4)
    parser.add_argument('--folder', type=Path, required=True)
    parser.add_argument('--preset', choices=PRESETS, default='lingbot_world_v2_1.3b', help='whose width it is')
    parser.add_argument('--layers', type=int, default=8)
    parser.add_argument('--size', type=int, nargs=2, default=[256, 448], help='of the images')
    parser.add_argument('--backend', default='auto')
    parser.add_argument('--parallel', default='sequence')
    parser.add_argument('--chunks', type=int, default=4, help='compared')
    parser.add_argument('--timed', type=int, default=10)
    parser.add_argument('--seconds', type=float, default=100.0, help='after which all ends')
    parser.add_argument('--tiny', action='store_true')
    for name, kind in (('program', str), ('scratch', Path), ('began', float), ('end', float)):
        parser.add_argument(f'--{name}', type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program:
        faulthandler.dump_traceback_later(TRACE_S, repeat=True)
        PROGRAMS[options.program](Program(options))
        return 0
    gpus = [] if options.tiny else [torch.cuda.get_device_name()]
    options.folder.mkdir(parents=True, exist_ok=True)
    options.end = time.time() + options.seconds
    for name in PROGRAMS:
        (options.folder / f'{name}.rows').unlink(missing_ok=True)
    result = {**provenance(('torch', 'triton', 'diffusers')), 'weights': 'random', 'failed': '', 'rows': []}

    def save() -> None:
        rows = [(options.folder / f'{name}.rows') for name in PROGRAMS]
        result['rows'] = [json.loads(line) for file in rows if file.exists() for line in file.read_text().splitlines()]
        write_result(result, options.folder / f'divided_world_{short_name(gpus)}x{options.gpus}.json')
    with tempfile.TemporaryDirectory() as folder:
        options.scratch = Path(folder)
        try:
            measure(options, result, save)
        except Exception as error:
            result['failed'] = f'{type(error).__name__}: {error}'
            raise
        finally:
            save()
    print(json.dumps(result, indent=1))
    for name in PROGRAMS:
        (options.folder / f'{name}.rows').unlink(missing_ok=True)
    wanted = {'one': 0, 'divided': DEVICE_LOST, 'again': 0}
    return 0 if result['exit_statuses'] == wanted and all(row.get('passed', True) for row in result['rows']) else 1


if __name__ == '__main__':
    raise SystemExit(main())
