"""Muon in batches of one shape: the results of torch's, from far fewer calls."""
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from worldmodel_ros.train.run.muon import BatchedMuon, orthogonalised

pytestmark = pytest.mark.usefixtures('one_thread')
SHAPES = [(48, 16), (16, 16), (64, 16), (16, 64)]


def matrices(layers=3, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=rng)) for _ in range(layers) for shape in SHAPES]


def trained(kind, steps=4, **options):
    parameters = matrices()
    optimiser = kind(parameters, lr=1e-2, weight_decay=0.05, **options)
    rng = torch.Generator().manual_seed(1)
    for step in range(steps):
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.randn(parameter.shape, generator=rng) if number or step else None
        optimiser.step()
    return parameters, optimiser


@pytest.mark.parametrize('options', [{'adjust_lr_fn': 'match_rms_adamw'}, {'nesterov': False}, {'ns_steps': 3}], ids=str)
def test_the_result_is_that_of_torch(options):
    (ours, optimiser), (theirs, reference) = (trained(kind, **options) for kind in (BatchedMuon, torch.optim.Muon))
    for number, (a, b, before) in enumerate(zip(ours, theirs, matrices())):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-2 * float((b - before).abs().max()))  # both iterate in bfloat16
        assert not torch.equal(a, before)
        torch.testing.assert_close(optimiser.state[a]['momentum_buffer'], reference.state[b]['momentum_buffer'])


def test_singular_values_come_near_one_whatever_the_shape_and_a_matrix_does_not_touch_its_neighbours():
    for shape in SHAPES:
        stack = torch.randn(5, *shape, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 3, 5)[:, None, None]
        found = orthogonalised(stack, (3.4445, -4.7750, 2.0315), 5, 1e-7).float()
        values = torch.linalg.svdvals(found)
        assert 0.3 < values.min() and values.max() < 1.6
        alone = torch.cat([orthogonalised(each[None], (3.4445, -4.7750, 2.0315), 5, 1e-7) for each in stack]).float()
        torch.testing.assert_close(found, alone, rtol=0, atol=0.02)
    assert not orthogonalised(torch.zeros(1, 4, 4), (3.4445, -4.7750, 2.0315), 5, 1e-7).any()


def test_calls_do_not_grow_with_the_number_of_layers():
    def calls(kind, layers):
        parameters = matrices(layers)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimiser = kind(parameters, lr=1e-2)
        optimiser.step()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            optimiser.step()
        return sum(event.count for event in profiler.key_averages() if 'mm' in event.key)

    assert calls(BatchedMuon, 15) == calls(BatchedMuon, 3) < calls(torch.optim.Muon, 15) / 10
