"""
Estimates motion from the images of a recording: the shift of the view, the robot's turning, and the pitch of the camera.

Corners are tracked from image to image (Lucas and Kanade 1981, forward and back). With a calibrated lens, their motion while
the robot goes straight meets at the focus of expansion, which is straight ahead of the robot whatever is seen; so the pitch
needs no target.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

import cv2
import numpy as np

from worldmodel_ros.inputs.camera import EQUIDISTANT, Lens
from .response import INTERVAL, SAMPLES, CannotTell, Estimate

STRAIGHT, ADVANCE, TURN = 0.01, 0.08, 0.1  # rad, at most, and m, at least, between images for a pitch; rad, for a turning
FARTHEST = 5             # images apart, at most, in such a pair
_CORNERS = 150
_FEWEST_CORNERS = 8
_FEWEST_PAIRS = 8
_BACK = 0.3              # pixels, largest forward-backward error of a corner
_OFF = 0.4               # pixels, beyond which a corner is down-weighted
_WIDE_PITCH = 3.0        # degrees, half-width of an interval that is too wide to be useful
_NODS = 1.5              # degrees that a robot nods when it starts and stops, which no pair of images shows
_WIDE_TURN = 0.15        # relative, width
_PAIRS_SAMPLES = 60      # of the bootstrap, with a fit for each


def follow(before: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Track corners: return their pixels (N, 2) in one grey image, and where they are in the other."""
    nothing = np.empty((0, 2), np.float32)
    start = cv2.goodFeaturesToTrack(before, _CORNERS, 0.01, 7)
    if start is None:
        return nothing, nothing
    end, found, _ = cv2.calcOpticalFlowPyrLK(before, after, start, None, winSize=(21, 21), maxLevel=3)
    back, returned, _ = cv2.calcOpticalFlowPyrLK(after, before, end, None, winSize=(21, 21), maxLevel=3)
    sound = (found[:, 0] == 1) & (returned[:, 0] == 1) & (np.linalg.norm(start - back, axis=2)[:, 0] < _BACK)
    return start[sound, 0], end[sound, 0]


def shift(before: np.ndarray, after: np.ndarray) -> float:
    """Return by how many pixels the view moved to the right from one grey image to the next; NaN with too few corners."""
    start, end = follow(before, after)
    return float(np.median(end[:, 0] - start[:, 0])) if len(start) >= _FEWEST_CORNERS else math.nan


def pitch(images: Sequence[np.ndarray], poses: np.ndarray, lens: Lens) -> Estimate:
    """
    Return how far down the camera looks [degrees], from grey images at poses (N, 3) of the wheels' odometry.

    The direction of travel is fitted sideways as well as up and down. Since a camera looks ahead, its sideways offset shows the
    size of the error, and widens the interval. Raises CannotTell.
    """
    normals = []
    for i, j in _pairs(poses):
        turned = math.remainder(poses[j, 2] - poses[i, 2], math.tau)
        advanced = (poses[j, :2] - poses[i, :2]) @ (math.cos(poses[i, 2]), math.sin(poses[i, 2]))
        if abs(turned) > STRAIGHT or abs(advanced) < ADVANCE:
            continue
        start, end = follow(images[i], images[j])
        if len(start) >= _FEWEST_CORNERS:
            level = np.array([[math.cos(turned), 0.0, -math.sin(turned)], [0.0, 1.0, 0.0],
                              [math.sin(turned), 0.0, math.cos(turned)]])
            # The direction of travel lies in the plane of a static corner's two directions.
            normals.append(np.cross(_rays(start, lens), _rays(end, lens) @ level.T))
    if len(normals) < _FEWEST_PAIRS:
        raise CannotTell(f'{len(normals)} pairs of images were taken {ADVANCE:g} m apart on a straight way, {_FEWEST_PAIRS} '
                         'are the fewest: drive straight ahead, past things with corners')
    scale = _OFF / lens.focal[0]
    down, side = _angles(_travel(np.concatenate(normals), scale))
    rng = np.random.default_rng(0)
    drawn = [_angles(_travel(np.concatenate([normals[k] for k in rng.integers(0, len(normals), len(normals))]), scale))[0]
             for _ in range(_PAIRS_SAMPLES)]
    low, high = np.quantile(drawn, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2])
    half = max(abs(side), down - low, high - down, _NODS)
    if half > _WIDE_PITCH:
        raise CannotTell(f'the pitch of the camera may be anything from {down - half:.0f} to {down + half:.0f} degrees: drive '
                         'straight ahead where more things with corners are near, none of which moves')
    return Estimate(down, float(down - half), float(down + half))


def turn_ratio(images: Sequence[np.ndarray], poses: np.ndarray, lens: Lens) -> Estimate:
    """Return how far the robot turned according to its images, relative to its wheels. Raises CannotTell."""
    ratios = []
    for i, j in _pairs(poses):
        turned = math.remainder(poses[j, 2] - poses[i, 2], math.tau)
        if abs(turned) < TURN:
            continue
        start, end = (_rays(pixels, lens)[:, :2] for pixels in follow(images[i], images[j]))
        if len(start) < 2 * _FEWEST_CORNERS:
            continue
        matrix, inliers = cv2.findEssentialMat(start, end, 1.0, (0.0, 0.0), cv2.RANSAC, 0.999, _OFF / lens.focal[0])
        if matrix is not None and matrix.shape == (3, 3):
            _, rotation, _, _ = cv2.recoverPose(matrix, start, end, np.eye(3), mask=inliers)
            ratios.append(math.atan2(rotation[0, 2], rotation[2, 2]) / turned)
    if len(ratios) < _FEWEST_PAIRS:
        raise CannotTell(f'{len(ratios)} pairs of images were taken {TURN:g} rad apart, and {_FEWEST_PAIRS} are the fewest: '
                         'turn on the spot, where things with corners are seen')
    rng = np.random.default_rng(0)
    drawn = np.median(rng.choice(ratios, (SAMPLES, len(ratios))), 1)
    low, high = np.quantile(drawn, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2])
    if high - low > _WIDE_TURN:
        raise CannotTell(f'by the images, the robot turned {low:.0%} to {high:.0%} of what its wheels tell, which tells no '
                         'slip: turn on the spot, where more things with corners are seen')
    return Estimate(float(np.median(ratios)), float(low), float(high))


def _pairs(poses: np.ndarray) -> list[tuple[int, int]]:
    """Return pairs of images, the second being the first with enough motion, at most FARTHEST images later."""
    found = []
    for i in range(len(poses) - 1):
        for j in range(i + 1, min(i + FARTHEST, len(poses) - 1) + 1):
            if (math.dist(poses[i, :2], poses[j, :2]) >= ADVANCE
                    or abs(math.remainder(poses[j, 2] - poses[i, 2], math.tau)) >= TURN):
                found.append((i, j))
                break
    return found


def _rays(pixels: np.ndarray, lens: Lens) -> np.ndarray:
    """Return the directions (N, 3) of pixels (N, 2), x / z, y / z and 1."""
    undistort = cv2.fisheye.undistortPoints if lens.model == EQUIDISTANT else cv2.undistortPoints
    slopes = undistort(pixels[:, None].astype(float), lens.matrix, np.array(lens.coefficients)) if len(pixels) else pixels
    return np.concatenate([np.reshape(slopes, (-1, 2)), np.ones((len(pixels), 1))], 1)


def _travel(normals: np.ndarray, scale: float) -> np.ndarray:
    """Return the direction (3,) that is most nearly perpendicular to all normals, with outliers down-weighted."""
    weights = np.ones(len(normals))
    for _ in range(20):  # iteratively reweighted least squares, with Cauchy weights
        travel = np.linalg.eigh((normals * weights[:, None]).T @ normals)[1][:, 0]
        weights = 1.0 / (1.0 + (normals @ travel / scale) ** 2)
    return travel if travel[2] > 0.0 else -travel


def _angles(travel: np.ndarray) -> tuple[float, float]:
    """Return how far below and to the left of its direction of travel the camera looks [degrees]."""
    x, y, z = travel.tolist()
    return math.degrees(math.atan2(-y, z)), math.degrees(math.atan2(x, z))
