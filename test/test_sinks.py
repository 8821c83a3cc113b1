"""Branches beyond their window: what they keep of what was observed, by every way to compute them."""
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_model import SMALL, small_model
from tiled_model import TILED

from worldmodel_ros.engine import load
from worldmodel_ros.engine.network_calls import Boundary, Call, run
from worldmodel_ros.engine.session import Session
from worldmodel_ros.evaluate.quality.imagination import Imagination
from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.presets import NO_SINKS, PRESETS, TINY
from worldmodel_ros.model.sampling import ONE_STEP, TWO_STEP, adain
from worldmodel_ros.serving.service.networks import Networks

WINDOWS = [replace(SMALL, name='sinks-test', window_frames=8, sink_frames=4, sink_statistics=0.3),
           replace(SMALL, name='sinks-of-two-chunks-test', window_frames=12, sink_frames=8,
                   sink_statistics=0.3, sink_statistics_after=12)]  # either from frame 8 on
FAR = np.random.default_rng(1).uniform(-0.3, 0.6, (20, 2)).astype(np.float32)


@pytest.fixture(scope='module', params=WINDOWS, ids=['a chunk', 'two chunks'])
def preset(request):
    return request.param


@pytest.fixture(scope='module')
def engine(preset, tmp_path_factory):
    return engine_of(preset, tmp_path_factory.mktemp('sinks'))


@pytest.fixture(scope='module')
def without(preset, tmp_path_factory):
    return engine_of(replace(preset, **NO_SINKS), tmp_path_factory.mktemp('without'))


def engine_of(preset, folder, backend='torch', sessions=8):
    checkpoint.save(small_model(preset=preset), folder / 'model', {'trained': False}, dtype=torch.float32)
    return load(str(folder / 'model'), backend, sessions=sessions)


def frames(count, seed=0, size=SMALL.image_size):
    return np.random.default_rng(seed).integers(0, 256, (count, *size, 3), dtype=np.uint8)


def driven(engine, count=12, seed=0) -> Session:
    session = engine.open_session()
    for index, frame in enumerate(frames(count, seed, engine.spec.image_size)):
        session.observe(frame, np.array([0.2, 0.1 * index]))
    return session


def finish(units, between=lambda: None):
    """The Future of a what-if; ``between`` is called before each of its units."""
    while True:
        try:
            next(units)
        except StopIteration as end:
            return end.value
        between()


def imagined(session, between=lambda: None, actions=FAR) -> np.ndarray:
    return finish(session.what_if(actions), between).latents


def test_sinks_change_nothing_before_the_window_would_lose_them(engine, without):
    ours, theirs = imagined(driven(engine)), imagined(driven(without))
    np.testing.assert_array_equal(ours[:8], theirs[:8])
    assert np.abs(ours[8:12] - theirs[8:12]).max() > 1e-3


@pytest.mark.parametrize('observed', [1, 3, 4, 9, 12])
@pytest.mark.parametrize('steps, sampler', [(2, TWO_STEP), (1, ONE_STEP)])
def test_a_session_imagines_what_plain_passes_do(engine, observed, steps, sampler):
    seen = frames(observed)
    executed = np.stack([np.array([0.2, 0.1 * index]) for index in range(observed)])
    batch = Imagination(engine.backend.model)
    latents, _ = batch.roll(batch.observe(seen[None], executed[None], (0,)), FAR[None], sampler)
    future = finish(driven(engine, observed).what_if(FAR, steps))
    np.testing.assert_allclose(latents[0].numpy(), future.latents, atol=2e-5)


def test_the_sinks_are_those_of_the_last_observed_frames_and_no_older_ones(engine):
    batch = Imagination(engine.backend.model)
    memory = batch.observe(frames(12)[None], np.zeros((1, 12, 2)), (0,))
    # What is imagined is the same; only the sinks are another stream's.
    other = batch.observe(frames(12, seed=5)[None], np.zeros((1, 12, 2)), (0,))
    swapped = replace(memory, sinks=other.sinks)
    ours, theirs = (batch.roll(each, FAR[None], TWO_STEP)[0] for each in (memory, swapped))
    torch.testing.assert_close(ours[:, :8], theirs[:, :8])
    assert (ours[:, 8:12] - theirs[:, 8:12]).abs().max() > 1e-3
    assert memory.sinks[0].shape[1] == engine.spec.sink_frames
    torch.testing.assert_close(memory.sinks[0][:, -1], memory.latent)


def test_onnx_runtime_gives_pytorchs_answers_with_the_same_sinks():
    """By the shipped model, whose graphs are exported already; to the first chunk that is drawn to its sinks."""
    engine, onnx = load('tiny', 'torch'), load('tiny', 'onnx')
    actions = np.tile(FAR, (4, 1))[:engine.spec.sink_statistics_after + engine.spec.chunk_frames]
    np.testing.assert_allclose(*(imagined(driven(each), actions=actions) for each in (onnx, engine)), rtol=1e-3, atol=1e-3)
    count = 8  # the window is not full yet
    a, b = driven(engine, count), driven(onnx, count)
    np.testing.assert_allclose(a.plan('red'), b.plan('red'), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(a.imagine(FAR[:4]).latents, b.imagine(FAR[:4]).latents, rtol=1e-3, atol=1e-4)
    # Wherever the pages lie in the pool: those of two sessions in turn, none next to another of its own.
    interleaved, other = onnx.open_session(), onnx.open_session()
    for index, (frame, noise) in enumerate(zip(*(frames(count, seed, onnx.spec.image_size) for seed in (0, 7)))):
        other.observe(noise, np.array([0.2, 0.4]))
        interleaved.observe(frame, np.array([0.2, 0.1 * index]))
    np.testing.assert_array_equal(interleaved.plan('red'), b.plan('red'))
    np.testing.assert_array_equal(interleaved.imagine(FAR[:4]).latents, b.imagine(FAR[:4]).latents)


def test_ticks_in_between_do_not_change_what_is_imagined(engine):
    session, seen = driven(engine), iter(frames(40, seed=7))
    disturbed = imagined(session, between=lambda: session.observe(next(seen), np.zeros(2)))
    np.testing.assert_array_equal(disturbed, imagined(driven(engine)))
    gone_on = driven(engine)
    moment = gone_on.moment()
    gone_on.observe(frames(1, seed=8)[0], np.zeros(2))
    np.testing.assert_array_equal(run(gone_on.branching(FAR, 2, moment), engine.backend).latents, disturbed)


def test_a_saved_session_keeps_its_sinks(engine, tmp_path):
    session, restored = driven(engine), engine.open_session()
    session.save(tmp_path / 's.safetensors')
    restored.load(tmp_path / 's.safetensors')
    np.testing.assert_array_equal(imagined(restored), imagined(session))


def test_sinks_take_no_pages_for_good_and_fit_an_engine_of_one_session(preset, tmp_path):
    engine = engine_of(preset, tmp_path, sessions=1)
    session = driven(engine)
    before = engine.memory.pool.allocator.usage().used
    units = session.what_if(np.tile(FAR, (4, 1)))
    for index, frame in enumerate(frames(30, seed=2)):  # the session drops its whole window meanwhile
        next(units)
        session.observe(frame, np.zeros(2))
    assert len(finish(units).latents) == 80
    assert engine.memory.pool.allocator.usage().used == before


@pytest.mark.parametrize('count', [3, 4, 8, 9, 20])
@pytest.mark.parametrize('observed', [1, 12])
def test_the_scheduler_is_told_of_every_unit(engine, observed, count):
    work, outputs, units = driven(engine, observed).branching(FAR[:count], 2), None, []
    while True:
        try:
            item = work.send(outputs)
        except StopIteration:
            break
        if isinstance(item, Boundary):
            units.append((f'm/{item.unit}', item.step))
        outputs = engine.backend.run(item.network, [item.inputs])[0] if isinstance(item, Call) else None
    assert units == [(unit.network, unit.step) for unit in Networks(engine, 'm').branch(count, 2)]


@pytest.mark.parametrize('changes', [{'sink_frames': 3}, {'sink_frames': 4, 'window_frames': 18},
                                     {'sink_frames': 16, 'window_frames': 16}, {'sink_frames': 20},
                                     {'sink_frames': -4}, {'sink_frames': 12, 'window_frames': 16}])
def test_sinks_are_some_of_the_whole_chunks_of_a_window(changes):
    with pytest.raises(ValueError, match='sink_frames is'):
        replace(TINY, **changes)


@pytest.mark.parametrize('changes, wrong', [({'sink_frames': 16}, 'the sinks are sink_slabs'),
                                            ({'sink_statistics': 1.1}, 'sink_statistics is 1.1'),
                                            ({'sink_statistics': float('nan')}, 'sink_statistics is nan')])
def test_with_tiles_sinks_are_slabs(changes, wrong):
    with pytest.raises(ValueError, match=wrong):
        replace(PRESETS['robot_3b'], **changes)


def test_with_tiles_chunks_far_ahead_take_over_the_statistics_of_the_last_observed_window(tmp_path):
    spec = replace(TILED, image_size=(64, 64), sink_statistics=0.3, sink_statistics_after=8)
    assert spec.kept_frames == 8 and spec.sinks_from == math.inf
    ours, theirs = (engine_of(each, tmp_path / each.name) for each in (spec, replace(spec, name='plain', sink_statistics=0.0)))
    session, other = driven(ours), driven(theirs)
    matched, plain = imagined(session), imagined(other)
    np.testing.assert_array_equal(matched[:8], plain[:8])
    like = np.stack([ours.backend.host(latent) for latent, _ in session._sinks])
    assert len(like) == 8 and np.array_equal(like[-1], ours.backend.host(session._latent))
    np.testing.assert_allclose(matched[8:12], adain(plain[8:12], like, 0.3), atol=1e-5)
    assert np.abs(matched[8:12] - plain[8:12]).max() > 1e-3
    session.save(tmp_path / 'session')
    again = ours.open_session()
    again.load(tmp_path / 'session')
    np.testing.assert_array_equal(imagined(again), matched)


@pytest.mark.parametrize('changes', [{'sink_statistics': 1.1}, {'sink_statistics': -0.1},
                                     {'sink_statistics': float('nan')}, {'sink_frames': 0}])
def test_statistics_are_a_share_and_of_sinks(changes):
    with pytest.raises(ValueError, match='sink_statistics is'):
        replace(TINY, **changes)


def test_latents_are_drawn_to_the_mean_and_deviation_of_each_channel():
    rng = np.random.default_rng(0)
    latents, like = (rng.normal(mean, scale, (4, 3, 5, 2)).astype(np.float32)
                     for mean, scale in (((0, 1), (1, 2)), ((2, -1), (3, 0.5))))

    def moments(array):
        return np.stack([array.mean((0, 1, 2)), array.std((0, 1, 2))])
    for share in (0.25, 1.0):
        drawn = adain(latents, like, share)
        np.testing.assert_allclose(moments(drawn), (1 - share) * moments(latents) + share * moments(like), atol=1e-5)
        by_torch = adain(torch.from_numpy(latents), torch.from_numpy(like), share)
        np.testing.assert_allclose(by_torch.numpy(), drawn, atol=1e-5)
        batch = adain(np.stack([like, latents]), np.stack([latents, like]), share)  # each by its own
        np.testing.assert_allclose(batch[1], drawn, atol=1e-5)
    np.testing.assert_allclose(adain(latents, like, 0.0), latents, atol=1e-5)
    assert np.isfinite(adain(np.zeros_like(latents), like, 1.0)).all()


def test_a_chunk_far_ahead_is_drawn_to_the_sinks_and_the_next_goes_on_from_it(engine):
    batch, apart = Imagination(engine.backend.model), Imagination(engine.backend.model)
    apart.rollout.preset = replace(engine.spec, sink_statistics=0.0)
    memory = batch.observe(frames(12)[None], np.zeros((1, 12, 2)), (0,))
    ours, theirs = (each.roll(memory, FAR[None], TWO_STEP)[0] for each in (batch, apart))
    first = max(8, engine.spec.sink_statistics_after)
    torch.testing.assert_close(ours[:, :first], theirs[:, :first])
    drawn = slice(first, first + 4)
    torch.testing.assert_close(ours[:, drawn], adain(theirs[:, drawn], memory.sinks[0], 0.3))
    assert (ours[:, drawn] - theirs[:, drawn]).abs().max() > 1e-3
    _, after = batch.roll(memory, FAR[None, :drawn.stop], TWO_STEP)
    assert torch.equal(after.latent, ours[:, drawn.stop - 1])


def test_the_shipped_tiny_has_sinks():
    spec = load('tiny', 'torch').spec
    assert spec == TINY and (spec.sink_frames, spec.sink_statistics) == (8, 0.3)


def test_a_branch_that_goes_on_from_where_another_ended_is_as_one_of_both(engine):
    whole = run(driven(engine).branching(FAR), engine.backend)
    session, moment, parts = driven(engine), None, []
    for part in (FAR[:4], FAR[4:16], FAR[16:]):
        future, moment = run(session.extending(part, moment=moment), engine.backend)
        session.observe(frames(1, seed=5)[0], np.zeros(2))  # the session goes on meanwhile
        parts.append(future)
    assert moment.imagined == len(FAR)
    for name in ('frames', 'latents', 'collision_risk'):
        np.testing.assert_array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(whole, name))
    with pytest.raises(ValueError, match='no whole chunks'):
        run(session.extending(FAR[:3]), engine.backend)


def test_the_units_of_a_branch_that_goes_on_are_those_that_are_planned(engine):
    session, moment, networks = driven(engine), None, Networks(engine, 'model')
    for part in (FAR[:8], FAR[8:]):
        work, units = session.extending(part, moment=moment), []
        outputs = None
        begun = moment.imagined if moment else 0
        try:
            while True:
                item, outputs = work.send(outputs), None
                if isinstance(item, Call):
                    outputs, = engine.backend.run(item.network, [item.inputs])
                else:
                    units.append(item.unit)
        except StopIteration as end:
            _, moment = end.value
        route = networks.branch(len(part), 2, begun, keep=True)
        assert units == [unit.network.rpartition('/')[2] for unit in route]
