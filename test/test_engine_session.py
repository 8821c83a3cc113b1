"""Sessions: staged commits, forks that leave no trace, saving and loading, back ends that agree."""
import numpy as np
import pytest
from small_model import SMALL, small_checkpoint

from worldmodel_ros.engine import load
from worldmodel_ros.engine.network_calls import HISTORY, QUANTILE, Recent, StepTimes
from worldmodel_ros.model.checkpoint_description import ModelError


@pytest.fixture(scope='module')
def engine(tmp_path_factory):
    return load(str(small_checkpoint(tmp_path_factory.mktemp('model'))), 'torch')


def frames(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *SMALL.image_size, 3), dtype=np.uint8)


def driven(engine, count=8, seed=0):
    session = engine.open_session()
    for frame in frames(count, seed):
        session.observe(frame, np.array([0.2, 0.4]))
    return session


def finish(generator):
    units = 0
    while True:
        try:
            next(generator)
            units += 1
        except StopIteration as end:
            return end.value, units


ACTIONS = np.tile(np.array([[0.3, 1.0]], np.float32), (SMALL.chunk_frames, 1))


def test_the_same_frames_give_the_same_plan_and_future(engine):
    a, b = driven(engine), driven(engine)
    np.testing.assert_array_equal(a.plan('red'), b.plan('red'))
    np.testing.assert_array_equal(a.imagine(ACTIONS).latents, b.imagine(ACTIONS).latents)


def test_plans_lie_inside_the_range_of_actions(engine):
    plan = driven(engine).plan('green')
    assert plan.shape == (SMALL.chunk_frames, 2)
    assert (plan >= SMALL.action_low).all() and (plan <= SMALL.action_high).all()


def test_a_future_depends_on_its_actions_and_its_steps(engine):
    session = driven(engine)
    left, right = session.imagine(ACTIONS), session.imagine(-ACTIONS)
    assert np.abs(left.latents - right.latents).max() > 1e-4
    assert np.abs(left.latents - session.imagine(ACTIONS, steps=1).latents).max() > 1e-4
    assert ((left.collision_risk >= 0) & (left.collision_risk <= 1)).all()


def test_a_what_if_of_one_chunk_is_the_imagined_chunk(engine):
    session = driven(engine)
    future = session.imagine(ACTIONS)
    branch, _ = finish(session.what_if(ACTIONS))
    np.testing.assert_array_equal(branch.latents, future.latents)
    np.testing.assert_array_equal(branch.frames, session.decode(future))


def test_a_what_if_leaves_the_session_as_it_was_even_between_its_steps(engine):
    plain, asked = driven(engine), driven(engine)
    branch = asked.what_if(np.repeat(ACTIONS, 3, 0))
    for frame in frames(4, seed=9):
        for session in (plain, asked):
            session.observe(frame, np.array([0.1, 0.0]))
        next(branch)
    np.testing.assert_array_equal(plain.plan('red'), asked.plan('red'))
    np.testing.assert_array_equal(plain.imagine(ACTIONS).latents, asked.imagine(ACTIONS).latents)


def test_a_what_if_interrupted_by_ticks_answers_for_the_moment_it_was_asked(engine):
    asked, undisturbed = driven(engine), driven(engine)
    work = asked.what_if(np.repeat(ACTIONS, 2, 0))
    next(work)
    for frame in frames(3, seed=5):
        asked.observe(frame, np.zeros(2))
        next(work)
    branch, _ = finish(work)
    np.testing.assert_array_equal(branch.latents, finish(undisturbed.what_if(np.repeat(ACTIONS, 2, 0)))[0].latents)


@pytest.mark.parametrize('steps', [1, 3, 4, 5, 11])
def test_a_what_if_has_as_many_frames_as_actions(engine, steps):
    branch, _ = finish(driven(engine).what_if(np.tile(ACTIONS[:1], (steps, 1))))
    assert len(branch.frames) == len(branch.collision_risk) == len(branch.latents) == steps
    assert set(branch.progress) == set(SMALL.goals)


@pytest.mark.parametrize('frame, executed', [
    (np.zeros((16, 16, 3), np.uint8), np.zeros(2)),
    (np.zeros((32, 32, 3), np.float32), np.zeros(2)),
    (np.zeros((32, 32, 3), np.uint8), np.array([np.nan, 0.0])),
    (np.zeros((32, 32, 3), np.uint8), np.zeros(3)),
])
def test_a_refused_observation_leaves_the_session_as_it_was(engine, frame, executed):
    session, untouched = driven(engine), driven(engine)
    with pytest.raises(ValueError, match='must be'):
        session.observe(frame, executed)
    np.testing.assert_array_equal(session.plan('red'), untouched.plan('red'))
    assert session.frames_seen == untouched.frames_seen


def test_a_network_that_fails_mid_tick_leaves_the_session_as_it_was(engine, monkeypatch):
    session, untouched = driven(engine), driven(engine)
    with monkeypatch.context() as patch:
        run = engine.backend.run
        patch.setattr(engine.backend, 'run', lambda network, batch: run(network, batch) if network != 'commit' else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.observe(frames(1)[0], np.zeros(2))
    for s in (session, untouched):
        s.observe(frames(1)[0], np.zeros(2))
    np.testing.assert_array_equal(session.plan('red'), untouched.plan('red'))


def test_calls_before_the_first_frame_say_what_is_missing(engine):
    session = engine.open_session()
    for call in (lambda: session.plan('red'), lambda: session.imagine(ACTIONS), lambda: next(session.what_if(ACTIONS)),
                 lambda: session.save('/nowhere')):
        with pytest.raises(ValueError, match='observe'):
            call()


def test_an_unknown_goal_is_refused_with_the_known_ones(engine):
    with pytest.raises(ValueError, match='red, green, blue, yellow'):
        driven(engine).plan('purple')


def test_a_saved_session_goes_on_where_it_was(engine, tmp_path):
    session = driven(engine)
    session.save(tmp_path / 's.safetensors')
    restored = engine.open_session()
    restored.load(tmp_path / 's.safetensors')
    for s in (session, restored):
        s.observe(frames(1, seed=3)[0], np.array([0.1, 0.2]))
    np.testing.assert_array_equal(session.plan('yellow'), restored.plan('yellow'))
    np.testing.assert_array_equal(session.imagine(ACTIONS).latents, restored.imagine(ACTIONS).latents)


def test_loading_what_is_no_session_is_refused_and_changes_nothing(engine, tmp_path):
    session, untouched = driven(engine), driven(engine)
    (tmp_path / 'broken').write_bytes(b'not a session')
    for path, match in ((tmp_path / 'broken', 'not a saved session'), (tmp_path / 'absent', 'cannot be read')):
        with pytest.raises(ValueError, match=match):
            session.load(path)
    np.testing.assert_array_equal(session.plan('red'), untouched.plan('red'))


def test_reset_forgets_everything(engine):
    session, fresh = driven(engine, seed=1), engine.open_session()
    session.reset()
    for frame in frames(3):
        for s in (session, fresh):
            s.observe(frame, np.zeros(2))
    np.testing.assert_array_equal(session.plan('red'), fresh.plan('red'))


def test_reset_recovers_from_nan_that_was_committed(engine, monkeypatch):
    session = driven(engine)
    with monkeypatch.context() as patch:
        run = engine.backend.run

        def broken(network, batch):
            outputs = run(network, batch)
            return outputs if network != 'encode' else [tuple(part * np.nan for part in each) for each in outputs]
        patch.setattr(engine.backend, 'run', broken)
        session.observe(frames(1)[0], np.zeros(2))
    assert not np.isfinite(session.plan('red')).any()
    session.reset()
    session.observe(frames(1)[0], np.zeros(2))
    assert np.isfinite(session.plan('red')).all()


def test_warm_up_measures_what_a_tick_takes(engine):
    engine.warm_up(4)
    assert 0 < engine.step_times.predict(1) < engine.step_times.predict(2)


def test_a_prediction_is_the_typical_tick_and_one_tail():
    times = StepTimes()
    for part, seconds in (('encode', 0.002), ('commit', 0.004), ('policy', 0.001), ('denoise', 0.005)):
        for _ in range(9):
            times.record(part, seconds)
        times.record(part, seconds + 0.020)  # every part was interrupted once, in different ticks
    for tick in range(20):
        times.record_tick(0.017 + (0.020 if tick < 2 else 0.0), steps=2)
    assert times.predict(2) == pytest.approx(0.037, abs=1e-6)
    assert times.predict(1) == pytest.approx(0.032, abs=1e-6)


def test_quantiles_of_the_last_values_are_those_of_numpy():
    recent, values = Recent(), np.random.default_rng(0).choice(50, 3 * HISTORY) / 1e3  # some of them equal
    assert recent.quantile(0.5) == 0.0
    for count, value in enumerate(values, 1):
        recent.append(float(value))
        for level in (0.5, QUANTILE):
            expected = np.quantile(values[max(0, count - HISTORY):count], level)
            assert recent.quantile(level) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize('decode, rate', [(0.005, 10.0), (0.090, 8.0), (0.190, 4.4444)])
def test_predictions_come_at_the_models_rate_or_as_fast_as_this_host_imagines_and_decodes_them(decode, rate):
    times = StepTimes()
    for part, seconds in (('encode', 0.010), ('commit', 0.010), ('policy', 0.005), ('denoise', 0.010), ('decode', decode)):
        times.record(part, seconds)
    assert times.prediction_rate(0.1) == pytest.approx(rate, rel=1e-4)


def test_an_unknown_model_or_back_end_is_refused_with_the_remedy():
    with pytest.raises(ModelError, match='shipped'):
        load('no-such-model')
    with pytest.raises(ModelError, match='onnx-int8'):
        load(backend='tensorflow')
