"""A Wan network divided among processes gives the chunks of one process."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import wan_process
from test_wan_model import CONFIG, difference

from worldmodel_ros.kernels.pages import Precision
from worldmodel_ros.model.wan.sequence import PagedSequences, Window

TIME = 120.0  # s
LIMITS = {'tensor': 2e-5, 'tensor-fp8': 0.06, 'sequence': 2e-5, 'sequence-fp8': 0.06}


@pytest.fixture(scope='module')
def divided(tmp_path_factory):
    """Folder with what two processes got, and what one gets in float32. Most of their time they start: they do so once."""
    folder, script = tmp_path_factory.mktemp('chunks'), Path(wan_process.__file__)
    command = [sys.executable, str(script), str(folder)]
    environment = os.environ | {'PYTHONPATH': os.pathsep.join([str(script.parents[1]), os.environ.get('PYTHONPATH', '')])}
    first = subprocess.Popen([*command, '0', '2'], stdout=subprocess.PIPE, text=True, env=environment)
    other = None
    try:
        port = first.stdout.readline().strip()
        other = subprocess.Popen([*command, '1', '2', port], env=environment)
        wanted = wan_process.chunks(Precision.FP32)
        assert first.wait(TIME) == 0 and other.wait(TIME) == 0
    finally:
        for process in (first, other):
            if process and process.poll() is None:
                process.kill()
                process.wait()
    return folder, wanted


@pytest.mark.parametrize('kind', wan_process.KINDS)
def test_two_processes_give_the_chunks_of_one(divided, kind):
    folder, wanted = divided
    found, same = (torch.load(folder / f'{kind}.{rank}.pt', weights_only=True) for rank in range(2))
    assert all(torch.equal(one, two) for one, two in zip(found, same, strict=True))
    assert max(map(difference, found, wanted)) <= LIMITS[kind]


def test_messages_in_the_background_do_not_meet_those_of_the_passes(divided):
    folder, _ = divided
    for rank in range(2):
        assert torch.load(folder / f'sums.{rank}.pt') == [2.0, 20.0]


def test_pages_hold_the_heads_of_their_process():
    class Half:
        rank, count = 0, 2
    whole, half = (PagedSequences(CONFIG, Window(6, 3, 3), (5, 7), Precision.FP32, page_tokens=16, group=group).pool.storage
                   for group in (None, Half))
    assert half.page_bytes * 2 == whole.page_bytes
