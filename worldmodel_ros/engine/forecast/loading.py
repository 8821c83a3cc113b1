"""Loads a scene forecast by name or folder, and opens streams of it, one for each robot."""
from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import cv2
import numpy as np

from worldmodel_ros.model.checkpoint_description import ModelError, read_description
from ..loading import WEIGHTS

if TYPE_CHECKING:
    from worldmodel_ros.model.presets import Camera
    from worldmodel_ros.model.scene_forecast import SceneForecast

FORECASTS = WEIGHTS / 'forecast'  # holds a folder for each shipped forecast


class Stream(Protocol):
    """One robot's forecasts, frame by frame; see ``control.pilot.Forecast``."""

    times: np.ndarray

    def observe(self, image: np.ndarray, executed: np.ndarray, measured: np.ndarray, passes: int
                ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Take a frame and return presence, places and walls."""


class Forecasts:
    """A loaded forecast: its name, its back end, the size (H, W) of its frames, the camera that it was trained with, and
    ``open``, which makes a new stream without history."""

    def __init__(self, name: str, backend: str, image_size: tuple[int, int], step_period: float,
                 make: Callable[[], Stream], camera: Camera | None = None) -> None:
        self.name, self.backend, self.image_size, self.step_period = name, backend, image_size, step_period
        self.open, self.camera = make, camera

    def fitted(self, image_size: tuple[int, int], step_period: float) -> Forecasts:
        """Return the same forecast for images of another size and the same aspect ratio, one every ``step_period`` s, which is
        its step or an integer fraction of it. Raises ModelError."""
        if (image_size, step_period) == (self.image_size, self.step_period):
            return self
        turns = round(self.step_period / step_period)
        height, width = self.image_size
        if image_size[0] * width != image_size[1] * height or not math.isclose(turns * step_period, self.step_period):
            raise ModelError(
                f'forecast {self.name} takes images of {height}x{width} each {self.step_period:g} s, and there are images of '
                f'{image_size[0]}x{image_size[1]} each {step_period:g} s: choose a forecast of that aspect, and one whose step '
                'is theirs or a multiple of it')
        return Forecasts(self.name, self.backend, image_size, step_period,
                         lambda: FittedStream([self.open() for _ in range(turns)], self.image_size), self.camera)


class FittedStream:
    """Streams that take turns, so that each sees images as far apart in time as in training."""

    def __init__(self, streams: Sequence[Stream], image_size: tuple[int, int]) -> None:
        """``image_size`` (H, W): what images are scaled to."""
        self._streams, self._size, self._turn = streams, image_size, 0
        self._measured: deque[np.ndarray] = deque(maxlen=len(streams))
        self.times = streams[0].times

    @property
    def features(self) -> np.ndarray:
        """Features of the newest frame's slots, (QUERIES, D)."""
        return self._streams[self._turn - 1].features

    def observe(self, image: np.ndarray, executed: np.ndarray, measured: np.ndarray, passes: int
                ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Take a frame and return presence, places and walls."""
        stream = self._streams[self._turn]
        self._turn = (self._turn + 1) % len(self._streams)
        if image.shape[:2] != self._size:
            image = cv2.resize(image, self._size[::-1], interpolation=cv2.INTER_AREA)
        self._measured.append(np.asarray(measured, float))
        # Of the time since the stream's own frame before, in which the others had theirs.
        return stream.observe(image, executed, np.mean(self._measured, 0), passes)


class TorchStream:
    """A stream that PyTorch runs on a CPU."""

    def __init__(self, forecast: SceneForecast) -> None:
        from worldmodel_ros.model.scene_forecast import HORIZONS, ForecastStream
        self._stream = ForecastStream(forecast)
        self.times = np.array([0.0, *(forecast.preset.step_period * frames for frames in HORIZONS)])

    @property
    def features(self) -> np.ndarray:
        """Features of the newest frame's slots, (QUERIES, D)."""
        return self._stream.features.numpy()

    def observe(self, image: np.ndarray, executed: np.ndarray, measured: np.ndarray, passes: int
                ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self._stream.observe(image, executed, measured, passes)


def forecast_folder(forecast: str) -> Path:
    """Return the folder of a shipped forecast by name, or of any other by path. Raises ModelError."""
    shipped = FORECASTS / forecast
    folder = shipped if (shipped / 'model.json').is_file() else Path(forecast).expanduser()
    if not (folder / 'model.json').is_file():
        known = ', '.join(sorted(p.parent.name for p in FORECASTS.glob('*/model.json'))) or 'none'
        raise ModelError(f'no scene forecast {forecast!r}: neither a shipped one ({known}) nor a folder with model.json')
    return folder


def load_forecast(forecast: str, backend: str = 'auto', threads: int = 1) -> Forecasts:
    """Load the forecast of a name or folder.

    ``backend``: ``onnx-int8``, ``onnx`` (float32) or ``torch``; ``auto`` takes the first. A world model's other back ends of
    torch stand for ``torch``, which uses a GPU if there is one. ``threads`` limits the threads of one network call.

    Raises ModelError, with the remedy, for a forecast that is missing or does not fit.
    """
    folder = forecast_folder(forecast)
    preset = read_description(folder).preset
    if backend.startswith('torch'):
        import torch

        if torch.cuda.is_available():
            from .device import DeviceForecast
            network = DeviceForecast(folder)
            name, make = network.name, network.open
        else:
            from worldmodel_ros.model.scene_forecast import SceneForecast
            torch.set_num_threads(threads)
            name, make = 'torch', partial(TorchStream, SceneForecast.load(folder))
    else:
        from .onnx import OnnxForecast
        network = OnnxForecast(folder, threads, quantised=backend != 'onnx')
        name, make = network.name, network.open
    return Forecasts(folder.name, name, preset.image_size, preset.step_period, make, preset.camera)
