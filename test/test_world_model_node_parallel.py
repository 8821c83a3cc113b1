"""A node whose model is divided among processes: its parameters say so, and it outlives the loss of one."""
import os
import signal
from dataclasses import replace

import pytest
import torch
from diagnostic_msgs.msg import DiagnosticStatus
from tiled_model import TILED, tiled_model
from world_model_rig import MOTION, rig

from worldmodel_ros.engine import load
from worldmodel_ros.model import checkpoint
from worldmodel_ros.msg import ActionChunk, DeadlineStatus

pytestmark = [pytest.mark.ros, pytest.mark.waiting(seconds=9), pytest.mark.usefixtures('one_thread'), pytest.mark.skipif(
    torch.cuda.is_available(), reason='for processes on a CPU; on GPUs: python benchmarks/ros_tick.py --gpus 2')]

PRESET = replace(TILED, name='divided-node-test', image_size=(64, 64), depth=2, window_frames=4, sink_slabs=0)
PATIENCE = 60.0  # s, for processes to start on a busy machine


@pytest.fixture
def folder(tmp_path):
    checkpoint.save(tiled_model(PRESET), tmp_path / 'model', {'trained': False}, dtype=torch.float32)
    return tmp_path / 'model'


def test_it_drives_says_what_it_has_lost_and_drives_on_when_that_is_back(folder):
    with rig('configure', 'activate', goal='red', load_engine=load, model=str(folder), backend='torch', gpus=2,
             parallel='sequence', patience=PATIENCE, deadline_s=1.0, camera_timeout_s=PATIENCE) as node:
        def newest():
            return node.messages()[-1]
        node.film_until(lambda: node.messages() and newest().tier in MOTION, 'a command')
        assert node.report()[2]['backend'] == 'torch-cpu-sequence-2'

        lost, = node.subject._engine.backend.processes.pids
        os.kill(lost, signal.SIGKILL)

        def failures():
            return [status for status in node.statuses if status.verdict == DeadlineStatus.INVALID]
        node.film_until(failures, 'the failure')
        report, failure = node.subject._report(), failures()[0]  # not the next one on the topic: it may come too late
        assert failure.tier == ActionChunk.TIER_STOP
        assert f'(process {lost}) was ended by signal 9' in failure.reason
        assert report.level == DiagnosticStatus.WARN
        assert report.message.startswith('the model is being restored: rank 1')

        node.film_until(lambda: newest().tier in MOTION and newest().sequence > failure.sequence, 'a command after it')
        assert newest().episode_id == failure.episode_id  # it has forgotten nothing
        started, = node.subject._engine.backend.processes.pids
        assert node.change('deactivate', 'cleanup')
        for pid in (lost, started):
            assert not os.path.exists(f'/proc/{pid}')
        assert not torch.distributed.is_initialized()  # so that it can be configured again
