"""The common header of all benchmark results, and how they are written."""
from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from worldmodel_ros.machine import PACKAGES, machine, versions

ROOT = Path(__file__).resolve().parents[1]


def command() -> str:
    """The command line of this process, relative to the repository."""
    script = Path(sys.argv[0]).resolve()
    name = os.fspath(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    return ' '.join(['python', name, *sys.argv[1:]])


def provenance(packages: tuple[str, ...] = PACKAGES) -> dict[str, Any]:
    """Return command, machine and versions, without which numbers cannot be compared."""
    return {'command': command(), 'machine': machine(), 'versions': versions(packages)}


def product_ms(times: int = 50) -> float:
    """Return the median time of a product of 384x384 float32 matrices on one thread, ms."""
    import torch
    matrix, spent = torch.rand((384, 384)), []
    torch.set_num_threads(1)
    for _ in range(times):
        begun = time.perf_counter()
        _ = matrix @ matrix
        spent.append(time.perf_counter() - begun)
    return statistics.median(spent) * 1e3


def write_result(result: dict[str, Any], file: Path | None, show: bool = False) -> None:
    """
    Write a result as JSON, if there is a file for it; create its folder.

    ``show``: print it, too. A long benchmark writes after each row, so that measurements are not lost.
    """
    text = json.dumps(result, indent=1)
    if show:
        print(text)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + '\n')


def short_name(gpus: Sequence[str]) -> str:
    """Return the name for a result file: the first GPU, such as h200; cpu without one."""
    return next((part.lower() for part in gpus[0].split() if part[1:].isdigit()), 'gpu') if gpus else 'cpu'
