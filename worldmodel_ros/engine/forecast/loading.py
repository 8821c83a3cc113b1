"""Finds a scene forecast by name or folder, and opens streams of it, one for each robot."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from worldmodel_ros.model.checkpoint_description import ModelError, read_description
from ..loading import WEIGHTS

if TYPE_CHECKING:
    from worldmodel_ros.model.presets import Camera
    from worldmodel_ros.model.scene_forecast import SceneForecast

FORECASTS = WEIGHTS / 'forecast'  # with a folder for each that the package ships


class Stream(Protocol):
    """One robot's forecasts, frame by frame; see ``control.pilot.Forecast``."""

    times: np.ndarray

    def observe(self, image: np.ndarray, executed: np.ndarray, measured: np.ndarray, passes: int
                ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Take a frame and return presence, places and walls."""


class Forecasts:
    """A loaded forecast: its name, what runs it, the size (H, W) of its frames, the camera that it was trained with, and
    ``open``, which makes a stream that knows nothing."""

    def __init__(self, name: str, backend: str, image_size: tuple[int, int], step_period: float,
                 make: Callable[[], Stream], camera: Camera | None = None) -> None:
        self.name, self.backend, self.image_size, self.step_period = name, backend, image_size, step_period
        self.open, self.camera = make, camera


class TorchStream:
    """A stream that PyTorch runs."""

    def __init__(self, forecast: SceneForecast) -> None:
        from worldmodel_ros.model.scene_forecast import HORIZONS, ForecastStream
        self._stream = ForecastStream(forecast)
        self.times = np.array([0.0, *(forecast.preset.step_period * frames for frames in HORIZONS)])

    @property
    def features(self) -> np.ndarray:
        """Of the newest frame's slots, (QUERIES, D)."""
        return self._stream.features.numpy()

    def observe(self, image: np.ndarray, executed: np.ndarray, measured: np.ndarray, passes: int
                ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self._stream.observe(image, executed, measured, passes)


def forecast_folder(forecast: str) -> Path:
    """Return the folder of a forecast that the package ships, by name, or of one's own, by path. Raises ModelError."""
    shipped = FORECASTS / forecast
    folder = shipped if (shipped / 'model.json').is_file() else Path(forecast).expanduser()
    if not (folder / 'model.json').is_file():
        known = ', '.join(sorted(p.parent.name for p in FORECASTS.glob('*/model.json'))) or 'none'
        raise ModelError(f'no scene forecast {forecast!r}: neither a shipped one ({known}) nor a folder with model.json')
    return folder


def load_forecast(forecast: str, backend: str = 'auto', threads: int = 1) -> Forecasts:
    """Load the forecast of a name or folder.

    ``backend``: ``onnx-int8``, ``onnx`` (float32) or ``torch``; ``auto`` takes the first. Back ends of a world model that run
    on torch stand for ``torch``. ``threads`` bounds the threads of one network call.

    Raises ModelError, with the remedy, for a forecast that is missing or does not fit.
    """
    folder = forecast_folder(forecast)
    preset = read_description(folder).preset
    if backend.startswith('torch'):
        import torch

        from worldmodel_ros.model.scene_forecast import SceneForecast
        network = SceneForecast.load(folder)
        torch.set_num_threads(threads)
        return Forecasts(folder.name, 'torch', preset.image_size, preset.step_period, lambda: TorchStream(network),
                         preset.camera)
    from .onnx import OnnxForecast
    network = OnnxForecast(folder, threads, quantised=backend != 'onnx')
    return Forecasts(folder.name, network.name, preset.image_size, preset.step_period, network.open, preset.camera)
