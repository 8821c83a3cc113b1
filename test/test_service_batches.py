"""Many sessions in one forward: the numbers of each alone, whatever their ages, steps and neighbours."""
import queue
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_model import SMALL, small_checkpoint

from worldmodel_ros.engine import load
from worldmodel_ros.engine.backends.torch import TorchBackend
from worldmodel_ros.engine.network_calls import Boundary, Call, Work, run, run_unit
from worldmodel_ros.engine.engine import Engine
from worldmodel_ros.engine.what_if import Branch, Question
from worldmodel_ros.kernels.pages import Precision
from worldmodel_ros.model.world_model import WorldModel
from worldmodel_ros.serving.scheduler import Tier
from worldmodel_ros.serving.service import calibration as service_calibration
from worldmodel_ros.serving.service.messages import Tick
from worldmodel_ros.serving.service.service import Service

ACTION = np.array([0.2, 0.4], np.float32)
CHUNK = np.tile(np.array([[0.3, 1.0]], np.float32), (SMALL.chunk_frames, 1))
AGES = (0, 1, 5, 9)


@pytest.fixture(scope='module')
def engine(tmp_path_factory):
    return load(str(small_checkpoint(tmp_path_factory.mktemp('model'))), 'torch', sessions=16)


def frames(count, seed):
    return np.random.default_rng(seed).integers(0, 256, (count, *SMALL.image_size, 3), dtype=np.uint8)


def driven(engine):
    """Sessions of different ages, seeds and pasts."""
    sessions = [engine.open_session(seed) for seed in range(len(AGES))]
    for seed, (session, age) in enumerate(zip(sessions, AGES)):
        for frame in frames(age, seed):
            session.observe(frame, ACTION)
    return sessions


def tick(session, frame, steps):
    yield Boundary('observe')
    yield from session.observing(frame, ACTION)
    plan = yield from session.planning('green')
    return plan, (yield from session.imagining(plan, steps))


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


def test_a_batch_of_ticks_gives_the_numbers_of_each_session_alone(engine):
    together, alone = driven(engine), driven(engine)
    for number in range(3):
        images = frames(len(AGES), 100 + number)
        works = [Work(tick(session, image, steps=2)) for session, image in zip(together, images)]
        for _ in range(3):
            assert run_unit(works, engine.backend) == [None] * len(works)
        for work, session, image in zip(works, alone, images):
            session.observe(image, ACTION)
            plan, future = work.result
            close(plan, session.plan('green'))
            expected = session.imagine(plan, steps=2)
            close(future.latents, expected.latents)
            close(future.collision_risk, expected.collision_risk)
            close(list(future.progress.values()), list(expected.progress.values()))


def test_different_steps_share_a_forward(engine):
    """A first half step, a second one and a whole step at once: the noise level enters by session."""
    sessions = driven(engine)[1:]
    works = [Work(session.imagining(CHUNK, steps)) for session, steps in zip(sessions, (2, 2, 1))]
    assert run_unit(works[:1], engine.backend) == [None]
    assert run_unit(works, engine.backend) == [None] * 3
    assert [work.boundary for work in works] == [None, Boundary('denoise', 1), None]
    assert run_unit(works[1:2], engine.backend) == [None]
    for work, session, steps in zip(works, sessions, (2, 2, 1)):
        close(work.result.latents, session.imagine(CHUNK, steps).latents)


def test_branches_of_several_questions_in_one_batch_are_the_branches_of_each(engine):
    sessions = driven(engine)[1:]
    asked = [(session, scale * np.repeat(CHUNK, 2, 0)) for session in sessions for scale in (1, -1)]
    works = [Work(session.branching(actions)) for session, actions in asked]
    while works[0].boundary:
        assert run_unit(works, engine.backend) == [None] * len(works)
    for work, (session, actions) in zip(works, asked):
        expected = run(session.branching(actions), engine.backend)
        close(work.result.latents, expected.latents)
        assert np.abs(work.result.frames.astype(int) - expected.frames).max() <= 1  # a pixel may round the other way


def test_work_that_fails_between_networks_leaves_its_neighbours_alone(engine):
    def failing(session):
        yield Boundary('observe')
        yield from session.observing(frames(1, 3)[0], ACTION)
        raise RuntimeError('no more')
    good, bad, alone = (engine.open_session() for _ in range(3))
    works = [Work(tick(good, frames(1, 2)[0], 1)), Work(failing(bad))]
    errors = run_unit(works, engine.backend)
    assert errors[0] is None and str(errors[1]) == 'no more'
    alone.observe(frames(1, 2)[0], ACTION)
    run_unit(works[:1], engine.backend)
    close(works[0].result[0], alone.plan('green'))


def test_a_network_that_fails_leaves_every_session_of_its_batch_as_it_was(engine, monkeypatch):
    sessions, untouched = driven(engine), driven(engine)
    used = engine.memory.pool.allocator.usage().used
    works = [Work(tick(session, image, 2)) for session, image in zip(sessions, frames(len(AGES), 7))]
    with monkeypatch.context() as patch:
        whole = engine.backend.run
        patch.setattr(engine.backend, 'run',
                      lambda network, batch: whole(network, batch) if network == 'encode' else 1 / 0)
        assert all(isinstance(error, ZeroDivisionError) for error in run_unit(works, engine.backend))
    assert engine.memory.pool.allocator.usage().used == used
    for session, other in zip(sessions, untouched):
        for each in (session, other):
            each.observe(frames(1, 8)[0], ACTION)
        close(session.plan('red'), other.plan('red'))


def test_work_says_where_it_begins_and_closes_what_it_holds():
    closed = []

    def calls():
        try:
            yield Boundary('decode')
            yield Call('decode', ())
        finally:
            closed.append(True)
    work = Work(calls())
    assert work.boundary == Boundary('decode')
    work.close()
    assert closed and work.boundary is None

    def without():
        yield Call('decode', ())
    with pytest.raises(ValueError, match='begin with a boundary'):
        Work(without())


def test_bfloat16_stays_near_float32():
    """The DiT and its pages in bfloat16: what a GPU is given."""
    preset = replace(SMALL, image_size=(64, 64))  # pages of bfloat16 have 16 tokens
    latents = []
    for precision in Precision.FP32, Precision.BF16:
        torch.manual_seed(0)
        backend = TorchBackend(WorldModel(preset), precision=precision)
        session = Engine(backend, None, 1).open_session()
        for frame in np.random.default_rng(0).integers(0, 256, (8, 64, 64, 3), dtype=np.uint8):
            session.observe(frame, ACTION)
        latents.append(session.imagine(CHUNK).latents)
    assert np.abs(latents[0] - latents[1]).max() < 0.05 * np.abs(latents[0]).max() + 1e-3


class Listener:
    def __init__(self):
        self.replies, self.pictures, self.failures = queue.Queue(), queue.Queue(), []

    def replied(self, reply):
        self.replies.put(reply)

    def pictured(self, picture):
        self.pictures.put(picture)

    def failed(self, reason, error):
        self.failures.append(reason)


def test_the_service_answers_in_real_time_what_sessions_alone_answer(engine, monkeypatch):
    """Real networks, the real thread, ticks of three robots at once and questions between them."""
    monkeypatch.setattr(service_calibration, 'RUNS', 3)
    monkeypatch.setattr(engine.backend, 'sizes', (1, 2, 4))
    service = Service(engine)
    service.start()
    try:
        clients = [Listener() for _ in range(3)]
        numbers = [service.open(client, seed) for seed, client in enumerate(clients)]
        alone = [engine.open_session(seed) for seed in range(3)]
        for number in range(3):
            images = frames(3, 50 + number)
            for session, image in zip(numbers, images):
                service.tick(session, Tick(image, ACTION, time.monotonic() + 20.0, number, number + 1, goal='blue'))
            for client, single, image in zip(clients, alone, images):
                single.observe(image, ACTION)
                reply = client.replies.get(timeout=20.0)
                assert (reply.sequence, reply.tier) == (number, Tier.TWO_STEP), reply.reason
                close(reply.plan, single.plan('blue'))
                future = single.imagine(reply.plan)
                close(reply.collision_risk, future.collision_risk)
                picture = client.pictures.get(timeout=20.0)
                assert np.abs(picture.future.frames.astype(int) - single.decode(future)).max() <= 1
        turn = np.repeat(CHUNK, 2, 0)
        for steps in (2, 1):
            promise = service.ask(numbers[1], Question((Branch('a', 8, turn), Branch('b', 8, -turn)), 'blue',
                                                       time.monotonic() + 30.0, denoising_steps=steps))
            answer = promise.result(40.0)
            assert answer.complete
            for (_, future), actions in zip(answer.branches, (turn, -turn)):
                close(future.latents, run(alone[1].branching(actions, steps), engine.backend).latents)
        assert not any(client.failures for client in clients) and service.stats()['ticks'] == 9
    finally:
        service.stop()


def test_a_service_whose_calibration_fails_says_so_at_the_start(engine, monkeypatch):
    monkeypatch.setattr(engine.backend, 'run', lambda network, batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Service(engine).start()
