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

pytestmark = pytest.mark.waiting(seconds=5)
TIME = 120.0  # s


@pytest.mark.parametrize(('kind', 'precision', 'limit'), [
    ('tensor', Precision.FP32, 2e-5), ('tensor', Precision.FP8, 0.06), ('sequence', Precision.FP32, 2e-5),
    ('sequence-fp8', Precision.FP8, 0.06)])
def test_two_processes_give_the_chunks_of_one(tmp_path, kind, precision, limit):
    script = Path(wan_process.__file__)
    command = [sys.executable, str(script), str(tmp_path)]
    environment = os.environ | {'PYTHONPATH': os.pathsep.join([str(script.parents[1]), os.environ.get('PYTHONPATH', '')])}
    first = subprocess.Popen([*command, '0', '2', precision.value, kind], stdout=subprocess.PIPE, text=True, env=environment)
    other = None
    try:
        port = first.stdout.readline().strip()
        other = subprocess.Popen([*command, '1', '2', precision.value, kind, port], env=environment)
        wanted = wan_process.chunks(Precision.FP32)
        assert first.wait(TIME) == 0 and other.wait(TIME) == 0
    finally:
        for process in (first, other):
            if process and process.poll() is None:
                process.kill()
                process.wait()
    found, same = (torch.load(tmp_path / f'{rank}.pt', weights_only=True) for rank in range(2))
    assert all(torch.equal(one, two) for one, two in zip(found, same, strict=True))
    assert max(map(difference, found, wanted)) <= limit


def test_pages_hold_the_heads_of_their_process():
    class Half:
        rank, count = 0, 2
    whole, half = (PagedSequences(CONFIG, Window(6, 3, 3), (5, 7), Precision.FP32, page_tokens=16, group=group).pool.storage
                   for group in (None, Half))
    assert half.page_bytes * 2 == whole.page_bytes
