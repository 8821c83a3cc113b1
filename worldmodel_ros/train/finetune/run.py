"""Fine-tunes a model on recordings: the autoencoder, then the DiT on what it encodes; judged before and after."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from worldmodel_ros.train.data.episodes import Episodes
from worldmodel_ros.train.objectives.vae import VaeOptions, normalise
from worldmodel_ros.train.run.config import Schedule
from worldmodel_ros.train.run.log import Log
from worldmodel_ros.train.run.loop import averaged_copy
from ...model.world_model import WorldModel
from .augment import mirror_signs
from .clips import encoded_variants, episodes
from .imagination import Moments, moments
from .judge import autoencoder_db, judge, score
from .objectives import Imagined, Recorded, RecordedAndImagined, VariedClips
from .options import FineTuning
from .split import Split
from .tuning import Tuned, tune

HELD_OUT_MOMENTS, VALIDATION_MOMENTS = 96, 32
Progress = Callable[[str], None]  # is told what begins


def fine_tune(model: WorldModel, parts: Split, options: FineTuning, out: Path,
              progress: Progress = lambda what: None) -> dict:
    """Adapt VAE and DiT of ``model`` in place, on its device; return a summary for JSON.

    The heads stay as they are. ``parts.held_out`` is used neither for training nor for early stopping. Loss logs go into
    the folder ``out``. With ``options.steps`` the same recordings give the same weights on one machine.
    """
    preset, device = model.preset, model.vae.latent_mean.device
    mirror = options.mirror and mirror_signs(preset) is not None
    of_vae, of_dit = options.schedules()
    judged = moments(parts.held_out, preset, HELD_OUT_MOMENTS)
    watched = moments(parts.validation, preset, VALIDATION_MOMENTS)
    recorded = episodes([chain for part in parts.training for chain in part.chains(preset)],
                        options.clip_frames(preset), device)
    progress('judging the model as it is')
    before = judge(model, judged)
    progress('the autoencoder learns')
    vae = _tune_vae(model, recorded, watched, options, of_vae, mirror, Log(out, 'autoencoder'))
    progress('the DiT learns')
    dit = _tune_dit(model, recorded, watched, options, of_dit, mirror, Log(out, 'dit'))
    progress('judging the result')
    with torch.no_grad():  # judge the weights as they are stored
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return {'before': before, 'after': judge(model, judged), 'split': parts.to_dict(), 'mirrored': mirror,
            'options': asdict(options), 'autoencoder': vae.to_dict(), 'dit': dit.to_dict()}


def _tune_vae(model: WorldModel, recorded: Episodes, watched: Moments, options: FineTuning, schedule: Schedule,
              mirror: bool, log: Log) -> Tuned:
    vae = model.vae.requires_grad_(True)
    averaged = averaged_copy(vae)
    objective = VariedClips(vae, recorded, VaeOptions(options.vae_batch))
    objective.mirror = mirror
    tuned = tune(vae, averaged, objective, schedule, log, lambda: autoencoder_db(averaged, watched), options.seed)
    vae.requires_grad_(False)
    if tuned.best_step:
        normalise(vae, recorded, torch.Generator(recorded.frames.device).manual_seed(options.seed))
    return tuned


def _tune_dit(model: WorldModel, recorded: Episodes, watched: Moments, options: FineTuning, schedule: Schedule,
              mirror: bool, log: Log) -> Tuned:
    generator = torch.Generator(recorded.frames.device).manual_seed(options.seed)
    encoded = encoded_variants(recorded, model.vae, model.preset, options.variants, mirror, generator)
    model.dit.requires_grad_(True)
    averaged = averaged_copy(model)
    objective = RecordedAndImagined(
        Recorded(model, averaged, averaged, encoded, options.recorded(model.preset)),
        Imagined(model, averaged, averaged, encoded, options.imagined(model.preset)), options.imagined_from)
    tuned = tune(model, averaged, objective, schedule, log, lambda: score(averaged, watched), options.seed)
    model.requires_grad_(False)
    return tuned
