"""The scene forecast through ONNX Runtime: what PyTorch gives, frame by frame, also when rungs change between frames."""
import os
import shutil
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from worldmodel_ros.engine.backends.export import export_graph
from worldmodel_ros.engine.forecast import export
from worldmodel_ros.engine.forecast.device import DeviceForecast
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


@pytest.mark.parametrize('passes', [(0,), (1,), (2, 0, 1, 1)])
def test_passes_of_fixed_shapes_on_a_device_give_what_torch_does(forecasts, folder, passes):
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    for expected, given in zip(drive(forecasts['torch'], passes), drive(DeviceForecast(folder, device), passes), strict=True):
        for wanted, got in zip(expected, given, strict=True):
            assert wanted.shape == got.shape
            np.testing.assert_allclose(got, wanted, atol=2e-5)


def test_streams_of_several_threads_take_turns_on_a_device(folder, monkeypatch):
    """A goal image is looked at by another thread than the robot's ticks."""
    network, inside, overlaps = DeviceForecast(folder, 'cpu'), [], []
    see = network.see

    def watched(*inputs):
        inside.append(1)
        overlaps.append(len(inside) > 1)
        time.sleep(0.002)
        found = see(*inputs)
        inside.pop()
        return found
    monkeypatch.setattr(network, 'see', watched)
    alone = drive(DeviceForecast(folder, 'cpu'), (2, 1))
    with ThreadPoolExecutor(3) as threads:
        driven = list(threads.map(lambda _: drive(network, (2, 1)), range(3)))
    assert len(overlaps) == 3 * FRAMES and not any(overlaps)
    for given in driven:
        for expected, got in zip(alone, given, strict=True):
            for wanted, number in zip(expected, got, strict=True):
                np.testing.assert_allclose(number, wanted, atol=2e-5)


def test_images_of_a_faster_and_larger_camera_reach_streams_as_they_were_trained(forecasts):
    fitted, small = forecasts['onnx'].fitted((128, 128), 0.1 / 3), forecasts['onnx']
    stream, alone = fitted.open(), [small.open() for _ in range(3)]
    rng, since = np.random.default_rng(0), deque(maxlen=3)
    for tick in range(3 * FRAMES):
        image, (executed, measured) = rng.integers(0, 256, (64, 64, 3), np.uint8), rng.uniform(-0.3, 0.5, (2, 2))
        since.append(measured)  # between the images of one stream
        expected = alone[tick % 3].observe(image, executed, np.mean(since, 0), 1)
        for wanted, got in zip(expected, stream.observe(image.repeat(2, 0).repeat(2, 1), executed, measured, 1), strict=True):
            np.testing.assert_array_equal(got, wanted)
        np.testing.assert_array_equal(stream.features, alone[tick % 3].features)
    assert stream.times.tolist() == alone[0].times.tolist() and small.fitted((64, 64), 0.1) is small


@pytest.mark.parametrize(('size', 'period'), [((64, 96), 0.1), ((64, 64), 0.04), ((64, 64), 0.2)])
def test_images_of_another_aspect_or_of_a_step_that_is_no_part_are_refused(forecasts, size, period):
    with pytest.raises(ModelError, match='choose a forecast of that aspect'):
        forecasts['onnx'].fitted(size, period)


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
