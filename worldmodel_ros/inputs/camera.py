"""
Warps images of any camera to the view of the camera that the model was trained with.

A different size, field of view, distortion or pitch (a rotation about the camera's centre) is a map from each pixel of the
trained view to a point in the camera's image. It is computed once and costs a fraction of a millisecond per image. What the
camera does not see cannot be made up: a camera whose view does not contain the trained one is refused, with the reason. Nor
can any map show what a higher camera would see.

A ``CameraInfo`` is any object with the fields of sensor_msgs/CameraInfo.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import cv2
import numpy as np

from .images import Fit, ImageError, fit

# Named as in REP 104 and sensor_msgs/distortion_models, with the numbers of coefficients that OpenCV accepts for each.
POLYNOMIAL = {'plumb_bob': (4, 5), 'rational_polynomial': (8, 12, 14)}
EQUIDISTANT = 'equidistant'
_SAME = 0.1       # pixels of the model: a view within this of a plain crop and scale counts as one
_MISSING = 1      # pixels of the model at an edge that the camera need not see: its outermost ones are repeated there
_FINEST = 4       # samples per side of a model pixel, at most, which are averaged
_RESOLUTION = 0.1  # degrees, of a camera's computed field of view
_LEVEL = 0.5       # degrees of pitch up to which it is not corrected: training varied it by three times that
_UP_TO = 89.0     # degrees from the axis: a pinhole's view ends before 90


class CameraError(ValueError):
    """A camera that cannot replace the trained one; the text says why, and what can be done."""


class Roi(Protocol):
    x_offset: int
    y_offset: int
    height: int
    width: int


class CameraInfo(Protocol):
    """Size, lens and projection of a camera: sensor_msgs/CameraInfo, as any library represents it."""

    height: int
    width: int
    distortion_model: str
    d: Sequence[float]
    k: Sequence[float]
    p: Sequence[float]
    binning_x: int
    binning_y: int
    roi: Roi


@dataclass(frozen=True)
class Lens:
    """
    How a camera maps directions to pixels. ``size`` (H, W) of its images; ``focal`` (fx, fy) and ``centre`` (cx, cy) in pixels,
    where the middle of the first pixel is at (0, 0); distortion ``model`` and ``coefficients``, '' and empty without.

    Raises CameraError for an unknown distortion.
    """

    size: tuple[int, int]
    focal: tuple[float, float]
    centre: tuple[float, float]
    model: str = ''
    coefficients: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (*self.focal, *self.centre, *self.coefficients))) or min(self.focal) <= 0.0:
            raise CameraError(f'camera_info is not valid: focal lengths {self.focal}, centre {self.centre}, distortion '
                              f'{self.coefficients}: calibrate the camera again')
        counts = (0, 4) if self.model == EQUIDISTANT else (0, *POLYNOMIAL.get(self.model, ()))
        if len(self.coefficients) not in counts:
            known = ', '.join((*POLYNOMIAL, EQUIDISTANT))
            raise CameraError(f'camera_info has {len(self.coefficients)} coefficients of the distortion model {self.model!r}; '
                              f'known are {known} with as many as OpenCV takes: rectify the images, remap to those, and set '
                              'image_rectified')
        if self.coefficients and not self.reach:
            raise CameraError(f'camera_info is not valid: by its distortion, {self.model} {self.coefficients}, no direction '
                              'has a pixel of its own: calibrate the camera again')

    @classmethod
    def of(cls, info: CameraInfo, rectified: bool = False) -> Lens | None:
        """
        Return the lens described by a CameraInfo, None for an uncalibrated camera (k is 0, as in ROS).

        ``rectified``: the images are those of image_proc, whose camera matrix is in ``p``, without distortion.
        Raises CameraError.
        """
        matrix = (info.p[0], info.p[5], info.p[2], info.p[6]) if rectified else (info.k[0], info.k[4], info.k[2], info.k[5])
        fx, fy, cx, cy = map(float, matrix)
        if not fx and not fy:
            return None
        across, down = max(1, info.binning_x), max(1, info.binning_y)
        roi = info.roi
        height, width = (roi.height or info.height) // down, (roi.width or info.width) // across
        # Coordinates of binned pixels also start at the middle of the first one.
        centre = ((cx - roi.x_offset + 0.5) / across - 0.5, (cy - roi.y_offset + 0.5) / down - 0.5)
        bent = not rectified and any(info.d)
        return cls((height, width), (fx / across, fy / down), centre, info.distortion_model if bent else '',
                   tuple(map(float, info.d)) if bent else ())

    @property
    def matrix(self) -> np.ndarray:
        """The camera matrix, float64 (3, 3)."""
        return np.array([[self.focal[0], 0.0, self.centre[0]], [0.0, self.focal[1], self.centre[1]], [0.0, 0.0, 1.0]])

    def project(self, slopes: np.ndarray) -> np.ndarray:
        """
        Return the pixels (N, 2), x and y, of directions (N, 2), given as x / z and y / z in the optical frame.

        Results for directions beyond ``reach`` are meaningless.
        """
        points = np.concatenate([slopes, np.ones((len(slopes), 1))], 1)[:, None]
        nothing = np.zeros(3)
        if self.model == EQUIDISTANT:
            found, _ = cv2.fisheye.projectPoints(points, nothing, nothing, self.matrix, np.array(self.coefficients))
        else:
            found, _ = cv2.projectPoints(points, nothing, nothing, self.matrix, np.array(self.coefficients))
        return found.reshape(-1, 2)

    @cached_property
    def reach(self) -> float:
        """
        The angle from the optical axis [rad] up to which the distortion is valid: beyond, its polynomial is not monotonic,
        and two directions map to one pixel.
        """
        angles = np.radians(np.arange(0.0, _UP_TO, _RESOLUTION))
        k = (*self.coefficients, *(0.0,) * 8)[:8]
        if self.model == EQUIDISTANT:
            square = angles ** 2
            radii = angles * (1.0 + square * (k[0] + square * (k[1] + square * (k[2] + square * k[3]))))
        else:
            slopes = np.tan(angles)
            square = slopes ** 2
            radii = slopes * (1.0 + square * (k[0] + square * (k[1] + square * k[4]))) / (
                1.0 + square * (k[5] + square * (k[6] + square * k[7])))
        falling = np.flatnonzero(np.diff(radii) <= 0.0)
        return float(angles[falling[0]] if len(falling) else angles[-1])

    @property
    def field_of_view(self) -> tuple[float, float]:
        """Degrees across and down that the images cover, along the two axes through the centre; at most 178."""
        angles = np.radians(np.arange(0.0, min(math.degrees(self.reach), _UP_TO), _RESOLUTION))
        found = []
        for axis, extent in ((0, self.size[1]), (1, self.size[0])):
            slopes = np.zeros((len(angles), 2))
            slopes[:, axis] = np.tan(angles)
            right, left = (self.project(sign * slopes)[:, axis] for sign in (1.0, -1.0))
            found.append(float(np.interp(extent - 0.5, right, angles) + np.interp(0.5, -left, angles)))
        return round(math.degrees(found[0]), 1), round(math.degrees(found[1]), 1)


def pinhole(vertical_fov: float, size: tuple[int, int]) -> Lens:
    """Return a centred camera with square pixels and this ``vertical_fov`` [degrees]."""
    height, width = size
    focal = height / 2 / math.tan(math.radians(vertical_fov) / 2)
    return Lens(size, (focal, focal), ((width - 1) / 2, (height - 1) / 2))


class View:
    """
    The view of the trained camera, made from images of another ``lens``.

    ``pitch``: by how many degrees the camera looks further down than the trained one. ``is_crop``: the view is a plain crop
    and scale, and images are treated as without a View, bit for bit. ``used``: the share of the camera's pixels that are
    inside the trained view.
    """

    def __init__(self, lens: Lens, vertical_fov: float, size: tuple[int, int], pitch: float = 0.0) -> None:
        """
        ``vertical_fov`` [degrees] and ``size`` (H, W) are those of the trained camera.

        Raises CameraError if the trained view is not inside the camera's.
        """
        self.lens, self.size, self.pitch, self._fov = lens, size, pitch, vertical_fov
        trained = pinhole(vertical_fov, size)
        self._require_inside(trained)
        places = lens.project(self._slopes(trained, *_pixels(size))).reshape(*size, 2)
        scale = float(np.median(np.linalg.norm(np.diff(places, axis=1), axis=2)))
        self.is_crop = float(np.abs(places - _cropped(lens.size, size)).max()) <= _SAME * scale
        corners = [np.arange(extent + 1) - 0.5 for extent in size]
        outline = _outline(lens.project(self._slopes(trained, *corners)).reshape(size[0] + 1, size[1] + 1, 2))
        self.used = min(1.0, cv2.contourArea(outline.astype(np.float32)) / (lens.size[0] * lens.size[1]))
        fine = min(_FINEST, max(1, math.ceil(scale)))
        self._fine = size[0] * fine, size[1] * fine
        # Fixed point, with the weights of the four neighbours in a table: half the time of floating-point maps.
        # ``make`` takes a quarter of a millisecond where ``project`` would take a hundred.
        make = cv2.fisheye.initUndistortRectifyMap if lens.model == EQUIDISTANT else cv2.initUndistortRectifyMap
        self._maps = make(lens.matrix, np.array(lens.coefficients), self._tilt.T, pinhole(vertical_fov, self._fine).matrix,
                          self._fine[::-1], cv2.CV_16SC2)

    def __call__(self, rgb: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """
        Return an image (H, W, 3) of the lens as the trained camera would see it, at its size or another ``size``.

        Raises ImageError for an image whose size is not that of its CameraInfo.
        """
        if rgb.shape[:2] != self.lens.size:
            (height, width), (h, w) = rgb.shape[:2], self.lens.size
            raise ImageError('not the size of camera_info', f'the image has {width} x {height} pixels, but camera_info is of '
                             f'{w} x {h}: remap camera/camera_info to that of these images')
        if self.is_crop:
            return fit(rgb, size)
        seen = cv2.remap(rgb, *self._maps, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
        # Average over what a pixel of the model sees: single samples would alias.
        return seen if self._fine == size else cv2.resize(seen, size[::-1], interpolation=cv2.INTER_AREA)

    def in_words(self) -> str:
        """Return, as text, what is done to images and how much of them is not used."""
        (across, down), (height, width) = self.lens.field_of_view, self.lens.size
        seen = f'{width} x {height} pixels, {across:g} x {down:g} degrees'
        if self.is_crop and self.used > 0.99:
            return f'{seen}: as in training, but for the size' if self.lens.size != self.size else f'{seen}: as in training'
        wide, high = _degrees(pinhole(self._fov, self.size))
        how = 'cropped' if self.is_crop else 'warped'
        turned = f', and turned {abs(self.pitch):.1f} degrees {"up" if self.pitch > 0 else "down"}' if self.pitch else ''
        return (f'{seen}: {how} to the {wide:g} x {high:g} degrees of training{turned}, {1.0 - self.used:.0%} of the image is '
                'cut off')

    def _require_inside(self, trained: Lens) -> None:
        """Raise CameraError unless the lens sees the trained view, except ``_MISSING`` pixels at its edges."""
        (h, w), lens = self.lens.size, self.lens
        inner = self._slopes(trained, *(each[_MISSING:-_MISSING] for each in _pixels(trained.size)))
        beyond = np.arctan(np.linalg.norm(inner, axis=1)) > lens.reach
        x, y = lens.project(inner).T
        missing = beyond | (x < -0.5) | (x > w - 0.5) | (y < -0.5) | (y > h - 0.5)
        if missing.any():
            (across, down), (wide, high) = lens.field_of_view, _degrees(trained)
            raise CameraError(
                f'the model was trained with a view of {wide:g} x {high:g} degrees, and {missing.mean():.0%} of it is not in '
                f'this camera\'s, which has {across:g} x {down:g}: take a wider lens, adapt the model to this camera '
                '(docs/finetuning.md), or leave camera_info out, and things will look nearer than they are (of a node: '
                'use_camera_info: false; of a bag: camera_info_topic: none in the file of --config)')

    @property
    def _tilt(self) -> np.ndarray:
        """The rotation (3, 3) from the trained camera's optical frame to this one's."""
        sin, cos = math.sin(math.radians(self.pitch)), math.cos(math.radians(self.pitch))
        return np.array([[1.0, 0.0, 0.0], [0.0, cos, -sin], [0.0, sin, cos]])

    def _slopes(self, trained: Lens, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Return the directions (R * C, 2), row by row, in the camera's frame, of points in the trained camera's image."""
        x, y = np.meshgrid((columns - trained.centre[0]) / trained.focal[0], (rows - trained.centre[1]) / trained.focal[1])
        rays = np.stack([x, y, np.ones_like(x)], 2).reshape(-1, 3) @ self._tilt.T
        return rays[:, :2] / rays[:, 2:]


def _degrees(lens: Lens) -> tuple[float, float]:
    """Return the field of view across and down [degrees] of a centred lens without distortion."""
    (height, width), (fx, fy) = lens.size, lens.focal
    across, down = (2.0 * math.degrees(math.atan(extent / 2 / f)) for extent, f in ((width, fx), (height, fy)))
    return round(across, 1), round(down, 1)


def _pixels(size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows and the columns of the pixels of an image (H, W)."""
    return np.arange(size[0]), np.arange(size[1])


def _cropped(source: tuple[int, int], size: tuple[int, int]) -> np.ndarray:
    """Return where in an image of size ``source`` the pixels that ``images.fit`` makes of it are, (H, W, 2)."""
    scale = min(source[0] / size[0], source[1] / size[1])
    places = np.stack(np.meshgrid(*(np.arange(extent) - (extent - 1) / 2 for extent in size[::-1])), 2) * scale
    return places + [(extent - 1) / 2 for extent in source[::-1]]


def _outline(places: np.ndarray) -> np.ndarray:
    """Return the border of points (H, W, 2), once around."""
    return np.concatenate([places[0], places[1:, -1], places[-1, -2::-1], places[-2:0:-1, 0]])


class Correction:
    """
    Brings images to the view of the trained camera by the newest CameraInfo; without one, crops and scales them.

    ``view`` is what ``images.read`` takes. ``refusal``: why the camera cannot replace the trained one; '' if it can.
    """

    def __init__(self, vertical_fov: float | None, size: tuple[int, int], rectified: bool = False) -> None:
        """``vertical_fov`` [degrees], None if unknown, and ``size`` (H, W): of the trained camera."""
        self._fov, self._size, self._rectified = vertical_fov, size, rectified
        self._heard: Lens | str | None = ''  # nothing yet
        self._view: View | None = None
        self._pitch = 0.0
        self._words = 'camera_info not heard: images are cropped and scaled as if they had the field of view of training'
        if vertical_fov is None:
            self._words = 'the model does not tell what camera it was trained with: images are cropped and scaled'
        self.refusal = ''

    @property
    def view(self) -> Fit:
        """What brings images to the model's size: ``images.fit`` itself as long as nothing else is needed."""
        return self if self.refusal or not _is_crop(self._view) else fit

    @property
    def corrects(self) -> bool:
        """Whether a CameraInfo was heard by which images are brought to the view of the trained camera."""
        return self._view is not None

    @property
    def pitch(self) -> float:
        """Degrees by which the camera's pitch is corrected."""
        return self._view.pitch if self._view else 0.0

    def take(self, info: CameraInfo) -> bool:
        """Switch to a CameraInfo; return whether images now look different."""
        if self._fov is None:
            return False
        try:
            lens = Lens.of(info, self._rectified)
        except CameraError as error:
            self._heard = ''
            return self._refuse(str(error))
        if lens == self._heard:
            return False
        self._heard = lens
        return self._make()

    def turn(self, pitch: float) -> bool:
        """
        Switch to a camera that looks ``pitch`` degrees further down than the trained one; return as ``take``. The pitch is not
        corrected if it is small, or if the corrected view is not inside the camera's.
        """
        pitch = pitch if abs(pitch) > _LEVEL else 0.0
        if abs(pitch - self._pitch) < _LEVEL / 5 and bool(pitch) == bool(self._pitch):
            return False
        self._pitch = pitch
        return isinstance(self._heard, Lens) and self._make()

    def _make(self) -> bool:
        """Make the view of the newest lens; return whether images now look different."""
        before, refused, lens = self._view, self.refusal, self._heard
        self._view, self.refusal = None, ''
        if lens is None:
            self._words = 'the camera is not calibrated (k is 0): images are cropped and scaled'
        else:
            try:
                self._view = self._turned(lens) or View(lens, self._fov, self._size)
            except CameraError as error:
                return self._refuse(str(error), refused)
            self._words = self._view.in_words()
        return bool(refused) or not (_is_crop(before) and _is_crop(self._view))

    def _turned(self, lens: Lens) -> View | None:
        try:
            return View(lens, self._fov, self._size, self._pitch) if self._pitch else None
        except CameraError:
            return None

    def _refuse(self, text: str, before: str | None = None) -> bool:
        before = self.refusal if before is None else before
        self._view, self.refusal = None, text
        return text != before

    def __call__(self, rgb: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Return an image as the trained camera would see it, at ``size`` (H, W). Raises ImageError for a refused camera."""
        if self.refusal:
            raise ImageError('camera', self.refusal)
        return self._view(rgb, size) if self._view else fit(rgb, size)

    def in_words(self) -> str:
        """Return, as text, what is done to images, and why."""
        return self.refusal or self._words


def _is_crop(view: View | None) -> bool:
    return view is None or view.is_crop
