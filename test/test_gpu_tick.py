"""A tick that is only queued: the numbers of one that is waited for, and nobody waits before its end."""
import contextlib
import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_engine import FakeClock, FakeEngine, FakeSession
from small_model import SMALL, small_checkpoint, small_model
from tiled_model import tiled_model

from worldmodel_ros.control.worker import BackgroundWork
from worldmodel_ros.engine.backends.frame_passes import listed, parts_for
from worldmodel_ros.engine.backends.pinned_inputs import Inputs
from worldmodel_ros.engine.backends.torch import TorchBackend, compile_heads, compile_layers, not_compiled
from worldmodel_ros.engine.engine import Engine
from worldmodel_ros.engine.faults import FaultyBackend, Faults
from worldmodel_ros.engine.what_if import Branch, Question
from worldmodel_ros.model import checkpoint

ACTION = np.array([0.2, 0.4], np.float32)
WITH_SINKS = replace(SMALL, window_frames=12, sink_frames=8, sink_statistics=0.3)
PARTS = ('encode', 'commit', 'policy', 'denoise')


class Mark:
    """A device's event, on a device whose time stands at ``number`` marks."""

    def __init__(self, number):
        self.number = number

    def elapsed_time(self, later):
        return float(later.number - self.number)


class QueuedBackend(TorchBackend):
    """A CPU that is treated as if it worked asynchronously; counts who waits for it."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.asynchronous = True
        self.waited = []
        self.marks = 0

    def mark(self):
        self.marks += 1
        return Mark(self.marks)

    def settle(self):
        self.waited.append('settle')

    def host(self, array):
        self.waited.append('host')
        return super().host(array)

    def run(self, network, batch):
        self.waited.append(network)
        return super().run(network, batch)

    def fetch(self, array):
        fetched, result = super().fetch(array), super().fetch(array).result
        fetched.result = lambda: (self.waited.append('fetched'), result())[1]
        return fetched


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return small_checkpoint(tmp_path_factory.mktemp('model'))


def frames(count, spec=SMALL):
    return np.random.default_rng(0).integers(0, 256, (count, *spec.image_size, 3), dtype=np.uint8)


def engine_of(backend, folder):
    return Engine(backend, folder, sessions=2)


@pytest.mark.parametrize('steps', [1, 2])
def test_a_queued_tick_gives_the_numbers_of_one_that_is_waited_for(folder, steps):
    answers = []
    for backend in (TorchBackend, QueuedBackend):
        session = engine_of(backend(checkpoint.load(folder)), folder).open_session(seed=3)
        for frame in frames(SMALL.window_frames + 3):
            session.observe(frame, ACTION)
            ahead = session.look_ahead('green', steps)
            plan, future = ahead.plan(), ahead.future()
        answers.append((plan, np.asarray(future.latents), future.collision_risk, session.decode(future)))
        assert future.progress.keys() == set(SMALL.goals) and np.array_equal(future.actions, plan)
    for ours, theirs in zip(*answers):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize('preset', [SMALL, WITH_SINKS], ids=['window', 'sinks'])
def test_pages_read_in_place_give_the_numbers_of_gathered_ones(preset):
    """While the window fills and when it rolls; of ticks, and of questions, which commit chunks and sinks."""
    answers = []
    for in_place in (False, True):
        backend = QueuedBackend(small_model(preset=preset), in_place=in_place)
        session = engine_of(backend, None).open_session(seed=3)
        answers.append([])
        for tick, frame in enumerate(frames(preset.window_frames + 3, preset)):
            session.observe(frame, ACTION)
            ahead = session.look_ahead('green', 1 + tick % 2)
            future = ahead.future()
            answers[-1] += [ahead.plan(), np.asarray(future.latents), future.collision_risk]
            if tick in (0, preset.window_frames + 1):
                units = session.what_if(np.tile(ACTION, (2 * preset.window_frames - 3, 1)))
                with contextlib.suppress(StopIteration):
                    while True:
                        next(units)
                answers[-1].append(np.asarray(session.decode(future), np.float32))
    for ours, theirs in zip(*answers):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5)


class FakeStream:
    """A stream of CUDA that does all work at once, and notes who waits for what."""

    def __init__(self):
        self.waits = []

    def wait_stream(self, stream):
        self.waits.append(stream)

    def wait_event(self, event):
        self.waits.append(event)

    def record_event(self):
        return object()


def test_modulations_next_to_the_layers_are_those_in_them(monkeypatch):
    layers, side, answers = FakeStream(), FakeStream(), []
    monkeypatch.setattr(torch.cuda, 'current_stream', lambda device=None: layers)
    monkeypatch.setattr(torch.cuda, 'stream', lambda stream: contextlib.nullcontext())
    for stream in (None, side):
        backend = TorchBackend(small_model(), in_place=True)
        backend._launch.side_stream = stream
        session = engine_of(backend, None).open_session()
        session.observe(frames(1)[0], ACTION)
        answers.append(session.imagine(np.tile(ACTION, (SMALL.chunk_frames, 1))).latents)
    np.testing.assert_array_equal(*answers)
    assert side.waits == [layers] * 3 and len(layers.waits) == 3 * SMALL.depth  # the commit and two steps


def test_lists_of_pages_are_split_into_parts_of_which_some_may_be_empty():
    starts, pages, lengths, counts = listed([np.array([7, 8, 9]), np.array([4])], parts=2, most=6, tokens=16)
    assert starts.tolist() == [0, 2, 3, 4, 4] and pages.tolist() == [7, 9, 4, 8, 0, 0]
    assert counts.tolist() == [2, 1, 1, 0] and set(lengths.tolist()) == {16}


def test_pages_are_split_as_far_as_processors_are_idle():
    assert parts_for(items=64, pages=20) == 2    # a chunk of base, on 132 processors
    assert parts_for(items=16, pages=17) == 6    # a frame of it: three pages a part, as with seven and eight
    assert parts_for(items=8 * 132, pages=20) == 1


def test_nobody_waits_for_the_device_between_frame_and_command(folder):
    backend = QueuedBackend(checkpoint.load(folder))
    session = engine_of(backend, folder).open_session()
    for frame in frames(3):
        session.observe(frame, ACTION)
        ahead = session.look_ahead('red')
        assert backend.waited == []
        ahead.plan()
        assert backend.waited == ['fetched']
        ahead.future()
        assert set(backend.waited) == {'fetched'}
        backend.waited.clear()


def test_queued_parts_are_timed_by_the_device_once_it_is_done(folder):
    engine = engine_of(QueuedBackend(checkpoint.load(folder)), folder)
    session = engine.open_session()
    session.observe(frames(1)[0], ACTION)
    ahead = session.look_ahead('red', 2)
    assert session.timings == {}  # the device may not have begun
    ahead.future()
    assert session.timings == dict.fromkeys(PARTS, 0.001)  # one mark later, each
    assert engine.step_times.predict(2) >= 5 * 0.001


def test_times_that_nobody_waited_for_are_forgotten(folder, monkeypatch):
    engine, recorded = engine_of(QueuedBackend(checkpoint.load(folder)), folder), []
    monkeypatch.setattr(engine.step_times, 'record', lambda part, seconds: recorded.append(part))
    session = engine.open_session()
    for frame in frames(5):
        session.observe(frame, ACTION)
    session.look_ahead('red').future()
    assert recorded == ['encode', 'commit', 'policy', 'denoise', 'denoise']


def test_injected_faults_strike_queued_work_too(folder):
    faults = Faults(nan=True)
    engine = engine_of(QueuedBackend(checkpoint.load(folder)), folder)
    engine.backend = FaultyBackend(engine.backend, faults)
    session = engine.open_session()
    session.observe(frames(1)[0], ACTION)
    assert np.isnan(session.look_ahead('red').plan()).all()
    faults.fail = True
    with pytest.raises(RuntimeError, match='fault_raise'):
        session.look_ahead('red')


@pytest.mark.parametrize('make', [
    small_model, functools.partial(small_model, preset=WITH_SINKS), tiled_model,
    functools.partial(QueuedBackend, small_model(preset=WITH_SINKS), in_place=True)],
    ids=['window', 'sinks', 'tiles', 'in place'])
def test_a_warmed_up_engine_has_met_all_that_a_robot_will_ask(make):
    made = make()
    backend = made if isinstance(made, QueuedBackend) else QueuedBackend(made)
    spec, shapes, launch = backend.preset, set(), backend._launch

    def noted(key, function, columns):
        shapes.add((key, tuple(np.shape(column[0]) for column in columns)))
        return launch(key, function, columns)
    noted.side_stream = None
    backend._launch = noted
    if backend._tiles:
        backend._tiles._launch = noted
    engine = engine_of(backend, None)
    engine.warm_up(ticks=1)
    met = set(shapes)
    session = engine.open_session()
    for tick, frame in enumerate(frames(spec.window_frames + 3, spec)):
        session.observe(frame, ACTION)
        session.look_ahead('red', 1 + tick % 2).future()
        if tick in (0, spec.window_frames, spec.window_frames + 2):
            for _ in session.what_if(np.tile(ACTION, (spec.window_frames + spec.chunk_frames, 1))):
                pass
    assert shapes == met  # nothing is captured while a robot drives


class Overlapping(QueuedBackend):
    """Units of questions are done when ``done`` is set; a tick that comes meanwhile overtakes them."""

    overlaps, busy = True, False

    def __init__(self, model):
        super().__init__(model)
        self.units, self.inside, self.order = 0, False, []

    @contextlib.contextmanager
    def in_background(self):
        assert not self.busy, 'one piece of work at a time'
        self.inside = True
        yield
        self.inside, self.busy, self.units = False, True, self.units + 1

    def settle_background(self):
        self.waited.append('background')
        self.busy = False

    def before_writing(self):
        self.order.append(('write', self.inside))

    def launch(self, network, batch):
        self.order.append((network, self.inside))
        return super().launch(network, batch)


def branch(session, backend, meanwhile=lambda: None):
    """The answer to a question; ``meanwhile`` is called while each unit of it is under way."""
    units = session.what_if(np.tile(ACTION, (SMALL.chunk_frames + 2, 1)))
    while True:
        try:
            next(units)
        except StopIteration as end:
            return end.value
        meanwhile()
        if backend.asynchronous:
            backend.busy = False


def test_a_question_beside_ticks_gets_the_answer_of_one_alone(folder):
    futures = []
    for backend in (TorchBackend(checkpoint.load(folder)), Overlapping(checkpoint.load(folder))):
        engine = engine_of(backend, folder)
        session = engine.open_session(seed=1)
        for frame in frames(SMALL.window_frames + 2):
            session.observe(frame, ACTION)
        session.look_ahead('red').future()
        backend.waited = []

        def tick():
            session.observe(frames(1)[0], ACTION)
            session.look_ahead('red').future()
        futures.append(branch(session, backend, tick if backend.asynchronous else lambda: None))
    for name in ('actions', 'latents', 'collision_risk', 'before', 'frames'):
        np.testing.assert_array_equal(*(getattr(future, name) for future in futures))
    assert len(futures[0].frames) == SMALL.chunk_frames + 2


def test_queueing_a_unit_of_a_question_waits_for_nobody_and_is_not_timed_as_a_ticks(folder):
    backend = Overlapping(checkpoint.load(folder))
    engine = engine_of(backend, folder)
    session = engine.open_session()
    session.observe(frames(1)[0], ACTION)
    session.look_ahead('red').future()
    times, backend.waited = dict(session.timings), []
    branch(session, backend, lambda: backend.waited and pytest.fail(f'somebody waited: {backend.waited}'))
    assert backend.units == 2 * 3 + 1  # of each chunk two steps and its pictures, and the commit between the two
    assert session.timings == times
    # Pages are written after the device was told, in the background and by a tick.
    session.observe(frames(1)[0], ACTION)
    for inside in (True, False):
        assert backend.order[backend.order.index(('commit', inside)) - 1] == ('write', inside)


def test_questions_beside_ticks_need_not_fit_and_are_not_asked_on_while_the_device_is_busy():
    clock, engine = FakeClock(), FakeEngine(what_if=9.0)
    session, observed = FakeSession(engine), 1
    engine.sleep = lambda seconds: passed.append(seconds)
    passed = []  # a unit each
    spare = BackgroundWork(engine, step_period=0.1, listener=None, clock=clock)
    promise = spare.ask(Question((Branch('left', 2, np.zeros((2, 2), np.float32)),), 'red', due=clock.now + 60.0))

    def step():
        return spare.step(session, observed, expected=clock.now + 0.1)
    assert step() > 0.0 and not promise.running()  # it does not fit before the next frame
    session.overlaps = True
    assert step() == step() == 0.0
    session.busy = True
    before = len(passed)
    assert 0.0 < step() < 0.002 and len(passed) == before
    session.busy = False
    while not promise.done():
        assert step() == 0.0
    assert promise.result().complete


def test_inputs_take_batches_from_host_and_device_and_repeat_the_first_row():
    rng = np.random.default_rng(1)
    host = [rng.random((3, 2), np.float32), rng.integers(0, 9, (3,)), rng.random((3, 4)) > 0.5]
    device = torch.arange(15.0).reshape(3, 5)

    def columns(rows):
        return [list(host[0][rows]), list(device[rows]), list(host[1][rows]), list(host[2][rows])]
    inputs = Inputs(torch.device('cpu'), 4, columns([0]))
    for rows in ([0], [2, 1], [1, 0, 2], [2]):
        inputs.fill(columns(rows))
        padded = rows + [rows[0]] * (4 - len(rows))
        for tensor, expected in zip(inputs.tensors, (host[0], device.numpy(), host[1], host[2])):
            np.testing.assert_array_equal(tensor.numpy(), expected[padded])
            assert tensor.numpy().dtype == expected.dtype


def test_an_argument_may_come_from_the_host_now_and_from_the_device_later():
    inputs = Inputs(torch.device('cpu'), 1, [[np.zeros(3, np.float32)], [np.float32(1.0)]])
    inputs.fill([[torch.ones(3)], [np.float32(0.5)]])
    assert inputs.tensors[0].tolist() == [[1.0] * 3] and inputs.tensors[1].tolist() == [0.5]
    inputs.fill([[np.full(3, 2.0, np.float32)], [np.float32(0.25)]])
    assert inputs.tensors[0].tolist() == [[2.0] * 3] and inputs.tensors[1].tolist() == [0.25]


@pytest.mark.parametrize('in_place, most', [(False, 7), (True, 8)], ids=['gathered', 'in place'])
def test_layers_and_heads_trace_whole_and_share_what_is_compiled(folder, monkeypatch, in_place, most):
    compiled = []

    def counting(graph, inputs):
        compiled.append(graph)
        return graph.forward
    monkeypatch.setattr(torch, 'compile', functools.partial(torch.compile, backend=counting, fullgraph=True))
    torch._dynamo.reset()
    plain, fused = (engine_of(TorchBackend(checkpoint.load(folder), in_place=in_place), folder) for _ in range(2))
    compile_layers(fused.backend.model.dit)
    compile_heads(fused.backend.model)
    plans = []
    for engine in (plain, fused):
        session = engine.open_session()
        for frame in frames(SMALL.window_frames + 2):
            session.observe(frame, ACTION)
        plans.append(session.look_ahead('red').plan())
    np.testing.assert_allclose(*plans, atol=1e-5)
    # The encoder, what frames are told, tokens, features, the policy, and of layers two or three: where pages are gathered, a
    # window that is not full is a shape of its own; where they are read in place, what comes before the first attention,
    # between two, and after the last.
    assert most - 1 <= len(compiled) <= most


def test_batches_of_several_sessions_run_as_they_are():
    traced = []

    @functools.partial(torch.compile, backend=lambda graph, inputs: (traced.append(graph), graph.forward)[1])
    def double(x):
        return 2 * x
    with not_compiled():
        double(torch.ones(2))
    assert not traced
    double(torch.ones(2))
    assert traced
