"""A model in several processes gives the answers of one process, and outlives the death of any other than rank 0."""
import gc
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiled_model import TILED
from timed_backend import Listener
from torch import nn

from worldmodel_ros.cache.stores.host import HostStore
from worldmodel_ros.engine.backends.pinned_inputs import Inputs
from worldmodel_ros.engine.distributed import supervisor
from worldmodel_ros.engine.distributed.leader import SLOTS, Completions
from worldmodel_ros.engine.distributed.processes import Processes
from worldmodel_ros.engine.device_failure import RankFailure
from worldmodel_ros.engine.loading import load
from worldmodel_ros.engine.session_store import SessionLog, read_newest
from worldmodel_ros.kernels.qk_norm import rotate_qk
from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.checkpoint_description import ModelError
from worldmodel_ros.model.parallel import rounding
from worldmodel_ros.model.parallel.group import ExchangedProducts, SequenceParallel, _block_of, pack, unpack
from worldmodel_ros.model.parallel.link import Link
from worldmodel_ros.model.parallel.tiles import FRAMES, TOKENS, DividedTiles, SentProducts, SharedModulations
from worldmodel_ros.model.tile_attention import PagedTiles
from worldmodel_ros.model.weights import RandomWeights, build
from worldmodel_ros.serving.scheduler import StepTable, Tier
from worldmodel_ros.serving.service import calibration as service_calibration
from worldmodel_ros.serving.service.messages import Tick
from worldmodel_ros.serving.service.service import Service, ServiceSettings

pytestmark = [pytest.mark.usefixtures('one_thread'), pytest.mark.skipif(
    torch.cuda.is_available(), reason='for processes on a CPU; on GPUs: python benchmarks/parallel.py')]

# 2 x 2 tiles a slab; a branch's second chunk takes over the statistics of what was observed.
DIVIDED = replace(TILED, name='divided-test', image_size=(64, 64), width=64, heads=4, sink_statistics=0.3,
                  sink_statistics_after=4)
ACTION = np.array([0.2, 0.4], np.float32)
CHUNK = np.tile(np.array([[0.3, 1.0]], np.float32), (DIVIDED.chunk_frames, 1))


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('divided') / 'model'
    checkpoint.save(build(DIVIDED, RandomWeights()), folder, {'trained': False}, dtype=torch.float32)
    return folder


@contextmanager
def several(folder, count, parallel, backend='torch'):
    engine = load(str(folder), backend, gpus=count, parallel=parallel)
    try:
        yield engine
    finally:
        engine.close()


def images(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *DIVIDED.image_size, 3), dtype=np.uint8)


def driven(engine, frames):
    session = engine.open_session()
    for frame in frames:
        session.observe(frame, ACTION)
    return session


def answers(session):
    """A plan, two tiers of an imagined chunk, and a branch of three chunks that commits what it imagines."""
    *_, branch = run(session.what_if(np.repeat(CHUNK, 3, 0)[:-1]))
    futures = [session.imagine(CHUNK, steps) for steps in (1, 2)]
    return [session.plan('red'), *(future.latents for future in futures), branch.latents,
            *(future.collision_risk for future in futures), np.array(list(branch.progress.values()))]


def run(generator):
    while True:
        try:
            yield next(generator)
        except StopIteration as end:
            yield end.value
            return


def assert_same(found, expected, atol):
    for each, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(each, right, atol=atol, rtol=0)


class TestFourProcessesThatShareTheFrames:
    @pytest.fixture(scope='class')
    def four(self, folder):
        with several(folder, 4, 'sequence') as engine:
            yield engine

    def test_they_answer_as_one(self, folder, four):
        for count in (1, 11):  # a young session, and one whose first slabs have been dropped
            frames = images(count)
            expected = answers(driven(load(str(folder), 'torch'), frames))
            assert np.abs(expected[2]).mean() > 0.1
            assert_same(answers(driven(four, frames)), expected, 1e-5)

    def test_a_last_step_goes_on_from_what_each_of_them_has_left_on_its_device(self, folder, four, monkeypatch):
        expected, names, launch = answers(driven(load(str(folder), 'torch'), images(11))), [], four.backend.passes._launch
        monkeypatch.setattr(four.backend.passes, '_prepare', True)  # as on GPUs
        monkeypatch.setattr(four.backend.passes, '_launch', lambda key, *rest: (names.append(key[0]), launch(key, *rest))[1])
        assert_same(answers(driven(four, images(11))), expected, 1e-5)
        assert names.count('prepare') == names.count('finish') > 1 and 'approach' not in names

    def test_a_session_of_one_process_goes_on_in_them_and_back(self, folder, four, tmp_path):
        single, frames = load(str(folder), 'torch'), images(7)
        session = driven(single, frames)
        session.save(tmp_path / 'single')
        moved = four.open_session()
        moved.load(tmp_path / 'single')
        assert_same(answers(moved), answers(session), 1e-5)
        moved.save(tmp_path / 'four')
        back = single.open_session()
        back.load(tmp_path / 'four')
        assert_same(answers(back), answers(session), 1e-6)

    def test_a_session_comes_into_them_from_a_store(self, folder, four):
        session, store = driven(load(str(folder), 'torch'), images(7)), HostStore()
        stored = SessionLog(store, 'robot', 1).checkpoint(session.capture(), {})
        list(stored.pieces())
        stored.write()
        coming, moved = four.stored_session(store), four.open_session()
        read_newest(store, 'robot', coming)
        list(coming.pieces())
        coming.settle()
        moved.restore(coming)
        assert_same(answers(moved), answers(session), 1e-5)


def step_table():
    table = StepTable()
    for part in ('observe', 'policy', 'denoise', 'decode', 'commit', 'snapshot'):
        table.record(f'{DIVIDED.name}/{part}', 1, 0.05)
    return table


def wait_until_complete(backend, patience=60.0):
    deadline = time.monotonic() + patience
    while True:
        try:
            return backend.require_complete()
        except RankFailure:
            assert time.monotonic() < deadline
            time.sleep(0.05)


class TestTwoProcessesThatShareTheWeights:
    @pytest.fixture(scope='class')
    def two(self, folder):
        with several(folder, 2, 'tensor') as engine:
            yield engine

    def test_they_answer_as_one(self, folder, two):
        frames = images(5)
        assert_same(answers(driven(two, frames)), answers(driven(load(str(folder), 'torch'), frames)), 1e-5)

    @pytest.mark.parametrize('fault', [signal.SIGKILL, signal.SIGSTOP])
    def test_a_lost_process_is_noticed_and_the_session_restored_from_its_frames(self, folder, two, fault):
        two.backend._patience = 60.0  # which a busy machine keeps
        expected, session = load(str(folder), 'torch').open_session(), two.open_session()
        *frames, lost, after = images(7)  # a window, so that the restored session lacks nothing

        def observe(frame):
            for each in (expected, session):
                each.observe(frame, ACTION)
        for frame in frames:
            observe(frame)
        session.imagine(CHUNK)
        branch = session.what_if(np.repeat(CHUNK, 2, 0))
        next(branch)
        pid, = two.backend.processes.pids
        two.backend._patience = 2.0
        os.kill(pid, fault)
        start = time.monotonic()
        observe(lost)  # is taken in nevertheless
        with pytest.raises(RankFailure, match='signal 9' if fault == signal.SIGKILL else 'within 2 s'):
            session.plan('red')
        assert time.monotonic() - start < 2.0 + 30.0  # on a busy machine
        with pytest.raises(RankFailure):
            session.imagine(CHUNK)
        two.backend._patience = 60.0
        wait_until_complete(two.backend)
        assert not runs(pid) and two.backend.processes.pids != [pid]
        with pytest.raises(RankFailure, match='next frame'):
            session.plan('red')
        with pytest.raises(RankFailure, match='replaced'):
            list(branch)
        observe(after)
        assert_same(answers(session), answers(expected), 1e-5)

    def test_a_session_whose_pages_were_filled_before_their_processes_were_lost_says_so(self, two, tmp_path):
        session, store = driven(two, images(5)), HostStore()
        session.save(tmp_path / 'file')
        stored = SessionLog(store, 'robot', 1).checkpoint(session.capture(), {})
        list(stored.pieces())
        stored.write()
        with open(tmp_path / 'file', 'rb') as file:
            of_file = two.read_session(file, (tmp_path / 'file').stat().st_size)
        of_store = two.stored_session(store)
        read_newest(store, 'robot', of_store)
        for coming in (of_file, of_store):
            list(coming.pieces())
            coming.settle()
        os.kill(two.backend.processes.pids[0], signal.SIGKILL)
        while not two.degraded_reason:
            time.sleep(0.01)
        wait_until_complete(two.backend)
        for coming in (of_file, of_store):
            session.restore(coming)
            with pytest.raises(RankFailure, match='replaced since; the next frame'):
                session.plan('red')
        session.observe(*images(1), ACTION)

    def test_a_stopped_process_keeps_nobody_waiting_who_saves_a_session(self, two, monkeypatch, tmp_path):
        session = driven(two, images(2))
        monkeypatch.setattr(supervisor, 'AWAITED_S', 1.0)
        os.kill(two.backend.processes.pids[0], signal.SIGSTOP)
        with pytest.raises(RankFailure, match='within 1 s'):
            session.save(tmp_path / 'lost')
        wait_until_complete(two.backend)
        session.observe(*images(1), ACTION)
        session.save(tmp_path / 'restored')

    def test_a_robot_is_told_of_the_loss_and_planned_for_again_and_frames_meanwhile_keep_no_pages(self, folder, two):
        service = Service(two, settings=ServiceSettings(sessions=1, pictures=False), table=step_table())
        listener, (image,) = Listener(), images(1)
        gc.collect()
        allocator = two.memory.pool.allocator
        others, (of_one,) = allocator.usage().guaranteed, two.memory.guaranteed_pages
        robot = service.open(listener)

        def reply():
            sequence = len(listener.replies) + 1
            service.tick(robot, Tick(image, ACTION, time.monotonic() + 60.0, sequence, goal='red'))
            while len(listener.replies) < sequence:
                service.step()
            return listener.replies[-1]
        expected = driven(load(str(folder), 'torch'), [image]).plan('red')
        np.testing.assert_allclose(reply().plan, expected, atol=1e-5, rtol=0)
        gc.disable()  # a collection would hide what is only garbage
        try:
            os.kill(two.backend.processes.pids[0], signal.SIGKILL)
            for number in range(5):
                lost = reply()
                assert lost.failed and lost.tier is Tier.NONE and lost.reason.startswith('RankFailure')
                assert number or 'signal 9' in lost.reason
                assert allocator.usage().guaranteed <= others + of_one
            wait_until_complete(two.backend)
            np.testing.assert_allclose(reply().plan, expected, atol=1e-5, rtol=0)  # of a session that begins again
            assert allocator.usage().guaranteed == others + of_one
        finally:
            gc.enable()
            service.stop()


@contextmanager
def compiling_now_and_then(pid, seconds):
    """A process that does nothing for so long at a time [s], as one that compiles; in the end it goes on."""
    over = threading.Event()

    def stop_and_go():
        while not over.wait(0.3):
            os.kill(pid, signal.SIGSTOP)
            over.wait(seconds)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_warm_up_has_no_deadline_of_a_tick_and_a_tick_has_it_again_after_it(folder, monkeypatch):
    with several(folder, 2, 'tensor') as engine:
        engine.backend._patience = 0.1  # as on GPUs: a tick's period
        pid, = engine.backend.processes.pids
        with compiling_now_and_then(pid, 1.0):
            engine.warm_up(ticks=3)
        assert engine.backend.epoch == 0 and not engine.degraded_reason and engine.backend.processes.pids == [pid]
        service = Service(engine, settings=ServiceSettings(sessions=1))
        monkeypatch.setattr(service_calibration, 'RUNS', 2)
        with compiling_now_and_then(pid, 1.0):
            service.calibrate()
        assert engine.backend.epoch == 0 and not engine.degraded_reason
        engine.backend._patience = 60.0  # which a busy machine keeps
        session = driven(engine, images(3))
        session.imagine(CHUNK)
        engine.backend._patience = 0.1
        os.kill(pid, signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(RankFailure, match='within 0.1 s'):
            session.imagine(CHUNK)
        assert time.monotonic() - start < 0.1 + 30.0  # on a busy machine, and not the minutes of a warm-up


def test_a_process_that_never_comes_out_of_its_warm_up_is_noticed_too(folder):
    with several(folder, 2, 'tensor') as engine:
        engine.backend._warm_up = 1.0
        os.kill(engine.backend.processes.pids[0], signal.SIGSTOP)
        with pytest.raises(RankFailure, match='within 1 s|processes of the model were missing'):
            engine.warm_up(ticks=3)
        assert engine.backend.epoch or engine.degraded_reason


def test_fp8_is_rounded_in_the_same_places_by_two_processes_as_by_one(folder):
    frames = images(5)
    expected = answers(driven(load(str(folder), 'torch-fp8'), frames))
    with several(folder, 2, 'sequence', 'torch-fp8') as engine:
        assert_same(answers(driven(engine, frames)), expected, 1e-6)


def test_exchanging_in_fp8_costs_what_its_rounding_does(folder):
    frames = images(5)
    expected = answers(driven(load(str(folder), 'torch'), frames))
    with several(folder, 2, 'sequence-fp8') as engine:
        found = answers(driven(engine, frames))
    error = np.sqrt(np.mean((found[2] - expected[2]) ** 2) / np.mean(expected[2] ** 2))
    assert 0.0 < error < 0.02


def test_the_processes_end_with_rank_0_however_that_ends(folder):
    program = ('import os, sys, signal; from worldmodel_ros.engine.loading import load;'
               'engine = load(sys.argv[1], "torch", gpus=2); pid, = engine.backend.processes.pids;'
               'print(pid, flush=True); os.kill(pid, signal.SIGSTOP); os.kill(os.getpid(), signal.SIGKILL)')
    done = subprocess.run([sys.executable, '-c', program, str(folder)], stdout=subprocess.PIPE, timeout=60)
    assert done.returncode == -signal.SIGKILL
    pid, = map(int, done.stdout.split())
    deadline = time.monotonic() + 10.0
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(pid)


def runs(pid):
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
    except FileNotFoundError:
        return False


STUCK = """
import ctypes
from worldmodel_ros.engine.distributed import supervisor
from worldmodel_ros.engine.distributed.processes import Processes

def waits_for_the_device():
    ctypes.PyDLL(None).sleep(60)  # and holds Python's lock

def finds_the_device_broken():
    raise RuntimeError('illegal address')

supervisor.DISSOLVING_S = 0.3
watched = supervisor.Supervisor(Processes([]), lambda: Processes([]), %s)
watched.failed(0, RuntimeError('a message was lost'))
watched._thread.join()
"""


@pytest.mark.parametrize('dissolve, said', [
    ('waits_for_the_device', 'Timeout'), ('finds_the_device_broken', 'illegal address')])
def test_rank_0_ends_with_a_reason_when_it_cannot_get_away_from_the_dead(dissolve, said):
    done = subprocess.run([sys.executable, '-c', STUCK % dissolve], stderr=subprocess.PIPE, text=True, timeout=30)
    assert done.returncode == 1
    assert 'a message was lost; starting all of them again' in done.stderr
    assert said in done.stderr and dissolve in done.stderr


def test_the_end_of_a_process_is_the_reason_even_if_a_message_to_it_failed_first():
    class Ending(Processes):
        def check(self, patience=0.0, also=None):
            if also is None:
                raise RankFailure('rank 1 of the model (process 7) was ended by signal 9')
            super().check(patience, also)

    said = threading.Event()

    def assemble():
        assert said.wait(30.0)
        return Processes([])
    watched = supervisor.Supervisor(Ending([]), assemble, lambda: None)
    try:
        assert str(watched.failed(0, BrokenPipeError(32, 'Broken pipe'))) == (
            'rank 1 of the model (process 7) was ended by signal 9')
    finally:
        said.set()
        watched.close()


@pytest.mark.parametrize('count, parallel, backend, reason', [
    (3, 'sequence', 'torch', '4 heads and 64 tokens'), (2, 'pipeline', 'torch', 'sequence-fp8'),
    (2, 'sequence', 'onnx', 'runs on one GPU'), (0, 'sequence', 'torch', 'gpus must be at least 1')])
def test_what_cannot_be_divided_is_refused_before_any_process_starts(folder, count, parallel, backend, reason):
    with pytest.raises(ModelError, match=reason):
        load(str(folder), backend, gpus=count, parallel=parallel)


@pytest.mark.parametrize('axis', [FRAMES, TOKENS])
@pytest.mark.parametrize('rank', [0, 1])
def test_own_tokens_are_rotated_to_their_own_places_by_the_kernel_of_a_gpu(rank, axis):
    """To which a part of a tensor along another axis than its first is no part, but that many values from there on."""
    pytest.importorskip('triton', reason='Triton is not installed')
    from worldmodel_ros.kernels.qk_norm_triton import rotate_qk_triton
    frames, tokens, heads, dim = 4, 6, 2, 16
    angle = torch.rand(frames * tokens, dim // 2, generator=torch.Generator().manual_seed(1)) * 6.3
    whole = PagedTiles((1, frames, 1, tokens), torch.stack([angle.cos(), angle.sin()]), None, [], [])
    qkv = torch.randn(1, frames, tokens, 3, heads, dim, generator=torch.Generator().manual_seed(2))
    group, weights, expected = SequenceParallel(Link('cpu', rank, 2)), torch.rand(2, dim), qkv.clone()
    rotate_qk(expected.view(-1, 3, heads, dim), whole.rotary, *weights)
    own = group.own(qkv, axis).contiguous()
    rotate_qk_triton(own.view(-1, 3, heads, dim), DividedTiles(group, whole, frames, axis).rotary, *weights)
    torch.testing.assert_close(own, group.own(expected, axis))


def test_a_model_without_tiles_is_refused():
    with pytest.raises(ModelError, match='no tiles'):
        load('tiny', 'torch', gpus=2)


def test_tensors_of_different_types_travel_in_one_message():
    tensors = [torch.arange(6, dtype=torch.float32).view(2, 3), torch.tensor(True), torch.zeros(0, 3),
               torch.randn(5).to(torch.float8_e4m3fn), torch.arange(20, dtype=torch.int64).view(2, 5, 2)]
    for found, tensor in zip(unpack(pack(tensors), tensors), tensors, strict=True):
        assert found.dtype == tensor.dtype and torch.equal(found.float(), tensor.float())


def rows_of_many_sizes():
    x = torch.randn(3, 2, 5, 16) * torch.logspace(-30, 30, 30).view(3, 2, 5, 1)
    x[1, 1, 3] = 0.0
    return x


def test_a_rounded_message_keeps_every_row_to_its_own_scale_and_shows_what_is_not_finite():
    x = rows_of_many_sizes()
    found = rounding.decode(rounding.encode(x), (3, 5, 16), torch.float32)
    assert ((found - x).norm(dim=-1) <= 0.04 * x.norm(dim=-1)).all()
    x[2, 0, 4, 7] = float('nan')
    found = rounding.decode(rounding.encode(x), (3, 5, 16), torch.float32)
    assert (found.isfinite().all(-1) == x.isfinite().all(-1)).all()


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_messages_are_rounded_by_the_kernels_as_they_are_defined(dtype):
    pytest.importorskip('triton', reason='Triton is not installed')
    from worldmodel_ros.model.parallel import rounding_triton
    x = rows_of_many_sizes().to(dtype)
    message = rounding.encode(x)
    used = 3 * 5 * (16 + 4)
    assert torch.equal(rounding_triton.encode(x)[:, :used], message[:, :used])
    found = rounding_triton.decode(message, (3, 5, 16), dtype)
    assert torch.equal(found, rounding.decode(message, (3, 5, 16), dtype))
    message = rounding.encode(x[:, :1])
    for module in (rounding, rounding_triton):
        whole = torch.zeros(3, 2, 5, 16, dtype=dtype)
        module.decode(message, (3, 5, 16), dtype, whole[:, 1:])  # next to what comes from another
        assert torch.equal(whole[:, 1:], rounding.decode(message, (3, 5, 16), dtype)) and not whole[:, 0].any()


def mailboxes(count):
    """What threads in place of processes send to each other."""
    return {(one, other): queue.Queue() for one in range(count) for other in range(count)}


class LinkOfThreads:
    """In place of ``Link``."""

    def __init__(self, rank, count, between):
        self.rank, self.count, self.order, self._between = rank, count, [], between

    turns = Link.turns

    def exchange(self, size, joined=1):
        self.whole = torch.empty(joined, self.count, size // joined, dtype=torch.uint8)
        return self

    def swap(self, sent, to, source):
        self.order.append(to)
        self._between[self.rank, to].put(sent.clone())

    def wait(self):
        for _, source in self.turns():
            self.whole[:, source] = self._between[source, self.rank].get(timeout=30.0).view(len(self.whole), -1)

    def all_to_all(self, rows):
        for to in range(self.count):
            self._between[self.rank, to].put(rows[to])
        return torch.stack([self._between[source, self.rank].get(timeout=30.0) for source in range(self.count)])[None]

    def all_gather(self, x):
        return self.all_to_all([x] * self.count)[0]


@pytest.mark.parametrize('rounded', [False, True])
def test_products_for_other_processes_come_first_and_all_have_those_of_their_heads(rounded):
    count, tokens, head_dim, parts, width = 3, 5, 16, 3, 8
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(width, parts * count * 2 * head_dim).requires_grad_(False)
    rows = torch.randn(count, tokens, width, generator=generator)
    wanted = linear(rows).unflatten(-1, (parts, count, -1))
    between = mailboxes(count)

    @torch.inference_mode()
    def exchanged(rank):
        link = LinkOfThreads(rank, count, between)
        group, order = SequenceParallel(link, rounded), link.order
        exchange, send = group.exchange_products, group.send_products

        def noted(product, like, width):
            return send(lambda to, out: (order.append(('product', to)), product(to, out))[1], like, width)
        group.send_products = noted
        products = ExchangedProducts(linear, group, head_dim)
        found = products(rows[rank])
        group.send_products = send
        others = [(rank + step) % count for step in range(1, count)]
        assert order == [each for other in others for each in (('product', other), other)] + [('product', rank)]

        joined = exchange(lambda to, out: products.shares[to](rows[rank]), found[0], head_dim, joined=True)
        assert joined.shape == (tokens, count, found.shape[2])
        assert torch.allclose(joined.transpose(0, 1), found, atol=1e-6)
        exact = exchange(lambda to, out: products.shares[to](rows[rank]), found[0], head_dim, joined=True, exact=True)

        arriving = products.send(rows[rank])
        assert torch.equal(arriving.own, found[rank])
        for source, values, scale in arriving.others():
            assert (values.dtype is torch.float8_e4m3fn) == (scale is not None) == rounded
            if rounded:
                values = (values.unflatten(1, (-1, head_dim)).float() * scale[..., None]).flatten(1)
            assert torch.equal(values, found[source])
        return found, exact.transpose(0, 1)
    with ThreadPoolExecutor(count) as pool:
        for rank, (found, exact) in enumerate(pool.map(exchanged, range(count))):
            right = wanted[:, :, :, rank].flatten(2)
            torch.testing.assert_close(found[rank], right[rank])
            assert float((found - right).norm() / right.norm()) < (0.04 if rounded else 1e-6)
            torch.testing.assert_close(exact, right)


class LinearTiles:
    """Stands for the attention of a pass of two slabs, whose results are its queries plus what was written so far."""

    def __init__(self, slabs, tokens):
        self.shape, self.whole_slabs, self.rotary = (slabs, 2, 1, tokens), True, torch.zeros(2, slabs * 2 * tokens, 2)
        self.written, self.attended = {}, []

    def write(self, layer, block, qkv, part, parts, scale=None, dtype=None):
        assert dtype is None or dtype is torch.float32
        qkv = qkv.float() if scale is None else qkv.float() * scale[..., None]
        self.written[part] = qkv[:, 1:].sum((0, 1))
        return qkv[:, 0]

    def attend(self, layer, q, part=0, parts=1, out=None):
        self.attended.append((part, parts))
        found = (q + sum(self.written.values())).flatten(1)
        return found if out is None else out.copy_(found)


@pytest.mark.parametrize('rounded', [False, True])
@pytest.mark.parametrize('processors', [1, 1000], ids=['each in turn', 'all at once'])
def test_keys_of_all_are_written_before_any_attends_and_each_has_what_its_own_queries_found(rounded, processors):
    count, tokens, heads, dim, width = 2, 64, 4, 4, 8
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(width, 3 * heads * dim).requires_grad_(False)
    x, between = torch.randn(1, 2 * count, tokens, width, generator=generator), mailboxes(count)
    block = SimpleNamespace(head_dim=dim)
    qkv = linear(x).view(-1, 3, heads, dim)
    expected = (qkv[:, 0] + qkv[:, 1:].sum((0, 1))).flatten(1).chunk(count)

    @torch.inference_mode()
    def attended(rank):
        group, whole = SequenceParallel(LinkOfThreads(rank, count, between), rounded), LinearTiles(count, tokens)
        group.processors = processors
        products = SentProducts(linear, group, dim)(group.own(x, FRAMES))
        return DividedTiles(group, whole, 2 * count, FRAMES).over_tiles(0, block, products), whole.attended
    with ThreadPoolExecutor(count) as pool:
        for (found, parts), right in zip(pool.map(attended, range(count)), expected, strict=True):
            assert found.shape == (1, 2, tokens, heads * dim)
            assert len(parts) == (count if processors == 1 else 1)
            torch.testing.assert_close(found.view(-1, heads * dim), right, rtol=0.0 if rounded else 1e-5,
                                       atol=0.04 * float(right.abs().max()) if rounded else 1e-4)


@pytest.mark.parametrize('frames', [4, 3])
def test_modulations_of_two_passes_are_each_layers_own(frames):
    count, width, generator = 2, 8, torch.Generator().manual_seed(0)
    linears = [nn.Linear(width, 6 * width).requires_grad_(False) for _ in range(3)]
    conditions = torch.randn(2, 1, frames, width, generator=generator).unbind()
    between = mailboxes(count)

    def shared(rank):
        return SharedModulations(linears, SequenceParallel(LinkOfThreads(rank, count, between)))(conditions)
    with ThreadPoolExecutor(count) as threads:
        found = list(threads.map(shared, range(count)))
    for at, cond in enumerate(conditions):
        own = cond.chunk(count, 1) if frames % count == 0 else (cond,) * count
        for rank in range(count):
            assert torch.equal(found[rank][at].cond, own[rank])
            for layer, linear in zip(found[rank][at].layers, linears):
                torch.testing.assert_close(layer, linear(own[rank]))


def test_completed_passes_are_seen_in_the_hosts_memory():
    completions = Completions(torch.device('cpu'))
    events = [completions.note() for _ in range(SLOTS + 2)]
    assert all(event.query() for event in events)
    events[0].slots[events[-1].slot] = 0  # as if the last one were still on its way
    assert not events[-1].query() and events[-2].query()


def test_inputs_that_lie_in_one_block_are_sent_as_it_is():
    columns = [[np.zeros((2, 3), np.float32)], [np.int64(1)], [np.ones(5, np.int32)]]
    inputs = Inputs(torch.device('cpu'), 1, columns)
    with torch.inference_mode():
        block = _block_of(inputs.tensors)
        block.fill_(1)
    assert all((tensor.view(torch.uint8) == 1).all() for tensor in inputs.tensors)
    assert _block_of([tensor.clone() for tensor in inputs.tensors]) is None
