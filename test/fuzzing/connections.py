"""
The server over its socket: robots that keep to the protocol, others that do not, and connections that come and go.

Whatever is sent, the server goes on, every session belongs to a connection, no descriptor is left open, and a robot that
keeps to the protocol is answered.
"""
from __future__ import annotations

import gc
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
from fake_service import FakeService
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from worldmodel_ros.engine.session_folder import SessionFolder
from worldmodel_ros.model.presets import TINY
from worldmodel_ros.serving.server.server import Server
from worldmodel_ros.serving.transport import messages
from worldmodel_ros.serving.transport.address import ListeningSocket
from worldmodel_ros.serving.transport.codec import pack
from worldmodel_ros.serving.transport.connection import Connection
from worldmodel_ros.serving.transport.frames import FrameSlots

from . import codec
from .harness import States

_SEEDS = codec.seeds()
_FRAME = np.zeros((*TINY.image_size, 3), np.uint8)
_WAIT = 2.0  # s, for an answer: nothing here takes so long


class ServerMachine(RuleBasedStateMachine):
    """A server with a service that answers at once, in this thread; its clients."""

    def __init__(self) -> None:
        super().__init__()
        self.before = len(os.listdir('/proc/self/fd'))
        self.folder = TemporaryDirectory(prefix='worldmodel_fuzz_')
        self.path = Path(self.folder.name) / 'engine.sock'
        self.listening = ListeningSocket(self.path)
        self.listening.listen()
        self.service = FakeService(sessions=3)
        self.server = Server(self.service, self.listening, SessionFolder(self.path.parent / 'sessions'))
        self.strangers: list[socket.socket] = []
        self.links: list = []
        self.number = 0

    def serve(self) -> None:
        """Let the server take in what there is."""
        for _ in range(4):
            self.server.run(0.0)
        assert len(self.service.listeners) == len(self.server.status()['robots']), 'a session or a connection without the other'

    def answer(self, link, kind):
        """Serve until a robot has an answer of a kind; what else comes on the way is read."""
        end = time.monotonic() + _WAIT
        while time.monotonic() < end:
            self.serve()
            received = link.receive(0.002)
            if received is None:
                continue
            message, descriptor = received
            if descriptor is not None:
                os.close(descriptor)
            if isinstance(message, kind):
                return message
        raise AssertionError(f'no {kind} came')

    # What robots do.

    @precondition(lambda self: len(self.links) < 2)
    @rule()
    def a_robot_connects(self):
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connected.connect(str(self.path))
        connection = Connection(connected)
        connection.send(messages.Hello(f'/robot{self.number}'))
        message = None
        end = time.monotonic() + _WAIT
        while message is None and time.monotonic() < end:
            self.serve()
            message = connection.receive(0.002)
        message, descriptor = message
        if isinstance(message, messages.Rejected):
            assert message.reason  # no session is free, or this process has said hello too often
            connection.close()
            return

        self.links.append((connection, FrameSlots(descriptor, TINY.image_size, message.slots, writable=True)))

    @precondition(lambda self: self.links)
    @rule(which=st.integers(0, 1), answer=st.booleans())
    def a_robot_ticks(self, which, answer):
        connection, slots = self.links[which % len(self.links)]
        self.number += 1
        slots.write(self.number % len(slots), self.number, _FRAME)
        connection.send(messages.Tick(self.number, self.number % len(slots), self.number, 1, 'red', time.monotonic() + 1.0,
                                      answer, np.zeros(2, np.float32)))
        reply = self.answer(connection, (messages.Planned, messages.Refused))
        assert reply.number == self.number

    @precondition(lambda self: self.links)
    @rule(which=st.integers(0, 1), steps=st.integers(1, 3))
    def a_robot_asks(self, which, steps):
        connection, _ = self.links[which % len(self.links)]
        self.number += 1
        branch = messages.Branch('policy', steps, np.zeros((0, 0), np.float32))
        connection.send(messages.Question(self.number, 'red', time.monotonic() + 1.0, 0, (branch,), 2))
        assert self.answer(connection, messages.Answered).number == self.number

    @precondition(lambda self: self.links)
    @rule(which=st.integers(0, 1))
    def a_robot_goes(self, which):
        connection, _ = self.links.pop(which % len(self.links))
        connection.close()
        self.serve()

    # What others do.

    @precondition(lambda self: len(self.strangers) < 6)
    @rule(hello=st.booleans())
    def a_stranger_connects(self, hello):
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connected.setblocking(False)
        connected.connect(str(self.path))
        self.strangers.append(connected)
        if hello:
            self.send(connected, pack(messages.Hello('/stranger')))

    @precondition(lambda self: self.strangers)
    @rule(which=st.integers(0, 5), seed=st.integers(0, 2 ** 32), count=st.integers(1, 20), file=st.booleans())
    def a_stranger_sends_anything(self, which, seed, count, file):
        random, stranger = Random(seed), self.strangers[which % len(self.strangers)]
        for _ in range(count):
            data = random.choice(_SEEDS)
            self.send(stranger, data if random.random() < 0.3 else codec.damaged(data, random, _SEEDS), file and
                      random.random() < 0.2)
        self.serve()

    @precondition(lambda self: self.strangers)
    @rule(which=st.integers(0, 5))
    def a_stranger_reads(self, which):
        with suppress(OSError):
            while self.strangers[which % len(self.strangers)].recv(2 ** 18):
                pass

    @precondition(lambda self: self.strangers)
    @rule(which=st.integers(0, 5), how=st.sampled_from([None, socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR]))
    def a_stranger_hangs_up(self, which, how):
        stranger = self.strangers[which % len(self.strangers)]
        if how is None:
            self.strangers.remove(stranger)
            stranger.close()
        else:
            with suppress(OSError):
                stranger.shutdown(how)
        self.serve()

    def send(self, connected: socket.socket, data: bytes, file: bool = False) -> None:
        descriptors = [self.listening.fileno()] if file else []
        with suppress(OSError):
            socket.send_fds(connected, [data], descriptors)

    def teardown(self) -> None:
        self.serve()
        for connection in [connection for connection, _ in self.links]:
            connection.send(messages.StatusRequest())
            self.answer(connection, messages.Status)  # it goes on
            connection.close()
        for stranger in self.strangers:
            stranger.close()
        self.serve()
        self.links.clear()
        self.server.close()
        self.service.stop()
        self.listening.close()
        self.folder.cleanup()
        assert not self.service.listeners, 'a session outlived its connection'
        self.server = self.service = None
        if len(os.listdir('/proc/self/fd')) > self.before:
            gc.collect()  # memory that is mapped has a descriptor of its own, until nobody refers to it
        assert len(os.listdir('/proc/self/fd')) <= self.before, 'a descriptor was left open'


TARGET = States(ServerMachine, inputs=3000)
