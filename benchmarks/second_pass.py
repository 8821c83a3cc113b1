"""Which use of a second pass's time is best: alternatives to it, each a rung above one pass, in paired rooms.

    python benchmarks/second_pass.py times --json second_pass_times.json
    python benchmarks/second_pass.py drive --seeds 3000000:3000400 --tasks street intercept --workers 2 --json second_pass.json
    python benchmarks/second_pass.py drive --ways one_pass doubt --seeds 3220000:3220200 --tasks street --json doubt.json

``times`` measures each from a frame to its command; ``drive`` has each decide, with that as its delay.
"""
import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from result_file import provenance, write_result

from worldmodel_ros.control.deliberation import CANDIDATES, Candidate, Compared, Deliberation, Question, Settings
from worldmodel_ros.control.pilot import DECIDING, SLOTS, Forecast
from worldmodel_ros.control.terms import Outcome, utilities
from worldmodel_ros.engine.forecast.loading import load_forecast
from worldmodel_ros.evaluate.control.episode import drive, rung_seconds
from worldmodel_ros.evaluate.control.forecast import TrueFuture
from worldmodel_ros.evaluate.control.learned import Learned
from worldmodel_ros.evaluate.control.run import VARIANTS
from worldmodel_ros.evaluate.control.summary import mcnemar
from worldmodel_ros.evaluate.control.tasks import TASKS
from worldmodel_ros.evaluate.processes import each
from worldmodel_ros.evaluate.quality.seeds import parse_seeds
from worldmodel_ros.motion import PERIOD, along_arc, to_base
from worldmodel_ros.sim.world import World

ALIKE = [number for number, slot in enumerate(SLOTS) if slot.alike]
MOVES = [number for number, slot in enumerate(SLOTS) if slot.moves]
_SAME = 0.4  # m, within which two present forecasts of alike things are of the same one
_LIKELY = 0.5
PACKAGES = ('mujoco', 'numpy', 'onnxruntime')
Told = tuple[np.ndarray, np.ndarray, np.ndarray]


class Certain(Deliberation):
    """The decision without doubt about what is out of view: forecasts count as certain."""

    def choose(self, terms, view, *rest, **named):
        things = {name: replace(thing, unseen=None) for name, thing in view.things.items()}
        return super().choose(terms, replace(view, things=things), *rest, **named)


class Around(Certain):
    """Two rounds of candidates, whatever the task."""

    def rounds(self, question: Question, candidates: Sequence[Candidate], count: int) -> Compared:
        return super().rounds(question, candidates, 2)


class Rounds(Deliberation):
    """``count`` rounds of candidates, whatever the task."""

    def __init__(self, settings: Settings, count: int) -> None:
        super().__init__(settings)
        self._count = count

    def rounds(self, question: Question, candidates: Sequence[Candidate], count: int) -> Compared:
        return super().rounds(question, candidates, self._count)


class Sampled(Certain):
    """Candidates are scored on samples of the future, by the measured error of the forecast, not on its mean."""

    COUNT = 6
    NOW, RATE = 0.035, 0.068  # m, and m per second: standard deviation of a mover's forecast place along each axis

    def __init__(self, settings=DECIDING) -> None:
        super().__init__(settings)
        noise = np.random.default_rng(0).normal(size=(self.COUNT // 2, len(SLOTS), 2))
        self._noise = np.concatenate([noise, -noise])

    def compare(self, question: Question, candidates: Sequence[Candidate]) -> Compared:
        found = super().compare(question, candidates)
        scale, worth = (self.NOW + self.RATE * question.times)[:, None], []
        for sample in self._noise:
            things = {name: replace(thing, path=thing.path + scale * sample[number]) if thing.moves else thing
                      for number, (name, thing) in enumerate(question.view.things.items())}
            worth.append(utilities(question.terms, Outcome(question.times, found.poses, things, question.view.walls)))
        return replace(found, worth=np.mean(worth, 0))


class Passes:
    """The forecast of ``passes`` passes; 1.5: the mean of one and two."""

    def __init__(self, stream: Forecast, passes: float) -> None:
        self._stream, self._passes, self.times = stream, passes, stream.times

    def observe(self, image: np.ndarray, executed: np.ndarray, measured: np.ndarray, passes: int) -> Told:
        return self._stream.observe(image, executed, measured, self._passes)


class Mirrored:
    """The mean of two forecasts: of the scene, and of its mirror image."""

    def __init__(self, stream: Forecast, other: Forecast) -> None:
        self._stream, self._other, self.times = stream, other, stream.times

    def observe(self, image: np.ndarray, executed: np.ndarray, measured: np.ndarray, passes: int) -> Told:
        told = self._stream.observe(image, executed, measured, passes)
        back = np.array([1.0, -1.0])
        presence, places, _ = self._other.observe(np.ascontiguousarray(image[:, ::-1]), executed * back, measured * back,
                                                  passes)
        return _mean(told, (presence, places * back, told[2]), told[2])


class Earlier:
    """The mean of the newest forecast and the one before, moved to the robot's present pose and time."""

    def __init__(self, stream: Forecast, share: float = 0.35) -> None:
        self._stream, self._share, self.times = stream, share, stream.times
        self._before: tuple[np.ndarray, np.ndarray] | None = None

    def observe(self, image: np.ndarray, executed: np.ndarray, measured: np.ndarray, passes: int) -> Told:
        presence, places, walls = told = self._stream.observe(image, executed, measured, passes)
        if self._before is not None:
            told = _mean(told, (self._before[0], _a_period_later(self._before[1], self.times, measured), walls), walls,
                         self._share)
        self._before = told[0], told[1]
        return told


class Remembered:
    """Things out of view are placed by the last forecast from when they were in view, for some seconds; ``share``: the weight
    of that, the rest is the newest forecast's."""

    SECONDS, SAME = 3.0, 0.7

    def __init__(self, stream: Forecast, share: float = 1.0) -> None:
        self._stream, self._share, self.times = stream, share, stream.times
        self._kept: list[tuple[int, float, np.ndarray]] = []  # slot, s since it was in view, places (T, 2)

    def observe(self, image: np.ndarray, executed: np.ndarray, measured: np.ndarray, passes: int) -> Told:
        presence, places, walls = self._stream.observe(image, executed, measured, passes)
        presence, places = presence.copy(), np.array(places)
        likely = [number for number in MOVES if presence[number] > _LIKELY]
        seen = [number for number in likely if _in_view(places[0, number])]
        unseen = [number for number in likely if number not in seen]
        free = [number for number in ALIKE if number not in likely]
        kept = [(slot, since + PERIOD, _a_period_later(path[:, None], self.times, measured)[:, 0])
                for slot, since, path in self._kept if since < self.SECONDS]
        for number in seen:
            kept = _without_nearest(kept, number, places[0, number], self.SAME)[1]
        self._kept = [(number, 0.0, places[:, number].copy()) for number in seen]
        for number in unseen:
            same, kept = _without_nearest(kept, number, places[0, number], self.SAME)
            if same:
                places[:, number] += self._share * (same[2] - places[:, number])
                self._kept.append((number, same[1], same[2]))
        for slot, since, path in kept:
            if _in_view(path[0], 36.0) and 0.4 < np.hypot(*path[0]) < 1.5:
                continue  # it would be seen there
            if slot in ALIKE:
                if not free:
                    continue
                slot = free.pop()
            elif slot in likely:
                continue
            presence[slot], places[:, slot] = 0.9, path
            self._kept.append((slot, since, path))
        return presence, places, walls


class Corrected:
    """A forecast of one pass, corrected in part by the truth about the shuttles that it knows: their places, their motion, or
    both; ``all``: shuttles that it does not know are added, too. An upper bound for a better forecast."""

    def __init__(self, stream: Forecast, what: str) -> None:
        self._stream, self._what, self.times = stream, what, stream.times
        self._world, self._future = _forecast()[1], TrueFuture()

    def observe(self, image: np.ndarray, executed: np.ndarray, measured: np.ndarray, passes: int) -> Told:
        presence, places, walls = self._stream.observe(image, executed, measured, passes)
        presence, places, pose = presence.copy(), np.array(places), np.array(self._world.pose)
        paths = self._future.paths(self._world, self.times)
        left = {mover.name: np.array([to_base(place, pose) for place in paths[mover.name]])
                for mover in self._world.scene.movers}
        known = [number for number in ALIKE if presence[number] > _LIKELY]
        for number in sorted(known, key=lambda number: -presence[number]):
            name = min(left, key=lambda name: np.hypot(*(left[name][0] - places[0, number])), default='')
            if name and np.hypot(*(left[name][0] - places[0, number])) < 0.6:
                true, told = left.pop(name), places[:, number].copy()
                place = told[0] if self._what == 'motion' else true[0]
                places[:, number] = place + (told - told[0] if self._what == 'place' else true - true[0])
        if self._what == 'all':
            for number, path in zip((number for number in ALIKE if number not in known), left.values(), strict=False):
                presence[number], places[:, number] = 0.9, path
        return presence, places, walls


def _in_view(place: np.ndarray, degrees: float = 42.0) -> bool:
    return abs(np.arctan2(place[1], place[0])) < np.radians(degrees)


def _without_nearest(kept: list, number: int, place: np.ndarray, within: float) -> tuple[tuple | None, list]:
    """Return the kept entry of the thing that a slot has at a place, or None, and the others."""
    same = [it for it in kept if (it[0] == number) or (it[0] in ALIKE and number in ALIKE)]
    nearest = min(same, key=lambda it: np.hypot(*(it[2][0] - place)), default=None)
    if nearest is None or np.hypot(*(nearest[2][0] - place)) > within:
        return None, kept
    return nearest, [it for it in kept if it is not nearest]


def _a_period_later(places: np.ndarray, times: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Return places (T, S, 2) in base_link a period later, at the same ``times`` (T,) from then on."""
    pose, = along_arc(np.zeros((1, 3)), np.asarray(measured, float)[None], PERIOD)
    later = np.stack([[np.interp(times + PERIOD, times, places[:, slot, axis]) for slot in range(places.shape[1])]
                      for axis in range(2)], -1).swapaxes(0, 1)
    # The last time is beyond the forecast, which is extrapolated.
    rate = (places[-1] - places[-2]) / (times[-1] - times[-2])
    later[-1] = places[-1] + rate * PERIOD
    cos, sin = np.cos(pose[2]), np.sin(pose[2])
    return (later - pose[:2]) @ np.array([[cos, -sin], [sin, cos]])


def _mean(one: Told, other: Told, walls: np.ndarray, share: float = 0.5) -> Told:
    """Return the mean of two forecasts, with ``share`` of the other; alike things are paired by position."""
    presence, places = one[0].copy(), np.array(one[1])
    pairs = [(number, number) for number in range(len(presence)) if number not in ALIKE]
    left = [number for number in ALIKE if other[0][number] > _LIKELY]
    for number in (number for number in ALIKE if presence[number] > _LIKELY):
        apart = [np.hypot(*(places[0, number] - other[1][0, it])) for it in left]
        if apart and min(apart) < _SAME:
            pairs.append((number, left.pop(int(np.argmin(apart)))))
    for number, it in pairs:
        if (presence[number] > _LIKELY) and (other[0][it] > _LIKELY):
            places[:, number] = (1.0 - share) * places[:, number] + share * other[1][:, it]
        if number not in ALIKE:
            presence[number] = (1.0 - share) * presence[number] + share * other[0][it]
    return presence, places, walls


MORE = (*(Candidate(f'lead {lead:.1f} s', lead) for lead in np.arange(0.0, 2.0, 0.2)),
        *(Candidate(f'{v:.1f} m/s, {w:.1f} rad/s, {steps * PERIOD:.1f} s', 0.0, (v, w), steps)
          for v in (-0.3, 0.0, 0.3, 0.6) for w in (-1.2, 0.0, 1.2) for steps in (3, 5, 8)), CANDIDATES[-1])

FARTHER = replace(DECIDING, horizon=DECIDING.far_horizon)
# By way: a stream, a deliberation and its settings.
WAYS: Mapping[str, tuple] = {
    'one_pass': (lambda open_: open_(), Certain, DECIDING),
    'doubt': (lambda open_: open_(), Deliberation, DECIDING),
    'farther': (lambda open_: open_(), Deliberation, FARTHER),
    **{f'{count}_rounds': (lambda open_: open_(), partial(Rounds, count=count), DECIDING) for count in (2, 3, 5)},
    **{f'{count}_rounds_farther': (lambda open_: open_(), partial(Rounds, count=count), FARTHER) for count in (2, 3, 5)},
    'network': (lambda open_: Passes(open_(), 2), Certain, DECIDING),
    'more_candidates': (lambda open_: open_(), Certain, replace(DECIDING, candidates=MORE)),
    'around_best': (lambda open_: open_(), Around, DECIDING),
    'more_around_best': (lambda open_: open_(), Around, replace(DECIDING, candidates=MORE)),
    'longer': (lambda open_: open_(), Certain, replace(DECIDING, horizon=3.0)),
    'samples': (lambda open_: open_(), Sampled, DECIDING),
    'mirrored': (lambda open_: Mirrored(open_(), open_()), Certain, DECIDING),
    'earlier': (lambda open_: Earlier(open_()), Certain, DECIDING),
    'remembered': (lambda open_: Remembered(open_()), Certain, DECIDING),
    'true_place': (lambda open_: Corrected(open_(), 'place'), Certain, DECIDING),
    'true_motion': (lambda open_: Corrected(open_(), 'motion'), Certain, DECIDING),
    'true_both': (lambda open_: Corrected(open_(), 'both'), Certain, DECIDING),
    'true_all': (lambda open_: Corrected(open_(), 'all'), Certain, DECIDING),
    'remembered_half': (lambda open_: Remembered(open_(), 0.5), Certain, DECIDING),
    'earlier_half': (lambda open_: Earlier(open_(), 0.5), Certain, DECIDING),
    'earlier_network': (lambda open_: Earlier(Passes(open_(), 2)), Certain, DECIDING),
    'earlier_mirrored': (lambda open_: Earlier(Mirrored(open_(), open_())), Certain, DECIDING),
}


@lru_cache(maxsize=1)
def _forecast():
    return load_forecast('tiny'), World()


def controller(way: str, look: Callable[[World, tuple[int, int]], np.ndarray] = World.render) -> Learned:
    """Return the controller of a way, for one episode."""
    forecast, _ = _forecast()
    stream, deliberation, settings = WAYS[way]
    return Learned(stream(forecast.open), forecast.image_size, 1, look=look, deliberation=deliberation(settings))


def _drive(job: tuple[str, str, str, int, float]) -> dict:
    way, variant, task, seed, late = job
    episode = drive(TASKS[task].setup(seed, VARIANTS[variant]), controller(way), late, _forecast()[1])
    return {'success': episode.success, 'reason': episode.reason, 'seconds': episode.seconds}


def driven(ways: Sequence[str], tasks: Sequence[str], seeds: Sequence[int], workers: int, kept: Path | None,
           stop_after: float = float('inf')) -> dict[tuple[str, str, int], dict]:
    """Drive each way, task (``variant.task`` for a variant) and seed; rooms that ``stop_after`` s cut off are absent."""
    end, found = time.monotonic() + stop_after, {}
    if kept and kept.exists():
        for line in kept.read_text().splitlines():
            row = json.loads(line)
            found[row['way'], row['task'], row['seed']] = row
    jobs = []
    for seed in seeds:
        for task in tasks:
            variant, name = task.split('.') if '.' in task else ('plain', task)
            jobs += [(way, variant, name, seed, delay(way)) for way in ways if (way, task, seed) not in found]
    for (way, variant, name, seed, _), done in each(_drive, jobs, workers):
        task = name if variant == 'plain' else f'{variant}.{name}'
        found[way, task, seed] = row = {'way': way, 'task': task, 'seed': seed, **done.result()}
        if kept:
            with kept.open('a') as stream:
                stream.write(json.dumps(row) + '\n')
        if time.monotonic() > end:
            break
    return found


def delay(way: str) -> float:
    """Return the seconds from an image to its command."""
    return rung_seconds()['one_step' if way in ('one_pass', 'doubt') or way.startswith('true') else 'two_step']


def table(found: dict[tuple[str, str, int], dict]) -> dict:
    """Return by task, for the rooms that all have driven: the success of each way, and its comparison with one pass."""
    result: dict[str, dict] = {}
    ways = list(dict.fromkeys(way for way, _, _ in found))
    for task in dict.fromkeys(task for _, task, _ in found):
        seeds = [seed for seed in sorted({seed for _, of, seed in found if of == task})
                 if all((way, task, seed) in found for way in ways)]
        success = {way: np.array([found[way, task, seed]['success'] for seed in seeds]) for way in ways}
        result[task] = {'n': len(seeds)}
        for way in ways:
            row = {'success': round(float(success[way].mean()), 4)}
            if way != ways[0]:
                won, lost = int((success[way] & ~success[ways[0]]).sum()), int((success[ways[0]] & ~success[way]).sum())
                row |= {'won': won, 'lost': lost, 'p': float(f'{mcnemar(won, lost):.3g}')}
            result[task][way] = row
    return result


class Timed:
    """A controller of one way; ``seconds``: CPU time of each decision, without rendering."""

    def __init__(self, way: str) -> None:
        self.seconds: list[float] = []
        self._imaging = 0.0
        self._controller = controller(way, self._look)

    def decide(self, *situation):
        begun, self._imaging = time.thread_time(), 0.0
        command = self._controller.decide(*situation)
        self.seconds.append(time.thread_time() - begun - self._imaging)
        return command

    def _look(self, world: World, size: tuple[int, int]) -> np.ndarray:
        begun = time.thread_time()
        image = world.render(size)
        self._imaging = time.thread_time() - begun
        return image


def times(ways: Sequence[str], seeds: Sequence[int]) -> dict:
    """Return the CPU time of each way's decisions on the street, in ms, and of a product of matrices in the same minutes."""
    spent, products = {way: [] for way in ways}, []
    matrix = np.random.default_rng(0).random((384, 384), np.float32)
    for seed in seeds:
        for way in ways:
            timed = Timed(way)
            drive(TASKS['street'].setup(seed), timed, delay(way), _forecast()[1])
            spent[way] += timed.seconds[3:]  # without the first calls
            begun = time.thread_time()
            _ = matrix @ matrix
            products.append(time.thread_time() - begun)
    return {'product_of_384x384_float32_ms': round(float(np.median(products)) * 1e3, 3), 'decision_cpu_ms': {
        way: {'p50': round(float(np.median(values)) * 1e3, 2), 'more_than_one_pass': round(
            float(np.median(values) - np.median(spent[ways[0]])) * 1e3, 2), 'n': len(values)} for way, values in spent.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('what', choices=('drive', 'times'))
    parser.add_argument('--ways', nargs='+', default=list(WAYS), choices=WAYS)
    parser.add_argument('--seeds', type=parse_seeds, default=range(3000000, 3000100))
    parser.add_argument('--tasks', nargs='+', default=['street', 'intercept'])
    parser.add_argument('--workers', type=int, default=1)
    parser.add_argument('--stop-after', type=float, default=float('inf'), help='s of driving')
    parser.add_argument('--episodes', type=Path, help='file of JSON lines, to go on from')
    parser.add_argument('--json', type=Path, help='file for the result')
    chosen = parser.parse_args()
    if chosen.what == 'times':
        write_result({**provenance(PACKAGES), **times(chosen.ways, chosen.seeds)}, chosen.json, show=True)
        return
    found = driven(chosen.ways, chosen.tasks, chosen.seeds, chosen.workers, chosen.episodes,
                   chosen.stop_after)
    write_result({**provenance(PACKAGES), 'tasks': table(found)}, chosen.json, show=True)


if __name__ == '__main__':
    main()
