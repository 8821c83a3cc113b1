"""A DiT whose layers are in FP8: near the one it was made from, smaller, and honest about what is not finite."""
import copy

import numpy as np
import pytest
import torch
from kernel_inputs import relative_error
from small_model import SMALL, small_model
from tiled_model import DenseTiles, tiled_model

from worldmodel_ros.engine.loading import model_folder
from worldmodel_ros.evaluate.drive.pictures import psnr
from worldmodel_ros.evaluate.quality.drives import record_drive
from worldmodel_ros.evaluate.quality.imagination import Imagination
from worldmodel_ros.kernels.rows import modulate_rows
from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.precision import KEPT, LINEARS, Fp8Linear, calibration, to_fp8, weight_bytes
from worldmodel_ros.model.sampling import TWO_STEP
from worldmodel_ros.model.rotary import rotary_angles

pytestmark = pytest.mark.usefixtures('one_thread')


@pytest.fixture(scope='module')
def dit():
    return small_model().dit


def inputs(seed=0):
    torch.manual_seed(seed)
    frames = SMALL.chunk_frames
    latents = torch.randn(2, frames, *SMALL.latent_size, SMALL.latent_channels)
    return (latents, torch.rand(2, frames), torch.zeros(2, frames, dtype=torch.long),
            torch.rand(2, frames, SMALL.actions), torch.from_numpy(rotary_angles(SMALL, np.arange(frames))),
            torch.zeros(frames, frames))


def in_fp8(dit, keep=KEPT, fused=False):
    return to_fp8(copy.deepcopy(dit), keep, fused)


def errors(found, expected):
    return [relative_error(a, b) for a, b in zip(found, expected, strict=True)]


def test_fp8_layers_answer_nearly_as_before_and_as_before_where_all_is_kept(dit):
    expected = dit(*inputs())
    assert 1e-3 < max(errors(in_fp8(dit)(*inputs()), expected)) < 0.06
    assert max(errors(in_fp8(dit, LINEARS)(*inputs()), expected)) < 1e-5


def test_bfloat16_layers_stay_in_bfloat16_between_the_products(dit):
    whole = copy.deepcopy(dit)
    for part in (whole.embed, whole.blocks, whole.modulation, whole.out):
        part.to(torch.bfloat16)
    latents, features, keys, _ = to_fp8(whole)(*inputs())
    assert latents.dtype is features.dtype is keys.dtype is torch.bfloat16
    assert relative_error(latents.float(), dit(*inputs())[0]) < 0.06


def test_what_is_kept_is_named_by_layer_or_by_block_and_layer(dit):
    found = {name for name, layer in in_fp8(dit, ('proj', '1.mlp.0')).blocks.named_modules()
             if isinstance(layer, Fp8Linear)}
    assert found == {'0.modulation', '0.qkv', '0.mlp.0', '0.mlp.2', '1.modulation', '1.qkv', '1.mlp.2'}
    with pytest.raises(ValueError, match=r"no linear layers \['2.proj', 'mlp'\] to keep"):
        in_fp8(dit, ('mlp', '2.proj', 'qkv'))


def test_weights_take_a_byte_each_a_scale_a_row_and_two_numbers_for_the_bound():
    blocks, size = small_model().dit.to(torch.bfloat16).blocks, SMALL.width
    whole = weight_bytes(blocks)
    rows = SMALL.depth * (6 + 3 + 1 + 4 + 1) * size
    assert weight_bytes(to_fp8(small_model().dit.to(torch.bfloat16), ()).blocks) == \
        whole - SMALL.depth * (6 + 3 + 1 + 4 + 4) * size ** 2 + 4 * rows + 8 * SMALL.depth * len(LINEARS)


@pytest.mark.parametrize(('fused', 'names'), [(False, ('mlp.2',)), (True, LINEARS[1:])])
def test_calibrated_layers_round_by_one_scale_that_has_room(dit, fused, names):
    model = in_fp8(dit, fused=fused)
    seen = []
    with calibration(model, names):
        def watch(_, inputs):
            values, scales = inputs[0]
            seen.append(float((values.float() * scales).abs().max()))
        handle = model.blocks[0].mlp['2'].register_forward_pre_hook(watch)
        model(*inputs())
        handle.remove()
    scales = [block.mlp['2'].input_scale for block in model.blocks]
    assert float(scales[0]) == pytest.approx(2.0 * seen[0] / 448.0) and scales[0] != scales[1]
    assert (model.blocks[0].proj.input_scale is None) == ('proj' not in names)
    assert max(errors(model(*inputs(1)), dit(*inputs(1)))) < 0.06


def test_a_fused_mlp_rounds_by_a_bound_that_no_result_exceeds(dit):
    expected = dit(*inputs())
    fused, apart = in_fp8(dit, fused=True), in_fp8(dit)
    hidden = []
    for block in fused.blocks:
        block.mlp['2'].register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    assert max(errors(fused(*inputs()), expected)) < 1.2 * max(errors(apart(*inputs()), expected))
    assert all(0.0 < values.float().abs().amax() < 448.0 for values, _ in hidden)


def test_the_bound_holds_for_rows_that_point_along_a_weight():
    torch.manual_seed(0)
    layer = Fp8Linear(torch.nn.Linear(64, 32))
    weight = layer.weight.float() * layer.weight_scale.t()
    rows, zero = weight[[3, 9]] * torch.tensor([[1.0], [-1e4]]), torch.zeros(1, 64)
    _, rounded, ahead = modulate_rows(rows, zero, zero, bound=layer.bound)
    normal = torch.nn.functional.layer_norm(rows, (64,))
    assert (layer(rounded).abs() <= 448.0 * ahead).all()
    assert (normal @ weight.t() + layer.bias).abs().amax() > 0.5 * 448.0 * ahead.amax()  # and it is no idle one


def test_calibration_that_saw_nothing_or_a_fault_is_refused(dit):
    model = in_fp8(dit)
    with pytest.raises(RuntimeError, match=r"no input.*\['0.qkv', '1.qkv'\]"), calibration(model, ('qkv',)):
        pass
    with pytest.raises(RuntimeError, match='non-finite'), calibration(model):
        model(inputs()[0] * float('nan'), *inputs()[1:])
    assert all(block.mlp['2'].input_scale is None for block in model.blocks)
    with calibration(model):
        model(*inputs())
    scales = [block.mlp['2'].input_scale for block in model.blocks]
    with pytest.raises(KeyError), calibration(model):
        raise KeyError
    assert scales[0] is not None and [block.mlp['2'].input_scale for block in model.blocks] == scales


@pytest.mark.parametrize('fused', [False, True])
@pytest.mark.parametrize('calibrated', [False, True])
def test_a_fault_in_one_picture_is_not_rounded_away(dit, calibrated, fused):
    model = in_fp8(dit, fused=fused)
    if calibrated:
        with calibration(model):
            model(*inputs())
    latents, *others = inputs()
    latents[0, 2, 0, 0, 0] = float('inf')
    result = model(latents, *others)[0]
    assert not result[0].isfinite().all() and result[1].isfinite().all()


def test_layers_of_both_kinds_attend_as_before():
    dit = tiled_model().dit
    preset, frames = dit.preset, np.arange(4)
    latents = torch.randn(1, len(frames), *preset.latent_size, preset.latent_channels)
    results = []
    for each in (dit, in_fp8(dit), in_fp8(dit, fused=True)):
        attention = DenseTiles(each)
        for times in (frames[:2], frames[2:]):
            attention.begin(times, commit=True)
            one = torch.ones(1, len(times))
            results.append(each.over_tiles(latents[:, times], one, one.long(), torch.zeros(*one.shape, 2), attention))
            attention.end()
    assert max(*errors(results[3], results[1]), *errors(results[5], results[1])) < 0.06


def test_layers_that_sum_over_processes_are_in_fp8_inside(dit):
    class Summed(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            return self.linear(x)
    shared = copy.deepcopy(dit)
    for block in shared.blocks:
        block.proj, block.mlp[2] = Summed(block.proj), Summed(block.mlp[2])
    to_fp8(shared)
    assert all(isinstance(layer.linear, Fp8Linear) for block in shared.blocks for layer in (block.proj, block.mlp['2']))
    with calibration(shared), calibration(alone := in_fp8(dit)):
        assert max(errors(shared(*inputs()), alone(*inputs()))) < 1e-5
    assert max(errors(shared(*inputs()), alone(*inputs()))) < 1e-5


def test_the_trained_model_foresees_the_same_in_fp8():
    model = checkpoint.load(model_folder('tiny'))
    drive = record_drive(5_100_000, 28, model.preset.image_size)
    pictures = []
    for convert in (lambda dit: dit, in_fp8):
        model.dit = convert(model.dit)
        imagination = Imagination(model)
        memory = imagination.observe(drive.frames[None, :24], drive.actions[None, :24], (0,))
        latents, _ = imagination.roll(memory, drive.actions[None, 24:], TWO_STEP)
        pictures.append(imagination.decode(latents[0, 1:], latents[0, :-1]))
    assert 35.0 < min(psnr(a, b) for a, b in zip(*pictures)) < 70.0
