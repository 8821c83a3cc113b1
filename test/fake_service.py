"""
A service without a model, behind a real server: its calls, with answers, delays and failures chosen by a test.
"""
from __future__ import annotations

import contextlib
import itertools
import subprocess
import threading
import time
from concurrent.futures import Future as Promise
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from fake_engine import future

from worldmodel_ros.engine.session_folder import SessionFileError, SessionFolder
from worldmodel_ros.engine.what_if import Answer, QuestionError
from worldmodel_ros.model.presets import TINY
from worldmodel_ros.serving.scheduler import Tier
from worldmodel_ros.serving.server.server import Limits, Server
from worldmodel_ros.serving.service.messages import Picture, Reply, ServiceFull, SessionError, check
from worldmodel_ros.serving.transport.address import ListeningSocket

PLAN = np.float32([[0.5, 0.1], [0.5, 0.2], [0.5, 0.3], [0.5, 0.4]])


class FakeService:
    """``answer`` is the reply to a tick: 'plan', 'refusal', 'failure', 'nan' or 'nothing'; after ``delay`` s."""

    def __init__(self, spec=TINY, sessions=2):
        self.spec, self.sessions = spec, sessions
        self.answer, self.delay, self.tier = 'plan', 0.0, Tier.TWO_STEP
        self.ticks, self.questions, self.listeners, self.closed, self.episodes = [], [], {}, [], []
        self.earlier = 0.0  # s that the next reply offers
        self._numbers = itertools.count(1)
        self._thread = ThreadPoolExecutor(1)

    def open(self, listener, seed=0, account=None):
        if len(self.listeners) >= self.sessions:
            raise ServiceFull(f'{self.sessions} sessions are open')
        number = next(self._numbers)
        self.listeners[number] = listener
        return number

    @property
    def full(self):
        return len(self.listeners) >= self.sessions

    def close(self, number):
        del self.listeners[number]
        self.closed.append(number)

    def tick(self, number, tick):
        if number not in self.listeners:
            raise SessionError(f'session {number} is closed')
        check(tick, self.spec)
        self.ticks.append(tick)
        if self.answer == 'refusal' or not tick.answer:
            self._reply(number, tick, Tier.NONE, None, 'two steps would finish 12.3 ms late')
        elif self.answer != 'nothing':
            self._thread.submit(self._serve, number, tick)

    def ask(self, number, question):
        self.questions.append(question)
        promise = Promise()
        self._thread.submit(self._answer, promise, question)
        return promise

    def save(self, number, folder, name):
        time.sleep(self.delay)
        folder.save(name, 7, lambda file: file.write(b'session'))
        return 'no time'

    def load(self, number, folder, name):
        if folder.load(name, lambda file, size: file.read()) != b'session':
            raise SessionFileError('it is not a saved session')
        return 'no time'

    def stats(self):
        return {'backend': 'fake', 'model': self.spec.name, 'sessions': len(self.listeners), 'late': 0, 'busy': 0.5,
                'waiting': 1, 'tiers': {'TWO_STEP': len(self.ticks)}, 'pages': {'used': 3, 'total': 8}}

    def stop(self):
        self._thread.shutdown(cancel_futures=True)

    def _serve(self, number, tick):
        time.sleep(self.delay)
        if self.answer == 'failure':
            self._reply(number, tick, Tier.NONE, None, 'OutputError: the plan is not finite', failed=True)
            return
        plan = PLAN * np.nan if self.answer == 'nan' else PLAN
        reply = self._reply(number, tick, self.tier, plan, '' if self.tier is Tier.TWO_STEP else 'little time')
        listener = self.listeners.get(number)
        if listener and reply:
            imagined = future(plan)
            imagined.frames = np.full((len(plan), *self.spec.image_size, 3), 128, np.uint8)
            listener.pictured(Picture(reply, imagined, 0.005))

    def _reply(self, number, tick, tier, plan, reason, failed=False):
        now = time.monotonic()
        reply = Reply(number, tick.sequence, tick.stamp, tick.episode, tier, plan, reason, now + 0.001, now, 0.002,
                      {'observe': 0.003, 'denoise': 0.004, 'total': 0.009}, np.zeros(4, np.float32), {}, failed, self.earlier)
        self.earlier = 0.0
        listener = self.listeners.get(number)
        if listener:
            listener.replied(reply)
        return reply

    def _answer(self, promise, question):
        if question.stamp < 0:
            promise.set_exception(QuestionError('older ones are not kept'))
            return
        branches = []
        for branch in question.branches:
            actions = np.zeros((branch.steps, 2), np.float32) if branch.actions is None else branch.actions
            imagined = future(actions)
            imagined.frames = np.full((branch.steps, *self.spec.image_size, 3), len(branches), np.uint8)
            branches.append((branch.name, imagined))
        promise.set_result(Answer(77, branches, complete=True))


class Serving:
    """A server at a path, in a thread of this process; it can die like a process, and come back."""

    def __init__(self, path, service=None, limits=Limits()):
        self.path, self.service, self.limits = path, service or FakeService(), limits
        self.server = None
        self.start()

    def start(self):
        self._listening = ListeningSocket(self.path)
        self._listening.listen()
        folder = SessionFolder(self.path.parent / 'sessions')
        self.server = Server(self.service, self._listening, folder, self.limits)
        self._over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self):
        self._over = True
        self._thread.join()
        if self.server:
            self.server.close()
            self._listening.close()
            self.server = None

    def hang(self):
        """Stop receiving messages; connections stay open."""
        self._over = True
        self._thread.join()

    def _run(self):
        while not self._over:
            self.server.run(0.01)


@contextlib.contextmanager
def serving(path, service=None, limits=Limits()):
    """Run a server until the end of the block."""
    running = Serving(path, service, limits)
    try:
        yield running
    finally:
        running.stop()
        running.service.stop()


def listens(path):
    """Whether a process listens at a path, where for a moment there is a socket that refuses connections."""
    rows = (line.split() for line in Path('/proc/net/unix').read_text().splitlines()[1:])
    return any(row[3] == '00010000' and row[7:] == [str(path)] for row in rows)  # __SO_ACCEPTCON


def wait_for_socket(process, path, timeout=120.0):
    """Wait until a process serves at a path; if it does not, end it and fail with its output."""
    end = time.monotonic() + timeout
    while not listens(path):
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise AssertionError(f'nothing serves at {path}: {last_words(process)}')
        time.sleep(0.05)


def last_words(process, timeout=5.0):
    """
    Return what an ended process wrote to its stderr pipe.

    A child process that it left behind keeps the pipe open, so that its end never comes: wait at most ``timeout`` s.
    """
    try:
        return process.communicate(timeout=timeout)[1]
    except subprocess.TimeoutExpired as left:
        return (left.stderr or b'').decode(errors='replace')


def wait_for(condition, timeout=60.0, period=0.002):
    """Return the value of ``condition`` once it is true; check it every ``period`` s."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, 'waited in vain'
        time.sleep(period)
    return value
