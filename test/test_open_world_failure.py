"""Where the first process of a divided world fails alone, all end, as the others wait for its messages."""
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from worldmodel_ros.cache.pool import OutOfPages
from worldmodel_ros.engine.device_failure import RankFailure
from worldmodel_ros.engine.open_world.divided import LeadingWorld
from worldmodel_ros.engine.open_world.session import WorldSession
from worldmodel_ros.exit_codes import DEVICE_LOST


def leading(closed=False):
    """The first process's world, without a model."""
    world = object.__new__(LeadingWorld)
    world._closed = closed
    return world


def test_an_error_of_this_process_alone_ends_it_to_be_started_again():
    code = ('from test_open_world_failure import leading\nwith leading().jointly():\n    raise RuntimeError("out of memory")')
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parent)
    assert done.returncode == DEVICE_LOST and 'rank 0 of the model failed: RuntimeError: out of memory' in done.stderr


@pytest.mark.parametrize('error', [ValueError, OutOfPages, RankFailure])
def test_what_all_processes_refuse_is_only_told(error):
    with pytest.raises(error), leading().jointly():
        raise error


def test_a_chunk_that_a_closed_world_has_interrupted_ends_nothing():
    with pytest.raises(RuntimeError, match='aborted'), leading(closed=True).jointly():
        raise RuntimeError('aborted')


@pytest.mark.parametrize('method, arguments', [
    ('imagine', (np.zeros((2, 4, 4)), None)), ('observe', (None, np.zeros((2, 4, 4)), None)), ('save', ())])
def test_all_that_processes_do_together_is_watched(method, arguments):
    failed = []

    @contextmanager
    def jointly():
        try:
            yield
        except AttributeError as error:  # there is nothing else in this world
            failed.append(error)
            raise
    session = object.__new__(WorldSession)
    session._world, session._number, session._imagined = SimpleNamespace(jointly=jointly, tell=lambda *told: None), 0, False
    with pytest.raises(AttributeError):
        getattr(session, method)(*arguments)
    assert failed
