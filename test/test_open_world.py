"""Open world models for a robot: what a session imagines, forks, observes and keeps, and the thread that runs it."""
import json
import math
import queue
import shutil
import time
from importlib.util import find_spec

import numpy as np
import open_world
import pytest
import torch

from worldmodel_ros.cache.pool import OutOfPages
from worldmodel_ros.engine.loading import is_world
from worldmodel_ros.engine.open_world.description import WorldDescription, optical_frame
from worldmodel_ros.engine.open_world.ladder import Rung
from worldmodel_ros.engine.open_world.session import WorldSession, to_uint8, to_vae
from worldmodel_ros.engine.open_world.worker import PERIOD, Seen, WorldWorker
from worldmodel_ros.engine.open_world.world import OpenWorld
from worldmodel_ros.engine.session_folder import SessionFileError, SessionFolder
from worldmodel_ros.engine.what_if import Branch, Question, QuestionError
from worldmodel_ros.model.checkpoint_description import ModelError
from worldmodel_ros.model.wan.camera import Intrinsics

pytestmark = pytest.mark.skipif(find_spec('diffusers') is None, reason='diffusers is not installed: extra [wan]')
H, W = open_world.SIZE
PINHOLE = Intrinsics(30.0, 30.0, 24.0, 16.0)
LEFT, RIGHT, STILL = (0.3, 1.0), (0.3, -1.0), (0.0, 0.0)
DEADLINE = 120.0  # s, for anything to happen on a busy machine


@pytest.fixture(scope='module')
def world(tiny_world):
    return OpenWorld.load(tiny_world)


def image(number=0, count=None):
    shape = (H, W, 3) if count is None else (count, H, W, 3)
    return np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)


def along(session, yaw, steps):
    """Poses of so many latent frames that turn and go forward from where the session is."""
    poses = [session.pose]
    for _ in range(steps):
        step = np.eye(4)
        step[[0, 0, 2, 2], [0, 2, 0, 2]] = np.cos(yaw), np.sin(yaw), -np.sin(yaw), np.cos(yaw)
        step[2, 3] = 0.1
        poses.append(poses[-1] @ step)
    return np.stack(poses[1:])


def chunk(session, yaw=0.1):
    return session.imagine(along(session, yaw, session.images_of_chunk // 4), PINHOLE)


def begun(world, observed=0):
    session = world.open(image(), np.eye(4))
    for number in range(observed):
        count = session.images_of_chunk
        session.observe(image(100 + number, count), along(session, 0.05, count // 4), PINHOLE)
    return session


def test_a_chunk_follows_an_image_and_chunks_follow_each_other(world):
    session = begun(world)
    first, second = chunk(session), chunk(session)
    assert first.shape == (8, H, W, 3) and second.shape == (12, H, W, 3) and first.dtype == np.uint8
    assert session.frame == 6 and len({frame.tobytes() for frame in (*first, *second)}) == 20
    session.close()
    again = begun(world)
    assert np.array_equal(chunk(again), first) and np.array_equal(chunk(again), second)
    again.close()
    assert world.pages.pool.allocator.usage().used == 0


def test_no_more_sessions_are_open_than_it_was_loaded_for(world):
    session = begun(world)
    with pytest.raises(OutOfPages, match='1 sessions'):
        begun(world)
    with pytest.raises(OutOfPages, match='1 sessions'):
        WorldSession.load(world, session.save())
    session.close()
    session = begun(world)
    del session  # its pages are free with it
    begun(world).close()


@pytest.mark.parametrize('observed', [0, 2])
def test_forks_share_what_was_and_differ_by_their_cameras(world, observed):
    session = begun(world, observed)
    used = world.pages.pool.allocator.usage().used
    left, right = session.fork(), session.fork()
    assert world.pages.pool.allocator.usage().used == used  # nothing was copied
    to_left, to_right = chunk(left, 0.3), chunk(right, -0.3)
    assert not np.array_equal(to_left, to_right) and session.frame == 3 * observed
    left.close(), right.close()
    assert np.array_equal(chunk(session, 0.3), to_left)
    session.close()


def test_what_is_imagined_after_observed_images_depends_on_them(world):
    futures = []
    for offset in (0, 1):
        session = world.open(image(), np.eye(4))
        session.observe(image(7 + offset, 8), along(session, 0.0, 2), PINHOLE)
        futures.append(chunk(session))
        with pytest.raises(ValueError, match='fork before imagining'):
            session.observe(image(9, 12), along(session, 0.0, 3), PINHOLE)
        session.close()
    assert futures[0].shape == (12, H, W, 3) and not np.array_equal(*futures)


def test_what_does_not_fit_is_refused_and_changes_nothing(world):
    session = begun(world)
    for images, poses in ((image(1, 7), np.tile(np.eye(4), (2, 1, 1))), (image(1, 8), np.tile(np.eye(4), (3, 1, 1))),
                          (image(1, 8), np.full((2, 4, 4), math.nan))):
        with pytest.raises(ValueError, match='images|poses'):
            session.observe(images, poses, PINHOLE)
    with pytest.raises(ValueError, match='image must be uint8'):
        world.open(image()[:-1], np.eye(4))
    wanted = chunk(session)
    session.close()
    session = begun(world)
    assert np.array_equal(chunk(session), wanted)
    session.close()


@pytest.mark.parametrize('past', ['image', 'observed', 'imagined'])
def test_a_saved_session_goes_on_bit_for_bit_with_the_states_of_the_vae(world, past):
    session = begun(world, 2 if past == 'observed' else 0)
    if past == 'imagined':
        chunk(session), chunk(session)
    content = session.save()
    wanted = chunk(session)
    session.close()
    again = WorldSession.load(world, content)
    assert np.array_equal(chunk(again), wanted)
    again.close()


def test_observing_goes_on_after_a_session_was_loaded(world):
    session = begun(world, 1)
    content = session.save()
    futures = []
    for saved in (False, True):
        current = WorldSession.load(world, content) if saved else session
        current.observe(image(50, 12), along(current, 0.1, 3), PINHOLE)
        futures.append(chunk(current))
        current.close()
    assert np.array_equal(*futures)


def test_damaged_sessions_and_those_of_another_world_are_refused(world, tiny_world, tmp_path):
    session = begun(world, 1)
    content = session.save()
    session.close()
    half = len(content) // 2
    for damaged in (b'', content[:-1], content[:half] + bytes([content[half] ^ 1]) + content[half + 1:],
                    content.replace(b'"imagined":"0"', b'"imagined":"1"'), b'\xff' * 64):
        with pytest.raises(SessionFileError, match='no session of an open world'):
            WorldSession.load(world, damaged)
    other = OpenWorld.load(open_world.write(tmp_path / 'other', size=[48, 32]))
    with pytest.raises(SessionFileError, match='another world'):
        WorldSession.load(other, content)
    assert world.pages.pool.allocator.usage().used == 0


@pytest.mark.parametrize(('changes', 'message'), [
    ({'size': [30, 48]}, 'whole tokens'), ({'top_speed': None}, 'top_speed'), ({'text': None}, 'text_encoder'),
    ({'preset': 'unheard_of'}, 'choose one of'), ({'speed': 1}, 'unknown: speed'), ({'camera_in_base': [0, 0]}, 'roll'),
    ({'chunk_frames': None}, 'name a preset'), ({'schedule': {'kind': 'unipc', 'steps': [1000], 'shift': 5}}, 'of 1,000'),
    ({'window_frames': 5}, 'no room'), ({'chunk_frames': 1}, 'chunk_frames is 1: it must be 2 or more'),
    ({'vae': 'nowhere'}, 'no VAE can be read'), ({'text': 'nowhere'}, 'no rows of a text')])
def test_a_description_that_does_not_fit_is_refused_with_the_remedy(tiny_world, tmp_path, changes, message):
    files = {'checkpoint': str(tiny_world), 'vae': str(tiny_world / 'vae'),
             'text': str(tiny_world / 'text' / 'rows.safetensors')}
    described = {key: value for key, value in {**open_world.WORLD, **files, **changes}.items() if value is not None}
    (tmp_path / 'world.json').write_text(json.dumps(described))
    with pytest.raises(ModelError, match=message):
        OpenWorld.load(tmp_path)


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
    return open_world.write(tmp_path_factory.mktemp('worlds') / 'two_networks', networks=2)


def test_two_networks_share_the_steps_of_a_session_and_forks_and_files_keep_both(pair, world):
    both = OpenWorld.load(pair)
    asked = []
    for index, network in enumerate(both.sampler.experts.networks):
        network.register_forward_pre_hook(lambda module, inputs, index=index: asked.append(index))
    session, alone = (each.open(image(), np.eye(4)) for each in (both, world))
    assert not np.array_equal(chunk(session), chunk(alone)) and asked == [0, 1]
    alone.close()
    kept, fork = session.save(), session.fork()
    wanted = chunk(session)
    assert np.array_equal(chunk(fork), wanted)
    fork.close()
    session.close()
    assert all(owner.pool.allocator.usage().used == 0 for owner in both.pages.owners)
    again = WorldSession.load(both, kept)
    assert again.frame == 3 and np.array_equal(chunk(again), wanted)
    again.close()
    with pytest.raises(SessionFileError, match='another world'):
        WorldSession.load(world, kept)


def test_a_robot_is_predicted_for_by_two_networks_in_fp8(pair):
    with Robot(OpenWorld.load(pair, 'torch-fp8'), observes=True) as robot:
        robot.show(9, LEFT)
        while robot.predictions.get(timeout=DEADLINE)[0].sequence < 9:
            pass
        answer = robot.ask([LEFT] * 4, [RIGHT] * 4)
        assert answer.complete and not np.array_equal(*(branch.frames for _, branch in answer.branches))
    assert not robot.failures


@pytest.mark.parametrize(('changes', 'message'), [
    ({'devices': ['cpu']}, 'devices are two names'), ({'devices': ['cpu', 'gpu']}, 'cannot be placed on cpu, gpu'),
    ({'boundary': 1.5}, 'between 0 and 1'), ({'boundary': 'high'}, 'could not convert')])
def test_two_networks_that_are_described_wrongly_are_refused(pair, tmp_path, changes, message):
    described = json.loads((pair / 'world.json').read_text())
    paths = {'checkpoint': str(pair), 'vae': str(pair / 'vae'), 'text': str(pair / 'text' / 'rows.safetensors')}
    (tmp_path / 'world.json').write_text(json.dumps(described | paths | changes))
    with pytest.raises(ModelError, match=message):
        OpenWorld.load(tmp_path)


def test_one_network_has_no_boundary(tiny_world, tmp_path):
    described = json.loads((tiny_world / 'world.json').read_text())
    paths = {'checkpoint': str(tiny_world), 'vae': str(tiny_world / 'vae'),
             'text': str(tiny_world / 'text' / 'rows.safetensors')}
    (tmp_path / 'world.json').write_text(json.dumps(described | paths | {'boundary': 0.9}))
    with pytest.raises(ModelError, match='has one network'):
        OpenWorld.load(tmp_path)


def test_worlds_are_told_from_other_models(tiny_world, tmp_path):
    assert is_world(str(tiny_world)) and not is_world('tiny') and not is_world(str(tmp_path))
    with pytest.raises(ModelError, match='back end'):
        OpenWorld(WorldDescription.read(tiny_world), 'onnx-int8')


def test_a_camera_that_looks_ahead_has_its_axes_in_the_base():
    pose = optical_frame([1.0, 2.0, 3.0, 0.0, 0.0, math.pi / 2])
    assert np.allclose(pose @ [0, 0, 1, 1], [1, 3, 3, 1]) and np.allclose(pose @ [0, 1, 0, 1], [1, 2, 2, 1])
    assert np.allclose(optical_frame([0, 0, 0, 0, math.pi / 2, 0])[:3, 2], [0, 0, -1])  # looks down


def test_images_come_back_from_the_range_of_the_vae():
    images = image(3, 2)
    assert np.array_equal(to_uint8(to_vae(images, torch.device('cpu'))), images)


class Robot:
    """A worker, what it predicts, and images at the rate of the video."""

    def __init__(self, world, **options):
        self.predictions, self.failures = queue.Queue(), []
        self.worker = WorldWorker(world, lambda *got: self.predictions.put(got), self.failures.append, **options)
        self.number, self.base = 0, np.eye(4)

    def __enter__(self):
        self.worker.start()
        return self

    def __exit__(self, *exception):
        self.worker.stop()

    def show(self, count=1, twist=STILL, episode=0):
        for _ in range(count):
            self.number += 1
            self.base = self.base.copy()
            self.base[0, 3] += twist[0] * PERIOD
            self.worker.submit(Seen(image(self.number), round(self.number * PERIOD * 1e9), time.monotonic(), self.base,
                                    np.float32(twist), PINHOLE, episode, self.number))

    def ask(self, *branches, seconds=DEADLINE, **options):
        branches = tuple(Branch(str(at), len(actions), np.float32(actions)) for at, actions in enumerate(branches))
        question = Question(branches, '', time.monotonic() + seconds, **options)
        return self.worker.ask(question).result(DEADLINE)


def test_each_prediction_is_anchored_in_the_newest_image(world):
    with Robot(world, chunks=2) as robot:
        robot.show(twist=LEFT)
        seen, future, made = robot.predictions.get(timeout=DEADLINE)
        assert seen.sequence == 1 and made.seconds > 0.0 and made.rung == Rung(2, True) and future.frames.shape == (20, H, W, 3)
        assert np.allclose(future.actions, LEFT)
        answer = robot.ask([LEFT] * 8, [LEFT] * 3, [RIGHT] * 3)
        assert answer.complete and answer.stamp == seen.stamp
        by_name = {name: branch.frames for name, branch in answer.branches}
        assert np.array_equal(by_name['0'], future.frames[:8])
        assert len(by_name['1']) == len(by_name['2']) == 3 and not np.array_equal(by_name['1'], by_name['2'])
        robot.show()
        assert robot.predictions.get(timeout=DEADLINE)[0].sequence == 2
    assert not robot.failures and world.pages.pool.allocator.usage().used == 0


def test_a_prediction_that_would_be_late_has_fewer_steps_or_is_of_the_smaller_model(world, tiny_world, tmp_path):
    other = shutil.copytree(tiny_world, tmp_path / 'large')
    described = json.loads((other / 'world.json').read_text())
    (other / 'world.json').write_text(json.dumps(described | {'smaller': str(tiny_world)}))
    large = OpenWorld.load(other)
    assert large.smaller.spec.image_size == large.spec.image_size
    with Robot(large, deadline=1e-6) as robot:  # whatever is known is late, what is not known yet is tried
        made = []
        for _ in range(6):
            robot.show(twist=LEFT)
            seen, future, how = robot.predictions.get(timeout=DEADLINE)
            made.append(how)
            assert future.frames.shape == (8, H, W, 3)
        rungs = Rung(2, True), Rung(2, True, True), Rung(1, False, True)
        assert [how.rung for how in made] == [rung for rung in rungs for _ in range(2)]  # the first time of each is not known
        assert made[0].expected == made[1].expected == 0.0 < made[-1].expected and not robot.failures
        assert robot.ask([LEFT] * 8).complete  # by the model that saw the newest image
    assert large.pages.pool.allocator.usage().used == large.smaller.pages.pool.allocator.usage().used == 0
    with Robot(large, observes=True, deadline=1e-6) as robot:  # one model's pages alone hold what was observed
        robot.show()
        assert robot.predictions.get(timeout=DEADLINE)[2].rung == Rung(2, True)
        robot.show(8)
        assert robot.predictions.get(timeout=DEADLINE)[2].rung == Rung(2, True)
        robot.show(12)
        assert robot.predictions.get(timeout=DEADLINE)[2].rung == Rung(1, False)
    (other / 'world.json').write_text(json.dumps(described | {'smaller': str(tiny_world), 'size': [48, 48]}))
    with pytest.raises(ModelError, match='give both the same size'):
        OpenWorld.load(other)


def test_observed_images_are_committed_chunk_by_chunk_and_a_gap_begins_again(world):
    with Robot(world, observes=True) as robot:
        robot.show()
        assert robot.predictions.get(timeout=DEADLINE)[0].sequence == 1  # the image alone
        robot.show(8)
        seen, future, _ = robot.predictions.get(timeout=DEADLINE)
        assert seen.sequence == 9 and future.frames.shape == (12, H, W, 3)
        assert robot.worker._session.frame == 3
        robot.show(11)
        robot.show(1, episode=0)
        assert robot.predictions.get(timeout=DEADLINE)[0].sequence == 21 and robot.worker._session.frame == 6
        robot.number += 30
        robot.show()
        assert robot.predictions.get(timeout=DEADLINE)[0].sequence == 52 and robot.worker._session.frame == 0
        robot.show(1, episode=1)
        assert robot.predictions.get(timeout=DEADLINE)[0].episode == 1 and robot.worker._session.frame == 0
    assert not robot.failures


def test_a_machine_that_cannot_keep_up_begins_again_with_the_newest_image(world, monkeypatch):
    with Robot(world, observes=True) as robot:
        robot.show()
        robot.predictions.get(timeout=DEADLINE)
        with monkeypatch.context() as patch:
            observe = WorldSession.observe
            patch.setattr(WorldSession, 'observe', lambda *arguments: (time.sleep(0.5), observe(*arguments)))
            robot.show(8)
            time.sleep(0.2)
            robot.show(37)  # the last of them is more than three chunks behind
            robot.predictions.get(timeout=DEADLINE)
            assert robot.predictions.get(timeout=DEADLINE)[0].sequence == 46
        assert robot.worker._session.frame == 0
    assert not robot.failures


def test_sessions_are_kept_in_files_while_images_are_observed(world, tmp_path):
    kept = SessionFolder(tmp_path / 'sessions')
    with Robot(world, observes=True) as robot:
        with pytest.raises(SessionFileError, match='no image'):
            robot.worker.save(kept, 'a.safetensors', 1.0)
        robot.show(9)
        while robot.predictions.get(timeout=DEADLINE)[0].sequence < 9:
            pass
        wanted = robot.ask([LEFT] * 4)
        assert 'bytes' in robot.worker.save(kept, 'a.safetensors', 1.0)
        robot.show(12)
        robot.predictions.get(timeout=DEADLINE)
        robot.worker.load(kept, 'a.safetensors', 1.0)
        assert robot.worker._session.frame == 3
        assert np.array_equal(robot.ask([LEFT] * 4).branches[0][1].frames, wanted.branches[0][1].frames)
    with Robot(world) as robot, pytest.raises(SessionFileError, match='world_observes'):
        robot.worker.load(kept, 'a.safetensors', 1.0)


def test_a_session_from_a_file_goes_on_by_the_odometry_of_now(world, tmp_path):
    kept, answers = SessionFolder(tmp_path / 'sessions'), []
    for start in (0.0, 50.0):  # m; the odometry has another origin since the robot was switched on again
        with Robot(world, observes=True) as robot:
            robot.base[0, 3] = start
            robot.show(9)
            while robot.predictions.get(timeout=DEADLINE)[0].sequence < 9:
                pass
            if start:
                robot.worker.load(kept, 'a.safetensors', 1.0)
            else:
                robot.worker.save(kept, 'a.safetensors', 1.0)
            answers.append(robot.ask([LEFT] * 4).branches[0][1].frames)
    assert np.abs(np.subtract(*answers, dtype=int)).max() <= 1  # of 255: places are rounded


def test_questions_that_cannot_be_answered_say_why(world):
    with Robot(world) as robot:
        with pytest.raises(QuestionError, match='no image'):
            robot.ask([LEFT])
        with pytest.raises(QuestionError, match='have none'):
            robot.worker.ask(Question((Branch('policy', 3),), '', time.monotonic() + 1.0))
        with pytest.raises(QuestionError, match='at most'):
            robot.ask([LEFT] * 300)
        robot.show()
        robot.predictions.get(timeout=DEADLINE)
        with pytest.raises(QuestionError, match='not that of the image'):
            robot.ask([LEFT], stamp=12345)
        late = robot.ask([LEFT] * 240, seconds=0.0)
        assert not late.complete and not late.branches


def test_a_failure_is_told_and_the_next_image_is_predicted_from(world, monkeypatch):
    with Robot(world) as robot:
        with monkeypatch.context() as patch:
            patch.setattr(WorldSession, 'imagine', lambda *arguments: 1 / 0)
            robot.show()
            end = time.monotonic() + DEADLINE
            while not robot.failures and time.monotonic() < end:
                time.sleep(0.01)
        robot.show()
        assert robot.predictions.get(timeout=DEADLINE)[0].sequence == 2
    assert isinstance(robot.failures[0], ZeroDivisionError) and world.pages.pool.allocator.usage().used == 0
