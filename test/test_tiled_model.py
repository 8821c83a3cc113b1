"""Models whose layers attend within frames and over tiles: a session on pages against masked attention."""
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_model import small_model
from tiled_model import TILED, DenseTiles, decided, tiled_model

from worldmodel_ros.cache.slab_index import SlabIndex
from worldmodel_ros.cache.stores.host import HostStore
from worldmodel_ros.engine.backends.torch import TorchBackend
from worldmodel_ros.engine.engine import Engine
from worldmodel_ros.engine.sampler import Noise
from worldmodel_ros.engine.session_store import SessionLog, read_newest
from worldmodel_ros.kernels import attention
from worldmodel_ros.kernels.pages import Precision
from worldmodel_ros.model.checkpoint_description import ModelError
from worldmodel_ros.model.dit import Block
from worldmodel_ros.model.presets import ROBOT_3B, ROBOT_3B_4K, Preset
from worldmodel_ros.model.sampling import FLOW, HALF

pytestmark = pytest.mark.usefixtures('one_thread')
ACTION = np.array([0.2, 0.4], np.float32)
CHUNK = np.tile(np.array([[0.3, 1.0]], np.float32), (TILED.chunk_frames, 1))


@pytest.fixture(scope='module')
def model():
    return decided(tiled_model())


def images(count, size=TILED.image_size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *size, 3), dtype=np.uint8)


def driven(engine, count):
    session = engine.open_session()
    for image in images(count, engine.spec.image_size):
        session.observe(image, ACTION)
    return session


def dense_pass(dit, dense, latents, times, tau, row, actions, commit):
    dense.begin(times, commit)
    shape = (1, len(times))
    with torch.inference_mode():
        x, features = dit.over_tiles(torch.from_numpy(latents)[None], torch.full(shape, tau), torch.full(shape, row),
                                     torch.from_numpy(actions)[None], dense)
    dense.end()
    return x[0].numpy(), features[0].numpy()


def dense_answers(backend, frames, steps=2):
    """Features of the newest frame, and the imagined chunk, by masked attention over all frames at once."""
    dit, dense, state = backend.model.dit, DenseTiles(backend.model.dit), None
    for time, image in enumerate(frames):
        (latent, state), = backend.run('encode', [(image, state)])
        latent = backend.host(latent)[None]
        _, features = dense_pass(dit, dense, latent, np.array([time]), 1.0, FLOW, ACTION[None], True)
    newest = len(frames) - 1
    noise = np.random.Generator(np.random.Philox(key=[0, newest + 1]))
    z = noise.standard_normal((TILED.chunk_frames, *TILED.latent_size, TILED.latent_channels), np.float32)
    for step in range(steps):
        x, _ = dense_pass(dit, dense, z, newest + 1 + np.arange(TILED.chunk_frames), step / steps, HALF, CHUNK, False)
        z = z + (x - z) * np.float32(1.0 / (steps - step))
    return features[0], z


@pytest.mark.parametrize('count', [1, 2, 5, 13])
def test_a_session_on_pages_gives_the_numbers_of_attention_under_a_mask_of_tiles(model, count):
    engine = Engine(TorchBackend(model), Path('tiled'), 1)
    session = driven(engine, count)
    features, latents = dense_answers(engine.backend, images(count))
    np.testing.assert_allclose(session._features, features, rtol=0, atol=2e-5)
    np.testing.assert_allclose(session.imagine(CHUNK).latents, latents, rtol=0, atol=2e-5)


@pytest.mark.parametrize('count', [5, 12])
def test_what_was_imagined_is_seen_by_the_next_chunk_slab_by_slab(model, count):
    """After 5 frames, the four imagined ones begin in the middle of a slab; after 12, each slab drops an old one."""
    engine = Engine(TorchBackend(model), Path('tiled'), 1)
    session, dit, dense = driven(engine, count), model.dit, DenseTiles(model.dit)
    *_, future = (latents for latents in results(session.what_if(np.repeat(CHUNK, 2, 0))))
    frames, state = images(count), None
    for time, image in enumerate(frames):
        (latent, state), = engine.backend.run('encode', [(image, state)])
        dense_pass(dit, dense, engine.backend.host(latent)[None], np.array([time]), 1.0, FLOW, ACTION[None], True)
    imagined = future[:TILED.chunk_frames]
    times = count + np.arange(TILED.chunk_frames)
    for slab in np.unique(times // TILED.tile[0]):
        part = times // TILED.tile[0] == slab
        dense_pass(dit, dense, imagined[part], times[part], 1.0, FLOW, CHUNK[part], True)
    shape = TILED.chunk_frames, *TILED.latent_size, TILED.latent_channels
    z = Noise(0, shape).draw(count + TILED.chunk_frames)
    for step in range(2):
        x, _ = dense_pass(dit, dense, z, times + TILED.chunk_frames, step / 2, HALF, CHUNK, False)
        z = z + (x - z) * np.float32(1.0 / (2 - step))
    np.testing.assert_allclose(future[TILED.chunk_frames:], z, rtol=0, atol=2e-5)


@pytest.mark.parametrize('between', [False, True])
def test_a_step_prepares_the_next_one_unless_another_chunk_comes_between(model, between):
    engine = Engine(TorchBackend(model), Path('tiled'), 2)
    session, other, tiles = driven(engine, 5), driven(engine, 3), engine.backend._tiles
    wanted, names, launch, denoise = session.imagine(CHUNK).latents, [], tiles._launch, tiles.denoise

    def noted(key, *rest):
        names.append(key[0])
        return launch(key, *rest)

    def interrupted(*inputs):
        outputs = denoise(*inputs)
        if between and names == ['prepare']:
            other.imagine(CHUNK, steps=2)
        return outputs
    tiles._launch, tiles.denoise, tiles._prepare = noted, interrupted, True
    found = session.imagine(CHUNK).latents
    assert names == (['prepare', 'prepare', 'finish', 'denoise'] if between else ['prepare', 'finish'])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    names.clear()
    session.imagine(CHUNK, steps=1)
    assert names == ['denoise']


def results(question):
    """What a question ends with: its latents."""
    future = yield from question
    yield future.latents


@pytest.mark.parametrize('precision', [Precision.BF16, Precision.FP8])
def test_pages_in_fewer_bits_give_nearly_the_same(model, precision):
    exact = driven(Engine(TorchBackend(model), Path('tiled'), 1), 11)
    engine = Engine(TorchBackend(decided(tiled_model()), precision=precision), Path('tiled'), 1)
    session = driven(engine, 11)
    expected, latents = (each.imagine(CHUNK).latents for each in (exact, session))
    assert 0.0 < np.sqrt(np.mean((latents - expected) ** 2) / np.mean(expected ** 2)) < 0.016
    if precision.quantised:
        recent, older = (pool.allocator.usage().used for pool in engine.memory.pools)
        assert (recent, older) == (3 * 16, 3 * 16)  # the sink, which stays, and the two newest slabs; the others


LONG = replace(TILED, window_frames=16, heading_pairs=4)  # a quarter of it is two slabs


def test_what_is_older_than_a_quarter_of_the_window_lies_in_fp4_and_costs_little():
    latents, used = {}, {}
    for precision in (Precision.FP32, Precision.FP8, Precision.FP4):
        engine = Engine(TorchBackend(decided(tiled_model(LONG)), precision=precision), Path('tiled'), 1)
        session = driven(engine, LONG.window_frames + 9)
        latents[precision] = session.imagine(CHUNK).latents
        used[precision] = [pool.allocator.usage().used // 16 for pool in engine.memory.pools]
    # The sink and the newest slabs, those within a quarter of the window, the others.
    assert used == {Precision.FP32: [10], Precision.FP8: [3, 7], Precision.FP4: [3, 1, 6]}
    exact = latents.pop(Precision.FP32)
    off = {precision: np.sqrt(np.mean((each - exact) ** 2) / np.mean(exact ** 2)) for precision, each in latents.items()}
    assert 0.0 < off[Precision.FP8] < off[Precision.FP4] < 0.05


def test_questions_and_a_window_of_sessions_fit_into_three_pools():
    engine = Engine(TorchBackend(tiled_model(LONG), precision=Precision.FP4), Path('tiled'), 2)
    sessions = [driven(engine, count) for count in (24, 17)]
    for session in sessions:
        *_, future = results(session.what_if(np.repeat(CHUNK, 2, 0)))
        assert len(future) == 2 * LONG.chunk_frames
        session.observe(images(1, seed=7)[0], ACTION)
    for pool, held in zip(engine.memory.pools, engine.memory.guaranteed_pages, strict=True):
        assert pool.allocator.usage().used <= 2 * held


@pytest.fixture(scope='module', params=[Precision.FP8, Precision.FP4])
def kept(request, tmp_path_factory):
    """
    A session whose pages lie in several pools, kept in a file and in a store.

    Returns its engine, the file, the store, and what the session itself imagines after one more frame.
    """
    engine, store = Engine(TorchBackend(decided(tiled_model(LONG)), precision=request.param), Path('tiled'), 2), HostStore()
    session, file = driven(engine, 21), tmp_path_factory.mktemp('kept') / 'session.safetensors'
    session.save(file)
    checkpoint = SessionLog(store, 'robot', 1).checkpoint(session.capture(), {})
    for _ in checkpoint.pieces():
        pass
    checkpoint.write()
    return engine, file, store, after_one_more(session)


def after_one_more(session):
    session.observe(images(1, seed=7)[0], ACTION)
    return session.imagine(CHUNK).latents


def test_a_session_whose_pages_lie_in_several_pools_goes_on_from_a_file(kept):
    engine, file, _, expected = kept
    other = engine.open_session()
    other.load(file)
    np.testing.assert_array_equal(after_one_more(other), expected)


def test_a_session_whose_pages_lie_in_several_pools_comes_back_from_a_store(kept):
    engine, _, store, expected = kept
    engine.slab_index = SlabIndex()  # none of them is known to be there
    other, stored = engine.open_session(), engine.stored_session(store)
    read_newest(store, 'robot', stored)
    for _ in stored.pieces():
        pass
    other.restore(stored)
    np.testing.assert_array_equal(after_one_more(other), expected)


def test_a_session_never_holds_more_than_its_window_and_its_sink(model):
    engine = Engine(TorchBackend(model), Path('tiled'), 1)
    session = driven(engine, 3 * TILED.window_frames)
    window = TILED.window_frames // TILED.tile[0]
    assert engine.memory.pool.allocator.usage().used == (window + TILED.sink_slabs) * 16
    assert session.frames_seen == 3 * TILED.window_frames


def test_a_pool_that_does_not_fit_into_the_memory_is_refused_with_the_remedy(model):
    class Full(TorchBackend):
        @staticmethod
        def storage_type(*arguments, **options):
            raise torch.OutOfMemoryError('tried to allocate 156 GiB')
    with pytest.raises(ModelError, match='320 pages.*tiled-test.*156 GiB.*fewer sessions'):
        Engine(Full(model), Path('tiled'), 1)


def test_pages_of_one_frame_are_not_rounded_by_the_page():
    with pytest.raises(ValueError, match='small-test.*not in fp8'):
        TorchBackend(small_model(), precision=Precision.FP8)


def test_a_mask_between_frames_is_refused_where_layers_attend_to_tiles(model):
    with pytest.raises(ValueError, match='tiled-test.*over_tiles'):
        model.dit(torch.zeros(1, 1, *TILED.latent_size, TILED.latent_channels), torch.ones(1, 1),
                  torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, 2),
                  torch.zeros(2, 1, TILED.tokens, TILED.head_dim // 2), torch.zeros(1, 1))


def test_the_large_preset_is_as_large_as_it_says():
    """3.06 billion parameters in the layers; of the cache, 6 layers of 18; and what JSON makes of it is the same."""
    with torch.device('meta'):
        blocks = torch.nn.ModuleList(Block(ROBOT_3B) for _ in range(ROBOT_3B.depth))
    assert sum(parameter.numel() for parameter in blocks.parameters()) == pytest.approx(3.06e9, rel=0.002)
    assert ROBOT_3B.cache_layers == (2, 5, 8, 11, 14, 17)
    assert ROBOT_3B.chunk_frames * ROBOT_3B.tokens == 16_384 == 4 * ROBOT_3B_4K.chunk_frames * ROBOT_3B_4K.tokens
    assert Preset.from_dict(json.loads(json.dumps(ROBOT_3B.to_dict()))) == ROBOT_3B


@pytest.mark.parametrize('change, message', [
    ({'tile': (3, 4, 4)}, 'whole tiles'), ({'tile': (2, 4, 5)}, 'whole tiles'), ({'patterns': ()}, 'at least one'),
    ({'patterns': ((1, 2),)}, 'slabs, rows, columns'), ({'tile': None}, 'give a tile'),
    ({'cache_every': 5}, 'no cache layer')])
def test_presets_whose_tiles_do_not_fit_are_refused_with_the_reason(change, message):
    with pytest.raises(ValueError, match=message):
        replace(TILED, **change)


@pytest.mark.parametrize('precision, most', [(Precision.FP32, 1e-5), (Precision.FP8, 0.01)])
def test_the_kernels_of_a_gpu_give_what_the_definitions_give(monkeypatch, precision, most):
    """Interpreted: a frame that is committed, and one step of a chunk."""
    preset = replace(TILED, image_size=(64, 64), depth=2, heads=1, width=16, patterns=((2, 1, 2),))
    pytest.importorskip('triton', reason='Triton is not installed')
    from worldmodel_ros.kernels.attention_triton import paged_attention_triton
    from worldmodel_ros.kernels.page_write_triton import write_qkv_triton
    from worldmodel_ros.kernels.qk_norm_triton import rotate_qk_triton
    defined, kernels = (driven(Engine(TorchBackend(decided(tiled_model(preset)), precision=precision),
                                       Path('t'), 1), 2) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr(attention.reference, 'paged_attention', paged_attention_triton)
        patch.setattr(attention.page_write, 'write_qkv', write_qkv_triton)
        patch.setattr(attention.qk_norm, 'rotate_qk', rotate_qk_triton)
        kernels.observe(images(1, preset.image_size, 3)[0], ACTION)
        found = kernels.imagine(CHUNK, steps=1).latents
    defined.observe(images(1, preset.image_size, 3)[0], ACTION)
    expected = defined.imagine(CHUNK, steps=1).latents
    assert np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected ** 2)) < most
