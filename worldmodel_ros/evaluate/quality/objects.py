"""Where the coloured objects are in an image, true or imagined: found by colour, placed by the camera's model."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np

from ...sim.scene import CAMERA_PITCH, COLOURS, Scene

# Hues (of 1) of the four colours, and how far light and imagination may shift them.
_HUES = {'red': 0.0, 'green': 0.37, 'blue': 0.61, 'yellow': 0.135}
_HUE_TOLERANCE = 0.065
# A pixel counts not at all below the first saturation, and fully above the second: walls have at most 0.48, mixed
# pixels at an object's edge lie between.
_SATURATION = (0.42, 0.62)
_DARKEST = 0.12    # of 1; below, a hue means nothing
NEAR = math.radians(10.0)  # of an imagined object's bearing from the true one's
_MIN_AREA = 1.5    # pixels of an image of 64 x 64


@dataclass(frozen=True)
class Sighting:
    """``bearing``: of the object's middle from the camera, rad in the axes of base_link, positive to the left.
    ``distance``: m, from the object's known size, None where the image's edge cuts it off."""

    bearing: float
    distance: float | None


def find_objects(picture: np.ndarray, scene: Scene) -> dict[str, Sighting]:
    """Return the objects seen in a square image uint8 (H, H, 3), by colour; ``scene`` gives camera and sizes."""
    hsv = cv2.cvtColor(picture.astype(np.float32) / 255.0, cv2.COLOR_RGB2HSV)
    hue, saturation, value = hsv[..., 0] / 360.0, hsv[..., 1], hsv[..., 2]
    coloured = np.clip((saturation - _SATURATION[0]) / (_SATURATION[1] - _SATURATION[0]), 0.0, 1.0)
    coloured[value < _DARKEST] = 0.0
    bearings, size = _bearings(picture.shape[0], scene), picture.shape[0]
    found = {}
    for index, colour in enumerate(COLOURS):
        shift = np.abs(hue - _HUES[colour])
        weight = np.where(np.minimum(shift, 1.0 - shift) < _HUE_TOLERANCE, coloured, 0.0)
        blob = _largest(weight, _MIN_AREA * (size / 64) ** 2)
        if blob is None:
            continue
        weight = np.where(blob, weight, 0.0)
        bearing = float((weight * bearings).sum() / weight.sum())
        found[colour] = Sighting(bearing, _distance(weight, blob, scene.props[index], size))
    return found


def compare_objects(true: Sequence[np.ndarray], imagined: Sequence[np.ndarray], scene: Scene) -> dict:
    """Return what imagined images show of the objects in the true images of the same moments, as ``find_objects`` sees them.

    ``there``, ``found``: colours in any true image, and those of them in any imagined one, wherever it is; ``not_there``:
    colours that no true image shows. An object is in place where an imagined image has it within NEAR of its bearing in the
    true image of that moment; ``found_in_place``: colours with that in at least half of the true images that show them. In a
    full turn a floor that has taken on a colour is found, but in place only while it happens to be where the object is.
    ``sightings``: how many objects all true images show, all imagined ones, and these in place.
    """
    truth, shown = ([find_objects(image, scene) for image in images] for images in (true, imagined))
    there, found = (set().union(*each) for each in (truth, shown))
    in_place = [colour for one, other in zip(truth, shown, strict=True) for colour in one.keys() & other.keys()
                if abs(one[colour].bearing - other[colour].bearing) <= NEAR]
    half = [colour for colour in there if 2 * in_place.count(colour) >= sum(colour in one for one in truth)]
    return {'there': sorted(there), 'found': sorted(found & there), 'found_in_place': sorted(half),
            'not_there': sorted(found - there),
            'sightings': {'true': sum(map(len, truth)), 'imagined': sum(map(len, shown)), 'in_place': len(in_place)}}


def _largest(weight: np.ndarray, least: float) -> np.ndarray | None:
    """Mask of the connected pixels that weigh most together, if that is enough."""
    count, labels = cv2.connectedComponents((weight > 0.0).astype(np.uint8), connectivity=8)
    if count < 2:
        return None
    sums = np.bincount(labels.ravel(), weight.ravel(), count)
    sums[0] = 0.0
    best = int(sums.argmax())
    return labels == best if sums[best] >= least else None


def _bearings(size: int, scene: Scene) -> np.ndarray:
    """Bearing of every pixel's ray, (size, size) rad in the axes of base_link."""
    centre = np.arange(size) + 0.5 - size / 2
    right, down = np.meshgrid(centre / (size / 2), centre / (size / 2))  # the field of view is 90 degrees
    pitch = CAMERA_PITCH + scene.camera_rotation[1]
    ahead = math.cos(pitch) - down * math.sin(pitch)
    return np.arctan2(-right, ahead) + scene.camera_rotation[0]


def _distance(weight: np.ndarray, blob: np.ndarray, prop, size: int) -> float | None:
    """From the area of the silhouette, which falls with the square of the distance."""
    if blob[:, [0, -1]].any() or blob[[0, -1]].any():
        return None
    width = 2 * prop.radius * (0.9 if prop.shape == 'box' else 1.0)  # a box shows between 0.71 and 1 of its circle
    to_surface = (size / 2) * math.sqrt(width * prop.height / float(weight.sum()))
    return to_surface + 0.7 * prop.radius  # the outline lies between the nearest point and the middle
