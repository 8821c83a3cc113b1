"""A model over tiles where robots use it: the node with its services, ``worldmodel serve``, and pages that two robots of one
room share."""
import json
import subprocess
import sys
import time
from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch
from fake_service import wait_for_socket
from tiled_model import TILED, decided, tiled_model
from world_model_rig import MOTION, rig

from worldmodel_ros.cache.stores.host import HostStore
from worldmodel_ros.engine import load
from worldmodel_ros.engine.session_store import SessionLog, read_newest
from worldmodel_ros.model import checkpoint
from worldmodel_ros.serving.client.link import open_link
from worldmodel_ros.serving.transport import messages, pictures
from worldmodel_ros.srv import SessionFile, WhatIf

pytestmark = pytest.mark.usefixtures('one_thread')
PRESET = replace(TILED, name='tiled-serving-test', image_size=(64, 64), depth=2, window_frames=12, heading_pairs=4)
EXECUTED = np.float32([0.1, 0.6])
TIMEOUT = 120.0  # s, for a model to load on a busy machine


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('tiled')
    checkpoint.save(decided(tiled_model(PRESET)), folder, {'trained': False}, dtype=torch.float32)
    return folder


def images(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *PRESET.image_size, 3), dtype=np.uint8)


@pytest.mark.ros
@pytest.mark.waiting(seconds=6)
def test_the_node_drives_answers_what_if_and_takes_up_a_saved_session(folder, tmp_path):
    with rig('configure', 'activate', goal='red', load_engine=load, model=str(folder), backend='torch', deadline_s=1.0,
             camera_timeout_s=60.0, session_directory=str(tmp_path)) as node:
        node.film_until(lambda: any(message.tier in MOTION for message in node.messages()), 'a command')
        answer = node.call(WhatIf, 'what_if', WhatIf.Request(names=['left', 'right', 'policy'], horizon=0.8), timeout=60.0)
        assert answer.success, answer.message
        assert [(branch.name, len(branch.frames)) for branch in answer.branches] == [('left', 8), ('right', 8), ('policy', 8)]
        left, right, _ = (cv2.imdecode(np.frombuffer(branch.frames[-1].data, np.uint8), cv2.IMREAD_COLOR)
                          for branch in answer.branches)
        assert left.shape == right.shape == (*PRESET.image_size, 3) and (left != right).any()
        for service in ('save_session', 'load_session'):
            done = node.call(SessionFile, service, SessionFile.Request(path='tiled.safetensors'), timeout=60.0)
            assert done.success, done.message
        before = node.messages()[-1].sequence
        node.film_until(lambda: any(message.tier in MOTION and message.sequence > before for message in node.messages()),
                        'a command after it')


@pytest.mark.waiting(seconds=6)
def test_a_served_robot_gets_the_plans_that_a_session_of_its_own_would_make(folder, tmp_path):
    path, session = tmp_path / 'engine.sock', load(str(folder), 'torch', sessions=1).open_session()
    command = [sys.executable, '-m', 'worldmodel_ros.cli', 'serve', '--socket', str(path)]
    options = ['--model', str(folder), '--backend', 'torch', '--sessions', '2', '--ticks', '0', '--realtime-priority',
               '0']
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for_socket(process, path, TIMEOUT)
            link = open_link(path, '/robot', PRESET)
            for number, frame in enumerate(images(20), 1):  # beyond the window, so that slabs are evicted
                link.slots.write(0, number, frame)
                deadline = time.monotonic() + 20.0
                link.connection.send(messages.Tick(number, 0, number, 1, PRESET.goals[0], deadline, True, EXECUTED))
                while not isinstance(message := receive(link), messages.Planned):
                    assert isinstance(message, messages.Imagined), message
                session.observe(frame, EXECUTED)
                np.testing.assert_allclose(message.plan, session.plan(PRESET.goals[0]), atol=1e-4)
            status = json.loads(subprocess.check_output([*command, '--status'], text=True))
            assert status['robots'][0]['ticks'] == 20
            link.connection.close()
        finally:
            process.terminate()
            process.communicate(timeout=TIMEOUT)


def receive(link):
    message, descriptor = link.connection.receive(TIMEOUT)
    if descriptor is not None:
        assert pictures.take(descriptor).shape == (PRESET.chunk_frames, *PRESET.image_size, 3)
    return message


def test_two_robots_of_one_room_share_its_pages_until_each_goes_its_own_way(folder):
    engine = load(str(folder), 'torch', sessions=2)
    first, second, store = engine.open_session(), engine.open_session(), HostStore()
    for frame in images(18):
        first.observe(frame, EXECUTED)
    used = [pool.allocator.usage().used for pool in engine.memory.pools]
    saved = SessionLog(store, 'room', 1, index=engine.slab_index).checkpoint(first.capture(), {})
    for _ in saved.pieces():
        pass
    saved.write()
    stored = engine.stored_session(store)
    read_newest(store, 'room', stored)
    for _ in stored.pieces():
        pass
    second.restore(stored)
    more = [pool.allocator.usage().used - before for pool, before in zip(engine.memory.pools, used)]
    tiles = engine.memory.layout.tiles
    assert sum(more) <= tiles < sum(used)  # all but the newest slab, which may still be written
    chunk = np.tile(EXECUTED, (PRESET.chunk_frames, 1))
    np.testing.assert_array_equal(second.imagine(chunk).latents, first.imagine(chunk).latents)
    before = first.imagine(chunk).latents
    for frame in images(3, seed=5):
        second.observe(frame, -EXECUTED)
    np.testing.assert_array_equal(first.imagine(chunk).latents, before)
    assert np.abs(second.imagine(chunk).latents - before).max() > 1e-3
