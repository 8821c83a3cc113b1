"""Weights in 8 bits: rounded row by row, read whole, in parts and for further training, and refused when damaged."""
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_model import SMALL, small_model

from worldmodel_ros.model import checkpoint, checkpoint_description
from worldmodel_ros.model.checkpoint_description import ModelError
from worldmodel_ros.model.weights import Part, StoredWeights
from worldmodel_ros.model.world_model import WorldModel

NAME = 'dit.blocks.0.qkv.weight'


@pytest.fixture(scope='module')
def stored(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp('model'), small_model()
    checkpoint.save(model, folder, {}, torch.int8)
    return model, folder


def test_each_row_is_off_by_half_a_step_at_most_and_all_else_is_as_in_16_bits(stored):
    model, folder = stored
    found = checkpoint.load(folder).state_dict()
    matrices = 0
    for name, tensor in model.state_dict().items():
        if name.startswith('dit.blocks.') and tensor.ndim == 2:
            step = tensor.abs().amax(1, keepdim=True) / 127.0
            assert ((found[name] - tensor).abs() <= 0.5001 * step + 1e-7).all()
            matrices += 1
        elif tensor.is_floating_point() and not name.rpartition('.')[2].startswith('latent_'):
            torch.testing.assert_close(found[name], tensor.bfloat16().float(), rtol=0, atol=0)
    assert matrices == 5 * SMALL.depth
    kinds = {name: tensor.dtype for file in folder.glob('*.safetensors') for name, tensor in load_file(str(file)).items()}
    assert kinds[NAME] == torch.int8 and sum(kind == torch.int8 for kind in kinds.values()) == matrices


def test_a_process_reads_its_part_of_the_rows_or_of_the_columns(stored):
    _, folder = stored
    whole = checkpoint.load(folder).state_dict()[NAME]
    for part in (Part(0, ((0, 2), (5, 9))), Part(1, ((3, 7),))):
        with StoredWeights(folder) as weights:
            torch.testing.assert_close(weights.take(NAME, whole.shape, part), part.of(whole), rtol=0, atol=0)


def test_training_goes_on_from_them(stored):
    _, folder = stored
    model = WorldModel(SMALL)
    assert checkpoint.start_from(model, folder) == []
    torch.testing.assert_close(model.state_dict()[NAME], checkpoint.load(folder).state_dict()[NAME], rtol=0, atol=0)


@pytest.mark.parametrize('damage, message', [
    (lambda state: state.pop(f'{NAME}.row_scale'), None),
    (lambda state: state.update({f'{NAME}.row_scale': torch.ones(3)}), r'int8 with \(3,\) scales'),
    (lambda state: state.update({NAME: state[NAME].float()}), r'float32 with \(\d+,\) scales, and should be int8'),
    (lambda state: state.update({'other.row_scale': torch.ones(3)}), 'have other.row_scale besides')])
def test_damaged_scales_are_refused(stored, tmp_path, damage, message):
    model, _ = stored
    checkpoint.save(model, tmp_path, {}, torch.int8)
    file, = tmp_path.glob('*.safetensors')
    state = load_file(str(file))
    damage(state)
    save_file(state, str(file))
    described = json.loads((tmp_path / 'model.json').read_text())
    described['crc32'][file.name] = checkpoint_description.checksum(file)
    (tmp_path / 'model.json').write_text(json.dumps(described))
    with pytest.raises(ModelError, match=message or 'without the scales of its rows'):
        checkpoint.load(tmp_path)
