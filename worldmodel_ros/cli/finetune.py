"""``worldmodel finetune``: adapt a model to the camera and motion of a robot, and measure the improvement."""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

from worldmodel_ros.cli import arguments

_EXAMPLES = """\
examples:
  worldmodel finetune drive --out out/mine                      hold out the last quarter to evaluate the result
  worldmodel finetune lap --config config/evaluate/donkeycar.yaml --out out/donkeycar
                                                                with the file that `worldmodel evaluate bag` takes
  worldmodel finetune monday tuesday --held-out-bag friday --out out/mine
                                                                evaluate on another recording
  worldmodel finetune data/drives --out out/mine                a LeRobot dataset (v3.0) instead of bags
  worldmodel replay drive --model out/mine                      watch the result live; no robot is driven

In --out: the model; finetune.json with all numbers, before and after; the losses (*.jsonl); and for each bag
report-BAG/report.html, which compares both models on the held-out part (report-BAG-2 for a second bag of this name).
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        'finetune', help='adapt a model to recordings of your own robot',
        description='Adapts a model to the camera and the motion of a recorded robot, and compares it with the original '
                    'on a held-out part of the recording.',
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('recordings', nargs='+', type=Path, metavar='BAG',
                        help='rosbag2 folder or file, or folder of a LeRobot dataset')
    parser.add_argument('--out', type=Path, required=True, metavar='DIR', help='folder for the adapted model')
    parser.add_argument('--config', type=Path, metavar='FILE',
                        help='YAML file with the topics of camera and actions, for all bags (default: guessed)')
    parser.add_argument('--model', default='tiny', help='shipped model or folder to start from (default: tiny)')
    judging = parser.add_mutually_exclusive_group()
    judging.add_argument('--held-out', type=_share, default=0.25, metavar='SHARE',
                         help='part at the end of each recording that is held out for evaluation (default: 0.25)')
    judging.add_argument('--held-out-bag', type=Path, nargs='+', action='extend', default=[], metavar='BAG',
                         help='recordings to evaluate on instead; the others are used for training in full')
    time = parser.add_mutually_exclusive_group()
    time.add_argument('--minutes', type=arguments.positive, help='training time (default: 2 on a GPU, 20 on a CPU)')
    time.add_argument('--steps', type=_count, nargs=2, metavar=('VAE', 'DIT'),
                      help='exact numbers of training steps instead: repeatable on one machine')
    parser.add_argument('--no-mirror', action='store_true',
                        help='do not train on mirrored episodes: for a camera or robot that is not symmetric')
    parser.add_argument('--device', default='auto', choices=('auto', 'cpu', 'cuda'),
                        help='where to train (default: auto)')
    parser.add_argument('--seed', type=arguments.seed, default=0, help='seed of all random numbers (default: 0)')
    parser.add_argument('--no-report', action='store_true', help='write no HTML reports, which take a minute')
    parser.set_defaults(run=_run)


def _share(text: str) -> float:
    value = arguments.positive(text)
    if value >= 1.0:
        raise argparse.ArgumentTypeError(f'{text}: give a share between 0 and 1, such as 0.25')
    return value


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f'{text!r} is not a number of steps, 1 or more')
    return int(text)


def _run(chosen: argparse.Namespace) -> int:
    from worldmodel_ros.bags.problems import BagError
    from worldmodel_ros.model.checkpoint_description import ModelError
    from worldmodel_ros.train.data.lerobot import DatasetError
    from worldmodel_ros.train.finetune.recording import RecordingError
    from worldmodel_ros.train.run.reading import ConfigError
    try:
        bags = _finetune(chosen)
    except (BagError, ConfigError, DatasetError, ModelError, RecordingError) as error:
        print(f'worldmodel finetune: {error}', file=sys.stderr)
        return 1
    if chosen.no_report:
        return 0
    names = _distinct([bag.stem for bag, *_ in bags])
    return max([_report(chosen, name, *bag) for name, bag in zip(names, bags)], default=0)


def _finetune(chosen: argparse.Namespace) -> list[tuple[Path, float, bool]]:
    """Train and save the model; return the held-out bags: the seconds to skip in each, and whether to leave out CameraInfo."""
    import json
    import time
    from dataclasses import replace

    import torch

    from worldmodel_ros.engine.loading import model_folder
    from worldmodel_ros.machine import machine, versions
    from worldmodel_ros.model import checkpoint
    from worldmodel_ros.model.checkpoint_description import ModelError, read_description
    from worldmodel_ros.train.data import lerobot
    from worldmodel_ros.train.finetune import recording, run, split, summary
    from worldmodel_ros.train.finetune.options import FineTuning
    from worldmodel_ros.train.run.ranks import usable_device
    began = time.monotonic()
    device = usable_device(chosen.device)
    description = read_description(model_folder(chosen.model))
    preset = description.preset
    if preset.tile:
        raise ModelError(f'{chosen.model} is of preset {preset.name!r}, which has tiles, and fine-tuning does not '
                         'support them yet: use a model without tiles')
    options = FineTuning.on(device, chosen.minutes, steps=tuple(chosen.steps) if chosen.steps else None,
                            mirror=not chosen.no_mirror, seed=chosen.seed)
    recordings, held_out = ([recording.read(path, preset, chosen.config) for path in paths]
                            for paths in (chosen.recordings, chosen.held_out_bag))
    for note in dict.fromkeys(note for r in (*recordings, *held_out) for note in r.notes):
        print(f'note: {note}', file=sys.stderr)
    parts = split.split(recordings, preset, options.clip_frames(preset), chosen.held_out, held_out)
    model = checkpoint.load(model_folder(chosen.model), device)
    result = run.fine_tune(model, parts, options, chosen.out, lambda what: print(what, flush=True))
    provenance = {'fine_tuned': {'from': chosen.model, 'split': result['split'], 'options': result['options'],
                                 'autoencoder': result['autoencoder'], 'dit': result['dit']},
                  'continues': [description.provenance]}
    if not all(r.calibrated for r in recordings):  # the model is adapted to another camera, whose calibration is unknown
        model.preset = replace(preset, camera=None)
    checkpoint.save(model, chosen.out, provenance)
    accelerator = torch.cuda.get_device_name() if device == 'cuda' else 'cpu'
    result |= {'model': str(chosen.model), 'device': accelerator, 'machine': machine(), 'versions': versions(),
               'seconds': round(time.monotonic() - began, 1)}
    (chosen.out / 'finetune.json').write_text(json.dumps(result, indent=1, allow_nan=False) + '\n')
    print(summary.in_words(result))
    return [(part.path, part.start, part.recording.refused) for part in parts.held_out if not lerobot.is_dataset(part.path)]


def _distinct(names: list[str]) -> list[str]:
    """Return names of which no two are the same: later ones get a number."""
    found: list[str] = []
    for name in names:
        taken, number = name, 1
        while taken in found:
            number += 1
            taken = f'{name}-{number}'
        found.append(taken)
    return found


def _report(chosen: argparse.Namespace, name: str, bag: Path, skip: float, is_cropped: bool) -> int:
    """Run ``worldmodel evaluate bag`` with both models on the held-out part; return its exit code."""
    from worldmodel_ros.cli import main as command
    config = _cropping(chosen) if is_cropped else chosen.config
    given = ['--config', str(config)] if config else []
    return command(['evaluate', 'bag', str(bag), *given, '--model', chosen.model, '--model', str(chosen.out),
                    *(['--skip', f'{skip:g}'] if skip else []), '--out', str(chosen.out / f'report-{name}')])


def _cropping(chosen: argparse.Namespace) -> Path:
    """Return a file like --config by which both models get the images that fine-tuning has used, without CameraInfo."""
    import yaml
    given = yaml.safe_load(chosen.config.read_text()) if chosen.config else None
    path = chosen.out / 'cropped.yaml'
    path.write_text(yaml.safe_dump({**(given or {}), 'camera_info_topic': 'none'}))
    return path
