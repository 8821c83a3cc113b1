"""
On a GPU: kernels, layers in FP8, sessions on pages and queued ticks give the numbers of their definitions.

    make test-gpu

The cases and their limits are those of the benchmarks, which also print how long each takes.
"""
import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from worldmodel_ros.kernels import graph_capture

pytestmark = pytest.mark.gpu
BENCHMARKS = Path(__file__).resolve().parents[2] / 'benchmarks'


@pytest.fixture
def program(monkeypatch):
    """The programs in benchmarks/, to be imported by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def full_float32(monkeypatch):
    """Products in float32 that are not rounded to TF32."""
    for backend in (torch.backends.cuda.matmul, torch.backends.cudnn):
        monkeypatch.setattr(backend, 'allow_tf32', False)


@pytest.mark.parametrize('part', [
    'attention', 'by_frame', 'in_parts', 'gelu_in_product', 'page_writing', 'temporal', 'requantising'])
def test_every_kernel_keeps_the_limit_of_its_definition(program, part):
    module = program('kernel_correctness')
    with torch.inference_mode():
        checks = list(module.PARTS[part](torch.Generator('cuda').manual_seed(0), np.random.default_rng(0)))
    assert checks and not [check for check in checks if not check.kept]


def test_every_kernel_of_the_fp8_layers_keeps_its_limit(program):
    torch.manual_seed(0)
    rows = list(program('fp8_kernels').correct())
    assert rows and not [row for row in rows if not row['kept']]


def test_sessions_on_pages_give_what_the_definitions_give(program, full_float32):
    rows = list(program('tile_correctness').rows())
    assert len(rows) == 8 and not [row for row in rows if not row['kept']]


@pytest.mark.parametrize('preset', ['tiny', 'base'])
def test_queued_captured_and_compiled_ticks_give_what_plain_calls_give(program, preset):
    rows = list(program('tick_agreement').rows([preset], repeats=5))
    assert len(rows) == 4 and not [row for row in rows if not row['agrees']]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason='needs two GPUs')
def test_messages_by_the_copy_engines_have_the_bits_of_nccls(tmp_path):
    subprocess.run([sys.executable, str(BENCHMARKS / 'exchange.py'), '--processes', '2', '--replays', '5', '--json',
                    str(tmp_path / 'rows.json')], check=True, timeout=120.0)
    rows = json.loads((tmp_path / 'rows.json').read_text())['rows']
    assert {row['way'] for row in rows} >= {'nccl', 'peers', 'peers-fp8'}
    assert not [row for row in rows if 'error' in row]


def test_triton_compiles_here():
    """Interpreted kernels would give the right numbers, too, and show nothing of the GPU's."""
    from triton.runtime.jit import JITFunction

    from worldmodel_ros.kernels import rows_triton
    assert any(isinstance(value, JITFunction) for value in vars(rows_triton).values()), sys.modules['triton']


def test_a_kernel_takes_the_place_of_a_small_memset_in_a_captured_graph(monkeypatch):
    runtime = pytest.importorskip('cuda.bindings.runtime')
    if not graph_capture._can_edit():
        pytest.skip('neither this PyTorch nor this driver lets graphs be edited')
    counter, replaced = torch.zeros(1024, dtype=torch.int32, device='cuda'), []
    stream, replace = torch.cuda.Stream(priority=-1), graph_capture.replace_memsets
    monkeypatch.setattr(graph_capture, 'replace_memsets', lambda *graph: replaced.append(replace(*graph)))

    def work():
        for start, size in ((16, 64), (512, 4)):  # bytes
            runtime.cudaMemsetAsync(counter.data_ptr() + start, 0, size, torch.cuda.current_stream().cuda_stream)
        counter.add_(1)
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    counter.fill_(1)
    with graph_capture.capturing(stream) as graph:
        work()
    for _ in range(3):
        graph.replay()
    wanted = np.full(1024, 4)
    wanted[4:20] = wanted[128] = 1  # cleared before each addition
    assert counter.tolist() == wanted.tolist() and replaced == [2]
