"""The description of a checkpoint, ``model.json``; read without torch, since a node needs no more than that."""
from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .presets import Preset

FORMAT = 1
WORLD_FILE = 'world.json'  # replaces ``model.json`` for an open world model (engine/open_world)


class ModelError(RuntimeError):
    """A model that cannot be loaded; the text names what, where and the remedy."""


@dataclass(frozen=True)
class Description:
    preset: Preset
    provenance: dict


def read_description(folder: Path) -> Description:
    """Read ``model.json``; raise ModelError when it is missing, broken or of another format."""
    content = _content(Path(folder))
    try:
        return Description(Preset.from_dict(content['preset']), content['provenance'])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f'{folder}/model.json does not describe a model: {error}') from error


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint, after verifying their checksums.

    Raises ModelError, naming the file, if one is missing, cannot be read or differs; a checkpoint written before ``model.json``
    had checksums is accepted as it is.
    """
    files = sorted(folder.glob('weights-*.safetensors'))
    written = _content(folder).get('crc32')
    if written is None:
        return files
    if not isinstance(written, dict):
        raise ModelError(f'{folder}/model.json does not describe a model: crc32 is no mapping from files to checksums')
    if missing := sorted(set(written) - {file.name for file in files}):
        raise ModelError(f'{folder / missing[0]} is missing; restore it from the release or train again')
    for file in files:
        try:
            found = checksum(file)
        except OSError as error:  # such as a link to what was deleted
            raise ModelError(f'{file} cannot be read ({error}); restore it from the release or train again') from error
        if found != written.get(file.name):
            raise ModelError(f'{file} is damaged: its checksum is not the one in model.json; restore it from the release or '
                             f'train again')
    return files


def checksum(file: Path) -> int:
    """Return the CRC-32 of a file: any flipped bit changes it, and gigabytes of weights take a second each."""
    crc = 0
    with file.open('rb') as stream:
        while block := stream.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


def _content(folder: Path) -> dict[str, Any]:
    file = folder / 'model.json'
    if not file.is_file():
        raise ModelError(f'no model at {folder}: model.json is missing; name a folder that `worldmodel train` wrote')
    try:
        content = json.loads(file.read_text())
        if content['format'] != FORMAT:
            raise ModelError(f'{file}: format {content["format"]!r}, this version reads {FORMAT}')
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f'{file} does not describe a model: {error}') from error
    return content
