"""Lists the decoders kept during stage ``decoder`` with their scores, and writes a model with one of them.

    python -m worldmodel_ros.train.run.points out/decoder/points.safetensors
    python -m worldmodel_ros.train.run.points out/decoder/points.safetensors --model tiny --share 0.8 --out out/sharp

Without ``--out`` it lists them. With it, it writes the model with the decoder of a point, by default of the best; with
``--share``, with the mean of its weights and the model's own. The rest of the model stays as it is, bit for bit.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from worldmodel_ros.engine.loading import model_folder
from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.checkpoint_description import ModelError, read_description

FILE = 'points.safetensors'
MOST = 6  # that are kept: 10 MB at the shipped size
# Targets: sharpness relative to the true image, of images 1 s ahead (mean and median) and of encoded ones (median), and the
# most PSNR that images 1 s ahead may lose, in dB.
AIM, ENCODED_AIM, MOST_LOSS_DB = 0.78, 0.95, 0.9

Row = dict[str, Any]  # step, and of two_step, one_step and encoded: psnr_db, sharpness, median_sharpness


class Points:
    """Averaged decoders, in bfloat16, and their rows; if a folder is given, in a file that is complete at any time."""

    def __init__(self, folder: Path | None = None) -> None:
        self._file = None if folder is None else folder / FILE
        self.before: dict[str, Any] = {}
        self.points: list[tuple[Row, dict[str, Tensor]]] = []
        if self._file is not None and self._file.is_file():
            self.before, self.points = read(self._file)

    def clear(self) -> None:
        """Drop those of an earlier attempt."""
        self.points = []

    def add(self, row: Row, decoder: Mapping[str, Tensor]) -> None:
        """Add a decoder; beyond MOST, the worst one is dropped."""
        weights = {name: value.detach().to('cpu', torch.bfloat16).contiguous() for name, value in decoder.items()}
        self.points = [point for point in self.points if point[0]['step'] < row['step']] + [(row, weights)]
        print(f'[decoder] judged: {json.dumps(row)}', flush=True)
        if len(self.points) > MOST:
            self.points.remove(min(self.points, key=self._rank))
        if self._file is not None:
            self._write()

    @property
    def chosen(self) -> tuple[Row, dict[str, Tensor]]:
        """The latest of those that reach the targets, else the one that comes nearest."""
        return max(self.points, key=self._rank)

    def _rank(self, point: tuple[Row, dict[str, Tensor]]) -> tuple[float, int]:
        row = point[0]
        imagined, encoded = row['two_step'], row['encoded']
        shares = [min(imagined['sharpness'], imagined['median_sharpness']) / AIM,
                  encoded['median_sharpness'] / ENCODED_AIM]  # its mean includes camera noise, which no decoder can render
        lost = self.before['two_step']['psnr_db'] - imagined['psnr_db']
        return round(min(1.0, *shares) - max(0.0, lost - MOST_LOSS_DB), 2), row['step']

    def _write(self) -> None:
        tensors = {f'{row["step"]}.{name}': value for row, weights in self.points for name, value in weights.items()}
        rows = {'before': self.before, 'points': [row for row, _ in self.points], 'chosen': self.chosen[0]['step']}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_suffix('.new')
        save_file(tensors, str(new), {'rows': json.dumps(rows)})
        os.replace(new, self._file)


def read(file: Path) -> tuple[Row, list[tuple[Row, dict[str, Tensor]]]]:
    """Return the row of the decoder before training, and the points of a file."""
    with safe_open(str(file), 'pt') as stored:
        rows, tensors = json.loads(stored.metadata()['rows']), {}
        for name in stored.keys():
            step, _, key = name.partition('.')
            tensors.setdefault(int(step), {})[key] = stored.get_tensor(name)
    return rows['before'], [(row, tensors[row['step']]) for row in rows['points']]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m worldmodel_ros.train.run.points', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('file', type=Path)
    parser.add_argument('--out', type=Path, help='folder for the model')
    parser.add_argument('--model', default='tiny', help='whose decoder is replaced (default: tiny)')
    parser.add_argument('--step', type=int, help='of the point (default: that of the best)')
    parser.add_argument('--share', type=float, default=1.0, help='of the point in the mean with the old weights (default: 1)')
    options = parser.parse_args(arguments)
    if not options.file.is_file():
        print(f'{options.file} is not there: name the {FILE} of a run', file=sys.stderr)
        return 1
    points = Points()
    points.before, points.points = read(options.file)
    best = points.chosen[0]['step']
    steps = {row['step']: (row, weights) for row, weights in points.points}
    if options.out is None:
        print('\n'.join(json.dumps(row) for row in (points.before, *(row for row, _ in points.points))))
        print(f'best: {best}')
        return 0
    step = best if options.step is None else options.step
    if step not in steps or not 0.0 <= options.share <= 1.0:
        print(f'choose --step from {", ".join(map(str, steps))}, and --share from 0 to 1', file=sys.stderr)
        return 1
    try:
        folder = model_folder(options.model)
        model, provenance = checkpoint.load(folder), read_description(folder).provenance
    except ModelError as error:
        print(error, file=sys.stderr)
        return 1
    row, weights = steps[step]
    old = model.vae.decoder.state_dict()
    if {name: value.shape for name, value in old.items()} != {name: value.shape for name, value in weights.items()}:
        print(f'{options.file} is of decoders of another size than that of {options.model}', file=sys.stderr)
        return 1
    model.vae.decoder.load_state_dict({name: torch.lerp(old[name], value.float(), options.share)
                                       for name, value in weights.items()})
    stage = {'before': points.before, 'judged': row, 'share': options.share}
    checkpoint.save(model, options.out, {'stages': {'decoder': stage}, 'continues': [provenance]},
                    torch.int8 if checkpoint.is_8_bit(folder) else torch.bfloat16)
    print(f'{options.out}: step {step}')
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
