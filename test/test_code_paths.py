"""The files through which a frame and a what-if question pass are those that docs/architecture.md names."""
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safety_rig import LIMITS, NAMES
from small_model import SMALL, small_checkpoint

from worldmodel_ros.control.ladder import NS, Settings
from worldmodel_ros.control.maneuvers import maneuver, path
from worldmodel_ros.control.responder import Observation, Responder
from worldmodel_ros.control.worker import Worker
from worldmodel_ros.engine import load
from worldmodel_ros.engine.what_if import Branch, Question
from worldmodel_ros.inputs.ticks import ExecutedActions, Frames, FrameSettings
from worldmodel_ros.safety.gate import Chunk, Gate, Policy
from worldmodel_ros.safety.motion import VelocityMotion

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / 'worldmodel_ros'
# What runs in any process. Nodes need ROS, and which files below a back end run depends on the back end.
COUNTED = ('control', 'engine', 'inputs', 'safety')


def counted(files):
    return {file for file in files if file.split('/')[0] in COUNTED and '/backends/' not in file}


def named(heading):
    """Return the files that the document names under a heading."""
    text = (ROOT / 'docs' / 'architecture.md').read_text()
    section = text.partition(f'\n## {heading}\n')[2].partition('\n## ')[0]
    return counted(re.findall(r'`([^`]+\.py)`', section))


class Noting:
    """Notes in `files` which files of the package have a function called in the block."""

    def __enter__(self):
        self.codes = set()
        sys.setprofile(lambda frame, event, argument: self.codes.add(frame.f_code) if event == 'call' else None)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        files = {Path(code.co_filename) for code in self.codes}
        self.files = counted(str(file.relative_to(PACKAGE)) for file in files if file.is_relative_to(PACKAGE))


class System:
    """What is between an image and a command, without ROS, on one thread."""

    def __init__(self, folder):
        self.engine = load(str(small_checkpoint(folder)), 'torch')
        self.now, self.answers, self.number = 100.0, [], 0
        self.executed = ExecutedActions(SMALL.actions, SMALL.step_period)
        self.frames = Frames(SMALL.step_period, SMALL.image_size)
        self.worker = Worker(self.engine, self.executed.mean, Responder(self, Settings(), SMALL.step_period, self.clock),
                             self, self.clock)
        self.worker._thread.running = True
        self.gate = Gate(NAMES, VelocityMotion(LIMITS.axes()), Policy())

    def clock(self):
        return self.now

    def answered(self, answer):
        self.answers.append(answer)

    def predicted(self, prediction):
        assert prediction.future.frames is not None

    def failed(self, reason, error, restarted):
        raise error

    def image(self):
        """One image, to the command that the gate passes; return that."""
        self.now, self.number = self.now + SMALL.step_period, self.number + 1
        stamp, height, width = round(self.now * NS), *SMALL.image_size
        data = np.random.default_rng(self.number).integers(0, 256, 3 * height * width, np.uint8)
        image = SimpleNamespace(height=height, width=width, encoding='bgr8', step=3 * width, data=data)
        self.executed.add(stamp, (0.1, 0.0))
        frame = self.frames.take(image, stamp, self.executed.moving(stamp), self.now, FrameSettings())
        self.worker.submit(Observation(frame.image, stamp, self.now, self.now + 10.0, 1, self.number, SMALL.goals[0]))
        self.worker.step()
        answer = self.answers[-1]
        chunk = Chunk(answer.stamp, answer.episode, answer.sequence, SMALL.step_period, NAMES, answer.actions.ravel())
        return self.gate.on_chunk(chunk, stamp, self.now)

    def what_if(self):
        """One question, to the path that its branch leads along."""
        promise = self.worker.ask(Question((Branch('left', 8, maneuver('left', 8)),), '', self.now + 10.0))
        while not promise.done():
            self.worker.step()
        (_, future), = promise.result().branches
        return path(future.actions, SMALL.step_period)


@pytest.fixture(scope='module')
def system(tmp_path_factory):
    system = System(tmp_path_factory.mktemp('model'))
    for _ in range(2):  # the first ones begin an episode, and fill what is kept
        assert system.image()
    return system


def test_a_frame_runs_the_files_that_the_document_names(system):
    with Noting() as noting:
        command = system.image()
    assert command and command.stamp == system.answers[-1].stamp
    assert noting.files == named('The way of one frame')


def test_a_what_if_runs_the_files_that_the_document_names(system):
    while system.worker.step() == 0.0:  # images of the ticks are decoded first
        pass
    with Noting() as noting:
        poses = system.what_if()
    assert poses.shape == (8, 3)
    assert noting.files == named('The way of one what-if')
