"""Several processes train one model: equal weights in all, and the gradient of all their clips together."""
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from worldmodel_ros.train.objectives.objective import Objective
from worldmodel_ros.train.run import ranks

HERE = Path(__file__).resolve().parent
PROCESSES = 2
# What each process runs: gradients of its share of a batch, then three steps of the loop on clips of its own.
PROGRAM = '''
import gc, os, sys
gc.disable()  # what is imported is no garbage, and to look for some in it takes a second
from pathlib import Path
import torch
from safetensors.torch import save_file
from torch import nn
torch.set_num_threads(1)
from test_train_ranks import Line, joint_batch, network
from worldmodel_ros.train.run.config import Schedule
from worldmodel_ros.train.run.loop import optimise
from worldmodel_ros.train.run.ranks import Ranks

out = Path(sys.argv[1])
ranks = Ranks.join('cpu')
model = network(seed=0)
share = joint_batch().chunk(ranks.count)[ranks.rank]
model(share).square().mean().backward()
ranks.average_gradients(model.parameters())
found = {f'gradient.{name}': p.grad.clone() for name, p in model.named_parameters()}
model = network(seed=ranks.rank)  # different at first: the first process's count
objective = []
optimise(model, lambda averaged: objective.append(Line(model)) or objective[0], Schedule(3, 1e-2), stage='line',
         ranks=ranks, out=out, seed=0)
found |= {f'weight.{name}': value for name, value in model.state_dict().items()}
found['drawn'] = torch.stack(objective[0].drawn)
save_file({k: v.contiguous() for k, v in found.items()}, str(out / f'{ranks.rank}.safetensors'))
ranks.leave()
left = [Path(f'/proc/self/task/{thread}/comm').read_text() for thread in os.listdir('/proc/self/task')]
assert not [name for name in left if 'gloo' in name], left  # one would abort the process as it ends
gc.freeze()  # nor as the process ends
'''


class Line(Objective):
    def __init__(self, model):
        self.model, self.drawn = model, []

    def parameters(self):
        return list(self.model.parameters())

    def draw(self, rng, generator):
        self.drawn.append(torch.randn(4, 8, generator=generator))
        return self.drawn[-1]

    def loss(self, batch):
        loss = self.model(batch).square().mean()
        return loss, {}


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 2))


def joint_batch():
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope='module')
def found(tmp_path_factory):
    """What each of two processes found."""
    out = tmp_path_factory.mktemp('ranks')
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(HERE), str(HERE.parent)]), 'MASTER_PORT': str(port),
                   'MASTER_ADDR': '127.0.0.1', 'WORLD_SIZE': str(PROCESSES)}
    started = [subprocess.Popen([sys.executable, '-c', PROGRAM, str(out)], env={**environment, 'RANK': str(rank)})
               for rank in range(PROCESSES)]
    assert [process.wait(120) for process in started] == [0] * PROCESSES
    return [load_file(str(out / f'{rank}.safetensors')) for rank in range(PROCESSES)], out


def test_the_gradient_is_that_of_all_clips_together(found):
    model = network(seed=0)
    model(joint_batch()).square().mean().backward()
    for name, parameter in model.named_parameters():
        for rank in range(PROCESSES):
            torch.testing.assert_close(found[0][rank][f'gradient.{name}'], parameter.grad)


def test_all_end_with_the_same_weights_after_clips_of_their_own(found):
    first, second = found[0]
    assert not torch.equal(first['drawn'], second['drawn'])
    weights = [name for name in first if name.startswith('weight.')]
    assert len(weights) == 4
    for name in weights:
        assert torch.equal(first[name], second[name]), name
        assert not torch.equal(first[name], network(0).state_dict()[name.removeprefix('weight.')]), name


def test_the_first_process_alone_writes_the_log(found):
    rows = [json.loads(line) for line in (found[1] / 'line.jsonl').read_text().splitlines()]
    assert rows and rows[-1]['step'] == 3


def test_gradients_travel_in_buckets_of_bounded_size(monkeypatch):
    monkeypatch.setattr(ranks, 'BUCKET_BYTES', 100)
    gradients = [torch.zeros(size) for size in (10, 10, 10, 50, 5)]
    assert [[g.numel() for g in bucket] for bucket in ranks._buckets(gradients)] == [[10, 10], [10], [50], [5]]
    assert ranks._buckets([]) == []
