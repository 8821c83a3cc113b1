"""What candidates lead to, by compiled loops and by numpy's calls: the same commands."""
import logging
import math
import sys
import time

import numpy as np
import pytest

from worldmodel_ros.control import deliberation
from worldmodel_ros.control.deliberation import CANDIDATES, Candidate, imagine
from worldmodel_ros.control.reactive_policy import Aim
from worldmodel_ros.control.scene_view import View
from worldmodel_ros.control.terms import Thing

WALLS = np.array([[1.0, 0.0, 2.8], [0.0, 1.0, 2.8], [-1.0, 0.0, 2.8], [0.0, -1.0, 2.8]])
AIMS = {'touch': Aim('0', 0.0, {}), 'reach': Aim('0', 0.42, {'red': 0.1}), 'keep a distance': Aim('0', 1.0, {}),
        'a place': Aim('0', 0.05, {}, in_view=False), 'a pose': Aim('0', 0.05, {}, in_view=False, yaw=2.0)}


def scene(rng, steps, walls):
    """A view with up to nine things that move, in any place, also where the robot is."""
    times = np.linspace(0.0, 3.0, steps + 1)[:, None]
    things = {}
    for number in range(rng.integers(1, 10)):
        path = rng.uniform(-2.5, 2.5, 2) + times * rng.uniform(-0.5, 0.5, 2)
        things[str(number)] = Thing(path, rng.uniform(0.05, 0.3), 'red', True, 1.0)
    return View(np.zeros(3), np.zeros(2), things, walls)


def numpy_alone(monkeypatch):
    monkeypatch.setattr(deliberation, 'compiled', lambda: None)


@pytest.mark.parametrize('aim', AIMS.values(), ids=AIMS)
@pytest.mark.parametrize('walls', [WALLS, WALLS[:0]], ids=['in a room', 'without walls'])
def test_compiled_loops_give_the_poses_and_commands_of_numpy(aim, walls, monkeypatch):
    rng, compared = np.random.default_rng(0), []
    for _ in range(20):
        steps = int(rng.integers(2, 31))
        where = rng.uniform(-2.0, 2.0, 3), rng.uniform(-0.3, 0.5, 2), rng.uniform(-0.3, 0.5, 2)
        candidates = *CANDIDATES, Candidate('a part', 0.7, (0.2, 0.3), 2.5)
        compared.append((aim, candidates, scene(rng, steps, walls), *where, steps))
    loops = [imagine(*case) for case in compared]
    assert deliberation.compiled() is not None
    numpy_alone(monkeypatch)
    for case, (poses, commands) in zip(compared, loops, strict=True):
        expected_poses, expected_commands = imagine(*case)
        assert poses.shape == (17, case[-1], 3) and commands.shape == (17, case[-1] - 1, 2)
        np.testing.assert_allclose(poses, expected_poses, atol=1e-9)
        np.testing.assert_allclose(commands, expected_commands, atol=1e-9)
    assert max(np.abs(commands).max() for _, commands in loops) > 0.3  # it is not nothing that agrees


@pytest.mark.untimed
def test_compiled_loops_are_worth_it(monkeypatch):
    case = AIMS['reach'], CANDIDATES, scene(np.random.default_rng(1), 30, WALLS), np.zeros(3), np.zeros(2), np.zeros(2), 30

    def fastest():
        taken = []
        for _ in range(30):
            begun = time.perf_counter()
            imagine(*case)
            taken.append(time.perf_counter() - begun)
        return min(taken)
    imagine(*case)  # compiled
    loops = fastest()
    numpy_alone(monkeypatch)
    assert loops < fastest() / 5


@pytest.mark.parametrize('missing', ['numba', 'a folder'])
def test_without_numba_numpy_does_it_and_says_so(missing, monkeypatch, caplog):
    """Numba raises RuntimeError where it finds no folder for what it has compiled."""
    name = 'worldmodel_ros.control.compiled_rollout'
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr(sys.modules['worldmodel_ros.control'], 'compiled_rollout', raising=False)
    if missing == 'numba':
        monkeypatch.setitem(sys.modules, 'numba', None)
    else:
        import numba

        def njit(**options):
            raise RuntimeError('cannot cache function: no locator available')
        monkeypatch.setattr(numba, 'njit', njit)
    deliberation.compiled.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            view = scene(np.random.default_rng(2), 20, WALLS)
            poses, _ = imagine(AIMS['reach'], CANDIDATES, view, np.zeros(3), np.zeros(2), np.zeros(2), 20)
        assert poses.shape == (16, 20, 3) and math.isfinite(poses.sum())
        assert 'imagined by numpy' in caplog.text
    finally:
        monkeypatch.undo()
        deliberation.compiled.cache_clear()
