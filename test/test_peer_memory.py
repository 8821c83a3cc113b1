"""Exchanges by memory that processes map into each other; here threads, whose memory is that of one process."""
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from worldmodel_ros.model.parallel import peer_memory
from worldmodel_ros.model.parallel.flags_triton import await_flags, set_flags
from worldmodel_ros.model.parallel.group import SequenceParallel
from worldmodel_ros.model.parallel.link import Link
from worldmodel_ros.model.parallel.peer_memory import FLAGS, PeerMemory, open_peer_memory

COUNT, ROOM = 3, 12288


class Shared:
    """The memory of one of several threads, in place of a GPU's: what is queued is done at once."""

    def __init__(self, rank, every):
        self.rank, self.every, self.stopped = rank, every, threading.Event()
        self.own = torch.zeros(FLAGS + ROOM, dtype=torch.uint8)
        self.forked = self.joined = 0
        every[rank] = self

    def others(self, peer):
        return [each for each in range(COUNT) if each != self.rank] if peer is None else [peer]

    def mark(self, kind, peer=None):
        for each in self.others(peer):
            words = self.every[each].own.view(torch.int32)
            assert words[kind * COUNT + self.rank] == 0, 'set before it was cleared'
            words[kind * COUNT + self.rank] = 1

    def await_flag(self, kind, peer=None):
        words, end = self.own.view(torch.int32), time.monotonic() + 30.0
        for each in self.others(peer):
            while not words[kind * COUNT + each] and not self.stopped.is_set():
                assert time.monotonic() < end, 'waited for ever'
                time.sleep(0.0)
            words[kind * COUNT + each] = 0

    def write(self, peer, offset, data, pitch):
        for row in data:
            self.every[peer].own[offset:offset + len(row)] = row
            offset += pitch

    def fork(self, peer):
        self.forked += 1

    def back(self):
        self.forked -= 1

    def join(self):
        self.joined += 1

    def abandon(self):
        self.stopped.set()

    def close(self):
        pass


@dataclass(eq=False)
class Work:
    """What is queued on a stream: ``run`` when all before has been done, and as soon as it is ``ready``."""

    stream: object
    after: list
    run: Callable[[], object]
    ready: Callable[[], bool]
    begun: bool = False
    done: bool = False


class Queued:
    """The memory of a process whose streams run only in ``run``."""

    def __init__(self, rank, every):
        self.rank, self.every = rank, every
        self.own, self.flags, self.meetings = torch.zeros(FLAGS + ROOM, dtype=torch.uint8), set(), {}
        self.stream, self.last, self.works, self.waits = 'main', {}, [], {}
        every[rank] = self

    def queue(self, run=lambda: None, ready=lambda: True):
        before = [self.last[self.stream]] if self.stream in self.last else []
        self.last[self.stream] = Work(self.stream, before + self.waits.pop(self.stream, []), run, ready)
        self.works.append(self.last[self.stream])

    def meet(self, name):
        """Queue a message of NCCL's, for which all processes must be there."""
        self.queue(ready=lambda: all(each.meetings[name].begun for each in self.every.values()))
        self.meetings[name] = self.last[self.stream]

    def others(self, peer):
        return [each for each in self.every if each != self.rank] if peer is None else [peer]

    def mark(self, kind, peer=None):
        def run():
            for each in self.others(peer):
                assert (kind, self.rank) not in self.every[each].flags, 'set before it was cleared'
                self.every[each].flags.add((kind, self.rank))
        self.queue(run)

    def await_flag(self, kind, peer=None):
        def awaited():
            return {(kind, each) for each in self.others(peer)}
        self.queue(lambda: self.flags.difference_update(awaited()), lambda: awaited() <= self.flags)

    def write(self, peer, offset, data, pitch):
        for at, row in enumerate(data):
            begin = offset + at * pitch
            self.queue(lambda row=row, begin=begin: self.every[peer].own[begin:begin + len(row)].copy_(row))

    def fork(self, peer):
        self.waits.setdefault(peer, []).append(self.last['main'])
        self.stream = peer

    def back(self):
        self.stream = 'main'

    def join(self):
        self.waits.setdefault('main', []).extend(last for stream, last in self.last.items() if stream != 'main')

    def abandon(self):
        pass

    def close(self):
        pass


def run(memories, draw, together):
    """Run what all have queued, in an order drawn at random: what is begun in a stream, or in all streams of a process if they
    do not run ``together``, must be done before the next can begin."""
    lanes = [[work for work in memory.works if work.stream == stream or not together]
             for memory in memories for stream in (memory.last if together else ['main'])]
    while any(lanes):
        able = []
        for lane in lanes:
            begun = [work for work in lane if work.begun]
            able += [(lane, work) for work in begun or lane
                     if (work.ready() if begun else all(before.done for before in work.after))]
        assert able, 'all wait for each other'
        lane, work = draw.choice(able)
        if work.begun:
            work.run()
            work.done = True
            lane.remove(work)
        work.begun = True


@pytest.fixture(autouse=True)
def small_parts_too(monkeypatch):
    monkeypatch.setattr(peer_memory, 'LEAST', 16)


def links():
    every = {}
    return [Link(torch.device('cpu'), rank, COUNT, _peers=PeerMemory(Shared(rank, every), rank, COUNT))
            for rank in range(COUNT)]


def together(work):
    """Run work(link) as each process, and return their results."""
    with ThreadPoolExecutor(COUNT) as pool:
        return list(pool.map(work, links()))


def value(rank, message, size):
    return torch.full((size,), 10.0 * message + rank)


def test_every_message_arrives_and_none_is_overwritten_before_it_was_read():
    sizes = [16, 64, 256, 1024]

    def work(link):
        steps, order = random.Random(link.rank), random.Random(7)
        for message in range(60):
            size = order.choice(sizes)
            time.sleep(steps.random() * 2e-3)
            parts = torch.stack([value(link.rank, message, size) + 0.1 * to for to in range(COUNT)])
            wanted = torch.stack([value(rank, message, size) + 0.1 * link.rank for rank in range(COUNT)])
            if message % 2:  # the rows of all parts are joined
                found = link.all_to_all(parts.view(torch.uint8), 4).view(torch.float32)
                wanted = wanted.view(COUNT, 4, -1).transpose(0, 1)
            else:
                exchange = link.exchange(4 * size)
                for to, source in link.turns():
                    exchange.swap(parts[to].view(torch.uint8), to, source)
                exchange.whole[0, link.rank] = parts[link.rank].view(torch.uint8)
                exchange.wait()
                found = exchange.whole[0].view(torch.float32)
            time.sleep(steps.random() * 2e-3)  # the others may be ahead
            assert torch.equal(found, wanted), message
        return link._peers._memory.forked
    assert together(work) == [0] * COUNT


@pytest.mark.parametrize('together', [False, True])
@pytest.mark.parametrize('count', [2, 3, 4])
def test_streams_need_not_run_at_the_same_time_and_may_run_in_any_order(count, together):
    """A CUDA graph promises neither."""
    def number(source, message, to):
        return 1 + 16 * message + 4 * source + to

    def check(whole, message, rank):
        for source in {*range(count)} - {rank}:
            assert (whole[:, source] == number(source, message, rank)).all(), (message, source, rank)

    for seed in range(8):
        every = {}
        memories = [Queued(rank, every) for rank in range(count)]
        for rank, memory in enumerate(memories):
            link, order = Link(torch.device('cpu'), rank, count, _peers=PeerMemory(memory, rank, count)), random.Random(seed)
            for message in range(6):
                if order.random() < 0.3:
                    memory.meet(message)
                exchange = link._peers.exchange(32 * order.choice([1, 2, 8]), order.choice([1, 2]))
                sent = torch.tensor([[number(rank, message, to)] for to in range(count)], dtype=torch.uint8).repeat(
                    1, exchange.whole.shape[0] * exchange.whole.shape[2])
                for to, source in link.turns():
                    before = len(memory.works)
                    exchange.swap(sent[to], to, source)
                    assert {work.stream for work in memory.works[before:]} == {to}  # products go on meanwhile
                exchange.wait()
                memory.queue(partial(check, exchange.whole, message, rank))
                memory.queue(partial(sent.fill_, 0))  # memory of what was sent may be used again
        run(memories, random.Random(seed), together)
        assert not any(memory.flags for memory in memories)


@pytest.mark.parametrize('rounded', [False, True])
def test_tokens_of_all_heads_become_heads_of_all_tokens_and_come_back(rounded):
    x = torch.randn(COUNT, 1, 2, 4, COUNT, 16)  # of each process: (B, T, P, H, d)

    def work(link):
        group = SequenceParallel(link, rounded)
        heads = group.exchange(x[link.rank], -2, 1).clone()
        return heads, group.exchange(heads, 1, -2).clone()
    for rank, (heads, back) in enumerate(together(work)):
        wanted = x[:, 0, :, :, rank].reshape(1, COUNT * 2, 4, 1, 16)
        assert float((heads - wanted).norm() / wanted.norm()) < (0.04 if rounded else 1e-7)
        assert float((back - x[rank]).norm() / x[rank].norm()) < (0.06 if rounded else 1e-7)


def test_only_parts_that_fit_and_are_aligned_are_exchanged_here():
    for size, joined, fits in ((8, 1, False), (24, 1, False), (ROOM // COUNT, 1, True), (ROOM // COUNT + 16, 1, False),
                               (32, 2, True), (16, 2, False)):
        assert (links()[0]._peers.exchange(size, joined) is not None) == fits


def test_a_process_that_waits_for_a_dead_one_goes_on_when_messages_are_given_up():
    alive = links()[0]
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(alive.all_to_all, torch.zeros(COUNT, 16, dtype=torch.uint8))
        time.sleep(0.1)
        assert not waits.done()
        alive._peers.abandon()
        assert waits.result(timeout=10.0).shape == (1, COUNT, 16)


def test_what_is_exchanged_after_the_memory_was_given_back_is_refused():
    """A pass that is still being compiled goes on for a while when a process was lost."""
    memory = links()[0]._peers
    exchange = memory.exchange(16)
    memory.abandon()
    memory.close()
    for act in (lambda: memory.exchange(16), lambda: exchange.swap(torch.zeros(16, dtype=torch.uint8), 1, 2), exchange.wait):
        with pytest.raises(RuntimeError, match='a process of the model was lost'):
            act()


def opened(monkeypatch, ranks=range(COUNT), refused=None, unmapped=None):
    """Open the memory of some processes; return what each found, or its error, and how often each gave its memory back. A GPU
    refuses to tell the handle of ``refused``, and to map the others' for ``unmapped``."""
    closed, meeting = [0] * COUNT, dist.HashStore()

    class Memory:
        def __init__(self, device, size, rank, count):
            self.rank = rank

        @property
        def handle(self):
            if self.rank == refused:
                raise RuntimeError('CUDA: cudaErrorNotSupported')
            return bytes([0, self.rank])

        def map(self, handles):
            assert handles == [bytes([0, rank]) for rank in range(COUNT)]
            if self.rank == unmapped:
                raise RuntimeError('CUDA: cudaErrorPeerAccessUnsupported')

        def abandon(self):
            pass

        def close(self):
            closed[self.rank] += 1

    def work(rank):
        try:
            return open_peer_memory(torch.device('cpu'), rank, COUNT, meeting)
        except RuntimeError as error:
            return error
    monkeypatch.setitem(sys.modules, 'worldmodel_ros.model.parallel.cuda_memory', SimpleNamespace(CudaMemory=Memory))
    with ThreadPoolExecutor(COUNT) as pool:
        return list(pool.map(work, ranks)), closed


def test_memory_is_opened_by_all_processes_or_by_none_and_then_given_back(monkeypatch):
    found, closed = opened(monkeypatch)
    assert all(isinstance(each, PeerMemory) for each in found) and closed == [0] * COUNT
    assert opened(monkeypatch, unmapped=1) == ([None] * COUNT, [1] * COUNT)
    assert opened(monkeypatch, refused=2) == ([None] * COUNT, [1] * COUNT)
    monkeypatch.setenv(peer_memory.SWITCH, '0')
    assert opened(monkeypatch) == ([None] * COUNT, [0] * COUNT)


def test_memory_is_given_back_when_a_process_dies_while_all_open_theirs(monkeypatch):
    monkeypatch.setattr(peer_memory, 'OPENING', timedelta(seconds=0.2))
    found, closed = opened(monkeypatch, ranks=[0, 2])
    assert all(isinstance(each, RuntimeError) for each in found) and closed == [1, 0, 1]


def test_kernels_set_the_flags_of_all_others_or_of_one():
    memories = [torch.zeros(8, dtype=torch.int32) for _ in range(3)]
    bases = torch.tensor([memory.data_ptr() for memory in memories])
    set_flags[(3,)](bases, 4, 0, 1)
    assert [memory[4].item() for memory in memories] == [1, 0, 1]
    set_flags[(1,)](bases, 5, 2, 1)
    assert [int(memory.sum()) for memory in memories] == [1, 0, 2]


def test_kernels_clear_the_flags_for_which_they_wait_and_wait_for_none_once_stopped():
    words, stop = torch.tensor([0, 0, 0, 1, 0, 1, 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    await_flags[(3,)](words, stop, 3, 4)
    assert words.tolist() == [0, 0, 0, 0, 0, 0, 1]
    await_flags[(1,)](words, stop, 6, -1)
    assert not words.any()
    stop[0] = 1
    await_flags[(3,)](words, stop, 3, 4)
