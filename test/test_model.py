"""Networks: streaming equals the clip, committing frame by frame equals training's one pass, checkpoints are checked."""
import errno
import json
import resource
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_model import SMALL, small_checkpoint, small_model

from worldmodel_ros.cache.pool import NumpyStorage
from worldmodel_ros.engine.backends.torch import TorchBackend
from worldmodel_ros.engine.memory import Memory
from worldmodel_ros.engine.session import Session
from worldmodel_ros.engine.network_calls import StepTimes
from worldmodel_ros.kernels.linear import GELU_ROWS
from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.checkpoint_description import ModelError
from worldmodel_ros.model.presets import SMOKE_TILES, TINY, Preset
from worldmodel_ros.model.rotary import rotary_angles
from worldmodel_ros.model.sampling import FLOW, HALF
from worldmodel_ros.model.world_model import WorldModel
from worldmodel_ros.train.data import clips


@pytest.fixture(scope='module')
def model():
    return small_model()


def test_decoding_a_clip_at_once_equals_decoding_it_as_a_stream(model):
    latents = torch.randn(5, *SMALL.latent_size, SMALL.latent_channels)
    at_once = model.vae.decode_clip(latents[1:], latents[0])
    _, state = model.vae.decode(latents[:1])
    for index in range(1, 5):
        image, state = model.vae.decode(latents[index:index + 1], state)
        torch.testing.assert_close(image[0], at_once[index - 1], rtol=1e-4, atol=1e-5)


def test_the_encoder_sees_one_frame_back_and_no_further(model):
    frames = torch.rand(3, 1, 3, *SMALL.image_size) * 2 - 1

    def last_latent(clip):
        state = None
        for image in clip:
            latent, state = model.vae.encode(image, state)
        return latent

    base = last_latent(frames)
    changed_before = frames.clone()
    changed_before[1] = -frames[1]
    changed_long_ago = frames.clone()
    changed_long_ago[0] = -frames[0]
    assert not torch.allclose(base, last_latent(changed_before))
    assert torch.equal(base, last_latent(changed_long_ago))


@pytest.mark.parametrize('cache_every', [1, 2])
def test_committing_frame_by_frame_and_denoising_equal_one_training_pass(cache_every):
    """The mask of training and the pages of a session are two descriptions of the same attention."""
    preset = replace(SMALL, cache_every=cache_every)
    model = small_model(preset=preset)
    frames, starts = 10, np.array([3, 9 - SMALL.chunk_frames + 1])
    rng = np.random.default_rng(0)
    h, w = SMALL.latent_size
    clean = rng.standard_normal((frames, h, w, SMALL.latent_channels)).astype(np.float32)
    noisy = rng.standard_normal((2 * SMALL.chunk_frames, h, w, SMALL.latent_channels)).astype(np.float32)
    actions = rng.uniform(-0.3, 0.6, (frames, 2)).astype(np.float32)
    times = clips.chunk_frames(SMALL, starts)
    tau = np.concatenate([np.ones(frames), np.full(len(times), 0.5)]).astype(np.float32)
    step = np.concatenate([np.full(frames, FLOW), np.full(len(times), HALF)])
    x, features, _, _ = model.dit(
        torch.from_numpy(np.concatenate([clean, noisy]))[None], torch.from_numpy(tau)[None], torch.from_numpy(step)[None],
        torch.from_numpy(actions[np.concatenate([np.arange(frames), times])])[None],
        torch.from_numpy(rotary_angles(SMALL, np.concatenate([np.arange(frames), times]))),
        torch.from_numpy(clips.sequence_bias(SMALL, frames, starts).astype(np.float32)))

    memory = Memory(preset, lambda layout, pages: NumpyStorage(layout, len(preset.cache_layers), SMALL.heads,
                                                               SMALL.head_dim, pages), 1)
    cache, storage = memory.open(), memory.pool.storage

    def block(latents, times, levels, rows, causal):
        window = memory.window(cache, times, causal)
        out = model.dit.over_pages(
            torch.from_numpy(latents)[None], torch.full((1, len(times)), levels), torch.full((1, len(times)), rows),
            torch.from_numpy(actions[times])[None], torch.from_numpy(rotary_angles(SMALL, times))[:, None],
            torch.from_numpy(window.bias())[None], *map(torch.from_numpy, storage.rows()),
            torch.from_numpy(storage.row_index(window.pages))[:, None])
        return [part.numpy() for part in out]

    for frame in range(frames):
        for chunk, start in enumerate(starts):
            if frame == start:
                part = slice(chunk * SMALL.chunk_frames, (chunk + 1) * SMALL.chunk_frames)
                alone = block(noisy[part], np.arange(start, start + SMALL.chunk_frames), 0.5, HALF, causal=False)[0]
                np.testing.assert_allclose(alone[0], x[0, frames:][part], rtol=1e-3, atol=1e-4)
        _, alone, k, v = block(clean[frame:frame + 1], np.array([frame]), 1.0, FLOW, causal=True)
        np.testing.assert_allclose(alone[0, 0], features[0, frame], rtol=1e-3, atol=1e-4)
        with cache.stage() as staged:
            staged.write(frame, k[:, 0, :, None], v[:, 0, :, None])
        memory.roll(cache, frame)


def test_gelu_in_the_product_gives_the_layer_that_its_modules_define(model, monkeypatch):
    """Of many rows alone; by a stand-in, since the CPU's own computes another GELU."""
    calls = []

    def fused(bias, x, weight, use_gelu):
        calls.append(x.shape)
        return torch.nn.functional.gelu(torch.addmm(bias, x, weight), approximate='tanh')
    monkeypatch.setattr(torch, '_addmm_activation', fused)
    block, width = small_model().dit.blocks[0], SMALL.width
    for tokens in (GELU_ROWS // 2, GELU_ROWS // 2 - 1):
        x, attended, state = (torch.randn(1, 2, rows, width) for rows in (tokens, tokens, 4))
        state = state[:, :, :, None].unbind(2)
        block.gelu_in_product = False
        expected = block.leave(x, attended, state)
        block.gelu_in_product = True
        torch.testing.assert_close(block.leave(x, attended, state), expected)
    assert calls == [(GELU_ROWS, width)]


def test_gelu_is_in_no_product_under_autocast(monkeypatch):
    monkeypatch.setattr(torch, '_addmm_activation', lambda *_, **__: pytest.fail('its inputs are of two types'))
    block = small_model().dit.blocks[0].to(torch.bfloat16)
    block.gelu_in_product = True
    with torch.inference_mode(), torch.autocast('cpu', torch.bfloat16):
        assert block._mlp(torch.randn(GELU_ROWS, SMALL.width)).dtype is torch.bfloat16


def test_a_session_of_a_day_sees_what_a_young_one_sees(tmp_path):
    """Only differences of times reach the attention, to the precision of float32."""
    backend = TorchBackend(checkpoint.load(small_checkpoint(tmp_path)))
    frames = np.random.default_rng(1).integers(0, 256, (9, *SMALL.image_size, 3), dtype=np.uint8)
    plans = []
    for age in (0, 10 * 3600 * 24 * SMALL.window_frames):
        session = Session(backend, Memory(SMALL, backend.storage, 1), StepTimes())
        session._time += age
        for frame in frames:
            session.observe(frame, np.array([0.3, -0.5]))
        plans.append(session.plan('blue'))
    np.testing.assert_allclose(*plans, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_comes_back_as_it_was(tmp_path, model):
    checkpoint.save(model, tmp_path / 'm', {'by': 'test'}, dtype=torch.float32)
    loaded = checkpoint.load(tmp_path / 'm')
    assert loaded.preset == SMALL
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name


def test_a_checkpoint_stays_as_it_was_where_the_disk_is_full(tmp_path, model, monkeypatch):
    checkpoint.save(model, tmp_path, {'by': 'test'}, dtype=torch.float32)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    write, written = checkpoint.save_file, []

    def full(tensors, file):
        if written:
            raise OSError(errno.ENOSPC, 'No space left on device')
        written.append(file)
        write(tensors, file)
    monkeypatch.setattr(checkpoint, 'save_file', full)
    with pytest.raises(OSError, match='No space left'):
        checkpoint.save(WorldModel(TINY), tmp_path, {})  # in more than one file
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    monkeypatch.setattr(checkpoint, 'save_file', write)
    checkpoint.save(WorldModel(TINY), tmp_path, {})
    assert checkpoint.load(tmp_path).preset == TINY
    checkpoint.save(model, tmp_path, {'by': 'test'}, dtype=torch.float32)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_no_checkpoint_file_exceeds_16_mib(tmp_path):
    checkpoint.save(WorldModel(TINY), tmp_path / 'm', {})
    sizes = [file.stat().st_size for file in (tmp_path / 'm').glob('*.safetensors')]
    assert len(sizes) > 1 and max(sizes) < 16 * 1024 * 1024


def test_a_missing_model_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(ModelError, match='worldmodel train'):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize('heads, most', [(2, 6), (4, 4)])  # widths of 32 and 16
def test_no_more_pairs_follow_the_heading_than_there_are_for_time(heads, most):
    preset = replace(SMOKE_TILES, heads=heads, heading_pairs=most)
    assert rotary_angles(preset, np.arange(3)).shape == (2, 3, preset.tokens, preset.head_dim // 2)
    with pytest.raises(ValueError, match=f'heading_pairs is {most + 1}: of the {preset.head_dim // 2} pairs of a head, {most}'):
        replace(preset, heading_pairs=most + 1)


@pytest.mark.parametrize('damage, message', [
    (lambda d: d.update(format=99), 'format 99'),
    (lambda d: d['preset'].pop('width'), 'missing.*width'),
    (lambda d: d['preset'].update(patch=3), 'multiple of 24'),
    (lambda d: d['preset'].update(step_period=0), 'step_period is 0 s, and must be above 0'),
    (lambda d: d['preset'].update(action_high=[0.6, -1.5]), 'must lie below action_high'),
    (lambda d: d['preset'].update(goals=['red', 'red']), 'goals has one name twice: red, red'),
    (lambda d: d['preset'].update(action_names=['linear.x', 'linear.x']), 'action_names has one name twice'),
])
def test_a_description_that_does_not_fit_is_refused_by_name(tmp_path, damage, message):
    folder = small_checkpoint(tmp_path)
    content = json.loads((folder / 'model.json').read_text())
    damage(content)
    (folder / 'model.json').write_text(json.dumps(content))
    with pytest.raises(ModelError, match=message):
        checkpoint.load(folder)


@pytest.mark.parametrize(('name', 'value'), [
    ('heads', 0), ('patch', 0), ('depth', 2 ** 40), ('depth', 2000), ('width', 'wide'), ('width', 2.5), ('goals', 4),
    ('action_low', [None, 0.0]), ('action_low', 'ab'), ('image_size', [64]), ('step_period', float('nan')),
    ('vae_width', 2 ** 16), ('width', 2 ** 12), ('tile', [1, 2]), ('patterns', [[1, 'x', 2]]), ('chunk_frames', True)])
def test_a_description_of_no_model_or_of_a_larger_one_than_the_weights_are_of_is_refused(tmp_path, name, value):
    folder = small_checkpoint(tmp_path)
    content = json.loads((folder / 'model.json').read_text())
    content['preset'][name] = value
    (folder / 'model.json').write_text(json.dumps(content))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError):
        checkpoint.load(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


@pytest.mark.parametrize('text', ['[' * 100_000, '[]', '{"format": 1, "preset": [], "provenance": {}}'],
    ids=['nested', 'list', 'no object'])
def test_a_description_that_is_nested_absurdly_or_no_object_is_refused(tmp_path, text):
    (tmp_path / 'model.json').write_text(text)
    with pytest.raises(ModelError, match='does not describe a model'):
        checkpoint.load(tmp_path)


def test_a_truncated_weight_file_is_refused_by_name(tmp_path):
    folder = small_checkpoint(tmp_path)
    file = next(folder.glob('*.safetensors'))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=file.name):
        checkpoint.load(folder)


def test_a_description_from_before_the_flow_policy_still_means_the_regression(tmp_path):
    old = WorldModel(replace(SMALL, policy='regression', head_features=0))
    checkpoint.save(old, tmp_path, {}, dtype=torch.float32)
    content = json.loads((tmp_path / 'model.json').read_text())
    del content['preset']['policy'], content['preset']['head_features']
    (tmp_path / 'model.json').write_text(json.dumps(content))
    loaded = checkpoint.load(tmp_path)
    features = torch.randn(1, SMALL.tokens, SMALL.width)
    assert torch.equal(loaded.action_head(features), old.eval().action_head(features))


def test_training_starts_from_a_model_of_other_heads_but_not_of_another_size(tmp_path, model):
    checkpoint.save(model, tmp_path / 'm', {}, dtype=torch.float32)
    begun = WorldModel(replace(SMALL, policy='regression'))
    assert checkpoint.start_from(begun, tmp_path / 'm') == ['action_head']
    for part in ('vae', 'dit', 'outcome_head'):
        for name, tensor in getattr(model, part).state_dict().items():
            assert torch.equal(tensor, getattr(begun, part).state_dict()[name]), (part, name)
    with pytest.raises(ModelError, match='dit has another shape'):
        checkpoint.start_from(WorldModel(replace(SMALL, depth=3)), tmp_path / 'm')


def test_a_policy_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(ValueError, match='regression, flow'):
        replace(SMALL, policy='guess')


def test_a_preset_survives_its_description():
    assert Preset.from_dict(json.loads(json.dumps(TINY.to_dict()))) == TINY
