"""The example clients, as they are, before a gateway."""
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest
from fake_service import FakeService
from gateway_rig import gateway
from PIL import Image
from test_gateway_clients import ENVIRONMENT

EXAMPLES = Path(__file__).resolve().parents[1] / 'examples'


def example(name, running, *arguments, python=sys.executable):
    done = subprocess.run([str(python), str(EXAMPLES / name), '--url', running.url(''), *map(str, arguments)],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not (ENVIRONMENT / 'stamp').is_file(), reason='openpi-client is not installed: tools/openpi_env.sh')
def test_the_robot_with_openpi_client(tmp_path):
    with gateway(tmp_path, FakeService(sessions=4)) as running:
        said = example('openpi_robot.py', running, '--steps', 6, python=ENVIRONMENT / 'bin' / 'python').splitlines()
        assert said[0] == 'tiny: linear.x, angular.z, every 0.1 s' and len(said) == 7
        assert said[5] == '4 linear.x=0.500 angular.z=0.100' and len(running.service.ticks) == 2


def test_the_robot_that_reconnects(tmp_path):
    service = FakeService(sessions=4)
    with gateway(tmp_path, service) as running:
        said = example('reconnecting_robot.py', running, '--steps', 5).splitlines()
    assert len(said) == 5 and 'step 4, episode 1' in said[-1] and 'two_step' in said[-1]
    assert np.allclose([tick.executed for tick in service.ticks], [[0, 0], *[[0.5, 0.1]] * 4])


def test_the_walk_of_a_camera(tmp_path):
    Image.new('RGB', (80, 60), 'gray').save(tmp_path / 'room.png')
    service = FakeService(sessions=4)
    with gateway(tmp_path, service) as running:
        said = example('camera_walk.py', running, '--image', tmp_path / 'room.png', '--chunks', 3,
                       '--out', tmp_path / 'walk.mp4')
    assert said.startswith('13 frames in ')
    actions = service.questions[0].branches[0].actions
    assert np.allclose(actions, [[0.3, 0.5]] * 12, atol=1e-5)
    with av.open(str(tmp_path / 'walk.mp4')) as film:
        assert len(list(film.decode(video=0))) == 13


def test_there_are_no_others():
    assert sorted(path.name for path in EXAMPLES.iterdir()) == ['camera_walk.py', 'openpi_robot.py', 'reconnecting_robot.py']
