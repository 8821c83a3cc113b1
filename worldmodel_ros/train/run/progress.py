"""An unfinished stage on disk: tensors as safetensors, numbers as JSON, nothing that executes code when it is read."""
from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .ranks import Ranks
from .reading import ConfigError


@dataclass(frozen=True)
class Progress:
    """State after ``step`` steps and ``seconds``: ``shared`` tensors of all processes, ``own`` ones of this process."""

    step: int
    seconds: float
    shared: dict[str, Tensor]
    own: dict[str, Tensor]


def moments_of(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return an optimiser's state of its parameters, by their numbers and its names for it."""
    return {f'{index}.{name}': torch.as_tensor(value) for index, moments in optimiser.state_dict()['state'].items()
            for name, value in moments.items()}


def restore_moments(optimiser: torch.optim.Optimizer, moments: Mapping[str, Tensor]) -> None:
    """Load what ``moments_of`` returned into an optimiser."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in moments.items():
        index, _, name = key.partition('.')
        state.setdefault(int(index), {})[name] = value
    optimiser.load_state_dict({**optimiser.state_dict(), 'state': state})


class Randomness:
    """All random numbers of a stage in one process: numpy's, those of the device's generator, and torch's own."""

    def __init__(self, seed: int, stage: str, ranks: Ranks):
        self._device, self._cuda = ranks.device, ranks.device.type == 'cuda'
        self._words = [seed, ranks.rank, *stage.encode()]
        self._begin(self._words)

    def begin_at(self, step: int) -> None:
        """Reseed for a stage that resumes at a step without its state there, so that it does not repeat earlier draws."""
        self._begin([*self._words, step])

    def _begin(self, entropy: list[int]) -> None:
        words = np.random.SeedSequence(entropy).generate_state(3)
        self.numpy = np.random.default_rng(int(words[0]))
        self.generator = torch.Generator(self._device).manual_seed(int(words[1]))
        torch.manual_seed(int(words[2]))

    def state(self) -> dict[str, Tensor]:
        """Return the state, as bytes."""
        text = json.dumps(self.numpy.bit_generator.state).encode()
        state = {'random.numpy': torch.tensor(list(text), dtype=torch.uint8), 'random.torch': torch.get_rng_state(),
                 'random.generator': self.generator.get_state()}
        return {**state, 'random.cuda': torch.cuda.get_rng_state(self._device)} if self._cuda else state

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore what ``state`` returned."""
        self.numpy.bit_generator.state = json.loads(bytes(state['random.numpy'].tolist()))
        torch.set_rng_state(state['random.torch'])
        self.generator.set_state(state['random.generator'])
        if self._cuda:
            torch.cuda.set_rng_state(state['random.cuda'], self._device)


def save(folder: Path, progress: Progress, ranks: Ranks) -> None:
    """Write the progress of all processes; the previous one stays until this is complete."""
    new, final = folder / 'new', folder / f'step-{progress.step:08d}'
    if ranks.main:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        _save(new / 'shared.safetensors', progress.shared)
        _write_json(new / 'progress.json', {'step': progress.step, 'seconds': round(progress.seconds, 3),
                                            'processes': ranks.count})
    ranks.wait()
    _save(new / f'process-{ranks.rank}.safetensors', progress.own)
    ranks.wait()
    if ranks.main:
        if final.exists():  # it was resumed from there, and no step has been made since
            shutil.rmtree(new)
        else:
            new.rename(final)
        for old in folder.glob('step-*'):
            if old != final:
                shutil.rmtree(old)
    ranks.wait()


def load(folder: Path, ranks: Ranks) -> Progress | None:
    """Return the newest complete progress in the folder, or None. Raises ConfigError for another number of processes."""
    found = sorted(folder.glob('step-*'))
    if not found:
        return None
    numbers = json.loads((found[-1] / 'progress.json').read_text())
    if numbers['processes'] != ranks.count:
        raise ConfigError(f'{found[-1]} is of {numbers["processes"]} processes, and these are {ranks.count}: go on with '
                         f'--gpus {numbers["processes"]}, or delete {folder} to begin the stage again')
    return Progress(numbers['step'], numbers['seconds'], load_file(str(found[-1] / 'shared.safetensors')),
                    load_file(str(found[-1] / f'process-{ranks.rank}.safetensors')))


def remove(folder: Path) -> None:
    """Delete all progress of a stage."""
    shutil.rmtree(folder, ignore_errors=True)


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    # safetensors refuses tensors that share memory; a contiguous copy of each shares none.
    save_file({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}, str(path))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + '\n')
