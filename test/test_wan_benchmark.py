"""What benchmarks/wan.py compares with computes what this package computes, and its rows are what they say."""
import importlib
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from worldmodel_ros.model.wan.dit import Prompt

BENCHMARKS = Path(__file__).resolve().parents[1] / 'benchmarks'


@pytest.fixture
def wan(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module('wan')


@pytest.fixture
def options(wan, tmp_path):
    return wan.argparse.Namespace(tiny=True, eager=True, folder=tmp_path, chunks=2, large_chunks=2, long=2, seconds=3600.0,
                                  dtypes=wan.DTYPES)


@torch.inference_mode()
def test_the_published_loop_beside_ours_gives_the_same_latents(wan, options):
    model = wan.Model(wan.Run(options), 'lingbot_world_fast', fp8=False)
    ours, theirs = model.pages().open(), wan.moved_window(model)
    sampler = wan.Sampler(wan.PublishedPass(model.dit, model.rays, False), model.preset.schedule)
    for _ in range(5):  # the window is full after three
        found = model.chunk(ours)
        wanted = sampler.chunk(theirs, model.padded, lambda step: model.noise, model.condition)
        assert float((found - wanted).norm() / wanted.norm()) < 0.01


def test_counted_work_is_that_of_the_real_sizes(wan, options):
    run = wan.Run(options)
    run.grid, run.tiny = (30, 52), False
    model = object.__new__(wan.Model)
    model.run, model.preset = run, run.preset('lingbot_world_fast')
    model.config, model.prompt = model.preset.config, Prompt(None, None, torch.zeros(512), None)
    tflop = model.tflop()
    # Of five passes, the last ends at the last layer's keys and values.
    whole = 5 - 1 / 40
    assert [round(tflop[part] / whole, 1) for part in ('attention', 'cross')] == [107.7, 2.0]
    assert tflop['linear'] == pytest.approx(111.9 * (whole + 3 * 5120 / (6 * 5120 + 2 * 13824) / 40), rel=1e-3)
    assert tflop['camera'] == pytest.approx(39.8, abs=0.1)


def test_a_tiny_run_writes_rows_as_they_come_and_names_what_failed(wan, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['wan.py', '--tiny', '--eager', '--parts', 'long', '--folder', str(tmp_path)])
    assert wan.main() == 0
    line, = (tmp_path / 'wan_tiny.jsonl').read_text().splitlines()
    result = json.loads((tmp_path / 'wan_tiny.json').read_text())
    assert result['rows'] == [json.loads(line)] and result['weights'] == 'random' and not result['failed']
    monkeypatch.setattr(wan, 'measure_long', lambda run: 1 / 0)
    assert wan.main() == 1
    assert 'ZeroDivisionError' in json.loads((tmp_path / 'wan_tiny.json').read_text())['failed']['long']


def test_a_stream_of_chunks_is_timed_from_images_to_images_and_from_its_beginning(wan, options):
    parallel, log = importlib.import_module('wan_parallel'), []

    class Images:
        """Which are there 20 ms after they were waited for."""

        def __init__(self, number):
            self.number = number

        def wait(self):
            log.append(f'images {self.number}')
            parallel.time.sleep(0.02)
            self._time = parallel.time.perf_counter()

    def chunk():
        log.append(f'chunk {sum(each.startswith("chunk") for each in log)}')
        return int(log[-1].split()[1])
    found = parallel.streamed(wan.Run(options), chunk, Images, 2)
    # The host is one chunk ahead, and waits for the images of the one before.
    assert log == ['chunk 0', 'chunk 1', 'images 0', 'chunk 2', 'images 1', 'chunk 3', 'images 2']
    assert {name: len(ms) for name, ms in found.items()} == {'chunk_ms': 2, 'latency_ms': 2, 'queued_ms': 2}
    assert all(period < latency + 1.0 and latency <= queued for period, latency, queued in zip(*found.values()))
    assert all(ms >= 39.0 for ms in found['queued_ms'])  # two times 20 ms


@pytest.mark.skipif(find_spec('diffusers') is None, reason='diffusers is not installed: extra [wan]')
@torch.inference_mode()
def test_images_are_those_of_the_stream_whether_passes_wait_for_them_or_not(wan, options):
    parallel, run = importlib.import_module('wan_parallel'), wan.Run(options)
    vae = wan.decoder(run)
    latents = torch.randn(4, 16, 3, *run.latent)
    after, overlapping = parallel.Decoder(run, vae), parallel.Decoder(run, vae)
    for part in latents[:2]:
        after.after(part)
        overlapping.overlapping(part)
    states = [decoder._stream.state.features for decoder in (after, overlapping)]
    assert all(torch.equal(one, other) for one, other in zip(*states) if isinstance(one, torch.Tensor))
    numbers = iter(range(2, 4))
    assert overlapping.difference(lambda: latents[next(numbers)]) == 0.0
