"""One training run: its folder, the stages finished in it, and the inputs of each stage."""
from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml

from worldmodel_ros.engine.loading import model_folder
from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.presets import Preset
from worldmodel_ros.model.vae import VAE
from worldmodel_ros.model.world_model import WorldModel
from worldmodel_ros.train.data.episodes import Episodes
from worldmodel_ros.train.data.live import Simulation
from .config import TrainConfig
from .ranks import Ranks
from .reading import ConfigError

# Stages that leave a checkpoint of all networks, in order.
NETWORKS = ('vae', 'teacher', 'student', 'self_forcing', 'imitation', 'decoder')


class Run:
    """
    The stages of a configuration in the folder ``out``, done by the processes ``ranks``.

    A stage's folder holds stage.json: the part of the configuration that the result depends on, and whether it is
    complete. A stage that is complete with the same configuration in one of ``others``, folders of other runs, is reused.
    """

    def __init__(self, config: TrainConfig, out: Path, ranks: Ranks, others: Sequence[Path] = ()):
        self.config, self.out, self.ranks, self.others = config, out, ranks, others
        self._episodes: Episodes | None = None
        self._simulation: Simulation | None = None

    def begin(self, stages: Sequence[str]) -> None:
        """Write the configuration to the folder. Raises ConfigError, and writes nothing, if the folder has one of ``stages`` of
        another configuration, or if these processes hold too few live episodes."""
        try:
            self.config.check_live(self.ranks.count)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        for stage in stages:
            self.find(stage)
        if self.ranks.main:
            self.out.mkdir(parents=True, exist_ok=True)
            (self.out / 'config.yaml').write_text(yaml.safe_dump(plain(self.config), sort_keys=False))

    @property
    def preset(self) -> Preset:
        """Shape of the model."""
        return self.config.model_preset

    @property
    def init(self) -> Path | None:
        """Folder of the model to start from: that of a shipped model's name, or any."""
        return None if self.config.init is None else model_folder(self.config.init)

    def has(self, stage: str) -> bool:
        """Return whether the configuration has the stage."""
        return getattr(self.config, stage) is not None

    def find(self, stage: str) -> Path | None:
        """Return the folder of the complete stage, or None. Raises ConfigError if ``out`` has it of another configuration."""
        for out in (self.out, *self.others):
            folder, complete, differences = self._look(out, stage)
            if complete and not differences:
                return folder
            if differences and out == self.out:
                raise ConfigError(f'{folder} was made with another configuration ({", ".join(differences)}): name '
                                  'another --out, or delete the folder to make this stage again')
        return None

    def found(self, stage: str) -> Path:
        """Like ``find``, but raises ConfigError if the stage is complete nowhere."""
        folder = self.find(stage)
        if folder is None:
            others = [f'; {other} has it of another configuration ({", ".join(differences)})' for other, differences in
                      ((other, self._look(other, stage)[2]) for other in self.others) if differences]
            raise ConfigError(f'the stage {stage} is not complete in {self.out}, and what follows needs it: leave it in '
                              f'--stages{"".join(others)}')
        return folder

    def _look(self, out: Path, stage: str) -> tuple[Path, bool, list[str]]:
        """Folder of a stage, whether it is complete, and what differs in its configuration."""
        path = out / stage / 'stage.json'
        if not path.is_file():
            return path.parent, False, []
        try:
            record = json.loads(path.read_text())
        except ValueError as error:
            raise ConfigError(f'{path} is damaged ({error}): delete {path.parent} to make this stage again') from error
        now = jsonable(self.config.of_stage(stage))
        there = record['config'] if 'weight_bits' not in now else {'weight_bits': 16, **record['config']}  # older ones lack it
        return path.parent, record['complete'], _differences(there, now)

    def record(self, stage: str, complete: bool, results: Mapping[str, Any] | None = None) -> None:
        """Write stage.json, in the main process."""
        if not self.ranks.main:
            return
        device = self.ranks.device
        name = torch.cuda.get_device_name(device) if device.type == 'cuda' else platform.processor() or platform.machine()
        folder = self.out / stage
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / 'stage.json.new'  # replaced as a whole: others read it while this runs
        new.write_text(json.dumps(
            {'complete': complete, **(results or {}), 'device': name, 'processes': self.ranks.count,
             'torch': torch.__version__, 'config': jsonable(self.config.of_stage(stage))}, indent=1) + '\n')
        new.replace(folder / 'stage.json')

    def results(self, stage: str) -> dict[str, Any]:
        """Return the content of a complete stage's stage.json, without the configuration."""
        record = json.loads((self.found(stage) / 'stage.json').read_text())
        return {key: value for key, value in record.items() if key not in ('config', 'complete')}

    def before(self, stage: str) -> str | None:
        """Return the stage whose networks ``stage`` starts from; None if it is the first."""
        earlier = NETWORKS[:NETWORKS.index(stage)] if stage in NETWORKS else NETWORKS
        return next((name for name in reversed(earlier) if self.has(name)), None)

    def networks(self, stage: str | None) -> WorldModel:
        """Return the networks that a stage left, to continue training; for None, those of ``init``, or new ones."""
        torch.manual_seed(self.config.seed)
        model = WorldModel(self.preset)
        if stage is not None:
            model.load_state_dict(checkpoint.load(self.found(stage)).state_dict())
        elif self.config.init is not None:
            new = checkpoint.start_from(model, self.init)
            if new and self.ranks.main:
                print(f'[init] {self.config.init} has no {" and no ".join(new)} of this form: new', flush=True)
        elif self.config.autoencoder is not None:
            checkpoint.take_autoencoder(model, model_folder(self.config.autoencoder))
        return model.to(self.ranks.device)

    def teacher(self) -> WorldModel:
        """Return the frozen teacher: that of the stage, or the model of ``init``."""
        return self.networks('teacher' if self.config.teacher else None).eval().requires_grad_(False)

    def episodes(self) -> Episodes:
        """Return this process's share of the episodes, on its device; read once."""
        if self.config.data.live:
            return self.simulation().episodes
        if self._episodes is None:
            from worldmodel_ros.train.data import lerobot  # needs OpenCV and Arrow, unlike live episodes
            folders = [Path(folder) for folder in self.config.data.folders] or [self.found('data') / 'train']
            episodes = lerobot.load(folders, str(self.ranks.device), self.preset, self.config.clip_frames,
                                    (self.ranks.rank, self.ranks.count))
            if episodes.frames.shape[1] < self.config.clip_frames:
                raise ConfigError(f'the longest of {len(episodes)} episodes has {episodes.frames.shape[1]} frames, and a '
                                  f'clip takes {self.config.clip_frames}: record longer drives without gaps, or set '
                                  'objective.clip_frames of the stages')
            self._episodes = episodes
        return self._episodes

    def held_back(self) -> Episodes | None:
        """Return the episodes that are not trained on, on this process's device; None if there are none."""
        if self.config.data.live:
            return self.simulation().held
        from worldmodel_ros.train.data import lerobot
        folder = self.found('data') / 'held_back'
        return lerobot.load([folder], str(self.ranks.device), self.preset) if lerobot.is_dataset(folder) else None

    def judged(self, vae: VAE) -> Episodes:
        """Return the held-back episodes, or if there are none, those that are trained on; encoded."""
        episodes = self.held_back() or self.episodes()
        if episodes.latents is None:
            episodes.encode(vae)
        return episodes

    def simulation(self) -> Simulation:
        """Return the simulation of this process's share of live episodes, started at the first call. Raises ConfigError for a
        mix of drivers that cannot be, or if it ends before there are enough episodes to begin."""
        data, ranks = self.config.data, self.ranks
        if self._simulation is None:
            # By seed, so that a run that resumes, also in another number of processes, holds back the same ones.
            every = range(data.first_seed, data.first_seed + data.episodes + data.held_back)
            held_back = every[data.episodes:] if ranks.main else range(0)
            if ranks.count > 1 and os.environ.get('MUJOCO_GL') == 'egl':  # otherwise all would render on the first GPU
                os.environ.setdefault('MUJOCO_EGL_DEVICE_ID', str(ranks.rank))
            # One core is left for the training itself.
            workers = max(1, (self.config.workers or os.cpu_count() or 1) // ranks.count - 1)
            try:
                self._simulation = Simulation(every[:data.episodes][ranks.rank::ranks.count], held_back, data.live, data.frames,
                                              self.preset, data.mix, ranks.device, workers, data.measured)
            except ValueError as error:
                raise ConfigError(f'data: {error}') from error
            try:
                self._simulation.wait(data.begin)
            except RuntimeError as error:
                raise ConfigError(f'data: {error}') from error
        return self._simulation

    def live_episodes(self) -> dict[str, int]:
        """Return the number of live episodes simulated so far, for the record; empty if the episodes are a dataset."""
        return {} if self._simulation is None else {'live_episodes': self._simulation.episodes.added}

    def release(self) -> None:
        """Free the episodes' memory."""
        self._episodes = None
        if self._simulation is not None:
            self._simulation.stop()
            self._simulation = None
        if self.ranks.device.type == 'cuda':
            torch.cuda.empty_cache()


def plain(config: TrainConfig) -> dict[str, Any]:
    """Return the configuration as plain values for YAML and JSON."""
    return jsonable(asdict(config))


def jsonable(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``content`` after a round trip through JSON: lists instead of tuples."""
    return json.loads(json.dumps(content))


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = '') -> list[str]:
    found = []
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += _differences(a, b, f'{prefix}{key}.')
        elif a != b:
            found.append(f'{prefix}{key} {a!r} there, {b!r} now')
    return found
