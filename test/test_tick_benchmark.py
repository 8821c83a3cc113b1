"""What the tick benchmark compares with computes what the engine computes, and its rows are what they say."""
import importlib
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from small_model import SMALL
from tiled_model import TILED

from worldmodel_ros.engine.loading import load_random
from worldmodel_ros.model.presets import BASE, PRESETS, ROBOT_3B

BENCHMARKS = Path(__file__).resolve().parents[1] / 'benchmarks'


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture(params=[SMALL, TILED], ids=['window', 'tiles'])
def preset(request, monkeypatch):
    monkeypatch.setitem(PRESETS, request.param.name, request.param)
    return request.param


def full_session(engine):
    spec, session = engine.spec, engine.open_session(seed=5)
    for frame in np.random.default_rng(0).integers(0, 256, (spec.window_frames, *spec.image_size, 3), dtype=np.uint8):
        session.observe(frame, np.full(spec.actions, 0.1, np.float32))
    return session


@torch.inference_mode()
def test_the_baseline_denoises_the_chunk_that_the_engine_denoises(benchmark, preset):
    engine = load_random(preset.name, 'torch', sessions=1)
    session = full_session(engine)
    actions = np.tile(np.array([[0.2, 0.3]], np.float32), (preset.chunk_frames, 1))
    wanted = session.imagine(actions, 2).latents

    baseline = benchmark('tick_baseline').build(preset, torch.device('cpu'))
    pages = session.moment().cache.table.pages.ravel()
    k, v = (torch.from_numpy(part) for part in engine.memory.pool.storage.read(pages))  # (n, L, H, tokens, d)
    if preset.tile:
        for layer in range(len(baseline.window)):
            both = [part[:, layer].transpose(0, 1).flatten(1, 2)[None] for part in (k, v)]
            baseline.window[layer] = torch.stack(both)
    else:
        baseline.k, baseline.v = (part.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, None] for part in (k, v))
    noise = np.random.Generator(np.random.Philox(key=[5, preset.window_frames])).standard_normal(
        (preset.chunk_frames, *preset.latent_size, preset.latent_channels), np.float32)
    found = baseline.chunk(torch.from_numpy(noise)[None], torch.from_numpy(actions)[None], 2)[0].numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert np.abs(wanted - noise).max() > 0.5


@pytest.mark.realtime  # compares times of different moments
def test_rows_have_the_times_of_every_part(benchmark, preset):
    engine = load_random(preset.name, 'torch', sessions=1)
    row = benchmark('tick_measure').measure(engine, steps=2, ticks=6, seconds=60.0)
    assert row['ticks'] == 6
    parts = row['encode_ms'] + row['commit_ms'] + row['policy_ms'] + row['chunk_ms']['p50'] + row['outcomes_ms']
    assert 0.5 * row['tick_ms']['p50'] < parts < 1.5 * row['tick_ms']['p50']
    assert row['plan_ms']['p50'] < row['tick_ms']['p50'] <= row['tick_ms']['p99'] <= row['tick_ms']['max']


def test_the_memory_of_a_session_is_what_the_formula_says(benchmark, preset):
    engine = load_random(preset.name, 'torch', sessions=1)
    found = benchmark('tick_measure').memory(engine)
    formula = benchmark('tick_work').cache_bytes_per_second(preset, 4.0) / 2 ** 20
    assert found['cache_mib_per_second'] == pytest.approx(formula, abs=1e-3)


def test_useful_work_is_counted_from_the_preset(benchmark):
    work = benchmark('tick_work')
    assert work.keys_per_query(BASE) == [20 * 256] * 16
    # 12 layers within frames of 1,024 tokens; of the 6 others four see a neighbourhood of whole tiles of 256 tokens, two
    # their column over 40 slabs of the window and 4 of the chunk.
    near = math.prod(ROBOT_3B.patterns[0])
    assert sorted(work.keys_per_query(ROBOT_3B)) == [1024] * 12 + [near * 256] * 4 + [44 * 256] * 2
    assert work.chunk_flops(ROBOT_3B, 2)['linear'] == 2 * 2 * 16384 * 12 * 3072 ** 2 * 18


def test_a_case_that_fails_leaves_the_rows_of_the_others(benchmark, monkeypatch, tmp_path, capsys):
    tick = benchmark('tick')

    def apart(case, limit, *more):
        row = {'gpu': 'NVIDIA H100', 'preset': case.preset, 'steps': 2, 'dtype': case.dtype,
               'chunk_ms': {'p50': 30.0 if case.dtype == tick.BASELINE else 10.0}}
        if case.preset == 'broken':
            return {'about': {}, 'rows': []}, 'exit status 1'
        return {'about': {'machine': {'gpus': ['NVIDIA H100 80GB HBM3']}}, 'rows': [row]}, ''
    monkeypatch.setattr(tick, 'run_apart', apart)
    monkeypatch.setattr(sys, 'argv', ['tick.py', '--presets', 'base', 'broken', 'tiny',
                                      '--dtypes', 'bf16', 'compile-bf16', '--folder', str(tmp_path)])
    assert tick.main() == 1
    result = tick.json.loads((tmp_path / 'tick_h100.json').read_text())
    assert [(row['preset'], row['dtype'], row['ratio_compile_bf16']) for row in result['rows']] == [
        ('base', 'bf16', 3.0), ('base', 'compile-bf16', 1.0), ('tiny', 'bf16', 3.0), ('tiny', 'compile-bf16', 1.0)]
    assert set(result['failed']) == {'broken/bf16/1', 'broken/compile-bf16/1'}
