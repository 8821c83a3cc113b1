"""Observing for an open world: which images are taken; without a model."""
from types import SimpleNamespace

import numpy as np
import pytest

from worldmodel_ros.engine.open_world.worker import GAP, PERIOD, Seen, WorldWorker
from worldmodel_ros.inputs.ticks import NS, FramePacer, Pace

WORLD = SimpleNamespace(preset=SimpleNamespace(schedule=SimpleNamespace(steps=(1, 2)), chunk_frames=3), smaller=None,
                        frame_images=4)


def observing():
    return WorldWorker(WORLD, lambda *got: None, lambda error: pytest.fail(str(error)), observes=True)


def seen(number, stamp=None):
    return Seen(np.zeros((2, 2, 3), np.uint8), round(number * PERIOD * NS) if stamp is None else stamp, 0.0, np.eye(4),
                np.zeros(2), None, 0, number)


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
