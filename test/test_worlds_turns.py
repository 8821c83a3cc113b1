"""Chunks of several worlds on one device: by deadline, pass by pass, in fewer steps or refused where there is no time."""
import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from worldmodel_ros.serving.worlds.turns import Late, Turns

pytestmark = pytest.mark.waiting
PASS = 0.08  # s
STEPS = 4
SIZE = 2, 2


class World:
    """A model whose passes sleep; ``made`` has each unit as it was made."""

    def __init__(self):
        self.made, self.open_sessions, self.broken = [], 0, ''
        self.spec = SimpleNamespace(name='world', image_size=SIZE)
        self.preset = SimpleNamespace(schedule=SimpleNamespace(steps=range(STEPS)), chunk_frames=3)
        self.window, self.frame_images = SimpleNamespace(frames=3), 4

    def units(self, steps):
        return ['pass'] * steps + ['rest']

    def settle(self):
        pass

    def open(self, image, pose):
        return Session(self, 'calibration')

    def chunk(self, name):
        session = Session(self, name)
        return SimpleNamespace(imagining=lambda steps: session.imagining(None, None, steps))


class Session:
    images_of_chunk, pose = 12, np.eye(4)

    def __init__(self, world, name):
        self.world, self.name = world, name

    def imagining(self, poses, intrinsics, steps):
        self.world.open_sessions += 1
        try:
            for at in range(steps):
                time.sleep(PASS)
                if self.world.broken == self.name and at == 1:
                    raise RuntimeError('out of memory')
                self.world.made.append(self.name)
                yield
            time.sleep(PASS)
            self.world.made.append(self.name)
            return np.full((12, *SIZE, 3), steps, np.uint8)
        finally:
            self.world.open_sessions -= 1

    def close(self):
        pass


def running(requests, deadline=0.0, broken=''):
    """What ``requests``, functions of turns and world that return awaitables, give or raise; and the world."""
    async def main():
        world, networks = World(), ThreadPoolExecutor(1)
        turns = Turns(world, networks, deadline)
        await turns.calibrate()
        world.made.clear()
        world.broken = broken
        always = asyncio.create_task(turns.run())
        found = await asyncio.gather(*(request(turns, world) for request in requests), return_exceptions=True)
        always.cancel()
        await asyncio.gather(always, return_exceptions=True)
        networks.shutdown()
        assert world.open_sessions == 0
        return found, world, turns
    return asyncio.run(main())


def take(name, due, after=0.0, refusable=True):
    async def request(turns, world):
        await asyncio.sleep(after)
        return await turns.take(name, world.chunk(name), time.monotonic() + due, refusable)
    return request


def test_what_is_needed_sooner_comes_between_the_passes_of_another_world():
    (first, second), world, turns = running([take('long', 60.0), take('soon', 1.0, after=1.5 * PASS)])
    assert first[0, 0, 0, 0] == second[0, 0, 0, 0] == STEPS
    assert world.made[0] == world.made[-1] == 'long'
    at = [index for index, name in enumerate(world.made) if name == 'soon']
    assert len(at) == STEPS + 1 and at[-1] - at[0] == STEPS  # in one piece: nothing was more urgent
    assert turns.counts == {'chunks': 2, 'fewer_steps': 0, 'late': 0}


def test_without_a_deadline_nothing_is_refused():
    found, _, turns = running([take(str(at), 0.0) for at in range(3)])
    assert [images.shape for images in found] == [(12, *SIZE, 3)] * 3 and turns.counts['chunks'] == 3


def test_what_would_be_late_has_fewer_steps_or_is_refused_or_is_made_late():
    whole, half = (STEPS + 1) * PASS, (STEPS // 2 + 1) * PASS
    found, _, turns = running([
        take('in time', 3.0 * whole), take('no time', 0.1 * half, after=2.0 * whole),
        take('some time', 0.5 * (whole + half), after=3.0 * whole),
        take('late', 0.1 * half, after=5.0 * whole, refusable=False)], deadline=1.0)
    assert found[0][0, 0, 0, 0] == STEPS
    assert isinstance(found[1], Late) and 'late' in str(found[1])
    assert found[2][0, 0, 0, 0] == STEPS // 2
    assert found[3].shape == (12, *SIZE, 3)
    assert turns.counts == {'chunks': 3, 'fewer_steps': 1, 'late': 1}


def test_a_chunk_that_fails_is_told_and_the_others_go_on():
    found, world, _ = running([take('bad', 60.0), take('good', 90.0)], broken='bad')
    assert isinstance(found[0], RuntimeError) and found[1].shape == (12, *SIZE, 3)
    assert world.made.count('bad') == 1 and world.made.count('good') == STEPS + 1


def test_step_times_are_those_of_the_units():
    _, _, turns = running([])
    assert turns.table.typical(f'world/pass of {STEPS}', 1) == pytest.approx(PASS, rel=0.5)
