"""A robot that decides on a forecast, with its world model in another process: ``worldmodel serve``, paused and killed."""
import os
import signal
import subprocess
import sys

import cv2
import numpy as np
import pytest
from fake_service import serving, wait_for_socket
from small_model import small_checkpoint
from test_world_model_node_deciding import forecasts, newest
from world_model_rig import MOTION, active, stamp_of, wait_for

from worldmodel_ros.nodes.common import diagnostics
from worldmodel_ros.srv import WhatIf

pytestmark = [pytest.mark.ros, pytest.mark.waiting(seconds=10)]
TIMEOUT = 120.0  # s, for a model to load on a busy machine


@pytest.fixture(scope='module')
def path(tmp_path_factory):
    return tmp_path_factory.mktemp('run') / 'engine.sock'


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    return small_checkpoint(tmp_path_factory.mktemp('model'))


def serve(path, model):
    command = [sys.executable, '-m', 'worldmodel_ros.cli', 'serve', '--socket', str(path), '--model', str(model)]
    process = subprocess.Popen([*command, '--backend', 'torch', '--realtime-priority', '0'], stderr=subprocess.PIPE, text=True)
    wait_for_socket(process, path, TIMEOUT)
    return process


def size(frames):
    return cv2.imdecode(np.frombuffer(frames[0].data, np.uint8), cv2.IMREAD_COLOR).shape[:2]


def test_every_command_comes_while_the_server_imagines_hangs_dies_and_comes_back(path, model):
    process = serve(path, model)
    try:
        with active(load_forecast=forecasts, forecast='some forecast', server=str(path), deadline_s=0.3,
                    camera_timeout_s=60.0) as node:
            def backend():
                return node.subject._activation.worker.backend

            def film(seconds):
                """Return the commands to the images of so long, and to more until most of so many are answered."""
                before = len(node.messages())
                node.film(seconds)
                node.film_until(lambda: len(node.messages()) >= before + int(8 * seconds), 'answers to most images')
                return node.messages()[before:]

            def images():
                return [message for message in node.messages('predicted_future') if message.decision.chosen]

            wait_for(lambda: backend() == 'torch-cpu of the server', 'the session')
            commands = {stamp_of(each): list(each.values) for each in film(2.0)}
            shown = wait_for(images, 'images of the server')[-1]
            assert list(shown.actions.values) == commands[stamp_of(shown)]
            # Of the own model they would be as large as its own ones.
            assert size(shown.frames) == (32, 32)
            answer = node.call(WhatIf, 'what_if', WhatIf.Request(names=['left'], horizon=0.3))
            assert answer.success and len(answer.branches[0].terms), answer.message
            assert size(answer.branches[0].frames) == (32, 32)
            all_commands = film(0.5)
            os.kill(process.pid, signal.SIGSTOP)
            all_commands += film(1.0)
            assert backend() == 'fake'
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            all_commands += film(0.5)
            assert size(images()[-1].frames) == (64, 64)
            process = serve(path, model)
            wait_for(lambda: film(0.2) and backend() == 'torch-cpu of the server', 'the server to be used again', TIMEOUT)
            seen = len(images())
            all_commands += film(1.0)
            wait_for(lambda: len(images()) > seen and size(images()[-1].frames) == (32, 32), 'its images')
            assert {command.tier for command in all_commands} <= set(MOTION)
            assert not node.engine.failing and node.subject.refusals.values() == {}
    finally:
        process.kill()
        process.wait()


def test_with_a_server_the_node_decides_and_the_server_imagines_what_was_decided(tmp_path):
    path = tmp_path / 'engine.sock'
    with serving(path) as served, active(load_forecast=forecasts, forecast='some forecast', server=str(path), deadline_s=0.3,
                                         camera_timeout_s=5.0) as node:
        wait_for(lambda: served.service.listeners, 'the session')
        node.film(1.0)
        chunks = {each.sequence: each for each in node.messages()}
        future = wait_for(lambda: newest(node.messages('predicted_future'), lambda each: each.sequence in chunks), 'images')
        assert future.decision.chosen and future.decision.sequence == future.sequence
        ticks = {tick.stamp: tick for tick in served.service.ticks}
        np.testing.assert_array_equal(ticks[stamp_of(future)].plan.ravel(), chunks[future.sequence].values)
        assert not node.engine.sessions[0].observed, 'the own model took frames in, too'
        assert {values['backend'] for values in node.film_until_well()} == {'fake of the server'}
        served.service.answer = 'refusal'  # it has no time: commands go on
        before = len(node.messages())
        node.film_until(lambda: len(node.messages()) >= before + 4, 'commands')
        assert all(chunk.tier in MOTION for chunk in node.messages()[before:])
        served.stop()
        before, images = len(node.messages()), len(node.messages('predicted_future'))
        node.film_until(lambda: len(node.messages()) >= before + 8, 'commands')
        assert all(chunk.tier in MOTION for chunk in node.messages()[before:])
        wait_for(lambda: len(node.messages('predicted_future')) > images, 'images of the own model')
        assert node.engine.sessions[0].observed
        level, text, values = node.report()
        assert level == diagnostics.WARN and values['backend'] == 'fake'
        assert 'imagining with the own model: the server is not used' in text, text
