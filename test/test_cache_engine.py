"""Sessions on pages: the numbers of a dense window, one pool for all, branches that never starve the tick."""
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from small_model import SMALL, small_checkpoint

from worldmodel_ros.cache.pool import OutOfPages
from worldmodel_ros.cache.layout import TileLayout
from worldmodel_ros.engine import load, memory
from worldmodel_ros.engine.what_if import Branch, Inquiry, Question, QuestionError
from worldmodel_ros.model.rotary import rotary_angles
from worldmodel_ros.model.sampling import FLOW, HALF

ACTION = np.array([0.2, 0.4], np.float32)
CHUNK = np.tile(np.array([[0.3, 1.0]], np.float32), (SMALL.chunk_frames, 1))


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return str(small_checkpoint(tmp_path_factory.mktemp('model')))


def frames(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *SMALL.image_size, 3), dtype=np.uint8)


def driven(engine, count):
    session = engine.open_session()
    for frame in frames(count):
        session.observe(frame, ACTION)
    return session


class DenseWindow:
    """The window as one tensor with a place for each frame: without pages, tables or eviction."""

    def __init__(self, model):
        self.model, self.times = model, np.full(SMALL.window_frames, -1)
        shape = SMALL.depth, 1, SMALL.heads, SMALL.window_frames, SMALL.tokens, SMALL.head_dim
        self.device = next(model.parameters()).device
        self.k, self.v = torch.zeros(2, *shape, device=self.device)

    def block(self, latents, times, tau, step, actions, causal):
        window = np.where(self.times < 0, -1e9, 0.0) * np.ones((len(times), 1))
        own = np.zeros((len(times), len(times)))
        with torch.inference_mode():
            inputs = (
                torch.from_numpy(latents)[None], torch.full((1, len(times)), tau), torch.full((1, len(times)), step),
                torch.from_numpy(actions)[None], torch.from_numpy(rotary_angles(SMALL, times)),
                torch.from_numpy(np.concatenate([window, own], 1).astype(np.float32)))
            x, features, k, v = self.model.dit(*(tensor.to(self.device) for tensor in inputs), self.k.flatten(3, 4),
                                               self.v.flatten(3, 4))
        if causal:
            place = times[0] % SMALL.window_frames
            self.k[:, :, :, place], self.v[:, :, :, place], self.times[place] = k, v, times[0]
        return x[0].cpu().numpy(), features[0].cpu().numpy()


def dense_answers(backend, images):
    """Plan, and chunk of two steps, after committing images to a dense window."""
    window, state = DenseWindow(backend.model), None
    for time, image in enumerate(images):
        (latent, state), = backend.run('encode', [(image, state)])
        _, features = window.block(backend.host(latent)[None], np.array([time]), 1.0, FLOW, ACTION[None], causal=True)
    newest = len(images) - 1
    noise = np.random.Generator(np.random.Philox(key=[0, newest + 1]))
    z = noise.standard_normal((SMALL.chunk_frames, *SMALL.latent_size, SMALL.latent_channels), np.float32)
    times = newest + 1 + np.arange(SMALL.chunk_frames)
    for step in range(2):
        x, _ = window.block(z, times, step / 2, HALF, CHUNK, causal=False)
        z = z + (x - z) * np.float32(1.0 / (2 - step))
    plans, = backend.run('policy', [(features[-1], np.zeros((len(SMALL.goals), *CHUNK.shape), np.float32),
                                     np.zeros_like(CHUNK), np.int64(0))])
    return plans[0], x


@pytest.mark.parametrize('count', [1, 3, SMALL.window_frames, SMALL.window_frames + 1, 2 * SMALL.window_frames + 3])
def test_a_session_on_pages_gives_the_numbers_of_a_dense_window(folder, count):
    engine = load(folder, 'torch')
    session = driven(engine, count)
    plan, latents = dense_answers(engine.backend, frames(count))
    np.testing.assert_array_equal(session.plan('red'), plan)
    np.testing.assert_array_equal(session.imagine(CHUNK).latents, latents)


@pytest.mark.parametrize('tile', [(2, 2, 2), (3, 1, 2), (4, 2, 1)])
def test_slabs_of_several_frames_and_tiles_give_the_same_numbers(folder, monkeypatch, tile):
    plain = driven(load(folder, 'torch'), 15)
    monkeypatch.setattr(memory, 'page_layout', lambda preset: TileLayout(tile, preset.grid))
    engine = load(folder, 'torch')
    session = driven(engine, 15)
    np.testing.assert_allclose(session.plan('red'), plain.plan('red'), rtol=0, atol=1e-5)
    ours, theirs = (list(results(s.what_if(np.repeat(CHUNK, 4, 0))))[-1] for s in (session, plain))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def results(question):
    """What a question ends with: its latents."""
    future = yield from question
    yield future.latents


def used(engine):
    return engine.memory.pool.allocator.usage().used


def test_a_question_holds_no_page_before_it_imagines_and_none_after_it_was_answered(folder):
    engine = load(folder, 'torch')
    session = driven(engine, 8)
    before = used(engine)
    questions = [session.what_if(np.repeat(CHUNK, 3, 0)) for _ in range(32)]
    for question in questions:
        next(question)
    assert used(engine) == before == SMALL.window_frames
    for _ in questions[0]:
        pass
    assert used(engine) == before
    for _ in range(4):
        next(questions[1])
    assert used(engine) == before + SMALL.chunk_frames
    del questions, question
    assert used(engine) == before


def test_a_question_of_the_longest_horizon_fits_while_the_session_drives_on(folder):
    engine = load(folder, 'torch', sessions=1)
    session = driven(engine, 8)
    question, ticks = session.what_if(np.tile(CHUNK[:1], (40, 1))), 0
    for _ in question:
        session.observe(frames(1, seed=ticks)[0], ACTION)
        ticks += 1
    assert ticks > 2 * SMALL.window_frames


def test_branches_without_end_never_starve_the_tick_and_are_told_so(folder):
    engine = load(folder, 'torch', sessions=1)
    session, plain = driven(engine, 8), driven(load(folder, 'torch'), 8)
    branches, refused = [], 0
    for tick in range(12):
        branches.append(session.what_if(np.repeat(CHUNK, 10, 0)))
        for branch in branches[-5:]:
            try:
                for _ in range(6):
                    next(branch)
            except (OutOfPages, StopIteration) as error:
                refused += isinstance(error, OutOfPages)
        for each in (session, plain):
            each.observe(frames(1, seed=tick)[0], ACTION)
    assert refused
    np.testing.assert_array_equal(session.plan('red'), plain.plan('red'))


def test_a_branch_that_lost_its_pages_between_two_steps_says_so_instead_of_reading_them(folder):
    engine = load(folder, 'torch', sessions=1)
    session = driven(engine, 8)
    branch = session.what_if(CHUNK)
    next(branch)
    next(branch)
    allocator = engine.memory.pool.allocator
    hoard = allocator.lease()
    hoard.allocate(allocator.usage().free - 1)
    for frame in frames(2, seed=3):
        session.observe(frame, ACTION)
    with pytest.raises(OutOfPages, match='needed by a session'):
        next(branch)


def test_an_inquiry_that_finds_no_pages_is_answered_with_the_reason(folder):
    engine = load(folder, 'torch', sessions=1)
    session = driven(engine, 8)
    hoard = engine.memory.pool.allocator.lease()
    hoard.allocate(engine.memory.pool.allocator.usage().free - 1)
    inquiry = Inquiry(Question((Branch('far', 12, np.repeat(CHUNK, 3, 0)),), 'red', 0.0), session, 1)
    with pytest.raises(QuestionError, match='no memory is left to imagine in.*drop branches'):
        while not inquiry.advance():
            pass


def test_sessions_beyond_what_the_engine_was_made_for_are_refused_until_one_ends(folder):
    engine = load(folder, 'torch', sessions=2)
    sessions = []
    with pytest.raises(OutOfPages, match='close sessions'):
        while True:
            sessions.append(driven(engine, SMALL.window_frames))
    assert len(sessions) >= 2
    sessions.pop()
    driven(engine, 2 * SMALL.window_frames)


def test_a_session_file_of_the_ring_cache_is_refused_and_changes_nothing(folder, tmp_path):
    engine = load(folder, 'torch')
    session, untouched = driven(engine, 8), driven(engine, 8)
    session.save(tmp_path / 'new.safetensors')
    tensors = load_file(tmp_path / 'new.safetensors')
    save_file(tensors, tmp_path / 'old.safetensors', metadata={'model': SMALL.name})
    with pytest.raises(ValueError, match='format 1, which has no checksum, and this version reads format 3'):
        session.load(tmp_path / 'old.safetensors')
    save_file(tensors, tmp_path / 'old.safetensors', metadata={'model': SMALL.name, 'format': '2'})
    with pytest.raises(ValueError, match='format 2, which has no checksum'):
        session.load(tmp_path / 'old.safetensors')
    about = {'model': SMALL.name, 'format': '3', 'fingerprint': engine.fingerprint, 'sha256': '0' * 64}
    for damage in ('latent', 'slabs', 'pages.v'):
        save_file({name: t for name, t in tensors.items() if name != damage}, tmp_path / 'damaged.safetensors',
                  metadata=about)
        with pytest.raises(ValueError, match=f'missing, or are of other shapes or types: {damage}'):
            session.load(tmp_path / 'damaged.safetensors')
    np.testing.assert_array_equal(session.plan('red'), untouched.plan('red'))
