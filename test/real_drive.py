"""The recorded drive of a real car, which lies beside the checkout where there is one."""
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def real_drive() -> Path:
    """Return the bag's folder; skips the test where it is not there."""
    path = Path(os.environ.get('WORLDMODEL_TEST_BAG') or ROOT.parent / 'shared' / 'data' / 'donkeycar_lap_a')
    if not path.exists():
        pytest.skip(f'the drive of a real car is not at {path}: set WORLDMODEL_TEST_BAG to the folder of its bag')
    return path
