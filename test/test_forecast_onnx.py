"""The scene forecast through ONNX Runtime: what PyTorch gives, frame by frame, also when rungs change between frames."""
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from worldmodel_ros.engine.backends.export import export_graph
from worldmodel_ros.engine.forecast import export
from worldmodel_ros.engine.forecast.loading import load_forecast
from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.checkpoint_description import ModelError
from worldmodel_ros.model.presets import PRESETS
from worldmodel_ros.model.scene_forecast import SceneForecast
from worldmodel_ros.model.world_model import WorldModel

pytestmark = pytest.mark.usefixtures('one_thread')
PRESET = replace(PRESETS['tiny'], name='narrow', width=64, depth=2, heads=2, vae_width=8, head_features=8, window_frames=4,
                 sink_frames=0, sink_statistics=0.0)
FRAMES = 12  # three windows


def narrow_forecast(folder):
    """Save a forecast with random weights, the same ones each time, so that its graphs are exported once for all tests."""
    torch.manual_seed(0)
    net = SceneForecast.from_world_model(WorldModel(PRESET))
    for parameter in net.parameters():  # what begins at zero would hide what it multiplies
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05)
    checkpoint.save(net, folder / 'narrow', {}, torch.float32)
    return folder / 'narrow'


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return narrow_forecast(tmp_path_factory.mktemp('models'))


@pytest.fixture(scope='module')
def forecasts(folder, tmp_path_factory):
    """Forecasts by back end. Those in int8 are quantised from the graphs that those in float32 have been exported to."""
    made = tmp_path_factory.mktemp('graphs')

    def export_once(module, inputs, file, shapes):
        if not (made / file.name).exists():
            export_graph(module, inputs, file, shapes)
            shutil.copy(file, made)
        shutil.copy(made / file.name, file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('WORLDMODEL_CACHE', os.environ['WORLDMODEL_TEST_SHARED'])
        patch.setattr(export, 'export_graph', export_once)
        yield {backend: load_forecast(str(folder), backend) for backend in ('torch', 'onnx', 'onnx-int8')}


def drive(forecast, passes):
    """What a new stream gives for frames of noise, with passes that change from frame to frame where there are several."""
    rng, stream = np.random.default_rng(0), forecast.open()
    return [stream.observe(rng.integers(0, 256, (64, 64, 3), np.uint8), *rng.uniform(-0.3, 0.5, (2, 2)),
                           passes[t % len(passes)]) for t in range(FRAMES)]


@pytest.mark.parametrize('backend, tolerance', [('onnx', 2e-5), ('onnx-int8', 0.05)])
@pytest.mark.parametrize('passes', [(0,), (1,), (2,), (2, 0, 1, 1)])
def test_onnx_gives_what_torch_does(forecasts, backend, tolerance, passes):
    largest = 0.0
    for expected, given in zip(drive(forecasts['torch'], passes), drive(forecasts[backend], passes), strict=True):
        for wanted, got in zip(expected, given, strict=True):
            assert wanted.shape == got.shape
            np.testing.assert_allclose(got, wanted, atol=tolerance)
            largest = max(largest, np.abs(wanted).max())
    assert largest > 0.2  # it is not nothing that agrees


def test_the_graph_of_a_second_pass_is_neither_exported_nor_opened_where_none_is_made(folder, tmp_path, monkeypatch):
    monkeypatch.setenv('WORLDMODEL_CACHE', str(tmp_path))
    forecast = load_forecast(str(folder), 'onnx')
    drive(forecast, (0, 1))
    assert [file.name for file in tmp_path.rglob('*.onnx')] == ['see.onnx']
    drive(forecast, (1, 2))
    assert sorted(file.name for file in tmp_path.rglob('*.onnx')) == ['again.onnx', 'see.onnx']


def test_streams_of_one_network_do_not_see_each_other(forecasts):
    alone = drive(forecasts['onnx'], (1,))
    rng, stream, other = np.random.default_rng(0), forecasts['onnx'].open(), forecasts['onnx'].open()
    for expected in alone:
        given = stream.observe(rng.integers(0, 256, (64, 64, 3), np.uint8), *rng.uniform(-0.3, 0.5, (2, 2)), 1)
        other.observe(np.full((64, 64, 3), 7, np.uint8), np.zeros(2), np.zeros(2), 2)
        for wanted, got in zip(expected, given, strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_a_forecast_that_is_missing_is_said_with_what_there_is(tmp_path):
    with pytest.raises(ModelError, match='no scene forecast'):
        load_forecast(str(tmp_path / 'nothing'))


def test_times_are_those_of_the_places(forecasts):
    for forecast in forecasts.values():
        stream = forecast.open()
        assert stream.times.tolist() == pytest.approx([0.0, 0.2, 0.4, 0.8, 1.6, 3.2])
