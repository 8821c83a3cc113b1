"""Observing for an open world: which images are taken, and where a session from a file goes on; without a model."""
import time
from types import SimpleNamespace

import numpy as np
import pytest

from worldmodel_ros.engine.open_world import worker
from worldmodel_ros.engine.open_world.worker import GAP, PERIOD, Seen, WorldWorker
from worldmodel_ros.engine.session_folder import SessionFolder
from worldmodel_ros.inputs.ticks import NS, FramePacer, Pace

STEP = 0.1  # m, of the base between two images


class Session:
    """Stands for a ``WorldSession``; ``poses``: of the base, m along x, at each latent frame that was observed."""

    def __init__(self, frame=0):
        self.frame, self.poses, self.rebased = frame, [], None

    @property
    def images_of_chunk(self):
        return 4 * (3 - (self.frame == 0))

    def fork(self):
        return Session(self.frame)

    def rebase(self, pose):
        self.rebased = pose[0, 3]

    def observe(self, images, poses, intrinsics):
        self.frame += 3
        self.poses += [pose[0, 3] for pose in poses]

    def imagine(self, poses, intrinsics, steps):
        return np.zeros((self.images_of_chunk, 2, 2, 3), np.uint8)

    def close(self):
        pass


WORLD = SimpleNamespace(preset=SimpleNamespace(schedule=SimpleNamespace(steps=(1, 2)), chunk_frames=3), smaller=None,
                        frame_images=4, description=SimpleNamespace(optical=np.eye(4)), open=lambda image, pose: Session())


def observing():
    return WorldWorker(WORLD, lambda *got: None, lambda error: pytest.fail(str(error)), observes=True)


def seen(number, stamp=None):
    base = np.eye(4)
    base[0, 3] = STEP * number
    return Seen(np.zeros((2, 2, 3), np.uint8), round(number * PERIOD * NS) if stamp is None else stamp, 0.0, base, np.zeros(2),
                None, 0, number)


@pytest.mark.parametrize('jitter', [0.0, 0.005])
@pytest.mark.parametrize('rate', [16.0, 20.0, 24.0, 25.0, 29.97, 30.0, 50.0, 60.0])
def test_a_camera_of_any_rate_is_observed_at_the_rate_of_the_video(rate, jitter):
    robot, pacer, rng, seconds = observing(), FramePacer(PERIOD, GAP), np.random.default_rng(0), 60
    observed = sessions = 0
    for number in range(round(seconds * rate)):
        stamp = NS + round((number / rate + rng.uniform(-jitter, jitter)) * NS)
        pace = pacer.classify(stamp, 0.05, 1.0)
        pacer.take(stamp, pace)
        if pace is not Pace.BETWEEN:
            robot.submit(seen(number, stamp))
            observed, sessions = observed + len(robot._waiting), sessions + robot._begins
            robot._waiting, robot._begins = [], False  # as if they were committed at once
    assert observed == pytest.approx(seconds / PERIOD, rel=0.02) and sessions == 1


@pytest.mark.parametrize('meanwhile', [5, 40], ids=['a few images', 'more than three chunks'])
def test_a_session_from_a_file_goes_on_from_the_newest_image_when_it_was_read(tmp_path, monkeypatch, meanwhile):
    robot, kept, loaded, numbers = observing(), SessionFolder(tmp_path), Session(300), iter(range(1, 1000))

    def show(count):
        for _ in range(count):
            robot.submit(seen(next(numbers)))

    def read(file, size):
        show(meanwhile)
        return loaded
    kept.save('a.safetensors', 1, lambda file: file.write(b'1'))
    monkeypatch.setattr(worker, 'WorldSession', SimpleNamespace(read=lambda world: read))
    robot.start()
    try:
        show(9)
        robot.load(kept, 'a.safetensors', 5.0)
        show(12)
        end = time.monotonic() + 10.0
        while not loaded.poses and time.monotonic() < end:
            time.sleep(0.01)
    finally:
        robot.stop()
    newest = STEP * (9 + meanwhile)
    assert loaded.rebased == pytest.approx(newest)
    assert loaded.poses == pytest.approx([newest + STEP * images for images in (4, 8, 12)])
