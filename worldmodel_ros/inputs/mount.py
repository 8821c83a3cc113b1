"""
Camera mount: its height and pitch from tf, and how far they are from those in training.

A transform is any object with the fields of geometry_msgs/TransformStamped. The small tree here is for frames that hardly
ever move; it keeps the newest transform of each frame, and no history.
"""
from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

GROUND = 'base_footprint'  # REP 120: on the floor; a base_link may be anywhere on the robot
HEIGHT_TOLERANCE, PITCH_TOLERANCE = 0.03, 2.0  # m, degrees: twice the variation in training (sim/scene.py)


@dataclass(frozen=True)
class Mount:
    """``height`` of the camera's centre above the robot's base or the floor [m], ``pitch`` [degrees], downwards."""

    height: float
    pitch: float

    def differences(self, height: float, pitch: float) -> list[str]:
        """Return, as text, the differences from a ``height`` [m] and a ``pitch`` [degrees] that exceed the tolerances."""
        higher, steeper = self.height - height, self.pitch - pitch
        found = []
        if abs(higher) > HEIGHT_TOLERANCE:
            found.append(f'{abs(higher):.2f} m {"higher" if higher > 0 else "lower"} than in training ({height:g} m)')
        if abs(steeper) > PITCH_TOLERANCE:
            found.append(f'{abs(steeper):.1f} degrees further {"down" if steeper > 0 else "up"} than in training '
                         f'({pitch:g} degrees down)')
        return found

    def cost(self, height: float, pitch: float) -> str:
        """
        Return, as text, how many goals the shipped forecast reached with a camera that differs as much from that of its
        training, at ``height`` [m] and ``pitch`` [degrees]; '' if it differs by less than the tolerances.

        The nearest measured value of each difference is used; their combination was not measured.
        """
        said = []
        for name, unit, off, tolerance in (('height_m', 'm', self.height - height, HEIGHT_TOLERANCE),
                                           ('pitch_deg', 'degrees', self.pitch - pitch, PITCH_TOLERANCE)):
            if abs(off) > tolerance:
                table = _costs()[name]
                nearest = min((key for key in table if float(key)), key=lambda key: abs(float(key) - off))
                row, trained = table[nearest], table['0']
                said.append(f'{abs(float(nearest)):g} {unit} {_direction(name, float(nearest))}: {row["colour"]:.0%} of goal '
                            f'objects and {row["pose"]:.0%} of poses reached in simulation, {row["contacts"]:.0%} with a '
                            f'contact ({trained["colour"]:.0%}, {trained["pose"]:.0%} and {trained["contacts"]:.0%} as in '
                            'training)')
        return '; '.join(said)


def _direction(name: str, off: float) -> str:
    ways = ('lower', 'higher') if name == 'height_m' else ('further up', 'further down')
    return ways[off > 0]


@cache
def _costs() -> dict[str, dict[str, dict[str, float]]]:
    """Shares by difference from training: benchmarks/results/control_mounts.json and control_mounts_places.json."""
    return json.loads(Path(__file__).with_name('mount_costs.json').read_text())


class Frames:
    """A tree of coordinate frames: the newest transform of each to its parent."""

    def __init__(self) -> None:
        self._parents: dict[str, tuple[str, np.ndarray]] = {}

    def add(self, transform: Any) -> None:
        """Add a transform; one that is not finite, or not a rotation, is ignored."""
        t, q = transform.transform.translation, transform.transform.rotation
        x, y, z, w = q.x, q.y, q.z, q.w
        norm = x * x + y * y + z * z + w * w
        if not math.isfinite(norm + t.x + t.y + t.z) or norm < 0.5:
            return
        scale = 2.0 / norm
        matrix = np.eye(4)
        matrix[:3, :3] -= scale * np.array([[y * y + z * z, w * z - x * y, -w * y - x * z],
                                            [-w * z - x * y, x * x + z * z, w * x - y * z],
                                            [w * y - x * z, -w * x - y * z, x * x + y * y]])
        matrix[:3, 3] = t.x, t.y, t.z
        self._parents[transform.child_frame_id.lstrip('/')] = transform.header.frame_id.lstrip('/'), matrix

    def mount(self, base: str, camera: str) -> Mount | None:
        """
        Return the mount of the optical frame ``camera`` (z ahead, y down: REP 103) over the floor, if there is a frame
        base_footprint next to ``base``, else over ``base``; None while the two are not connected.
        """
        prefix, slash, _ = base.rpartition('/')
        for ground in (f'{prefix}{slash}{GROUND}', base):
            pose = self.pose(ground, camera)
            if pose is not None:
                ahead = pose[:3, 2]
                return Mount(float(pose[2, 3]), math.degrees(math.asin(max(-1.0, min(1.0, -ahead[2])))))
        return None

    def pose(self, base: str, frame: str) -> np.ndarray | None:
        """Return the pose (4, 4) of ``frame`` in ``base``; None while the two are not connected."""
        (top, of_base), (other, of_frame) = self._to_root(base), self._to_root(frame)
        return np.linalg.inv(of_base) @ of_frame if top == other else None

    def _to_root(self, frame: str) -> tuple[str, np.ndarray]:
        """Return the root above ``frame``, and the pose of ``frame`` in it."""
        matrix, seen = np.eye(4), set()
        while frame in self._parents and frame not in seen:  # publishers that disagree may create a cycle
            seen.add(frame)
            frame, own = self._parents[frame]
            matrix = own @ matrix
        return frame, matrix
