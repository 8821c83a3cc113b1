"""The server of open worlds and its clients' links, with a model that paints numbers."""
import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from worldmodel_ros.serving.client.link import Unavailable
from worldmodel_ros.serving.transport.address import ListeningSocket
from worldmodel_ros.serving.worlds.link import WorldLink, WorldRefused
from worldmodel_ros.serving.worlds.server import WorldServer

SIZE = 2, 2
CHUNK = 12         # images; the first chunk has four fewer
LINGER = 60.0      # s
TIMEOUT = 60.0     # s, on a busy machine
PINHOLE = np.ones((1, 4))


class Model:
    """A model whose images have the number of the image that their world began with, plus their own number in the world."""

    def __init__(self):
        self.worlds = set()  # open sessions, without branches
        self.spec = SimpleNamespace(name='painted', image_size=SIZE, step_period=1 / 16, chunk_frames=CHUNK)
        self.preset = SimpleNamespace(schedule=SimpleNamespace(steps=range(2)), chunk_frames=3)
        self.window, self.frame_images, self.backend = SimpleNamespace(frames=3), 4, 'painted'
        self.go = threading.Event()  # networks wait for it
        self.go.set()

    def units(self, steps):
        return ['pass'] * steps + ['rest']

    def settle(self):
        assert self.go.wait(TIMEOUT)

    def open(self, image, pose):
        self.settle()
        session = Session(self, int(image[0, 0, 0]))
        self.worlds.add(session)
        return session


class Session:
    pose = np.eye(4)

    def __init__(self, model, first, painted=0):
        self.model, self.first, self.painted = model, first, painted

    @property
    def images_of_chunk(self):
        return CHUNK if self.painted else CHUNK - 4

    def fork(self):
        return Session(self.model, self.first, self.painted)

    def imagining(self, poses, intrinsics, steps):
        for _ in range(steps):
            yield
        numbers = self.first + self.painted + 1 + np.arange(self.images_of_chunk)
        self.painted += len(numbers)
        return np.broadcast_to(numbers.astype(np.uint8)[:, None, None, None], (len(numbers), *SIZE, 3))

    def close(self):
        self.model.worlds.discard(self)


def with_server(talk, tmp_path, deadline=0.0):
    """What ``talk(model, path, server)`` returns, a coroutine that runs next to a server."""
    async def main():
        model, networks, stop, ready = Model(), ThreadPoolExecutor(1), asyncio.Event(), asyncio.Event()
        with contextlib.closing(ListeningSocket(tmp_path / 'world.sock')) as listening:
            listening.listen()
            server = WorldServer(model, listening, networks, deadline)
            serving = asyncio.create_task(server.run(stop, ready.set))
            await ready.wait()
            try:
                return await asyncio.wait_for(talk(model, listening.path, server), TIMEOUT)
            finally:
                model.go.set()
                stop.set()
                await serving
                networks.shutdown()
    return asyncio.run(main())


def image(number):
    return np.full((*SIZE, 3), number, np.uint8)


async def walk(link, event, count, first=None, note=''):
    """The numbers of the frames of ``count`` poses; ``first``: that of an image that begins the world."""
    _, frames = await link.walk(event, None if first is None else image(first), np.tile(np.eye(4), (count, 1, 1)),
                                np.tile(PINHOLE, (count, 1)), note)
    return frames[:, 0, 0, 0].tolist()


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def test_who_asks_again_for_the_walk_that_began_a_world_has_the_note_of_that_world(tmp_path):
    async def talk(model, path, server):
        lost = await WorldLink.open(path, 'a', LINGER)
        assert await walk(lost, 'old', 1, 50, 'old note') == [50]
        model.go.clear()
        asked = asyncio.ensure_future(walk(lost, 'one', 9, 100, 'note'))
        await until(lambda: server.status()['service']['requests'])
        lost.close()
        with pytest.raises(Unavailable, match='closed'):
            await asked
        link = await WorldLink.open(path, 'a', LINGER)
        again = asyncio.ensure_future(walk(link, 'one', 9, 100, 'note'))
        model.go.set()
        assert await again == list(range(100, 109)) and server.status()['service']['repeated'] == 1
        return link.begun, link.note
    assert with_server(talk, tmp_path) == (True, 'note')


def test_a_walk_without_an_image_that_is_refused_for_its_deadline_leaves_the_world_and_its_newest_event(tmp_path):
    async def talk(model, path, server):
        link = await WorldLink.open(path, 'a', LINGER)
        await walk(link, 'one', 9, 50)
        second = await walk(link, 'two', 12)
        with late(server), pytest.raises(WorldRefused, match='no chunk within'):
            await walk(link, 'three', 12)
        assert await walk(link, 'two', 12) == second == list(range(59, 71)) and server.status()['service']['repeated'] == 1
        return await walk(link, 'three', 12)
    assert with_server(talk, tmp_path, deadline=TIMEOUT) == list(range(71, 83))


def test_where_a_new_world_is_refused_for_its_deadline_no_world_goes_on(tmp_path):
    async def talk(model, path, server):
        link = await WorldLink.open(path, 'a', LINGER)
        await walk(link, 'one', 9, 50)
        with late(server), pytest.raises(WorldRefused, match='no chunk within'):
            await walk(link, 'two', 9, 100)
        with pytest.raises(WorldRefused, match='send an image'):
            await walk(link, 'three', 12)
        assert not server.status()['service']['sessions']
        return await walk(link, 'two', 9, 100)
    assert with_server(talk, tmp_path, deadline=TIMEOUT) == list(range(100, 109))


def test_a_world_of_which_all_clients_are_lost_while_it_is_asked_for_does_not_stay_open(tmp_path):
    async def talk(model, path, server):
        model.go.clear()
        asked = []
        for leave in (WorldLink.end, WorldLink.close):  # one that says goodbye, and then one that is lost
            link = await WorldLink.open(path, 'a', 0.0)
            asked.append(asyncio.ensure_future(walk(link, '', 9, 50)))
            await until(lambda: server.status()['service']['requests'])
            leave(link)
            await until(lambda: not server._peers)
        model.go.set()
        assert all(isinstance(answer, Unavailable) for answer in await asyncio.gather(*asked, return_exceptions=True))
        await until(lambda: not server._places and not server._tasks)
        await server._do(lambda: None)  # behind what the networks still do
        return len(model.worlds)
    assert with_server(talk, tmp_path) == 0


@contextlib.contextmanager
def late(server):
    """Every first chunk is late until the end of the block."""
    turns = server._turns
    turns.deadline, kept = -1.0, turns.deadline
    try:
        yield
    finally:
        turns.deadline = kept
