"""What the stages of a training run do: each takes what earlier ones left, and leaves its own results in its folder.

They return what is worth recording in stage.json, where `pipeline` also notes what they depended on.
"""
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.checkpoint_description import read_description
from worldmodel_ros.model.world_model import WorldModel
from worldmodel_ros.train.data import lerobot
from worldmodel_ros.train.data.episodes import Episodes
from worldmodel_ros.train.data.simulate import Drives, simulate
from worldmodel_ros.train.objectives import short_horizon, world
from worldmodel_ros.train.objectives.vae import VaeObjective, normalise
from . import curves, metrics, progress
from .calibrate import calibrate
from .config import STAGES, Schedule
from .loop import Objective, optimise
from .reading import ConfigError
from .run import Run


def simulate_data(run: Run, folder: Path) -> dict[str, Any]:
    """Simulated drives for training, and others for the calibration."""
    data = run.config.data
    if data.folders:
        return {'folders': list(data.folders)}
    first_held_back = data.first_seed + data.episodes
    for name, first, episodes in (('train', data.first_seed, data.episodes),
                                  ('held_back', first_held_back, data.held_back)):
        if episodes and not lerobot.is_dataset(folder / name):
            shutil.rmtree(folder / name, ignore_errors=True)  # of an attempt that did not get to its end
            try:
                simulate(folder / name, Drives(first, episodes, data.frames, run.preset), run.config.workers, data.mix)
            except ValueError as error:
                raise ConfigError(f'data: {error}') from error
    return {'seeds': f'{data.first_seed}:{first_held_back}', 'episodes': data.episodes,
            'frames': data.episodes * data.frames}


def train_vae(run: Run, folder: Path) -> dict[str, Any]:
    """The autoencoder, and the normalisation of its latents."""
    model, episodes, stage = run.networks(run.before('vae')), run.episodes(), run.config.vae
    result = _optimise(run, 'vae', stage, model.vae,
                       lambda averaged: VaeObjective(model.vae, episodes, stage.objective))
    normalise(model.vae, episodes, torch.Generator(run.ranks.device).manual_seed(run.config.seed))
    return _leave(run, folder, model, result)


def train_teacher(run: Run, folder: Path) -> dict[str, Any]:
    """The flow, the policy and the outcomes."""
    model, stage = run.networks(run.before('teacher')), run.config.teacher
    episodes = _encoded(run, model)
    return _learn(run, folder, stage, model, episodes, ('flow',),
                  lambda averaged: world.teacher(model, episodes, stage.objective))


def train_student(run: Run, folder: Path) -> dict[str, Any]:
    """Steps of half and whole length, distilled from the teacher."""
    return _distil(run, folder, 'student', world.student)


def train_self_forcing(run: Run, folder: Path) -> dict[str, Any]:
    """The student on its own roll-outs."""
    return _distil(run, folder, 'self_forcing', world.self_forcing)


def train_policy(run: Run, folder: Path) -> dict[str, Any]:
    """The policy alone; everything else stays as it is."""
    model, stage = run.networks(run.before('imitation')), run.config.imitation
    episodes = _encoded(run, model)
    result = _optimise(run, 'imitation', stage, model,
                       lambda averaged: world.imitation(model, episodes, stage.objective))
    return _leave(run, folder, model, result)


def calibrate_contacts(run: Run, folder: Path) -> dict[str, Any]:
    """The contact probability on drives that were not trained on; leaves the model that is shipped in `final`."""
    config = run.config
    model = checkpoint.load(run.found(run.before('calibration')) if run.before('calibration') else run.init,
                            str(run.ranks.device))
    done = [stage for stage in STAGES[:STAGES.index('calibration')] if run.has(stage)]
    provenance = {'preset': config.preset, 'seed': config.seed, 'stages': {stage: run.results(stage) for stage in done},
                  'continues': [read_description(run.init).provenance] if run.init else []}
    held_back = run.found('data') / 'held_back'
    result: dict[str, Any] = {}
    if lerobot.is_dataset(held_back):
        episodes = lerobot.load([held_back], str(run.ranks.device), run.preset)
        episodes.encode(model.vae)
        try:
            result['contact_calibration'] = calibrate(model, episodes, **asdict(config.calibration))
        except ValueError as error:
            raise ConfigError(f'calibration: {error}; raise data.held_back') from error
    checkpoint.save(model, run.out / 'final', {**provenance, **result})
    curves.draw(run.out, run.out / 'curves.png')
    return result


def evaluate(run: Run, folder: Path) -> dict[str, Any]:
    """What is shipped, read back: short predictions on drives of other seeds, and `worldmodel evaluate quality`."""
    config, device = run.config.evaluation, str(run.ranks.device)
    run.release()
    drives = folder / 'drives'
    if not lerobot.is_dataset(drives):
        shutil.rmtree(drives, ignore_errors=True)
        simulate(drives, Drives(config.first_seed, config.episodes, run.config.data.frames, run.preset),
                 run.config.workers)
    final = run.found('calibration').parent / 'final'
    shipped = checkpoint.load(final, device)
    episodes = lerobot.load([drives], device, run.preset)
    episodes.encode(shipped.vae)
    result = metrics.evaluate(shipped, episodes, config.batches, config.batch)
    (folder / 'metrics.json').write_text(json.dumps(result, indent=1) + '\n')
    print(json.dumps({'psnr_db': {name: row['mean'] for name, row in result['psnr_db'].items()},
                      'heads': result['heads']}), flush=True)
    del shipped, episodes
    run.release()
    if config.quality:
        command = quality_command(final, config.quality, folder / 'quality.json', config.parts,
                                  run.config.workers)
        environment = os.environ if config.gpu else {**os.environ, 'CUDA_VISIBLE_DEVICES': ''}
        code = subprocess.run(command, env=environment).returncode
        if code:
            raise ConfigError(f'evaluation: {" ".join(command)} ended with code {code}; see above, then run it again')
    return {}


def quality_command(model: Path, seeds: str, file: Path, parts: Sequence[str], workers: int) -> list[str]:
    """The command that judges a model; a process of its own, since training knows nothing of the evaluation."""
    return [sys.executable, '-m', 'worldmodel_ros.cli', 'evaluate', 'quality', '--model', str(model), '--seeds', seeds,
            '--json', str(file), '--workers', str(workers or os.cpu_count() or 1),
            *(['--parts', ','.join(parts)] if parts else [])]


def _distil(run: Run, folder: Path, name: str, make: Callable[..., Objective]) -> dict[str, Any]:
    model, teacher, stage = run.networks(run.before(name)), run.teacher(), getattr(run.config, name)
    episodes = _encoded(run, model)
    # A new student cannot step at all; only what it takes over can be lost.
    kept = ('flow',) if name == 'student' else tuple(short_horizon.SAMPLERS)
    return _learn(run, folder, stage, model, episodes, kept,
                  lambda averaged: make(model, averaged, teacher, episodes, stage.objective))


def _learn(run: Run, folder: Path, stage: Schedule, model: WorldModel, episodes: Episodes, kept: Sequence[str],
           make: Callable[[nn.Module], Objective]) -> dict[str, Any]:
    """Train the DiT; say loudly, and record, if the stage costs near predictions of the kinds that are to be kept."""
    near, errors = None, {}
    if run.ranks.main:
        held_back = None if run.config.data.folders else run.found('data') / 'held_back'
        known = held_back is not None and lerobot.is_dataset(held_back)
        near = short_horizon.ShortHorizon(
            model, lerobot.load([held_back], str(run.ranks.device), run.preset) if known else episodes)
        errors['before'] = near.errors(model)
    result = _optimise(run, folder.name, stage, model, make)
    if near is not None:
        errors['after'] = near.errors(world.frozen_copy(model))  # a copy is not compiled
        lost = short_horizon.lost(errors['before'], {name: errors['after'][name] for name in kept})
        errors['lost'] = lost
        print(f'[{folder.name}] error of the next {run.preset.chunk_frames} frames, before: {errors["before"]}, '
              f'after: {errors["after"]}', flush=True)
        if lost:
            print(f'[{folder.name}] WARNING: this stage made near predictions worse: {", ".join(lost)}. Do not ship '
                  'what follows from it before you know why; a lower rate or fewer steps may help.', file=sys.stderr,
                  flush=True)
    return _leave(run, folder, model, result) | {'short_horizon': errors}


def _encoded(run: Run, model: WorldModel) -> Episodes:
    episodes = run.episodes()
    if episodes.latents is None:
        episodes.encode(model.vae)
    return episodes


def _optimise(run: Run, name: str, stage: Schedule, module: nn.Module, make: Callable[[nn.Module], Objective]
              ) -> dict[str, Any]:
    config = run.config

    def made(averaged: nn.Module) -> Objective:
        try:
            return make(averaged)
        except ValueError as error:
            raise ConfigError(f'{name}.objective: {error}') from error

    return optimise(module, made, stage, stage=name, ranks=run.ranks, out=run.out, seed=config.seed,
                    compile_networks=config.compile, checkpoint_minutes=config.checkpoint_minutes)


def _leave(run: Run, folder: Path, model: WorldModel, result: dict[str, Any]) -> dict[str, Any]:
    """Save the networks in full precision, in the main process; the progress has done its service."""
    if run.ranks.main:
        checkpoint.save(model, folder, {'stage': folder.name, **result}, dtype=torch.float32)
        progress.remove(folder / 'progress')
    return {'steps': result['steps'], 'training_seconds': result['seconds']}
