"""What ``model.json`` says of a checkpoint: read without torch, since a node needs no more than that."""
from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from .presets import Preset

FORMAT = 1


class ModelError(RuntimeError):
    """A model that cannot be loaded; the text names what, where and the remedy."""


@dataclass(frozen=True)
class Description:
    preset: Preset
    provenance: dict


def read_description(folder: Path) -> Description:
    """Reads ``model.json``; raises ModelError when it is missing, broken or of another format."""
    file = Path(folder) / 'model.json'
    if not file.is_file():
        raise ModelError(f'no model at {folder}: model.json is missing; name a folder that `worldmodel train` wrote')
    try:
        content = json.loads(file.read_text())
        if content['format'] != FORMAT:
            raise ModelError(f'{file}: format {content["format"]!r}, this version reads {FORMAT}')
        return Description(Preset.from_dict(content['preset']), content['provenance'])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f'{file} does not describe a model: {error}') from error
