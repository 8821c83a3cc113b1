"""Shares results that are slow to make and wanted by several test files: one process of a run makes them, others read them."""
from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Made = TypeVar('Made')


def made_once(name: str, make: Callable[[], Made]) -> Made:
    """Return what ``make`` returns, pickled by the first process of this run that asks for ``name``; the others wait for it."""
    folder = Path(os.environ['WORLDMODEL_TEST_SHARED'])
    folder.mkdir(parents=True, exist_ok=True)
    file, part = folder / f'{name}.pickle', folder / f'{name}.part'
    with open(folder / f'{name}.lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            part.write_bytes(pickle.dumps(make()))
            part.rename(file)  # atomic, so that a process that dies leaves no partial file
    return pickle.loads(file.read_bytes())
