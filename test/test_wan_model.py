"""Networks of the Wan family: checkpoints, windows and their positions, forks, precision, cameras."""
import json
import math

import numpy as np
import pytest
import torch
import wan_tiny as tiny
from safetensors.torch import save_file

from worldmodel_ros.cache.layout import FlatLayout
from worldmodel_ros.kernels.pages import Precision
from worldmodel_ros.model.checkpoint_description import ModelError
from worldmodel_ros.model.wan import camera
from worldmodel_ros.model.wan.checkpoint import WanCheckpoint, build, diffusers_name, load, original_shapes, tensor_share
from worldmodel_ros.model.wan.config import PRESETS, WanConfig
from worldmodel_ros.model.wan.dense import DenseSequence
from worldmodel_ros.model.wan.precision import to_fp8
from worldmodel_ros.model.wan.rotary import rotate, rotation, time_shift
from worldmodel_ros.model.wan.graphs import GraphedSampler
from worldmodel_ros.model.wan.sampler import Sampler
from worldmodel_ros.model.wan.schedule import Schedule, Step
from worldmodel_ros.model.wan.sequence import PagedSequences, Window

CONFIG = WanConfig(tiny.HEADS * tiny.HEAD_DIM, tiny.LAYERS, tiny.HEADS, tiny.FFN, 36, camera_width=1536,
                   text_width=tiny.TEXT_WIDTH, text_tokens=tiny.TEXT_TOKENS)
ORIGINAL = {'_class_name': 'WanModelFast', 'dim': CONFIG.width, 'num_layers': CONFIG.layers, 'num_heads': CONFIG.heads,
            'ffn_dim': CONFIG.ffn, 'in_dim': 36, 'out_dim': 16, 'text_len': tiny.TEXT_TOKENS, 'text_dim': tiny.TEXT_WIDTH}
SHORT = Schedule((Step(999.0, 0.999, 1.0), Step(800.0, 0.8, 0.8)))
WINDOW = Window(6, 3, 3, limit=12, step=3)


@pytest.fixture(scope='module')
def dit():
    return build(CONFIG, tiny.Drawn())


@pytest.fixture(scope='module')
def tensors():
    return {name: tiny.weight(name, shape) for name, shape in original_shapes(CONFIG).items()}


def pages(precision=Precision.FP32, window=WINDOW, **counts):
    return PagedSequences(CONFIG, window, tiny.GRID, precision, page_tokens=16, **counts)


@torch.inference_mode()
def chunk_of(dit, sequence, number, draw=''):
    rays = tiny.draw(f'rays {number}{draw}', 3 * math.prod(tiny.GRID), 1536)
    return Sampler(dit, SHORT).chunk(sequence, dit.prompt(tiny.text()), tiny.noise(number, 3), tiny.condition(number, 3),
                                     rays)


def difference(found, wanted):
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def same(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def write_shards(folder, tensors, config=ORIGINAL, indexed=True):
    folder.mkdir()
    (folder / 'config.json').write_text(json.dumps(config))
    names, where = sorted(tensors), {}
    for at in range(3):
        file = f'model-{at + 1:05d}-of-00003.safetensors'
        save_file({name: tensors[name] for name in names[at::3]}, str(folder / file))
        where |= dict.fromkeys(names[at::3], file)
    if indexed:
        (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': where}))
    return folder


def test_shards_of_both_layouts_and_torch_files_are_the_same_network(tmp_path, dit, tensors):
    assert same(load(write_shards(tmp_path / 'original', tensors), layers=torch.float32), dit)
    assert same(load(write_shards(tmp_path / 'no_index', tensors, indexed=False), layers=torch.float32), dit)
    config = {'num_attention_heads': 2, 'attention_head_dim': 128, 'num_layers': 3, 'ffn_dim': 512, 'in_channels': 36,
              'out_channels': 16, 'text_dim': tiny.TEXT_WIDTH, 'text_len': tiny.TEXT_TOKENS, 'image_dim': None,
              'qk_norm': 'rms_norm_across_heads', 'patch_size': [1, 2, 2]}
    renamed = {diffusers_name(name): tensor for name, tensor in tensors.items()}
    assert 'blocks.0.norm2.weight' in renamed and 'scale_shift_table' in renamed
    assert same(load(write_shards(tmp_path / 'diffusers', renamed, config), layers=torch.float32), dit)
    file = tmp_path / 'student.pt'
    torch.save({'generator_ema': {f'model._fsdp_wrapped_module.{name}': t for name, t in tensors.items()}, 'step': 7}, file)
    assert same(load(file, layers=torch.float32, config=CONFIG), dit)


def test_layers_take_their_type_and_what_scales_rows_stays_in_float32(tmp_path, tensors):
    loaded = load(write_shards(tmp_path / 'model', tensors))
    kinds = {name: parameter.dtype for name, parameter in loaded.named_parameters()}
    assert {kinds[name] for name in ('blocks.1.qkv.weight', 'blocks.1.camera.film.bias', 'text.0.weight',
                                     'camera.rays.weight')} == {torch.bfloat16}
    assert {kinds[name] for name in ('blocks.1.modulation', 'blocks.1.q_norm', 'blocks.1.cross_norm.bias', 'head.weight',
                                     'time.0.weight', 'patch.weight')} == {torch.float32}


def test_the_parts_of_processes_are_together_the_whole(tmp_path, dit, tensors):
    folder = write_shards(tmp_path / 'model', tensors)
    parts = [load(folder, layers=torch.float32, part=tensor_share(CONFIG, rank, 2)).state_dict() for rank in range(2)]
    whole = dit.state_dict()
    for name, axis, groups in (('blocks.2.qkv.weight', 0, 3), ('blocks.2.q_norm', 0, 1), ('blocks.2.cross_kv.bias', 0, 2),
                               ('blocks.2.proj.weight', 1, 1), ('blocks.2.ffn.0.bias', 0, 1), ('blocks.2.ffn.2.weight', 1, 1)):
        split = [part[name].chunk(groups, axis) for part in parts]
        joined = torch.cat([share[group] for group in range(groups) for share in split], axis)
        assert torch.equal(joined, whole[name]) and parts[0][name].numel() * 2 == whole[name].numel(), name
    assert torch.equal(parts[1]['blocks.0.proj.bias'], whole['blocks.0.proj.bias'])
    with pytest.raises(ValueError, match='divided'):
        tensor_share(CONFIG, 0, 3)


@pytest.mark.parametrize(('break_it', 'message'), [
    (lambda t: t.pop('blocks.1.ffn.0.bias'), 'lack blocks.1.ffn.0.bias'),
    (lambda t: t.update(extra=torch.zeros(1)), 'have extra besides'),
    (lambda t: t.update({'head.head.bias': torch.zeros(3)}), r'head.head.bias is \(3,\)')])
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, tensors, break_it, message):
    tensors = dict(tensors)
    break_it(tensors)
    with pytest.raises(ModelError, match=message):
        load(write_shards(tmp_path / 'model', tensors), layers=torch.float32)


def test_files_that_hold_more_than_tensors_or_other_networks_are_refused(tmp_path, tensors):
    class Evil:
        def __reduce__(self):
            return print, ('run',)
    torch.save({'model': Evil()}, tmp_path / 'evil.pt')
    with pytest.raises(ModelError, match='plain tensors'):
        load(tmp_path / 'evil.pt', config=CONFIG)
    for change in ({'image_dim': 1280}, {'patch_size': [1, 4, 4]}, {'qk_norm': False}, {'num_heads': 3}, {'dim': 'wide'}):
        with pytest.raises(ModelError):
            WanConfig.from_json({**ORIGINAL, **change})
    folder = write_shards(tmp_path / 'model', tensors)
    (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': {'a': '../outside.safetensors'}}))
    with pytest.raises(ModelError, match='files of its folder'), WanCheckpoint(folder):
        pass


def test_presets_have_the_published_sizes_and_refuse_other_networks():
    sizes = {name: round(preset.config.parameters / 1e9, 2) for name, preset in PRESETS.items()}
    assert sizes == {'lingbot_world_fast': 18.54, 'lingbot_world_v2_14b': 18.54, 'lingbot_world_v2_1.3b': 1.71,
                     'self_forcing_1.3b': 1.42}
    assert [preset.slab_frames for preset in PRESETS.values()] == [3, 2, 2, 3]
    with pytest.raises(ModelError, match='choose another preset'):
        PRESETS['self_forcing_1.3b'].check(CONFIG)


def test_schedules_have_the_published_noise_levels():
    steps = PRESETS['lingbot_world_fast'].schedule.steps
    assert [round(step.sigma, 7) for step in steps] == [.9998999, .9789709, .9479089, .8258525]
    assert [round(step.entry, 7) for step in steps] == [1.0, .9788296, .9476931, .8251926]
    assert [round(step.sigma, 4) for step in PRESETS['self_forcing_1.3b'].schedule.steps] == [1.0, .9375, .8333, .625]
    with pytest.raises(ValueError, match='must fall'):
        Schedule((Step(1.0, 0.5, 1.0), Step(2.0, 0.6, 0.6)))


def test_pages_give_what_a_dense_window_gives_also_when_sinks_are_moved(dit):
    paged, dense, unmoved = pages().open(), DenseSequence(CONFIG, WINDOW, tiny.GRID), DenseSequence(
        CONFIG, Window(6, 3, 3), tiny.GRID)
    for number in range(7):
        found, wanted, other = (chunk_of(dit, sequence, number) for sequence in (paged, dense, unmoved))
        assert difference(found, wanted) <= 2e-5, number
        # From 12 frames on, and only then, sinks are moved: the shift changes what a chunk sees.
        assert (difference(wanted, other) > 1e-4) == (number >= 4), number
    assert [WINDOW.shift(end, 0) for end in (12, 13, 15, 16)] == [0, 3, 3, 6]


def test_a_dense_window_is_on_the_device_of_the_layers():
    qkv = torch.empty(3 * math.prod(tiny.GRID), 3, tiny.HEADS, tiny.HEAD_DIM, device='meta')
    with DenseSequence(CONFIG, WINDOW, tiny.GRID).chunk(3) as attention:
        for layer in range(CONFIG.layers):
            assert attention.attend(layer, qkv, *torch.empty(2, CONFIG.width, device='meta')).is_meta


def test_positions_are_exact_far_beyond_the_published_table():
    q, k = tiny.draw('q', 1, 128), tiny.draw('k', 1, 128)
    products = []
    for frame in (5, 100_000):
        rotary = rotation(128, np.array([frame - 3, frame]), (1, 1))[:, :, None]
        k_turned, q_turned = (rotate(x, *rotary[:, at]) for at, x in enumerate((k, q)))
        products.append(float((q_turned * k_turned).sum()))
    assert products[0] == pytest.approx(products[1], rel=1e-5)
    moved = rotate(rotate(k, *rotation(128, np.array([4]), (1, 1))), *time_shift(128, 60))
    assert torch.allclose(moved, rotate(k, *rotation(128, np.array([64]), (1, 1))), atol=1e-5)


def test_forks_share_all_pages_and_do_not_see_each_other(dit):
    owner = pages(branches=2)
    root = owner.open()
    for number in range(4):
        chunk_of(dit, root, number)
    used = owner.pool.allocator.usage().used
    left, right = root.fork(), root.fork()
    assert owner.pool.allocator.usage().used == used
    futures = [chunk_of(dit, branch, 4, way) for branch, way in ((left, 'left'), (right, 'right'))]
    assert difference(*futures) > 1e-3
    assert left.frame == right.frame == 15 and root.frame == 12
    alone = pages().open()
    for number in range(4):
        chunk_of(dit, alone, number)
    assert torch.equal(chunk_of(dit, root, 4, 'left'), futures[0])  # as if nobody had asked
    assert torch.equal(chunk_of(dit, alone, 4, 'left'), futures[0])
    left.close(), right.close(), root.close()
    assert owner.pool.allocator.usage().used == 0


@pytest.mark.parametrize('precision', [Precision.FP32, Precision.FP8])
def test_a_sequence_goes_on_from_what_was_saved_also_when_its_sinks_have_moved(dit, precision):
    if precision is not Precision.FP32:
        dit = build(CONFIG, tiny.Drawn(), layers=torch.bfloat16)
    sequence, other = pages(precision).open(), pages(precision).open()
    for number in range(7):  # from the fifth chunk on they have
        if number in (1, 6):
            saved = {name: tensor.clone() for name, tensor in sequence.save().items()}
        wanted = chunk_of(dit, sequence, number)
        if number in (1, 6):
            assert ('first.k' in saved) == (number == 6)
            chunk_of(dit, other, 0, 'another past')
            other.restore(saved)
            assert torch.equal(chunk_of(dit, other, number), wanted) and other.frame == sequence.frame
    slabs = saved['slabs'].clone()
    slabs[-1, 0] += 1
    moved = int(saved['position'][1])
    for damage in ({'slabs': slabs}, {'position': torch.tensor([18, 0])}, {'position': torch.tensor([21, moved])},
                   {'first.k': saved['first.k'][:1]}, {'pages.v': saved['pages.v'][:-1]}):
        with pytest.raises(ValueError):
            other.restore(saved | damage)
    assert other.frame == 21  # as it was


@pytest.mark.parametrize(('precision', 'layers', 'limit'), [(Precision.BF16, torch.bfloat16, 0.01),
                                                            (Precision.FP8, torch.bfloat16, 0.06)])
def test_bf16_and_fp8_stay_within_their_limits(dit, precision, layers, limit):
    low = build(CONFIG, tiny.Drawn(), layers=layers)
    if precision is Precision.FP8:
        to_fp8(low)
    sequence, exact = pages(precision).open(), pages().open()
    worst = max(difference(chunk_of(low, sequence, number), chunk_of(dit, exact, number)) for number in range(6))
    assert 1e-4 < worst <= limit


@pytest.mark.parametrize('precision', [Precision.FP32, Precision.FP8])
def test_chunks_from_held_inputs_are_those_of_the_sampler(dit, precision):
    plain, graphed = Sampler(dit, SHORT), GraphedSampler(Sampler(dit, SHORT), most=1)
    one, other = pages(precision, branches=2).open(), pages(precision, branches=2).open()
    texts = [dit.prompt(tiny.text()), dit.prompt(2.0 * tiny.text()), dit.prompt(tiny.text()[:3])]

    def chunk(sampler, sequence, number, text):
        rays = tiny.draw(f'rays {number}', 3 * math.prod(tiny.GRID), 1536)
        return sampler.chunk(sequence, texts[text], tiny.noise(number, 3), tiny.condition(number, 3), rays)
    with torch.inference_mode():
        for number, text in enumerate((0, 0, 1, 2, 0, 0, 0)):  # the window fills and rolls, sinks move, the text is another one
            found, wanted = chunk(graphed, other, number, text), chunk(plain, one, number, text)
            assert torch.equal(found, wanted), number
        left, right = other.fork(), one.fork()
        assert torch.equal(chunk(graphed, left, 8, 1), chunk(plain, right, 8, 1))
        assert torch.equal(chunk(graphed, other, 9, 1), chunk(plain, one, 9, 1))
        seen = tiny.draw('seen', 16, 3, *tiny.LATENT)
        for sampler, sequence in ((graphed, other), (plain, one)):
            sampler.commit(sequence, texts[0], seen, tiny.condition(0, 3))
        assert torch.equal(chunk(graphed, other, 10, 0), chunk(plain, one, 10, 0))


def test_observed_frames_are_committed_without_denoising(dit):
    one, other = pages().open(), DenseSequence(CONFIG, WINDOW, tiny.GRID)
    for sequence in (one, other):
        with torch.inference_mode():
            Sampler(dit, SHORT).commit(sequence, dit.prompt(tiny.text()), tiny.draw('seen', 16, 3, *tiny.LATENT),
                                       tiny.condition(0, 3))
        assert sequence.frame == 3
    assert difference(chunk_of(dit, one, 1), chunk_of(dit, other, 1)) <= 1e-5


def test_a_chunk_that_fails_leaves_the_sequence_as_it_was(dit):
    sequence = pages().open()
    first = chunk_of(dit, sequence, 0)
    with pytest.raises(RuntimeError, match='half way'), sequence.chunk(3):
        raise RuntimeError('half way')
    assert sequence.frame == 3 and first.isfinite().all()
    with pytest.raises(ValueError, match='slabs of 3'), sequence.chunk(2):
        pass
    with pytest.raises(ValueError, match='no room for'):
        Window(6, 3, 3, limit=8, step=3)


def test_a_prompts_padding_counts_as_if_each_of_its_rows_were_there(dit):
    text = tiny.text()
    padded = torch.cat([text, torch.zeros(tiny.TEXT_TOKENS - len(text), tiny.TEXT_WIDTH)])
    folded, whole = dit.prompt(text), dit.prompt(padded)
    assert folded.keys.shape[2] == 8 and whole.keys.shape[2] == tiny.TEXT_TOKENS
    q = tiny.draw('queries', 1, tiny.HEADS, 9, tiny.HEAD_DIM)
    attended = [torch.nn.functional.scaled_dot_product_attention(q, each.keys[:1], each.values[:1],
                                                                 attn_mask=each.bias.expand(9, -1)) for each in (folded, whole)]
    assert difference(*attended) < 1e-6
    with pytest.raises(ValueError, match='at most 24'):
        dit.prompt(torch.zeros(25, tiny.TEXT_WIDTH))


def test_flat_pages_waste_only_the_end_of_a_slab():
    layout = FlatLayout(3, 1560)
    assert layout.tiles == 37 and layout.valid(3).tolist() == [128] * 36 + [72] and layout.valid(1).sum() == 1560
    assert np.array_equal(np.bincount(layout.frame_index.ravel()), [1560, 1560, 1560, 37 * 128 - 4680])


def test_rays_are_those_of_a_second_way_in_float64():
    poses, size = tiny.poses(6), (32, 48)
    lens = camera.Intrinsics(31.0, 29.0, 22.5, 17.25)
    relative = camera.relative_poses(poses[3:], poses[2], 0.5)
    found = camera.rays(relative, lens, size).numpy()
    k = np.array([[lens.fx, 0, lens.cx], [0, lens.fy, lens.cy], [0, 0, 1]])
    for frame in range(3):
        seen = np.linalg.solve(poses[frame + 2], poses[frame + 3])
        for v, u in ((0, 0), (31, 47), (5, 30)):
            ray = seen[:3, :3] @ np.linalg.solve(k, [u + 0.5, v + 0.5, 1.0])
            wanted = [*(seen[:3, 3] / 0.5), *(ray / np.linalg.norm(ray))]
            assert np.abs(found[frame, v, u] - wanted).max() <= 1e-6
    assert np.abs(camera.relative_poses(poses, None, 1.0)[0] - np.eye(4)).max() == 0.0
    with pytest.raises(ValueError, match='divided'):
        camera.relative_poses(poses, None, 0.0)


def test_a_chunks_control_does_not_depend_on_what_comes_later():
    poses = tiny.poses(9)
    whole = camera.relative_poses(poses, None, 0.3)
    parts = [camera.relative_poses(poses[at:at + 3], poses[at - 1] if at else None, 0.3) for at in (0, 3, 6)]
    assert np.abs(np.concatenate(parts) - whole).max() < 1e-12


def test_plans_of_twists_move_the_camera_as_the_base_moves():
    optical = np.array([[0.0, 0, 1, 0.1], [-1, 0, 0, 0], [0, -1, 0, 0.3], [0, 0, 0, 1]])
    straight = camera.twist_poses(np.eye(4), np.tile([0.5, 0, 0, 0, 0, 0], (4, 1)), 0.25, optical)
    steps = camera.relative_poses(straight, optical, 1.0)
    assert np.abs(steps[:, :3, 3] - [0, 0, 0.125]).max() < 1e-12  # ahead is the optical z
    # A quarter of a circle of 2 m radius, in 8 parts, ends where the circle does.
    period, angle = 0.25, math.pi / 2 / 8
    arc = camera.twist_poses(np.eye(4), np.tile([2.0 * angle / period, 0, 0, 0, 0, angle / period], (8, 1)), period, np.eye(4))
    assert np.abs(arc[-1, :3, 3] - [2.0, 2.0, 0.0]).max() < 1e-12
    assert np.abs(arc[-1, :3, 0] - [0.0, 1.0, 0.0]).max() < 1e-12


def test_poses_between_others_turn_on_the_shortest_arc():
    half_turn = np.diag([-1.0, -1.0, 1.0, 1.0])
    between = camera.resample_poses([0.0, 1.0], np.stack([np.eye(4), half_turn]), [0.0, 0.5, 1.0])
    assert np.abs(between[[0, 2]] - np.stack([np.eye(4), half_turn])).max() < 1e-12
    assert np.abs(np.abs(between[1, :2, :2]) - [[0, 1], [1, 0]]).max() < 1e-12
    with pytest.raises(ValueError, match='do not tell'):
        camera.resample_poses([0.0, 1.0], np.stack([np.eye(4), half_turn]), [1.5])


def test_images_keep_their_shape_in_whole_tokens():
    assert camera.video_size(480, 832) == (464, 832) and camera.video_size(480, 640) == (544, 720)
    lens = camera.Intrinsics.of_ros(np.array([[500.0, 0, 319.5], [0, 500, 239.5], [0, 0, 1]])).scaled((480, 640), (240, 320))
    assert lens == camera.Intrinsics(250.0, 250.0, 160.0, 120.0) and lens.cropped(20, 0).cy == 100.0
    with pytest.raises(ValueError, match='no tokens'):
        camera.ray_tokens(torch.zeros(1, 24, 32, 6))
