"""The worker with a real engine: faults beneath the session, recovery, what-if and files."""
import time
from concurrent.futures import wait

import numpy as np
import pytest
from small_model import SMALL, small_checkpoint

from worldmodel_ros.control.ladder import NS, Settings, Tier, Verdict
from worldmodel_ros.control.responder import Observation, Responder
from worldmodel_ros.control.worker import Worker
from worldmodel_ros.engine import load
from worldmodel_ros.engine.faults import FaultyBackend, Faults
from worldmodel_ros.engine.session_folder import SessionFileError, SessionFolder
from worldmodel_ros.engine.what_if import Branch, Question
from worldmodel_ros.evaluate.quality.horizons import finish
from worldmodel_ros.motion import MANEUVERS, maneuver

pytestmark = pytest.mark.waiting

DEADLINE = 3.0  # s; other tests run next to these


class Driver:
    """A worker in its thread, that is given frames one after the other."""

    def __init__(self, engine):
        self.answers, self.predictions, self.failures = [], [], []
        self.faults = Faults()
        engine.backend = FaultyBackend(engine.backend, self.faults)
        self.engine = engine
        self.worker = Worker(engine, lambda start, end: np.float32([0.1, 0.0]),
                             Responder(self, Settings(), SMALL.step_period), self)
        self.worker.start()
        self.frames = 0

    def answered(self, answer):
        self.answers.append(answer)

    def predicted(self, prediction):
        self.predictions.append(prediction)

    def failed(self, reason, error, restarted):
        self.failures.append(reason)

    def tick(self, episode=1):
        """Give one frame and return its answer."""
        self.frames += 1
        image = np.random.default_rng(self.frames).integers(0, 256, (*SMALL.image_size, 3), dtype=np.uint8)
        now = time.monotonic()
        self.worker.submit(Observation(
            image, self.frames * NS // 10, now, now + DEADLINE, episode, self.frames, 'red'))
        end = now + 10 * DEADLINE
        while len(self.answers) < self.frames and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.02)
        return self.answers[self.frames - 1]


@pytest.fixture
def driver(tmp_path):
    engine = load(str(small_checkpoint(tmp_path)), 'torch')
    engine.warm_up()
    driver = Driver(engine)
    yield driver
    driver.worker.stop()


def test_frames_are_answered_and_their_futures_decoded(driver):
    for _ in range(5):
        assert driver.tick().tier is Tier.TWO_STEP
    prediction = driver.predictions[-1]
    assert prediction.future.frames.shape == (SMALL.chunk_frames, *SMALL.image_size, 3)
    assert all(prediction.timings[part] > 0.0 for part in ('encode', 'commit', 'policy', 'denoise', 'decode'))


@pytest.mark.parametrize('fault', ['nan', 'fail'])
def test_a_fault_stops_the_robot_and_nothing_of_it_is_left(driver, fault):
    driver.tick()
    setattr(driver.faults, fault, True)
    answer = driver.tick()
    assert (answer.tier, answer.verdict) == (Tier.STOP, Verdict.INVALID)
    setattr(driver.faults, fault, False)
    answers = [driver.tick()]
    while answers[-1].tier is not Tier.TWO_STEP:
        assert len(answers) < 50, answers
        answers.append(driver.tick())
    tiers = [answer.tier for answer in answers]
    # Three good ticks of each, at least: on a busy machine not every tick is one.
    assert tiers[:3] == [Tier.STOP] * 3 and tiers.count(Tier.ONE_STEP) >= 3
    assert all(a.actions is None or np.isfinite(a.actions).all() for a in answers)


def test_a_delay_is_measured_and_predicted(driver):
    before = driver.engine.step_times.predict(2)
    driver.faults.delay = 0.03
    for _ in range(15):
        driver.tick()
    assert driver.engine.step_times.predict(2) > before + 0.1


def test_what_if_answers_every_maneuver(driver):
    driver.tick()
    branches = tuple(Branch(name, 6, maneuver(name, 6)) for name in MANEUVERS) + (Branch('policy', 6),)
    promise = driver.worker.ask(Question(branches, 'red', time.monotonic() + 30.0))
    wait([promise], 30.0)
    answer = promise.result(timeout=0)
    assert answer.complete
    assert [name for name, _ in answer.branches] == [*MANEUVERS, 'policy']
    assert all(future.frames.shape[0] == 6 for _, future in answer.branches)


def test_what_if_in_one_step_imagines_what_the_session_does_in_one(driver):
    driver.tick()
    turn = maneuver('left', 6)
    futures = {steps: driver.worker.ask(Question((Branch('left', 6, turn),), 'red', time.monotonic() + 30.0,
                                                 denoising_steps=steps)).result(30.0).branches[0][1] for steps in (1, 2)}
    for steps, future in futures.items():
        wanted = finish(driver.worker._session.what_if(turn, steps))
        np.testing.assert_array_equal(future.latents, wanted.latents)
    assert np.abs(futures[1].latents - futures[2].latents).max() > 0.01


def test_a_session_survives_the_way_through_a_file(driver, tmp_path):
    driver.tick()
    folder, name = SessionFolder(tmp_path), 'session.safetensors'
    driver.worker.save(folder, name, 10.0)
    driver.worker.load(folder, name, 10.0)
    assert driver.tick().tier is Tier.TWO_STEP
    (tmp_path / name).write_bytes(b'nonsense')
    with pytest.raises(SessionFileError, match='not a saved session'):
        driver.worker.load(folder, name, 10.0)
