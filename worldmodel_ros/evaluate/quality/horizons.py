"""Open-loop prediction up to five seconds ahead, from warm sessions, under the commands that were executed."""
from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from worldmodel_ros.evaluate.drive.pictures import psnr, sharpness, ssim
from ...model.sampling import ONE_STEP, TEACHER, TRUNCATED, TRUNCATED_ONE, TWO_STEP, Steps
from ...sim.scene import COLOURS
from .displacement import find_pose
from .drives import Drive, resimulate
from .imagination import Imagination
from .objects import Sighting, find_objects

if TYPE_CHECKING:
    from ...engine.engine import Engine
    from ...model.presets import SequencePreset

HORIZONS = (0.4, 1.0, 2.0, 5.0)  # s
CONTEXT = 24                     # frames that a session has seen at a start, for a model with a window of 16: it is full
SPACING = 29                     # frames between starts, nearly independent of each other
SAMPLERS: dict[str, Steps] = {'two_step': TWO_STEP, 'one_step': ONE_STEP}
STRIP = ('truth', 'two_step', 'one_step', 'teacher')
# These use the network that serves as the teacher.
TEACHERS: dict[str, Steps] = {'teacher': TEACHER, 'truncated': TRUNCATED, 'truncated_one_step': TRUNCATED_ONE}
_POSED = ('two_step', 'one_step', 'teacher')  # whose images' poses are searched for


def steps_of(horizon: float, period: float) -> int:
    return round(horizon / period)


def context_of(spec: SequencePreset) -> int:
    """Return CONTEXT for a model's own ``context_frames``."""
    return spec.context_frames + CONTEXT - 16


def starts(drive: Drive, ahead: int, context: int = CONTEXT) -> range:
    """Return the frames of an episode after which a session with ``context`` frames is asked for ``ahead`` more."""
    return range(context - 1, len(drive.frames) - ahead, SPACING)


def drive_frames(period: float, count: int, context: int = CONTEXT) -> int:
    """Return the length of an episode that has ``count`` starts."""
    return context + steps_of(HORIZONS[-1], period) + (count - 1) * SPACING


def horizon_records(drive: Drive, student: Imagination, teacher: Imagination, deployed: Engine | None
                    ) -> tuple[list[dict], dict[str, np.ndarray]]:
    """Return one record for each start, horizon and way to predict: see ``_records``. ``deployed`` runs on its own back end.

    Also returns strips, uint8 (rows, 1 + horizons, H, W, 3): the last seen image and those that follow, true and as each
    of STRIP predicted them; from the first start, and from the one at which two steps did worst.
    """
    spec = student.spec
    wanted = [steps_of(horizon, spec.step_period) for horizon in HORIZONS]
    context = context_of(spec)
    moments = starts(drive, wanted[-1], context)
    seen, executed, later = _streams(drive, moments, wanted[-1], spec.chunk_frames, context)
    pictures = {**_imagined(student, SAMPLERS, seen, executed, later, wanted),
                **_imagined(teacher, TEACHERS, seen, executed, later, wanted)}
    if deployed is not None:
        pictures |= _deployed(deployed, seen, executed, later, wanted)
    true = np.stack([[drive.frames[start + steps] for steps in wanted] for start in moments])
    pictures['truth'] = true
    pictures['copy_last'] = np.broadcast_to(seen[:, -1:], true.shape)
    pictures['vae'] = np.stack([_through_vae(student, drive.frames[[start + k - 1, start + k]])
                                for start in moments for k in wanted]).reshape(true.shape)
    for name, nominal in (('simulator', False), ('simulator_nominal_gains', True)):
        pictures[name] = np.stack([resimulate(drive, start, wanted, spec.step_period, nominal) for start in moments])
    records = [record for i, start in enumerate(moments) for j, horizon in enumerate(HORIZONS)
               for record in _records(drive, start, wanted[j], horizon, {n: p[i, j] for n, p in pictures.items()})]
    worst = min(range(len(moments)), key=lambda i: gain(records, moments[i]))
    return records, {name: np.stack([np.concatenate([seen[i, -1:], pictures[way][i]]) for way in STRIP])
                     for name, i in (('first', 0), ('worst', worst))}


def gain(records: list[dict], start: int) -> float:
    """Return the dB of two steps over copying from a start, mean over the horizons that count; infinite if none does."""
    means = {way: [r['psnr_db'] for r in records if r['start'] == start and r['way'] == way and r['moving']]
             for way in ('two_step', 'copy_last')}
    return float(np.mean(means['two_step']) - np.mean(means['copy_last'])) if means['two_step'] else math.inf


def _streams(drive: Drive, moments: range, ahead: int, chunk: int, context: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Frames and actions up to each start, and the actions after it, in whole chunks."""
    seen = np.stack([drive.frames[s - context + 1:s + 1] for s in moments])
    executed = np.stack([drive.actions[s - context + 1:s + 1] for s in moments])
    later = np.stack([drive.actions[s + 1:s + 1 + ahead] for s in moments])
    missing = -ahead % chunk
    return seen, executed, np.concatenate([later, np.repeat(later[:, -1:], missing, 1)], 1)


def _imagined(model: Imagination, samplers: dict[str, Steps], seen: np.ndarray, executed: np.ndarray,
              later: np.ndarray, wanted: list[int]) -> dict[str, np.ndarray]:
    """Images (N, horizons, H, W, 3) by each sampler. Every start's stream has its own noise."""
    memory = model.observe(seen, executed, tuple(range(len(seen))))
    found = {}
    for name, sampler in samplers.items():
        latents, _ = model.roll(memory, later, sampler, keep=False)
        pairs = [(latents[:, k - 1], latents[:, k - 2]) for k in wanted]
        found[name] = np.stack([model.decode(*pair) for pair in pairs], 1)
    return found


def _deployed(engine: Engine, seen: np.ndarray, executed: np.ndarray, later: np.ndarray, wanted: list[int]
              ) -> dict[str, np.ndarray]:
    """The same by sessions on the back end that robots run."""
    found: dict[str, list] = {'deployed_two_step': [], 'deployed_one_step': []}
    for seed, (frames, actions, following) in enumerate(zip(seen, executed, later, strict=True)):
        session = engine.open_session(seed)  # the noise of the same stream in the batch
        for frame, action in zip(frames, actions, strict=True):
            session.observe(frame, action)
        for name, steps in (('deployed_two_step', 2), ('deployed_one_step', 1)):
            found[name].append(finish(session.what_if(following, steps)).frames[[k - 1 for k in wanted]])
    return {name: np.stack(frames) for name, frames in found.items()}


def finish(units: Iterator):
    """Run a generator to its end and return its value."""
    while True:
        try:
            next(units)
        except StopIteration as end:
            return end.value


def _through_vae(model: Imagination, frames: np.ndarray) -> np.ndarray:
    """The second of two frames, encoded and decoded: no prediction can be better."""
    latents = model.encode(frames[None])[0]
    return model.decode(latents[1:], latents[:1])[0]


def _records(drive: Drive, start: int, steps: int, horizon: float, pictures: dict[str, np.ndarray]) -> Iterator[dict]:
    """Yield for each way to predict: how near its image is to the true one, and where things are in it.

    ``objects``: of each object that is visible in the true image, (whether it was at the start too, error of the
    bearing in deg, estimated over true distance); None where it was not found or, for distances, is cut off. ``goal``:
    which of them the driver drove to all the way, None for none.
    """
    end = start + steps
    true = drive.frames[end]
    visible = [i for i in range(len(COLOURS)) if drive.visible[end, i]]
    goal = drive.goal(start, steps)
    for name, picture in pictures.items():
        sightings = find_objects(picture, drive.scene)
        place = find_pose(picture, drive, end) if name in _POSED else None
        yield {'seed': drive.seed, 'driver': drive.driver, 'start': start, 'horizon': horizon, 'way': name,
               'moving': drive.is_moving(start, steps), 'psnr_db': psnr(picture, true), 'ssim': ssim(picture, true),
               'sharpness': sharpness(picture) / max(sharpness(true), 1e-6),
               'objects': [(bool(drive.visible[start, i]), *_errors(drive, end, i, sightings.get(COLOURS[i])))
                           for i in visible],
               'goal': visible.index(goal) if goal in visible else None,
               'position_error_m': place and place[0], 'yaw_error_deg': place and place[1]}


def _errors(drive: Drive, frame: int, index: int, sighting: Sighting | None) -> tuple[float | None, float | None]:
    if sighting is None:
        return None, None
    error = math.remainder(sighting.bearing - float(drive.bearings[frame, index]), math.tau)
    return abs(math.degrees(error)), sighting.distance and sighting.distance / float(drive.distances[frame, index])
