"""Several runs that differ in a few keys (config/train/ablations.yaml): a shared beginning, a pool of GPUs, one table."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .config import STAGES, TrainConfig, from_dict
from .loop import Interrupted, signals
from .reading import ConfigError, read_yaml, with_values
from .run import plain

SHARED = 'shared'
_KEYS = ('base', 'set', 'shared', 'variants')


@dataclass(frozen=True)
class Variants:
    """``shared`` stages are done once, with the configuration ``base``; each named variant reuses those that are the same for
    it, and does the rest in its own folder."""

    base: TrainConfig
    shared: tuple[str, ...]
    configs: Mapping[str, TrainConfig]


def is_variants(content: Mapping[str, Any]) -> bool:
    """Return whether a file's content names variants."""
    return 'variants' in content


def read_variants(path: Path, overrides: Sequence[str] = ()) -> Variants:
    """Read variants; ``overrides`` apply to all. Raises ConfigError."""
    content = read_yaml(path)
    unknown = set(content) - set(_KEYS)
    if unknown or not isinstance(content.get('base'), str) or not isinstance(content.get('variants'), list):
        raise ConfigError(f'{path}: variants have the keys {", ".join(_KEYS)}: base names a file next to this one, variants '
                          f'is a list of name and set; not known: {", ".join(sorted(unknown)) or "none"}')
    base = path.parent / content['base']
    common = with_values(read_yaml(base), content.get('set') or {})
    configs = {}
    for entry in content['variants']:
        if not isinstance(entry, dict) or not isinstance(entry.get('name'), str) or set(entry) - {'name', 'set'}:
            raise ConfigError(f'{path}: a variant has a name and, under set, keys of {base.name} with values; got {entry!r}')
        if entry['name'] in (*configs, SHARED):
            raise ConfigError(f'{path}: the name {entry["name"]!r} is taken: give each variant a different one')
        configs[entry['name']] = from_dict(with_values(common, entry.get('set') or {}), f'{path}: {entry["name"]}',
                                           overrides)
    shared = tuple(content.get('shared') or ())
    if set(shared) - set(STAGES):
        raise ConfigError(f'{path}: shared names {", ".join(sorted(set(shared) - set(STAGES)))}; the stages are '
                          f'{", ".join(STAGES)}')
    return Variants(from_dict(common, str(path), overrides), shared, configs)


def run_variants(variants: Variants, out: Path, gpus: int, device: str, others: Sequence[Path] = ()) -> list[str]:
    """
    Run all variants, ``gpus`` at a time, each on one GPU; return the names of those that failed. ``others`` are folders of
    runs whose complete stages are reused.

    A run's output is in its folder's log.txt. One that fails does not stop the others. SIGINT and SIGTERM interrupt those that
    are running, which save their progress.

    :raises Interrupted: after a signal, once all have ended.
    """
    with signals() as told:
        return _run(variants, out, gpus, device, others, told)


def _run(variants: Variants, out: Path, gpus: int, device: str, others: Sequence[Path], told: Sequence[float]) -> list[str]:
    """Do what ``run_variants`` does until ``told`` to end."""
    take = ['--take-from', *map(str, others)] if others else []
    if variants.shared:
        command = [*_command(variants.base, out / SHARED, device), '--stages', ','.join(variants.shared), *take]
        shared = _start(command, out / SHARED, 0 if gpus > 1 else None)
        while shared.poll() is None:
            _pause([shared], told)
        if shared.returncode:
            return [SHARED]
    waiting, running, failed = list(variants.configs.items()), {}, []
    while waiting or running:
        free = [slot for slot in range(max(1, gpus)) if slot not in running]
        for slot in free[:len(waiting)]:
            name, config = waiting.pop(0)
            command = [*_command(config, out / name, device), *(take or ['--take-from']), str(out / SHARED)]
            running[slot] = (name, _start(command, out / name, slot if gpus > 1 else None))
        _pause([process for _, process in running.values()], told)
        for slot, (name, process) in list(running.items()):
            if process.poll() is not None:
                del running[slot]
                print(f'[{name}] {"done" if process.returncode == 0 else f"failed, see {out / name}/log.txt"}',
                      flush=True)
                failed += [name] if process.returncode else []
    return failed


def _pause(running: Sequence[subprocess.Popen], told: Sequence[float]) -> None:
    """Wait a little; once ``told`` to end, interrupt what is running, wait for it, and raise Interrupted."""
    time.sleep(0.2)
    if told:
        try:
            _interrupt(running)
        except KeyboardInterrupt:  # at another SIGINT, which ends them without saving
            _interrupt(running)
        raise Interrupted('the variants that were running have ended; the same command goes on from there')


def _interrupt(running: Sequence[subprocess.Popen]) -> None:
    for process in running:
        process.send_signal(signal.SIGINT)
    for process in running:
        process.wait()


def _command(config: TrainConfig, out: Path, device: str) -> list[str]:
    out.mkdir(parents=True, exist_ok=True)
    file = out / 'config.yaml'
    file.write_text(yaml.safe_dump(plain(config), sort_keys=False))
    return [sys.executable, '-m', 'worldmodel_ros.cli', 'train', '--config', str(file), '--out', str(out),
            '--device', device]


def _start(command: Sequence[str], out: Path, gpu: int | None) -> subprocess.Popen:
    environment = dict(os.environ)
    if gpu is not None:
        visible = os.environ.get('CUDA_VISIBLE_DEVICES', '').split(',')
        environment['CUDA_VISIBLE_DEVICES'] = visible[gpu] if gpu < len(visible) and visible[0] else str(gpu)
    print(f'[{out.name}] {" ".join(command)}', flush=True)
    with (out / 'log.txt').open('a') as log:
        # Only this process interrupts it: otherwise a terminal's SIGINT would reach it twice.
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
