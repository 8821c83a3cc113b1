"""Gives the tests a ROS 2 of their own: an unused domain, on this machine only, and no display."""
import os
import random
import shutil
import socket
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

_state_directory = None


def _unused_domain() -> int:
    """Return a domain id from 1 to 100 in which no process of this machine takes part."""
    candidates = random.SystemRandom().sample(range(1, 101), 100)
    for domain in candidates:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                # DDS gives the first participant of a domain this port for discovery.
                probe.bind(('', 7400 + 250 * domain + 10))
                return domain
            except OSError:
                continue
    return candidates[0]


def pytest_configure(config):
    """Set the environment before any test module is imported; the processes that tests start inherit it."""
    global _state_directory
    if _state_directory is not None:
        return
    _state_directory = Path(tempfile.mkdtemp(prefix='worldmodel_ros_test_'))
    os.environ.update({
        'ROS_DOMAIN_ID': str(_unused_domain()),
        'ROS_AUTOMATIC_DISCOVERY_RANGE': 'LOCALHOST',
        'ROS_HOME': str(_state_directory / 'ros'),
        'ROS_LOG_DIR': str(_state_directory / 'ros' / 'log'),
        'FASTRTPS_DEFAULT_PROFILES_FILE': str(ROOT / 'config' / 'fastdds_large_images.xml'),
        'MPLBACKEND': 'agg',
        # Triton decides when it is imported: its kernels are tested on the CPU.
        'TRITON_INTERPRET': '1',
    })
    os.environ.setdefault('MUJOCO_GL', 'osmesa')
    # The ROS 2 wheels do not say where they are. A sourced distribution does, and may lack sys.prefix.
    prefixes = [p for p in os.environ.get('AMENT_PREFIX_PATH', '').split(os.pathsep) if p]
    if sys.prefix not in prefixes and (Path(sys.prefix) / 'share' / 'ament_index').is_dir():
        os.environ['AMENT_PREFIX_PATH'] = os.pathsep.join([sys.prefix, *prefixes])


def pytest_unconfigure(config):
    if _state_directory is not None:
        shutil.rmtree(_state_directory, ignore_errors=True)


@pytest.fixture(scope='module')
def one_thread():
    """Sums of PyTorch in one order; and networks as small as the tests' only wait for a second thread."""
    import torch
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
