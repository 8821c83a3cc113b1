"""An open world model on several processes imagines what one process does, and ends where one of them fails."""
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import open_world
import pytest
from test_open_world import DEADLINE, LEFT, PINHOLE, RIGHT, Robot, chunk, image

from worldmodel_ros.engine.loading import load_world
from worldmodel_ros.engine.open_world.session import WorldSession
from worldmodel_ros.engine.open_world.world import OpenWorld
from worldmodel_ros.engine.session_folder import SessionFileError
from worldmodel_ros.exit_codes import DEVICE_LOST
from worldmodel_ros.model.checkpoint_description import ModelError

pytestmark = [pytest.mark.waiting, pytest.mark.skipif(find_spec('diffusers') is None,
                                                      reason='diffusers is not installed: extra [wan]')]
CLOSE = 1  # of 255: float32 sums in another order, and images are rounded


@pytest.fixture(scope='module')
def alone(tiny_world):
    return OpenWorld.load(tiny_world)


@pytest.fixture(scope='module', params=['sequence', 'tensor'])
def divided(tiny_world, request):
    world = load_world(str(tiny_world), gpus=2, parallel=request.param)
    yield world
    world.close()


def same(found, wanted):
    return found.shape == wanted.shape and np.abs(found.astype(int) - wanted).max() <= CLOSE


def test_chunks_branches_observed_images_and_files_are_those_of_one_process(divided, alone):
    sessions = divided.open(image(), np.eye(4)), alone.open(image(), np.eye(4))
    for session in sessions:
        session.observe(image(7, 8), np.stack([np.eye(4)] * 2), PINHOLE)
    for yaw in (0.1, -0.1):
        forks = [session.fork() for session in sessions]
        assert same(*(chunk(fork, yaw) for fork in forks))
        assert same(*(chunk(fork, yaw) for fork in forks))  # the window rolls
        for fork in forks:
            fork.close()
    files = [session.save() for session in sessions]
    wanted = chunk(sessions[0])
    assert same(wanted, chunk(sessions[1]))
    for session in sessions:
        session.close()
    again = WorldSession.load(divided, files[0])
    assert np.array_equal(chunk(again), wanted)
    again.close()
    for world, content in ((divided, files[1]), (alone, files[0])):  # what is kept has all heads, wherever it was made
        moved = WorldSession.load(world, content)
        assert same(chunk(moved), wanted)
        moved.close()
    assert divided.pages.pool.allocator.usage().used == 0


def test_what_is_refused_leaves_all_processes_as_they_were(divided):
    session = divided.open(image(), np.eye(4))
    with pytest.raises(ValueError, match='images'):
        session.observe(image(1, 3), np.eye(4)[None], PINHOLE)
    with pytest.raises(SessionFileError):
        WorldSession.load(divided, b'nothing')
    assert chunk(session).shape == (8, *open_world.SIZE, 3)
    session.close()


def test_a_robot_asks_what_if(divided):
    with Robot(divided) as robot:
        robot.show(twist=LEFT)
        robot.predictions.get(timeout=DEADLINE)
        answer = robot.ask([LEFT] * 4, [RIGHT] * 4)
        assert answer.complete and not np.array_equal(*(branch.frames for _, branch in answer.branches))
    assert not robot.failures


def test_a_world_that_cannot_be_divided_so_is_refused(tiny_world, tmp_path):
    with pytest.raises(ModelError, match='2 heads and 128 hidden units cannot be divided among 3'):
        load_world(str(tiny_world), gpus=3)
    pair = open_world.write(tmp_path / 'pair', networks=2)
    with pytest.raises(ModelError, match='placed by devices'):
        load_world(str(pair), gpus=2)


def test_where_another_process_dies_this_one_ends_to_be_started_again(tiny_world):
    code = ('import sys, time\nfrom worldmodel_ros.engine.loading import load_world\n'
            f'world = load_world({str(tiny_world)!r}, gpus=2)\nprint(*world.pids, flush=True)\ntime.sleep({DEADLINE})')
    environment = os.environ | {'PYTHONPATH': os.pathsep.join(
        [str(Path(__file__).resolve().parents[1]), os.environ.get('PYTHONPATH', '')])}
    process = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        os.kill(int(process.stdout.readline()), signal.SIGKILL)
        assert process.wait(DEADLINE) == DEVICE_LOST
    finally:
        process.kill()
        process.wait()
