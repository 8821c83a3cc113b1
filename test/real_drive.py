"""The recorded drive of a real car, which lies next to the checkout if present."""
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def real_drive() -> Path:
    """Return the bag's folder; skip the test if it is missing."""
    path = Path(os.environ.get('WORLDMODEL_TEST_BAG') or ROOT.parent / 'shared' / 'data' / 'donkeycar_lap_a')
    if not path.exists():
        pytest.skip(f'the drive of a real car is not at {path}: set WORLDMODEL_TEST_BAG to the folder of its bag')
    return path
