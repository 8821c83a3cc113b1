"""Errors of a scene forecast about what it does not see: shuttles of streets, by how long each has been out of view.

    python benchmarks/unseen_movers.py --seeds 3000000:3000060 --json unseen_movers.json
"""
import argparse
from pathlib import Path

import numpy as np
import second_pass
from result_file import provenance, write_result

from worldmodel_ros.control.pilot import DECIDING, SLOTS, Forecast
from worldmodel_ros.control.scene_view import OutOfView, Seen
from worldmodel_ros.engine.forecast.loading import load_forecast
from worldmodel_ros.evaluate.control.episode import drive
from worldmodel_ros.evaluate.control.forecast import TrueFuture
from worldmodel_ros.evaluate.control.learned import Learned
from worldmodel_ros.evaluate.control.tasks import TASKS
from worldmodel_ros.evaluate.quality.seeds import parse_seeds
from worldmodel_ros.motion import PERIOD, to_base
from worldmodel_ros.sim.world import World

BINS = (0.0, 0.05, 0.75, 1.25, 2.0, 3.0, 5.0, 8.0)  # s out of view
NEAR = 1.5    # m from the robot: things farther off touch nothing soon
SAME = 1.5    # m, within which a forecast is matched to a shuttle
LIKELY = 0.5


class Compared:
    """A forecast; ``rows``: of each shuttle at each frame, how long it was out of view, the errors now and in 0.8 s (2, 2) in
    m along and across the base, and whether it was known; the first is None for shuttles that were never in view."""

    def __init__(self, stream: Forecast, world: World, rows: list) -> None:
        self._stream, self._rows, self.times = stream, rows, stream.times
        self._world, self._future, self._watch = world, TrueFuture(), OutOfView(SLOTS)
        self._in_view: dict[str, int] = {}
        self._tick = 0

    def observe(self, image: np.ndarray, executed: np.ndarray, measured: np.ndarray, passes: int) -> second_pass.Told:
        presence, places, walls = told = self._stream.observe(image, executed, measured, passes)
        pose, paths = np.array(self._world.pose), self._future.paths(self._world, self.times[[0, 3]])
        unseen = self._watch.look(Seen(presence, places, walls, self.times), pose).unseen
        self._tick += 1
        true = {mover.name: np.array([to_base(place, pose) for place in paths[mover.name]])
                for mover in self._world.scene.movers}
        self._in_view |= {name: self._tick for name in true if self._world.visible(name)}
        known = [number for number in second_pass.ALIKE if presence[number] > LIKELY]
        pairs = sorted((float(np.hypot(*(places[0, number] - path[0]))), number, name)
                       for number in known for name, path in true.items())
        slots: dict[str, int] = {}
        for away, number, name in pairs:
            if away < SAME and name not in slots and number not in slots.values():
                slots[name] = number
        for name, path in true.items():
            if np.hypot(*path[0]) < NEAR:
                number = slots.get(name)
                error = None if number is None else places[[0, 3], number] - path
                self._rows.append((self._in_view.get(name) and (float(unseen[number]) if number is not None else
                                                                (self._tick - self._in_view[name]) * PERIOD), error))
        return told


def table(rows: list) -> dict:
    """Return, by seconds out of view, the share of known shuttles and their errors."""
    found = {}
    for low, high in zip(BINS, BINS[1:], strict=False):
        some = [error for since, error in rows if since is not None and low <= since < high]
        errors = np.array([error for error in some if error is not None])
        if len(errors):
            found[f'{low:g} to {high:g} s'] = {
                'n': len(some), 'known': round(len(errors) / len(some), 3),
                **{name: {'median_m': round(float(np.median(np.hypot(*errors[:, at].T))), 3),
                          'rms_of_an_axis_m': round(float(np.sqrt((errors[:, at] ** 2).mean())), 3)}
                   for at, name in enumerate(('now', 'in_0_8_s'))}}
    never = [error for since, error in rows if since is None]
    return {'by_seconds_out_of_view': found, 'never_in_view': {'n': len(never), 'known': round(
        sum(error is not None for error in never) / max(1, len(never)), 3)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--seeds', type=parse_seeds, default=range(3000000, 3000060))
    parser.add_argument('--json', type=Path, help='file for the result')
    parser.add_argument('--forecast', default='tiny', help='name of a shipped one, or folder')
    chosen, rows = parser.parse_args(), []
    forecast, world = load_forecast(chosen.forecast), World()
    for seed in chosen.seeds:
        controller = Learned(Compared(forecast.open(), world, rows), forecast.image_size, 1,
                             deliberation=second_pass.Certain(DECIDING))
        drive(TASKS['street'].setup(seed), controller, second_pass.delay('one_pass'), world)
    write_result({**provenance(second_pass.PACKAGES), 'streets': f'{chosen.seeds.start}:{chosen.seeds.stop}',
                  'shuttles_within_m': NEAR, **table(rows)}, chosen.json, show=True)


if __name__ == '__main__':
    main()
