"""
Runs the stages of a training run in order, reusing finished ones.

Each stage reads the results of earlier ones and leaves its own in its folder, with stage.json (``run.Run.record``). The stages
that learn are one function, ``learn``, over the objectives of ``train.objectives``.
"""
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.checkpoint_description import read_description
from worldmodel_ros.train.objectives.decoder import DecoderObjective
from worldmodel_ros.train.objectives.imitation import ImitationObjective
from worldmodel_ros.train.objectives.objective import Objective
from worldmodel_ros.train.objectives.self_forcing import SelfForcingObjective
from worldmodel_ros.train.objectives.short_horizon import SAMPLERS, ShortHorizon, lost
from worldmodel_ros.train.objectives.student import StudentObjective
from worldmodel_ros.train.objectives.teacher import TeacherObjective
from worldmodel_ros.train.objectives.vae import VaeObjective, normalise
from . import portable, progress
from .calibrate import calibrate
from .config import STAGES
from .log import draw_curves
from .loop import averaged_copy, optimise
from .points import Points
from .reading import ConfigError
from .run import NETWORKS, Run

OBJECTIVES = {'vae': VaeObjective, 'teacher': TeacherObjective, 'student': StudentObjective,
              'self_forcing': SelfForcingObjective, 'imitation': ImitationObjective, 'decoder': DecoderObjective}
DISTILLED = ('student', 'self_forcing')  # their objectives see the averaged weights and the frozen teacher, too
# Near predictions that a stage must not degrade. A new student cannot step yet; it can lose only what it takes over.
KEPT = {'teacher': ('flow',), 'student': ('flow',), 'self_forcing': tuple(SAMPLERS)}


def run_stages(run: Run, names: Sequence[str] = ()) -> None:
    """
    Run the named stages in order, by default all of the configuration; complete ones are reused.

    Raises ConfigError for a stage that is unknown, left out by the configuration, or lacks what it needs.
    """
    unknown = [name for name in names if name not in STAGES]
    if unknown:
        raise ConfigError(f'{", ".join(unknown)} is no stage: choose from {", ".join(STAGES)}')
    left_out = [name for name in names if not run.has(name)]
    if left_out:
        raise ConfigError(f'{", ".join(left_out)} is null in the configuration: give the section, or leave it out of '
                          '--stages')
    chosen = [name for name in STAGES if run.has(name) and (not names or name in names)]
    run.begin(chosen)
    for name in chosen:
        folder, stage = run.find(name), WORK[name]
        if folder is not None:
            if run.ranks.main:
                print(f'[{name}] taken from {folder}', flush=True)
            continue
        for needed in stage.needs:
            if run.has(needed):
                run.found(needed)
        run.ranks.wait()  # no process may read a record while it is written
        run.record(name, complete=False)
        began, results = time.monotonic(), {}
        if run.ranks.main or not stage.alone:
            results = stage.work(run, name)
        run.ranks.wait()
        run.record(name, complete=True, results={'seconds': round(time.monotonic() - began, 1), **results})
        run.ranks.wait()


def learn(run: Run, name: str) -> dict[str, Any]:
    """
    Train the previous stage's networks on the episodes, and save a checkpoint of them in full precision.

    Warns, and records, if the stage degrades near predictions of the kinds in ``KEPT``.
    """
    config, stage, folder = run.config, getattr(run.config, name), run.out / name
    model, episodes = run.networks(run.before(name)), run.episodes()
    learner = model.vae if name == 'vae' else model
    others = (run.teacher(),) if name in DISTILLED else ()
    points = Points(run.out if run.ranks.main else None) if name == 'decoder' else None
    if learner is model and episodes.latents is None:
        episodes.encode(model.vae)

    def objective(averaged: nn.Module) -> Objective:
        networks = (model, averaged, *others) if others or points else (learner,)
        try:
            judged = (run.judged(model.vae), points) if points else ()
            return OBJECTIVES[name](*networks, episodes, stage.objective, *judged)
        except ValueError as error:
            raise ConfigError(f'{name}.objective: {error}') from error

    near = ShortHorizon(model, run.held_back() or episodes) if config.compare and name in KEPT and run.ranks.main else None
    before = near.errors(model) if near else {}
    result = optimise(learner, objective, stage, stage=name, ranks=run.ranks, out=run.out, seed=config.seed,
                      compile_networks=config.compile, checkpoint_minutes=config.checkpoint_minutes,
                      carried=run.out / portable.FOLDER if config.portable and learner is model else None,
                      carried_bits=config.weight_bits)
    recorded = {'steps': result['steps'], 'training_seconds': result['seconds'], **run.live_episodes()}
    if near:
        recorded['short_horizon'] = _compare(name, before, near.errors(averaged_copy(model)), run)  # a copy is not compiled
    if points:
        recorded |= {'before': points.before, 'judged': points.chosen[0]}
    if name == 'vae':
        normalise(model.vae, episodes, torch.Generator(run.ranks.device).manual_seed(config.seed))
    if run.ranks.main:
        checkpoint.save(model, folder, {'stage': name, **result}, dtype=torch.float32)
        progress.remove(folder / 'progress')
    return recorded


def _compare(name: str, before: dict[str, float], after: dict[str, float], run: Run) -> dict[str, Any]:
    """Errors of near predictions before and after a stage, and which got worse."""
    worse = lost(before, {kind: after[kind] for kind in KEPT[name]})
    print(f'[{name}] error of the next {run.preset.chunk_frames} frames, before: {before}, after: {after}', flush=True)
    if worse:
        print(f'[{name}] WARNING: this stage made near predictions worse: {", ".join(worse)}. Do not ship what follows from it '
              'before you know why; a lower rate or fewer steps may help.', file=sys.stderr, flush=True)
    return {'before': before, 'after': after, 'lost': worse}


def simulate_data(run: Run, name: str) -> dict[str, Any]:
    """Simulate episodes for training, and others for the calibration."""
    data, folder = run.config.data, run.out / name
    if data.live:
        run.simulation()
        return {'live': data.live}
    if data.folders:
        return {'folders': list(data.folders)}
    # Datasets need OpenCV and Arrow, which not every machine that trains on live episodes has.
    from worldmodel_ros.train.data import lerobot
    from worldmodel_ros.train.data.simulate import Drives, simulate
    first_held_back = data.first_seed + data.episodes
    for part, first, episodes in (('train', data.first_seed, data.episodes),
                                  ('held_back', first_held_back, data.held_back)):
        if episodes and not lerobot.is_dataset(folder / part):
            shutil.rmtree(folder / part, ignore_errors=True)  # of an unfinished attempt
            try:
                simulate(folder / part, Drives(first, episodes, data.frames, run.preset), run.config.workers, data.mix)
            except ValueError as error:
                raise ConfigError(f'data: {error}') from error
    return {'seeds': f'{data.first_seed}:{first_held_back}', 'episodes': data.episodes,
            'frames': data.episodes * data.frames}


def calibrate_contacts(run: Run, name: str) -> dict[str, Any]:
    """Calibrate the contact probability on episodes that were not trained on; save the shipped model in ``final``."""
    config = run.config
    before = run.before(name)
    model = checkpoint.load(run.found(before) if before else run.init, str(run.ranks.device))
    done = [stage for stage in STAGES[:STAGES.index(name)] if run.has(stage)]
    provenance = {'preset': config.preset, 'seed': config.seed, 'stages': {stage: run.results(stage) for stage in done},
                  'continues': [read_description(run.init).provenance] if run.init else []}
    result: dict[str, Any] = {}
    frozen = [stage for stage in NETWORKS if run.has(stage)] == ['decoder']  # the part of the model that predicts contacts
    if not frozen and (episodes := run.held_back()):
        episodes.encode(model.vae)
        try:
            result['contact_calibration'] = calibrate(model, episodes, **asdict(config.calibration))
        except ValueError as error:
            raise ConfigError(f'{name}: {error}; raise data.held_back') from error
    checkpoint.save(model, run.out / 'final', {**provenance, **result},
                    torch.int8 if run.config.weight_bits == 8 else torch.bfloat16)
    draw_curves(run.out, run.out / 'curves.png')
    return result


def evaluate(run: Run, name: str) -> dict[str, Any]:
    """Evaluate the saved model: short predictions on episodes of other seeds, and ``worldmodel evaluate quality``."""
    from worldmodel_ros.train.data import lerobot
    from worldmodel_ros.train.data.simulate import Drives, simulate
    from . import metrics
    config, device, folder = run.config.evaluation, str(run.ranks.device), run.out / name
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
    print(json.dumps({'psnr_db': {sampler: row['mean'] for sampler, row in result['psnr_db'].items()},
                      'heads': result['heads']}), flush=True)
    del shipped, episodes
    run.release()
    if config.quality:
        command = quality_command(final, config.quality, folder / 'quality.json', config.parts,
                                  run.config.workers)
        environment = os.environ if config.gpu else {**os.environ, 'CUDA_VISIBLE_DEVICES': ''}
        code = subprocess.run(command, env=environment).returncode
        if code:
            raise ConfigError(f'{name}: {" ".join(command)} ended with code {code}; see above, then run it again')
    return {}


def quality_command(model: Path, seeds: str, file: Path, parts: Sequence[str], workers: int) -> list[str]:
    """Return the command that judges a model, in a separate process since training does not depend on the evaluation."""
    return [sys.executable, '-m', 'worldmodel_ros.cli', 'evaluate', 'quality', '--model', str(model), '--seeds', seeds,
            '--json', str(file), '--workers', str(workers or os.cpu_count() or 1),
            *(['--parts', ','.join(parts)] if parts else [])]


class Stage(NamedTuple):
    """
    ``work(run, name)`` does the stage in all processes, or with ``alone`` in the main one, and returns what to record in
    stage.json; ``needs``: stages that must be complete before, if the configuration has them.
    """

    work: Callable[[Run, str], dict[str, Any]]
    needs: tuple[str, ...] = ()
    alone: bool = False


WORK = {'data': Stage(simulate_data, alone=True),
        **{name: Stage(learn, STAGES[:STAGES.index(name)]) for name in OBJECTIVES},
        'calibration': Stage(calibrate_contacts, STAGES[:STAGES.index('calibration')], alone=True),
        'evaluation': Stage(evaluate, ('calibration',), alone=True)}
