"""Finds the storage files of a bag, with or without metadata.yaml."""
from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory

import yaml
import zstandard

from .problems import BagError, Problem
from .unpacking import TooLarge, unpack_file

_SUFFIXES = ('.mcap', '.db3')
_PACKED = ('.zstd', '.zst')
_REINDEX = '`ros2 bag reindex {}` writes a new one'


@dataclass
class BagFiles:
    """Storage files in the order of recording; ``message_count`` as stated in metadata.yaml."""

    paths: list[Path]
    message_count: int | None = None
    problems: list[Problem] = field(default_factory=list)


def find_files(path: Path, resources: ExitStack) -> BagFiles:
    """
    Return the storage files of a bag folder or file; compressed files are unpacked into a temporary folder, which is deleted
    with ``resources``. Raises BagError if there are none.
    """
    if not path.exists():
        raise BagError(f'{path} does not exist: give the folder that `ros2 bag record` wrote, or its .mcap or .db3 '
                       'file')
    files = _in_folder(path) if path.is_dir() else BagFiles([path])
    for file in files.paths:
        _check_kind(file)
    if any(file.suffix in _PACKED for file in files.paths):
        folder = Path(resources.enter_context(TemporaryDirectory(prefix='worldmodel_bag_')))
        files.paths = [_unpack(file, folder, files.problems) if file.suffix in _PACKED else file
                       for file in files.paths]
    return files


def _in_folder(folder: Path) -> BagFiles:
    there = sorted((p for p in folder.iterdir() if p.is_file() and _storage_suffix(p)), key=_natural)
    if not there:
        names = ', '.join(sorted(p.name for p in folder.iterdir())[:8]) or 'nothing'
        raise BagError(f'{folder} is not a bag: it has no .mcap or .db3 file, only {names}. Give the folder that '
                       '`ros2 bag record` wrote')
    metadata = folder / 'metadata.yaml'
    if not metadata.exists():
        return BagFiles(there, problems=[Problem(
            'no metadata', f'{folder} has no metadata.yaml, as after a crash of the recorder: all files in it are '
            f'read. {_REINDEX.format(folder)}')])
    try:
        information = yaml.safe_load(metadata.read_text())['rosbag2_bagfile_information']
        listed = [folder / PurePath(name).name for name in information['relative_file_paths']]
        count = int(information['message_count'])
    except (OSError, yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        return BagFiles(there, problems=[Problem(
            'metadata', f'{metadata} cannot be read ({type(error).__name__}: {error}): all files in the folder are '
            f'read. {_REINDEX.format(folder)}')])
    missing = [file.name for file in listed if not file.exists()]
    problems = [Problem('missing file', f'{folder} lacks {", ".join(missing)}, which metadata.yaml lists: the others '
                        'are read; copy the rest of the recording', len(missing))] if missing else []
    return BagFiles([file for file in listed if file.exists()] or there, count, problems)


def _storage_suffix(path: Path) -> str | None:
    name = path.name.removesuffix('.zstd').removesuffix('.zst')
    return next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), None)


def _natural(path: Path) -> tuple:
    """Sort drive_2 before drive_10."""
    digits = ''.join(c if c.isdigit() else ' ' for c in path.name).split()
    return [int(d) for d in digits], path.name


def _check_kind(path: Path) -> None:
    with path.open('rb') as stream:
        start = stream.read(16)
    if start.startswith(b'#ROSBAG V'):
        raise BagError(f'{path} is a bag of ROS 1: convert it with `pip install rosbags && rosbags-convert --src '
                       f'{path} --dst {path.with_suffix("")}`')
    if _storage_suffix(path) is None:
        raise BagError(f'{path} is neither .mcap nor .db3: give the folder that `ros2 bag record` wrote, or a file '
                       'in it')


def _unpack(path: Path, folder: Path, problems: list[Problem]) -> Path:
    target = folder / path.stem
    try:
        unpack_file(path, target)
    except zstandard.ZstdError as error:
        problems.append(Problem('damaged', f'{path} cannot be unpacked to its end ({error}): what comes before is '
                                'read. Copy the recording again'))
    except TooLarge as error:
        problems.append(Problem('too large', f'{path} is not unpacked to its end ({error}): what comes before is read. '
                                f'If it is a recording, `zstd -d {path}` where there is room, and give what comes of it'))
    return target
