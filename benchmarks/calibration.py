"""Compares what `worldmodel calibrate` estimates for simulated robots with the truth; and the recorded lap of a real car.

    python benchmarks/calibration.py --robots 20 --lap donkeycar_lap_a --json benchmarks/results/calibration.json

Each robot is in another room, with its own wheels and camera, and its commands are delayed by a time drawn with the seed. The
first ``--filmed`` of them also have a camera, from which pitch and slip are estimated. All numbers follow from the seeds.
"""
from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import numpy as np
from result_file import ROOT, provenance, write_result

sys.path.insert(0, str(ROOT / 'test'))
LONGEST = 0.25  # s, of the delays that are drawn
WITHIN = {'latency_s': 0.020, 'gain_share': 0.05, 'camera_pitch_deg': 1.5}


def told(seed: int, filmed: bool) -> dict:
    """Return the estimates for one robot, and the truth."""
    from test_calibrate import simulated

    from worldmodel_ros.calibrate.recording import AXES, calibrate
    from worldmodel_ros.sim.scene import CAMERA_PITCH
    delay = round(float(np.random.default_rng(seed).uniform(0.0, LONGEST)), 3)
    world, signals = simulated(seed, delay, filmed)
    found, gain = calibrate(signals), float(np.mean(world.scene.wheel_gain))
    row = {'seed': seed, 'delay_s': delay, 'gain': round(gain, 4), 'refused': sorted(found.refused)}
    for axis in AXES:
        if response := found.responses.get(axis):
            row[axis] = {'latency_error_s': round(response.latency.value - delay, 4),
                         'gain_error_share': round(response.gain.value / gain - 1.0, 4),
                         'latency_s': response.latency.to_dict(), 'gain': response.gain.to_dict()}
    if filmed:
        row['camera_pitch_deg'] = round(math.degrees(CAMERA_PITCH + world.scene.camera_rotation[1]), 2)
        if pitch := found.estimates.get('camera_pitch_deg'):
            row['camera_pitch_error_deg'] = round(pitch.value - row['camera_pitch_deg'], 2)
        if slip := found.estimates.get('turn_slip'):
            row['turn_slip'] = slip.to_dict()
    return row


def summary(rows: list[dict]) -> dict:
    """Return the error of the estimates, and how many could be made."""
    axes = [row[axis] for row in rows for axis in ('speed', 'turn') if axis in row]
    pitches = [abs(row['camera_pitch_error_deg']) for row in rows if 'camera_pitch_error_deg' in row]
    latency, gain = ([abs(axis[key]) for axis in axes] for key in ('latency_error_s', 'gain_error_share'))
    return {'robots': len(rows), 'axes_told': len(axes), 'axes_asked': 2 * len(rows),
            'latency_error_s': {'p50': float(np.median(latency)), 'max': max(latency)},
            'gain_error_share': {'p50': float(np.median(gain)), 'max': max(gain)},
            'latency_within': float(np.mean([each <= WITHIN['latency_s'] for each in latency])),
            'gain_within': float(np.mean([each <= WITHIN['gain_share'] for each in gain])),
            'filmed': sum('camera_pitch_deg' in row for row in rows), 'pitch_told': len(pitches),
            'pitch_error_deg_max': max(pitches, default=None)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--robots', type=int, default=20)
    parser.add_argument('--filmed', type=int, default=4)
    parser.add_argument('--first-seed', type=int, default=7_600_000)
    parser.add_argument('--lap', type=Path, help='bag of the real car')
    parser.add_argument('--json', type=Path, metavar='FILE')
    chosen = parser.parse_args()
    rows = [told(chosen.first_seed + number, number < chosen.filmed) for number in range(chosen.robots)]
    result = {**provenance(('numpy', 'mujoco', 'opencv-python-headless')), 'asked': WITHIN, 'simulated': summary(rows)}
    if chosen.lap:
        from worldmodel_ros.calibrate.recording import calibrate, read
        result['real_lap'] = calibrate(read(chosen.lap, ROOT / 'config' / 'evaluate' / 'donkeycar.yaml')).to_dict()
    write_result({**result, 'rows': rows}, chosen.json, show=False)
    print(result)


if __name__ == '__main__':
    main()
