"""The camera dialect: the flow of messages of vllm-omni's pull request 3701, its errors, and the extensions."""
import io
import json

import cv2
import numpy as np
import pytest
from camera_paths import camera, commands, path
from dataclasses import replace
from fake_service import FakeService, wait_for
from gateway_rig import TIMEOUT, client, gateway
from websockets.exceptions import ConnectionClosed

from worldmodel_ros.model.presets import TINY
from worldmodel_ros.serving.gateway import poses
from worldmodel_ros.serving.gateway.camera import PATH
from worldmodel_ros.serving.gateway.msgpack import decode, encode

IMAGE = np.random.default_rng(0).integers(0, 256, (96, 128, 3), dtype=np.uint8)
DRIVE = path(commands(60))


@pytest.fixture(scope='module')
def running(tmp_path_factory):
    with gateway(tmp_path_factory.mktemp('run'), FakeService(sessions=40)) as started:
        yield started


@pytest.fixture(autouse=True)
def fresh(running):
    running.service.answer = 'plan'
    running.service.ticks.clear()
    running.service.questions.clear()


class World:
    """A client, as the one of the pull request."""

    def __init__(self, connection):
        self.connection = connection
        self.config = decode(connection.recv(TIMEOUT))

    def send(self, **request):
        self.connection.send(encode(request))

    def heard(self):
        message = self.connection.recv(TIMEOUT)
        return message if isinstance(message, str) else decode(message)

    def infer(self, first, count, **changes):
        """Send poses of DRIVE; the messages until the last frame or the first error."""
        self.send(**{'prompt': 'walk', 'camera': camera(DRIVE[first:first + count]), **changes})
        messages = [self.heard()]
        while messages[-1]['type'] != 'error' and not (
                messages[-1]['type'] == 'frame' and messages[-1]['index'] == messages[-1]['total'] - 1):
            messages.append(self.heard())
        return messages


@pytest.fixture
def world(running):
    with client(running, PATH, ping_interval=None) as connection:
        yield World(connection)
        connection.send(encode({'endpoint': 'reset'}))
        assert connection.recv(TIMEOUT) == 'reset successful'


def test_the_first_message_is_the_configuration(world):
    config = world.config
    assert (config['patch_size'], config['vae_stride']) == ([1, 2, 2], [1, 8, 8])
    assert (config['latent_frames_per_chunk'], config['max_area'], config['fps']) == (4, 4096, 10.0)
    assert config['extensions']['frames'] == ['float32', 'uint8', 'jpeg', 'mp4']
    assert np.allclose(config['camera_in_base'], poses.mount_pose((0.10, 0.0, 0.25, 0.0, 0.1396, 0.0)))


def test_an_image_and_poses_are_answered_by_frames_in_parts(running, world):
    replies = world.infer(0, 25, image=IMAGE, session_id=None, extra_body={
        'height': 480, 'width': 832, 'num_frames': 25, 'fps': 16, 'session_id': None, 'frames_per_chunk': 4, 'seed': 42})
    assert [set(reply) for reply in replies] == [{'type', 'index', 'total', 'video'}] * 7
    assert [(reply['index'], reply['total'], len(reply['video'])) for reply in replies] == [
        *((k, 7, 4) for k in range(6)), (6, 7, 1)]
    video = np.concatenate([reply['video'] for reply in replies], axis=0)
    assert video.shape == (25, 64, 64, 3) and video.dtype == np.float32 and 0.0 <= video.min() <= video.max() <= 1.0
    tick, = running.service.ticks
    assert np.array_equal(video[0], tick.image * np.float32(1 / 255)) and tick.goal == ''
    (branch,), question = running.service.questions[0].branches, running.service.questions[0]
    assert np.allclose(branch.actions, commands(60)[:24], atol=1e-4) and question.keep and not question.onward


def test_the_next_request_goes_on_over_a_connection_of_its_own(running):
    for first, count, extra in ((0, 25, {'image': IMAGE}), (25, 24, {}), (49, 12, {})):
        with client(running, PATH) as connection:
            replies = World(connection).infer(first, count, session_id='walk', **extra)
            assert sum(len(reply['video']) for reply in replies) == count
    actions = np.concatenate([question.branches[0].actions for question in running.service.questions])
    assert np.allclose(actions, commands(60), atol=1e-4) and len(running.service.ticks) == 1
    assert [question.onward for question in running.service.questions] == [False, True, True]


def test_poses_that_are_no_whole_chunk_are_shown_and_imagined_again_with_the_next_ones(running, world):
    shown = [sum(len(reply['video']) for reply in world.infer(first, count, **extra)) for first, count, extra in (
        (0, 4, {'image': IMAGE}), (4, 2, {}), (6, 5, {}), (11, 2, {}))]
    assert shown == [4, 2, 5, 2]
    asked = [(len(q.branches[0].actions), q.keep, q.onward) for q in running.service.questions]
    assert asked == [(3, False, False), (4, True, False), (1, False, True), (4, True, True), (2, False, True),
                     (4, True, True)]
    kept = np.concatenate([q.branches[0].actions for q in running.service.questions if q.keep])
    assert np.allclose(kept, commands(60)[:12], atol=1e-4)


def test_cameras_is_understood_as_camera(world):
    world.send(prompt='', image=IMAGE, cameras=camera(DRIVE[:1]))
    assert world.heard()['video'].shape == (1, 64, 64, 3)


def test_a_reset_is_confirmed_by_a_text_and_the_next_request_needs_an_image(running, world):
    world.infer(0, 5, image=IMAGE)
    world.send(endpoint='reset')
    assert world.heard() == 'reset successful'
    assert 'send an image' in world.infer(5, 4)[0]['message']
    assert len(world.infer(0, 5, image=IMAGE)) == 2
    assert [tick.episode for tick in running.service.ticks] == sorted({tick.episode for tick in running.service.ticks})


def test_a_fresh_session_without_an_image_is_an_error_and_the_connection_stays(world):
    error, = world.infer(0, 5, session_id='nobody')
    assert error['type'] == 'error' and 'send an image' in error['message']
    assert world.infer(0, 5, image=IMAGE)[-1]['total'] == 2


@pytest.mark.parametrize('message', [b'\x99not-msgpack', encode([1, 2, 3]), encode(7)])
def test_what_is_no_request_is_an_error_and_the_connection_stays(world, message):
    world.connection.send('a text, which is not answered')
    world.connection.send(message)
    error = world.heard()
    assert error['type'] == 'error' and 'Invalid request payload' in error['message']


@pytest.mark.parametrize('changes, reason', [
    ({'camera': None}, 'camera must be a map'), ({'camera': {'poses': DRIVE[:2]}}, 'no intrinsics'),
    ({'image': IMAGE.astype(float)}, 'uint8 (H, W, 3)'), ({'extra_body': 3}, 'extra_body is a map'),
    ({'extra_body': {'frames_per_chunk': 0}}, 'frames_per_chunk'), ({'extra_body': {'num_frames': 3}}, 'more than num_frames'),
    ({'extra_body': {'fps': float('nan')}}, 'fps'), ({'prompt': 3}, 'are texts'), ({'endpoint': 'train'}, 'endpoint is'),
    ({'session_id': 'a b'}, 'session_id must be'), ({'extensions': {'frames': 'gif'}}, 'extensions are a map'),
    ({'extensions': {'sound': True}}, 'extensions are a map'), ({'camera': camera(DRIVE[[0, 20]])}, 'is missed by'),
    ({'event_id': 'e' * 129}, 'up to 128 characters'), ({'session_id': np.zeros(2)}, 'are texts'),
    ({'extra_body': np.zeros(3)}, 'extra_body is a map'), ({'extensions': {'frames': np.zeros(2)}}, 'extensions are a map'),
    ({'extensions': {'timings': 1}}, 'extensions are a map')])
def test_what_makes_no_sense_is_refused_with_the_reason_and_the_connection_stays(world, changes, reason):
    error, = world.infer(0, 5, **{'image': IMAGE, **changes})
    assert error['type'] == 'error' and reason in error['message']
    assert world.infer(0, 5, image=IMAGE)[-1]['total'] == 2


def test_a_path_that_is_refused_leaves_the_world_where_it_was(world):
    world.infer(0, 5, image=IMAGE)
    assert 'is missed by' in world.infer(30, 4)[0]['message']
    assert len(world.infer(5, 4)) == 1


def test_frames_come_as_it_was_asked_for(world):
    video = {}
    for encoding in ('float32', 'uint8', 'jpeg', 'mp4'):
        reply = world.infer(0, 4, image=IMAGE, extensions={'frames': encoding})[0]
        assert reply.get('encoding', 'float32') == encoding
        video[encoding] = reply['video']
    assert video['uint8'].dtype == np.uint8 and np.array_equal(video['uint8'] * np.float32(1 / 255), video['float32'])
    pictures = [cv2.imdecode(np.frombuffer(each, np.uint8), cv2.IMREAD_COLOR)[..., ::-1] for each in video['jpeg']]
    import av
    with av.open(io.BytesIO(video['mp4'])) as container:
        assert container.streams.video[0].codec_context.name == 'h264'
        film = [frame.to_ndarray(format='rgb24') for frame in container.decode(video=0)]
    for decoded in (pictures, film):
        assert np.shape(decoded) == (4, 64, 64, 3)
        assert np.abs(np.array(decoded[1:], int) - video['uint8'][1:]).mean() < 3  # the first one is noise
    assert world.infer(0, 4, image=IMAGE)[0]['encoding'] == 'mp4', 'the connection has agreed on it'


def test_an_event_gets_receipts_and_its_reply_again(running, world):
    world.infer(0, 5, image=IMAGE)
    first = world.infer(5, 8, event_id='turn')
    assert first[0] == {'type': 'receipt', 'event_id': 'turn', 'accepted': True}
    assert first[1] == {'type': 'receipt', 'event_id': 'turn', 'applied_in_chunk': 1}
    asked = len(running.service.questions)
    again = world.infer(5, 8, event_id='turn')
    assert len(running.service.questions) == asked
    assert [encode(reply) for reply in again] == [encode(reply) for reply in first]
    assert world.infer(13, 4, event_id='on')[1]['applied_in_chunk'] == 3
    error = world.infer(40, 4, event_id='far')
    assert [reply['type'] for reply in error] == ['error']  # it is not accepted


def test_a_connection_that_drops_while_frames_are_on_their_way_loses_nothing(running):
    running.service.delay = 0.3
    try:
        with client(running, PATH) as connection:
            world = World(connection)
            world.infer(0, 5, image=IMAGE, session_id='drop')
            world.send(prompt='', session_id='drop', event_id='step', camera=camera(DRIVE[5:9]))
            assert world.heard()['accepted']
            wait_for(lambda: len(running.service.questions) == 2)
            connection.socket.close()
        with client(running, PATH) as connection:
            again = World(connection).infer(5, 4, session_id='drop', event_id='step')
            assert len(again[-1]['video']) == 4 and len(running.service.questions) == 2
    finally:
        running.service.delay = 0.0


def test_frames_that_were_too_many_to_be_kept_are_not_waited_for_in_vain(world, monkeypatch):
    monkeypatch.setattr('worldmodel_ros.serving.gateway.camera._KEPT', 0)
    world.infer(0, 5, image=IMAGE, event_id='large')
    again = world.infer(0, 5, image=IMAGE, event_id='large')
    assert again[-1]['type'] == 'error' and 'large was answered, and its frames are not kept' in again[-1]['message']


def test_timings_rays_and_poses_come_with_the_frames_they_belong_to(world):
    asked = {'timings': True, 'rays': 'moment', 'poses': True, 'frames': 'uint8'}
    intrinsics = np.linspace(60, 90, 9)[:, None] * [1, 1, 0, 0] + [0, 0, 64, 48]  # of each frame its own
    replies = world.infer(0, 9, image=IMAGE, extensions=asked, camera={'poses': DRIVE[:9], 'intrinsics': intrinsics})
    assert [reply['chunk'] for reply in replies] == [0, 0, 1]
    for reply in replies:
        timings = reply['timings']
        assert set(timings) == {'queue_ms', 'observe_ms', 'imagine_ms', 'total_ms'}
        assert timings['observe_ms'] + timings['imagine_ms'] <= timings['total_ms'] + 1e-6
    reached = np.concatenate([reply['poses'] for reply in replies])
    assert np.allclose(reached, DRIVE[:9], atol=1e-6)
    rays = np.concatenate([reply['rays'] for reply in replies])
    fitted = poses.fitted(intrinsics, (96, 128), (64, 64))
    assert np.abs(rays - poses.pluecker(DRIVE[:9], fitted, (64, 64), 'moment')).max() < 1e-5


def test_worlds_of_several_sessions_do_not_mix(running):
    with client(running, PATH) as one, client(running, PATH) as two:
        worlds = World(one), World(two)
        for k, world in enumerate(worlds):
            world.infer(20 * k, 5, image=np.full((64, 64, 3), k, np.uint8), session_id=f'w{k}')
        for k, world in enumerate(worlds):
            assert len(world.infer(20 * k + 5, 4, session_id=f'w{k}')) == 1
        assert 'is missed by' in worlds[0].infer(25, 4, session_id='w0')[0]['message']
        assert len(worlds[0].infer(29, 4, session_id='w1')) == 1  # from one connection to the other's session


def test_a_session_of_the_other_dialect_is_not_taken(running, world):
    from gateway_rig import infer, robot
    with robot(running) as connection:
        infer(connection, session_id='robot')
        assert 'is a session of openpi' in world.infer(0, 5, image=IMAGE, session_id='robot')[0]['message']


def test_what_the_engine_cannot_imagine_is_an_error_and_the_world_begins_anew(running, world):
    world.infer(0, 5, image=IMAGE)
    running.service.ask, ask = lambda number, question: (_ for _ in ()).throw(ValueError('no')), running.service.ask
    try:
        assert world.infer(5, 4)[0]['type'] == 'error'
    finally:
        running.service.ask = ask
    assert 'send an image' in world.infer(5, 4)[0]['message']


def test_a_model_that_is_no_robot_is_refused_by_a_text_and_a_close(tmp_path):
    arm = replace(TINY, name='arm', action_names=('elbow', 'wrist'))
    with gateway(tmp_path, FakeService(arm)) as running, client(running, PATH) as connection:
        said = json.loads(connection.recv(TIMEOUT))
        assert said['type'] == 'error' and 'elbow, wrist of model arm' in said['error']
        with pytest.raises(ConnectionClosed):
            connection.recv(TIMEOUT)
