"""``worldmodel train``: run the training stages of a configuration, on the CPU, one GPU or several."""
from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_EXAMPLES = """examples:
  # simulated episodes, teacher, student, calibration, evaluation, from the shipped weights and their autoencoder
  worldmodel train --config config/train/tiny.yaml

  # the same command resumes after Ctrl-C, and keeps finished stages; some stages, other values
  worldmodel train --config config/train/tiny.yaml --stages data,teacher
  worldmodel train --config config/train/tiny.yaml --out out/mine --set teacher.steps=2000 --set seed=1

  # four GPUs of this machine; on several machines: torchrun ... -m worldmodel_ros.cli train --config ...
  worldmodel train --config config/train/small.yaml --gpus 4

  # only the last stages, from a teacher that was trained elsewhere
  worldmodel train --config config/train/tiny.yaml --init out/teacher --stages data,student,calibration,evaluation

  # variants that differ in a few keys, four at a time, and a table of them
  worldmodel train --config config/train/ablations.yaml --gpus 4

  # continue from a model with recordings, which have no labels: the heads stay as they are
  worldmodel export drive1 drive2 --out data/drives
  worldmodel train --config config/train/recorded.yaml --data data/drives --out out/mine

  # all stages in a minute, as a smoke test
  worldmodel train --config config/train/smoke.yaml --device cpu
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        'train', help='train a world model on simulated episodes',
        description='Trains autoencoder, teacher and student, stage by stage.',
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--config', type=Path, required=True, help='YAML file of the run (config/train/ has them)')
    parser.add_argument('--out', type=Path, help='folder of the run (default: out/NAME of the configuration)')
    parser.add_argument('--stages', default='', metavar='A,B',
                        help='these stages only (default: all of the configuration); not with variants')
    parser.add_argument('--set', action='append', default=[], metavar='KEY=VALUE', dest='overrides',
                        help='override a key of the configuration, such as teacher.steps=1000; may be repeated')
    parser.add_argument('--data', type=Path, nargs='+', action='extend', metavar='FOLDER',
                        help='LeRobot datasets instead of simulated episodes (data.folders)')
    parser.add_argument('--init', type=Path,
                        help='shipped model or folder to start from, instead of the training stages before the first of '
                             '--stages; its autoencoder is kept')
    parser.add_argument('--device', default='auto', help='cuda, cpu or auto (default)')
    parser.add_argument('--gpus', type=int, default=1, help='number of processes, one per GPU (default: 1)')
    parser.add_argument('--take-from', type=Path, nargs='+', action='extend', default=[], metavar='RUN',
                        help='folders of other runs, from which stages with the same configuration are taken')
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    try:
        from worldmodel_ros.train.run.loop import Interrupted
        from worldmodel_ros.train.run.reading import ConfigError
        try:
            return _main(chosen)
        except ConfigError as error:
            raise SystemExit(f'worldmodel train: {error}') from error
        except Interrupted as interrupted:
            if os.environ.get('RANK', '0') == '0':
                print(f'worldmodel train: {interrupted}', file=sys.stderr)
            return 128 + signal.SIGINT
    except ModuleNotFoundError as error:
        print(f'worldmodel train: {error}. Training needs the whole project: install it with "pip install .", '
              'and see "worldmodel doctor".', file=sys.stderr)
        return 1


def _main(chosen: argparse.Namespace) -> int:
    from worldmodel_ros.train.run.config import read_config
    from worldmodel_ros.train.run.reading import read_yaml
    from worldmodel_ros.train.run.variants import is_variants
    chosen.out = chosen.out or Path('out') / chosen.config.stem
    starts_others = chosen.gpus > 1 and 'WORLD_SIZE' not in os.environ
    if starts_others:
        from worldmodel_ros.train.run.ranks import require_devices
        require_devices(chosen.device, chosen.gpus)
    if is_variants(read_yaml(chosen.config)):
        return _variants(chosen)
    if starts_others:
        read_config(chosen.config, _overrides(chosen))  # otherwise every process would report an error
        return _start_processes(chosen.gpus)
    return _train(chosen)


@contextmanager
def _imports_that_stay() -> Iterator[None]:
    """Keep imports out of garbage collection: traversing them repeatedly, and once more at exit, takes 1.3 s of a core."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _train(chosen: argparse.Namespace) -> int:
    with _imports_that_stay():
        import torch
        import torch._dynamo  # otherwise the first optimiser would import it, later

        from worldmodel_ros.model.checkpoint_description import ModelError
        from worldmodel_ros.train.data.episodes import DatasetError
        from worldmodel_ros.train.run.config import read_config
        from worldmodel_ros.train.run.ranks import Ranks
        from worldmodel_ros.train.run.reading import ConfigError
        from worldmodel_ros.train.run.run import Run
        from worldmodel_ros.train.run.stages import run_stages

    config = read_config(chosen.config, _overrides(chosen))
    torch.set_float32_matmul_precision('high')
    ranks = Ranks.join(chosen.device)
    run = Run(config, chosen.out, ranks, chosen.take_from)
    try:
        run_stages(run, [name for name in chosen.stages.split(',') if name])
    except (DatasetError, ModelError) as error:
        raise ConfigError(str(error)) from error
    finally:
        run.release()  # ends the simulation processes
        ranks.leave()
    return 0


def _variants(chosen: argparse.Namespace) -> int:
    from worldmodel_ros.train.run.reading import ConfigError
    from worldmodel_ros.train.run.table import write_table
    from worldmodel_ros.train.run.variants import read_variants, run_variants
    if chosen.stages:
        raise ConfigError(f'--stages {chosen.stages}: {chosen.config} has variants, which go through all their stages: leave '
                          'it out, and set stages that are not wanted to null, such as --set evaluation=null')
    variants = read_variants(chosen.config, _overrides(chosen))
    failed = run_variants(variants, chosen.out, chosen.gpus, chosen.device, chosen.take_from)
    print(write_table(chosen.out, list(variants.configs)))
    if failed:
        print(f'worldmodel train: failed: {", ".join(failed)}', file=sys.stderr)
    return 1 if failed else 0


def _overrides(chosen: argparse.Namespace) -> list[str]:
    """Return the overrides of configuration keys, from flags and from ``--set``."""
    import yaml
    flags = []
    if chosen.data:
        folders = yaml.safe_dump([str(folder.resolve()) for folder in chosen.data], default_flow_style=True)
        flags += [f'data.folders={folders.strip()}']
    if chosen.init:
        flags += [f'init={chosen.init}', *(f'{stage}=null' for stage in _replaced(chosen.stages.split(',')))]
    return [*flags, *chosen.overrides]


def _replaced(stages: list[str]) -> list[str]:
    """Return the stages that an initial model replaces: the autoencoder and those before the first named learning stage."""
    from worldmodel_ros.train.run.run import NETWORKS
    named = [stage for stage in NETWORKS if stage in stages]
    return ['vae', *NETWORKS[1:NETWORKS.index(named[0])]] if named else ['vae']


def _start_processes(count: int) -> int:
    """Become torchrun, which starts this command once per GPU, forwards signals, and ends all processes when one fails."""
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', str(count),
               '-m', 'worldmodel_ros.cli', *sys.argv[1:]]
    sys.stdout.flush()
    os.execv(sys.executable, command)
